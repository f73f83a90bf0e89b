"""A task that a CPU trains in seconds: sums of two numbers, and a tiny checkpoint that nearly knows them."""
