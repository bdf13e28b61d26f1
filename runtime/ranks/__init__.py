"""How rank processes meet, agree and fail together. Nothing in this folder depends on a model."""
