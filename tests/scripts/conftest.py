"""The tiny checkpoint and data set that the scripts make, as the CPU rollout's tests use them too."""

from tests.cpu.conftest import checkpoint, data, tokenizer

__all__ = ["checkpoint", "data", "tokenizer"]
