"""What planner and runtime share: placements, transitions, the notation, the plan file."""
