"""Which sequences are computed together: on which rank, in which mini-batch and micro-batch."""
