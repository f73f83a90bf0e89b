"""Attention that few types have, where it is split up: the learned sinks of gpt-oss, and values narrower than keys."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.architectures.test_every_model import SAMPLES, save_causal
from tests.engine.carried_cases import ONE_GROUP
from tests.engine.ranks import check_exact_on_ranks
from tests.support import assert_same, check_exact, make_engine, run_engine, run_reference
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_groups_split_into_chunks_are_exact(model_type: str, tmp_path: Path) -> None:
    path = save_causal(tmp_path, model_type)
    check_exact(make_engine(path, splits=True), path, make_batch(ONE_GROUP, max_token_len_per_gpu=36), splits=True)


def test_sinks_keep_their_gradient_where_attention_is_recomputed_and_are_missed_where_it_is_not_corrected(
    tmp_path: Path,
) -> None:
    engine = make_engine(save_causal(tmp_path, "gpt_oss"), engine={"activations": "inputs"})
    want = run_reference(str(tmp_path), make_batch(SAMPLES))
    assert_same(run_engine(engine, make_batch(SAMPLES, max_token_len_per_gpu=160)), want)
    with patch.object(torch, "logaddexp", lambda lse, sinks: lse):
        wrong = run_engine(engine, make_batch(SAMPLES))
    with pytest.raises(AssertionError, match="off by"):
        assert_same(wrong, want)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_heads_spread_over_two_ranks_are_exact(model_type: str, tmp_path: Path) -> None:
    spread = {"ulysses_sequence_parallel_size": 2}
    check_exact_on_ranks(save_causal(tmp_path, model_type), partial(make_batch, ONE_GROUP), engine=spread)
