"""Sequences to micro-batches and ranks, by deduplicated cost and with groups whole."""
