"""From a module to a graph of ATen calls, on meta: recording, translation, which runs to make."""
