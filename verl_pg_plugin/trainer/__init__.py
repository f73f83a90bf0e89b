"""verl's V1 trainers with a balance that keeps groups on one rank."""

from verl_pg_plugin.trainer.modes import MODES, PREFIX


def registered_mode(mode: str) -> str:
    """Name under which our trainer for a V1 mode is registered; registers it in this process.

    Args:
        mode: value of ``trainer.v1.trainer_mode``, with or without our prefix.

    Raises:
        ValueError: there is no such V1 mode.
    """
    plain = mode.removeprefix(PREFIX)
    if plain not in MODES:
        raise ValueError(f"unknown trainer.v1.trainer_mode={mode!r}; choose one of {', '.join(MODES)}")
    import verl_pg_plugin.trainer.group_trainers  # noqa: F401  (registers the three classes)

    return PREFIX + plain
