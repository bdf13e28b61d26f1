"""Where the integers that model code computes with come from."""
