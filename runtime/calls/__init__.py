"""What goes into a forward pass: the calls that a plan is proven for, caches."""
