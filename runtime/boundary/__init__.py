"""The boundary of each module of a split model: which code sees local and which full tensors."""
