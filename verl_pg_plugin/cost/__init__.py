"""What rows cost: one model for micro-batches, balance, benchmarks, doctor and metrics."""
