"""From states of tensors to the plan file: layouts, modules, reasons, predictions."""
