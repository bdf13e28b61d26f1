"""What each ATen op does to sharded tensors, one line an op; nothing here knows of a solver."""
