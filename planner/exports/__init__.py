"""Plans in other formats, one file a format."""
