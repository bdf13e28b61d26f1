"""What model code asks of data, while there is none: numbers, rows, branches, loops."""
