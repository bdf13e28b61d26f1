"""The traced model as the planner sees it, and facts that do not depend on placements."""
