"""Sharding rules: what each ATen op does to sharded tensors, one line per op. No solver in here."""
