"""Which transformers architectures can share prefixes."""
