"""Modules that benchmarks share. verl selects its platform on import, which must come after this."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
