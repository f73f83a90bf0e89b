"""Choose the rank, mini-batch and micro-batch that computes each sequence."""
