"""Which model is meant: the Hub, its config, its class; building it without memory."""
