"""The module to trace, read or copied onto the meta device without weights."""
