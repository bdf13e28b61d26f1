"""How a split model is for those who stand outside: hooks, single modules, what comes in later."""
