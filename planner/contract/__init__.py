"""What planner and runtime agree on: placements, their transitions, the notation, the plan file."""
