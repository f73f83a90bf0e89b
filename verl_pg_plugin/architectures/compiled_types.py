"""Architectures whose decoder layers are known to run under ``torch.compile``, and those known not to.

``tests/architectures/test_compiled_layers.py`` runs them; ``scripts/make_models_table.py`` keeps what it found.
"""

from __future__ import annotations

__all__ = ["BREAKING_TYPES", "COMPILED_TYPES"]

COMPILED_TYPES: frozenset[str] = frozenset({"arcee", "bitnet", "cohere", "cohere2", "qwen3"})
"""As exact compiled as they are uncompiled, and compiled once while micro-batches change."""

BREAKING_TYPES: dict[str, str] = {}
"""What goes wrong, by model type."""
