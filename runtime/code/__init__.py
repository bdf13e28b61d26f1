"""The code and attributes of a model's modules: read, named, copied, given local integers."""
