"""The traced model as the planner sees it, and facts that hold of it whatever is split."""
