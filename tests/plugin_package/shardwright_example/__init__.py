"""One rule, layer style, solver, device profile and output format, all outside of Shardwright."""
