"""An untested model class is verified in the first mini-batches of a run and refused if it is wrong."""

import logging
import queue
import re
import shutil
import time
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.batches import make_batch

from tests.engine import modeling_own
from tests.engine.modeling_own import MIXINGS
from tests.engine.ranks import on_ranks
from tests.engine.test_verify import SAMPLES, inferred, updated, verified
from tests.support import TINY, check_exact, group, infer, make_engine, old_outputs, run_reference, update
from verl_pg_plugin.engine import micro_batch
from verl_pg_plugin.engine.ranks import RankError
from verl_pg_plugin.engine.verify import MismatchError

TRUSTED = {"trust_remote_code": True}
CUT = make_batch(SAMPLES, max_token_len_per_gpu=120)


def save_own(folder: Path, mixing: str, name: str = "OwnForCausalLM") -> str:
    """Write a checkpoint of type qwen3 with its own class."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**TINY, mixing=mixing, auto_map={"AutoModelForCausalLM": f"modeling_own.{name}"})
    getattr(modeling_own, name)(config).save_pretrained(folder)
    shutil.copy(str(modeling_own.__file__), folder)
    return str(folder)


@pytest.mark.parametrize(
    ("mixing", "name"), [*((mixing, "OwnForCausalLM") for mixing in MIXINGS), ("shift", "ByCuSeqlens")]
)
def test_a_class_that_mixes_neighbouring_tokens_is_refused(mixing: str, name: str, tmp_path: Path) -> None:
    engine = make_engine(save_own(tmp_path, mixing, name), model=TRUSTED)
    for run, kind in ((infer, "forward-only"), (update, "update")):
        said = rf"(?s)^\+\+prefix_grouper.verify=auto: .*{kind} micro-batch 0 .* and alone -?\d.*verify=off to train"
        with pytest.raises(MismatchError, match=said):
            run(engine, make_batch(SAMPLES))


@pytest.mark.parametrize("padded", [False, True], ids=["no shared tokens", "padded groups"])
def test_other_micro_batches_are_verified_too(tmp_path: Path, padded: bool) -> None:
    engine = make_engine(save_own(tmp_path, "shift"), model=TRUSTED, padded=padded)
    apart = make_batch([*group(9, [14], 1), *group(7, [12], 2), *group(8, [11], 3)])
    with pytest.raises(MismatchError):
        infer(engine, make_batch(SAMPLES, use_dynamic_bsz=False, micro_batch_size_per_gpu=7) if padded else apart)


def test_verify_off_runs_a_wrong_class(tmp_path: Path) -> None:
    path, batch = save_own(tmp_path, "shift"), make_batch(SAMPLES)
    outputs = old_outputs(make_engine(path, model=TRUSTED, engine={"verify": "off"}), batch)["log_probs"]
    alone = run_reference(path, batch, **TRUSTED).outputs["log_probs"]
    assert max((got - want).abs().max() for got, want in zip(outputs, alone, strict=True)) > 0.1


def test_an_exact_class_is_verified_in_one_mini_batch_of_each_kind(tmp_path: Path, caplog, monkeypatch) -> None:
    path = save_own(tmp_path, "nothing")
    engine = make_engine(path, model=TRUSTED)
    alone = micro_batch._compute_alone
    monkeypatch.setattr(micro_batch, "_compute_alone", lambda *args: time.sleep(0.1) or alone(*args))
    assert [verified(step(engine, CUT)) for step in (inferred, inferred, updated, updated)] == [4, 0, 4, 0]
    check_exact(engine, path, CUT, **TRUSTED)
    assert "the model is a OwnForCausalLM, whose code in transformers_modules" in caplog.text.replace("FSDP", "")
    for kind in ("forward-only", "update"):
        assert float(re.search(rf"{kind} mini-batch verified in (\S+) s", caplog.text)[1]) >= 0.4, "of four forwards"


def end_on_two_ranks(rank: int, path: str) -> tuple[str, str, int]:
    """Return this rank's error and number of warnings; only rank 0 has several sequences in a micro-batch."""
    batch, records = make_batch(SAMPLES if rank == 0 else group(9, [14], 1)), queue.SimpleQueue()
    logging.getLogger("verl_pg_plugin.engine.verify").addHandler(QueueHandler(records))
    with pytest.raises((MismatchError, RankError)) as caught:
        infer(make_engine(path, model=TRUSTED), batch)
    return caught.type.__name__, str(caught.value), records.qsize()


def test_a_mismatch_on_one_rank_stops_all_ranks_and_the_first_one_warns(tmp_path: Path) -> None:
    (first, message, num_warnings), second = on_ranks(2, end_on_two_ranks, save_own(tmp_path, "shift"))
    assert (first, num_warnings) == ("MismatchError", 1)
    assert second == ("RankError", f"rank 0: MismatchError: {message}", 0)
