"""Which calls of the model are traced, and how one set of calls is traced."""
