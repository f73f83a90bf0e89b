"""From a verl batch to micro-batches with a layout each."""
