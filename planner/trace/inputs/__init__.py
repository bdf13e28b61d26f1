"""Example inputs of modules, and the values that meta inputs remember."""
