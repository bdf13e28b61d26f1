"""A plan inside vLLM: its plugin, and the model class that the plugin registers."""
