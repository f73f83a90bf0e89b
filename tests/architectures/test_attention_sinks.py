"""gpt-oss, whose heads have learned sinks, under the options of packed mode that reach into attention."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.architectures.test_every_model import SAMPLES, SEED
from tests.architectures.tiny_configs import tiny_config
from tests.engine.carried_cases import carrying, carrying_engine
from tests.engine.ranks import on_ranks
from tests.support import Result, actor_loss, assert_same, group, make_engine, run_engine, run_reference
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

ONE_GROUP = group(20, [5, 9, 1, 7], 3)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(SEED)
    folder = tmp_path_factory.mktemp("gpt_oss")
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("gpt_oss"), dtype=torch.float32)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [{"activations": "attention"}, {"activations": "inputs"}],
    ids=str,
)
def test_sinks_keep_their_gradient(options: dict[str, Any], gpt_oss: str) -> None:
    batch = make_batch(SAMPLES, max_token_len_per_gpu=160)
    got = run_engine(make_engine(gpt_oss, packed=True, engine=options), batch, actor_loss())
    assert_same(got, run_reference(gpt_oss, make_batch(SAMPLES), actor_loss()))


def test_carried_prefixes_are_exact(gpt_oss: str) -> None:
    engine = carrying_engine(gpt_oss)
    with carrying(engine):
        got = run_engine(engine, make_batch(ONE_GROUP, max_token_len_per_gpu=32), actor_loss())
    assert_same(got, run_reference(gpt_oss, make_batch(ONE_GROUP), actor_loss()))


def test_attention_without_the_correction_is_found_out(gpt_oss: str) -> None:
    """The control of this file."""
    engine, want = make_engine(gpt_oss, packed=True), run_reference(gpt_oss, make_batch(SAMPLES), actor_loss())
    with patch.object(torch, "logaddexp", lambda lse, sinks: lse):
        wrong = run_engine(engine, make_batch(SAMPLES), actor_loss())
    with pytest.raises(AssertionError, match="off by"):
        assert_same(wrong, want)


def run_on_rank(rank: int, path: str) -> Result:
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    return run_engine(engine, make_batch(ONE_GROUP, sp_size=2), actor_loss())


@pytest.mark.slow
def test_heads_spread_over_two_ranks_take_their_own_sinks(gpt_oss: str) -> None:
    expected = run_reference(gpt_oss, make_batch(ONE_GROUP), actor_loss())
    for result in on_ranks(2, run_on_rank, gpt_oss):
        assert_same(result, expected)
