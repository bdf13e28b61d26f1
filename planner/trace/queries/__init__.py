"""Questions of model code about its surroundings: training, gradients, autocast, flags, numbers."""
