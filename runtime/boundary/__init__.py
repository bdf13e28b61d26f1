"""The boundary of each module of a split model: who sees a rank's parts, and who full tensors."""
