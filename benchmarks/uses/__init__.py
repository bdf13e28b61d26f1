"""Uses of split models: see `__main__.py`."""
