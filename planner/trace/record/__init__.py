"""Recording: the model's own code runs on fake tensors, and each ATen call is recorded."""
