"""Running a split module on fake tensors, and the log by which such runs are compared."""
