"""Verify mode compares the samples it should, as often as it should, and says what differs."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from verl.utils import tensordict_utils as tu

from tests.engine.carried_cases import carrying_engine
from tests.engine.value_models import (
    check_exact_values,
    critic_batch,
    critic_loss,
    make_value_engine,
    save_value_model,
)
from tests.engine.verifying import SAMPLES, break_layouts, infer, update, wrong_kv_row
from tests.support import group, make_engine
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.modalities.text import SHARING_OFF
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")


def test_the_message_names_sample_token_and_ways_out(qwen3: str) -> None:
    engine = break_layouts(make_engine(qwen3, packed=True, engine={"verify": "first"}), wrong_kv_row)
    batch = make_batch(SAMPLES)
    tu.assign_non_tensor_stack(batch, "uid", [f"prompt-{i // 2}" for i in range(len(SAMPLES))])
    with pytest.raises(MismatchError) as caught:
        infer(engine, batch)
    message = str(caught.value)
    for part in (
        r"^sample \d \(uid prompt-\d\) of the 7 in forward-only micro-batch 0",
        r"of response token \d+ of \d+ is -?[\d.]+, and alone -?[\d.]+ \(error [\d.]+, tolerance [\d.e-]+",
        r"2 layers, all through packed attention, attention kernel sdpa, torch\.float32",
        r"use_prefix_grouper=False.*verify_tolerance",
    ):
        assert re.search(part, message), message


def verified(metrics: dict[str, list[float]]) -> float:
    (samples,) = metrics["prefix_grouper/verified_rows"]
    return samples


WHOLE, LONE, CUT = make_batch(SAMPLES), make_batch(SAMPLES[6:]), make_batch(SAMPLES, max_token_len_per_gpu=120)
BY_FOUR = make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)  # two micro-batches
WHEN: dict[str, tuple[str, list, list[int]]] = {
    "first of each kind": ("first", [(infer, CUT), (update, CUT)] * 2, [2, 2, 0, 0]),
    "first that shares something": ("first", [(infer, LONE), (infer, WHOLE), (infer, LONE)], [0, 2, 0]),
    "every third across mini-batches": ("every_3", [(infer, BY_FOUR)] * 6, [2, 2, 0, 2, 2, 0]),
}


@pytest.mark.parametrize("when", WHEN)
def test_as_many_micro_batches_are_verified_as_asked(qwen3: str, when: str) -> None:
    verify, steps, expected = WHEN[when]
    engine = make_engine(qwen3, packed=True, engine={"verify": verify})
    assert [verified(step(engine, batch)) for step, batch in steps] == expected


def test_first_is_not_spent_on_the_owner_of_a_split_group(qwen3: str) -> None:
    """The chunk of a prompt that fills a micro-batch reads no token but its own."""
    engine = carrying_engine(qwen3, engine={"verify": "first"})
    batch = make_batch(group(60, [3, 3, 3], 1), use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    assert [verified(infer(engine, batch)) for _ in range(2)] == [2, 0], "it, and the first that reads what it left"


def test_first_is_not_spent_on_turns_that_only_continue_one_another(qwen3: str) -> None:
    """They share tokens, and no sequence attends to tokens of another: a wrong key would go unseen."""
    engine = break_layouts(make_engine(qwen3, packed=True, engine={"verify": "first"}), wrong_kv_row)
    turns = make_batch([Sample(range(4 * k + 3), range(4 * k + 3, 4 * k + 5)) for k in range(4)])
    assert [verified(infer(engine, turns)) for _ in range(2)] == [2, 0]
    with pytest.raises(MismatchError, match="update micro-batch 0"):
        update(engine, WHOLE)


def test_a_tolerance_of_the_user_replaces_the_measured_one(qwen3: str) -> None:
    broken = {"verify": "first"}
    batch = make_batch(SAMPLES)
    loose = break_layouts(make_engine(qwen3, packed=True, engine={**broken, "verify_tolerance": 10.0}), wrong_kv_row)
    assert infer(loose, batch)["prefix_grouper/verify_max_error"][0] > 0.01
    strict = make_engine(qwen3, packed=True, engine={**broken, "verify_tolerance": 1e-9})
    with pytest.raises(MismatchError, match="tolerance 1e-09"):
        infer(strict, batch)


def test_a_critic_is_verified_by_its_values(tmp_path: Path) -> None:
    path, batch, first = save_value_model(tmp_path), critic_batch(SAMPLES), {"verify": "first"}
    check_exact_values(make_value_engine(path, options=first), path, batch)
    broken = break_layouts(make_value_engine(path, options=first), wrong_kv_row)
    with pytest.raises(MismatchError, match="values of response token"):
        update(broken, batch, critic_loss())


def test_a_layer_that_skips_the_packed_attention_fails_in_the_verifying_forward(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(qwen3, packed=True, engine={"verify": "first"})
    monkeypatch.setattr(engine, "shared_model", replace(engine.shared_model, layers=Counter(attention=3)))
    with pytest.raises(RuntimeError, match=f"ran in 2 of 3 layers.*{SHARING_OFF}"):
        infer(engine, make_batch(SAMPLES))


def test_the_padded_mode_is_refused(qwen3: str) -> None:
    padded = {"engine": {"verify": "first", "use_dynamic_bsz": False}, "model": {"use_remove_padding": False}}
    with pytest.raises(ValueError, match=r"verify=first: padded groups.*use_remove_padding=True"):
        make_engine(qwen3, packed=True, **padded)
