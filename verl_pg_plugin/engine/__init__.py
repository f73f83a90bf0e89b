"""verl's FSDP engine with packed mode behind its input, output and micro-batch seams."""
