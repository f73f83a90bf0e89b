"""Attention over packed tokens: the op, its kernels, and its entry in transformers' attention registry."""
