"""Plans tried on meta by the model's own code, and what a failure forbids."""
