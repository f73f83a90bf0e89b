"""Names under which V1 looks a trainer up that keeps groups together."""

PREFIX = "pg_"
"""verl's registry holds one class per name: ``pg_X`` is the class of ``X`` behind ``keep_groups``."""


def group_keeping(mode: str) -> str:
    """The name that stands for a V1 trainer mode with groups kept together; a name that does already stays."""
    return PREFIX + mode.removeprefix(PREFIX)
