"""``keep_activations=auto`` leaves what an update needs and a reserve on every rank, and steps back in time."""

from dataclasses import replace

import pytest
import torch

from tests.engine.test_kept_layers import update
from tests.support import make_engine, save_tiny_model
from verl_pg_plugin.engine.activation_budget import RESERVE, ActivationBudget, Held
from verl_pg_plugin.engine.device_memory import DeviceMemory

GIB = 2**30
KIND, OTHER = ("Layer", "Attention"), ("Layer", "Recurrence")
IDLE = DeviceMemory(total=80 * GIB, usable=40 * GIB, allocated=20 * GIB, peak=20 * GIB)
ROWS = 1 << 20
BYTES = 1024.0
"""Of a row of a layer, so that a layer holds a GiB of the micro-batch."""


def held(kept: frozenset[int] = frozenset(), rows: int = ROWS, peak: int = 30, retries: int = 0, **more) -> Held:
    after = replace(IDLE, peak=peak * GIB, retries=retries)
    return Held(kept=((kept, rows),), before=IDLE, after=after, **more)


def measured(*updates: list[Held], kinds=(KIND,) * 36) -> ActivationBudget:
    """After the first update, the optimizer's step and one that measures."""
    budget = ActivationBudget("auto", kinds)
    for ranks in ([held()], [held(frozenset({35}), bytes_per_row={KIND: BYTES})], *updates):
        budget.begin([IDLE] * len(ranks))
        budget.end(ranks)
        budget.stepped = True
    budget.begin([IDLE])
    return budget


def test_the_first_update_keeps_nothing_and_the_second_one_layer_of_each_kind():
    budget = ActivationBudget("auto", [KIND, OTHER, KIND, KIND])
    budget.begin([IDLE])
    assert budget.layers(ROWS) == frozenset()
    budget.end([held()])
    budget.begin([IDLE])
    assert budget.layers(ROWS) == frozenset(), "the optimizer has no states yet"
    budget.stepped = True
    budget.begin([IDLE])
    assert budget.layers(ROWS) == {1, 3}


def test_what_is_kept_leaves_the_rise_of_an_update_and_the_reserve():
    assert len(measured().layers(ROWS)) == 40 - 80 * RESERVE - 10 == 22
    assert measured().layers(ROWS) == frozenset(range(14, 36))


def test_more_rows_than_the_first_update_had_raise_what_an_update_needs():
    assert len(measured().layers(2 * ROWS)) == (40 - 80 * RESERVE - 20) // 2
    assert len(measured().layers(ROWS // 2)) == 36


def test_fewer_rows_than_the_first_update_had_leave_the_whole_rise_free():
    """Weights' gradients are as large for few rows as for many."""
    assert len(measured(kinds=(KIND,) * 64).layers(ROWS // 2)) == (40 - 80 * RESERVE - 10) * 2


def test_the_rise_is_that_of_the_rank_with_the_fewest_rows():
    """Which rank's memory rose most is not known, so more rows than that one's may raise it by more."""
    budget = ActivationBudget("auto", [KIND] * 36)
    budget.end([held(), held(rows=2 * ROWS)])
    budget.end([held(frozenset({35}), bytes_per_row={KIND: BYTES})] * 2)
    budget.stepped = True
    budget.begin([IDLE] * 2)
    assert len(budget.layers(2 * ROWS)) == (40 - 80 * RESERVE - 20) // 2


def test_where_memory_ended_half_as_many_layers_are_kept_and_they_are_the_last():
    budget = measured()
    budget.step_down([(budget.layers(ROWS), ROWS)])
    assert budget.layers(ROWS) == frozenset(range(25, 36))
    budget.step_down([(frozenset({35}), ROWS)])
    assert budget.layers(ROWS) == frozenset()


def test_a_device_without_room_keeps_nothing_not_even_to_measure():
    budget = ActivationBudget("auto", [KIND] * 36)
    budget.end([held()])
    budget.stepped = True
    budget.begin([replace(IDLE, usable=18 * GIB + GIB // 2)])
    assert budget.layers(ROWS) == frozenset()
    full = measured()
    full.begin([replace(IDLE, usable=17 * GIB)])
    assert full.layers(ROWS) == frozenset()


def test_the_fullest_rank_decides_for_all():
    budget = measured([held(bytes_per_row={KIND: 2 * BYTES}), held()])
    budget.begin([IDLE, replace(IDLE, usable=30 * GIB)])
    assert len(budget.layers(ROWS)) == (30 - 80 * RESERVE - 10) // 2
    budget.begin([IDLE, None])
    assert budget.layers(ROWS) == frozenset(), "one rank does not know"


def test_an_update_in_which_torch_gave_its_cache_back_halves_the_budget(caplog: pytest.LogCaptureFixture):
    kept = held(frozenset({35}))
    assert len(measured([kept]).layers(ROWS)) == 22
    with caplog.at_level("WARNING"):
        assert len(measured([kept, replace(kept, after=replace(IDLE, retries=1))]).layers(ROWS)) == 11
    assert "50% of the budget" in caplog.text
    assert len(measured([held(retries=1)]).layers(ROWS)) == 22, "nothing was kept, so it was not the budget"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, DeviceMemory]:
    """A device whose memory the test sets; loading the model took nearly all of it for a moment."""
    memory = {"now": replace(IDLE, peak=70 * GIB)}

    def forget_peak() -> None:
        memory["now"] = replace(memory["now"], peak=IDLE.allocated + 4096)

    monkeypatch.setattr(DeviceMemory, "read", lambda: memory["now"])
    monkeypatch.setattr(DeviceMemory, "forget_peak", forget_peak)
    return memory


@pytest.mark.usefixtures("process_group")
def test_an_engine_goes_from_nothing_to_what_fits_and_no_bit_changes(tmp_path, device: dict[str, DeviceMemory]):
    path = save_tiny_model(tmp_path, num_hidden_layers=4)
    _, expected = update(make_engine(path, packed=True))
    engine, kept = make_engine(path, packed=True, engine={"keep_activations": "auto"}), []
    for _ in range(3):
        metrics, gradients = update(engine)
        assert all(torch.equal(gradients[name], want) for name, want in expected.items())
        kept.extend(metrics["prefix_grouper/kept_layers"])
        engine.keeper.budget.stepped = True  # with weights that stay as they are
    assert kept == [0.0, 1.0, 4.0]
    device["now"] = replace(device["now"], usable=0)
    assert update(engine)[0]["prefix_grouper/kept_layers"] == [0.0]


@pytest.mark.usefixtures("process_group")
def test_a_step_of_the_optimizer_is_what_auto_waits_for(tmp_path, device: dict[str, DeviceMemory]):
    engine = make_engine(save_tiny_model(tmp_path), packed=True, engine={"keep_activations": "auto"})
    update(engine)
    assert update(engine)[0]["prefix_grouper/kept_layers"] == [0.0]
    with engine.train_mode():
        engine.optimizer_step()
    assert update(engine)[0]["prefix_grouper/kept_layers"] == [1.0]


@pytest.mark.usefixtures("process_group")
def test_auto_says_once_why_a_cpu_keeps_attention_alone(tmp_path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("WARNING"):
        engine = make_engine(save_tiny_model(tmp_path), packed=True, engine={"keep_activations": "auto"})
    assert engine.keeper is None
    assert caplog.text.count("keep_activations=auto keeps attention's outputs alone: the free memory of a cpu") == 1
    assert "prefix_grouper/kept_layers" not in update(engine)[0]
