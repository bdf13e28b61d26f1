"""Reports on plans: tables, explanations, differences, comparison with hand-written plans."""
