"""Plans as one page of HTML that needs nothing else: what to look at, by one file a drawing."""
