"""Writes a plan from the states of tensors: layouts, modules, reasons, predictions, the drawing."""
