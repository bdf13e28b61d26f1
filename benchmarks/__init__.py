"""Measurements that say what Shardwright costs and saves."""
