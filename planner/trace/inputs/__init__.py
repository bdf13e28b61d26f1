"""Example inputs of modules, and values attached to inputs on meta."""
