"""Features of torch that are traced as plain ops or as Python: flex_attention, cond, scripts."""
