"""What a tensor can be on a mesh, which states an op allows together, what a change takes."""
