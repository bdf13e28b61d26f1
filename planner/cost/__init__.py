"""The cost model: time and bytes of ops, collectives, copies and memory."""
