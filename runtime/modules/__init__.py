"""What modules of a model become: layers, local parameters, the root, and its guard."""
