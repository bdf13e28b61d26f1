"""Example inputs, made from a config, the names of arguments and what docs say of them."""
