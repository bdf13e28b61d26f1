"""Device profiles as JSON files, and the code that reads and measures them."""
