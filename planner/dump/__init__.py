"""What the planner saw and decided, as readable text: to follow a wrong plan in minutes."""
