"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over shared rows: a short convolution, then a recurrence."""
