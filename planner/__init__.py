"""From a model to a proven plan: trace, axes, problem, solvers, plan file, command line."""
