"""Under torchrun: swap layers, run collectives, read and write shards. Never imports a solver."""
