"""One file a command; heavy imports stand inside the functions, so that `--help` takes no time."""
