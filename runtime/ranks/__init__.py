"""Processes that meet, agree, and leave together; nothing here knows of a model."""
