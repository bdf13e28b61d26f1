"""Checks what enters and leaves a forward pass: arguments, outputs and caches."""
