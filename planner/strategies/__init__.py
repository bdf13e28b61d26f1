"""States of tensors on a mesh, strategies of ops, and the steps of redistributions."""
