"""The boundary of each module of a split model: which code sees local or full tensors."""
