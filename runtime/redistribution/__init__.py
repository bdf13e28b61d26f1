"""How one placement of a tensor becomes another, and its gradient the other way."""
