"""Plans in other formats, with one file per format."""
