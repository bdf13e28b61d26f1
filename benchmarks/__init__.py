"""Measurements of what Shardwright costs and saves."""
