"""Reports on plans: tables, explanations, differences."""
