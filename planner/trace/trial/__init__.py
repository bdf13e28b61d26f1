"""Running a split module on fake tensors, and what such a run is compared by."""
