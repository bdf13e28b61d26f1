"""The whole of what ranks have in parts: tensors, pickles, optimizers."""
