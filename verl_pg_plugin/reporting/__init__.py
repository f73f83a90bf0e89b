"""What a run shows on its console: one short line for each step, and what sharing gained at the end."""
