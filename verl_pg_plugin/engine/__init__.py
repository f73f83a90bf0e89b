"""verl's FSDP and VeOmni engines with shared prefixes."""
