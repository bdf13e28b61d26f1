"""A plan that was read from a file, proven again for its model: whoever wrote it."""
