"""From a record of calls to the planner's graph, and facts about its tensors."""
