"""What people ask of plans: tables, reasons, differences, comparison with plans by hand."""
