"""Long runs in every mode hold no more at their end than after their warm-up."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.soak import MODES, Update, leaks, soak_and_repeat


def history(**growing: float) -> list[Update]:
    """300 updates that hold more from update to update, beside the ups and downs of the modes."""
    plain = Update(
        0, "packed", 0.1, 1000, 1, resident_mib=600.0, tensors=100, tensor_mib=3.0, descriptors=30, threads=2
    )
    updates = []
    for number in range(300):
        held = {name: getattr(plain, name) + number * more for name, more in growing.items()}
        update = replace(plain, update=number, **held)
        updates.append(replace(update, tensors=update.tensors + 10 * (number % len(MODES))))
    return updates


@pytest.mark.parametrize(
    ("name", "more"), [("resident_mib", 0.0625), ("tensors", 1), ("tensor_mib", 0.001), ("descriptors", 1 / 64)]
)
def test_a_small_leak_in_every_update_is_seen(name: str, more: float) -> None:
    assert not leaks(history())
    assert list(leaks(history(**{name: more}))) == [name]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_grows_in_300_updates_and_the_last_round_is_that_of_fresh_processes(tmp_path: Path) -> None:
    updates, other = soak_and_repeat(300, str(tmp_path))
    assert not leaks(updates)
    assert not other
    assert any(update.chains for update in updates)
