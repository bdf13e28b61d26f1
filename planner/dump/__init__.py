"""Writes what the planner traced and decided as readable text, to find out why a plan is wrong."""
