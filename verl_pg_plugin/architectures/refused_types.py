"""Architectures that pass every general check and still cannot share prefixes in verl."""

from __future__ import annotations

__all__ = ["REFUSED_TYPES"]

REFUSED_TYPES: dict[str, str] = {
    "aria_text": "multiplies its experts' weights one by one outside of a module, where FSDP2 has not gathered them",
    "doge": "computes a mask of its own from the values, which attention over shared prefixes does not take",
    "emu3": "is multimodal (vq_config); only text models are supported",
    "phimoe": "draws experts at random in training, so a shared row would draw once for all its responses",
}
"""Why, by model type; the tests of every architecture show that nothing is missing here."""
