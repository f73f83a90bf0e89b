"""Names of verl's V1 trainer modes and of ours."""

MODES = ("sync", "colocate_async", "separate_async")
PREFIX = "pg_"
"""verl's registry holds one class per name, so ours carry a prefix."""
