"""The question put to the solvers: variables for tensors, factors for ops, pins, the objective."""
