"""What the benchmarks share. Its platform verl chooses once, when it is first imported, which is after this."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
