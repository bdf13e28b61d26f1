"""Conversion of a record of calls to the planner's graph, with facts about its tensors."""
