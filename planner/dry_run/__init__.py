"""Plans run on meta by the model's own code before any rank does, and what a failure forbids."""
