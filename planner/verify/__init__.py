"""Plans held against the whole graph, independently of any solver: do they hold, what they cost."""
