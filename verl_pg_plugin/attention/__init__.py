"""Attention over shared rows: the op, its kernels, and its entry in transformers' attention registry."""
