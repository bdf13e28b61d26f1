"""The solver's problem: variables for tensors, factors for ops, pins, conventions, objective."""
