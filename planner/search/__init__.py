"""The way from a traced model to a plan that was proven and tried: what is tried after what."""
