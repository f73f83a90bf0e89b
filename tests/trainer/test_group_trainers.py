"""The group-keeping trainers are verl's own trainers under another name."""

import pytest
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, get_trainer_cls

from verl_pg_plugin.trainer import registered_mode

VERLS = {
    "sync": PPOTrainerSync,
    "colocate_async": PPOTrainerColocateAsync,
    "separate_async": PPOTrainerSeparateAsync,
}


@pytest.mark.parametrize("mode", VERLS)
def test_each_v1_mode_has_a_trainer_that_only_changes_the_balance(mode: str) -> None:
    trainer_cls = get_trainer_cls(registered_mode(mode))
    assert issubclass(trainer_cls, VERLS[mode])
    changed = {
        name
        for cls in trainer_cls.__mro__[: trainer_cls.__mro__.index(VERLS[mode])]
        for name in vars(cls)
        if callable(getattr(cls, name, None)) and not name.startswith("__")
    }
    assert changed == {"_balance_batch"}
    assert get_trainer_cls(mode) is VERLS[mode], "verl's own entry stays as it is"


def test_the_registered_name_is_accepted_too() -> None:
    assert registered_mode("pg_sync") == registered_mode("sync") == "pg_sync"


def test_an_unknown_mode_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"trainer_mode='fast'; choose one of sync, colocate_async, separate_async"):
        registered_mode("fast")
