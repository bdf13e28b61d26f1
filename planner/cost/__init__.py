"""What a placement costs: time and bytes of ops, collectives, copies and memory."""
