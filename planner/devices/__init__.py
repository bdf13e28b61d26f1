"""Profiles of devices and their links as JSON files, how they are read and measured."""
