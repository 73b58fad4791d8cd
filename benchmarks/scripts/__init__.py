"""What is timed without a file of cells: each module has `main`, with its options as keywords, and prints a table."""
