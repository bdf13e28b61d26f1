"""Plans checked and priced on the unfolded graph, independently of any solver."""
