"""State that modules and caches keep from one call to the next."""
