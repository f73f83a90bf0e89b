"""Multi-head latent attention: values narrower than keys, through kernels that take them and kernels that do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.engine.carried_cases import ONE_GROUP, carrying_engine
from tests.engine.ranks import on_ranks
from tests.support import Result, actor_loss, assert_same, make_engine, run_engine, run_reference
from verl_pg_plugin.attention.kernels import KERNELS, Kernel, select_kernel
from verl_pg_plugin.synthetic import make_batch

LATENT_TYPES = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"]


def save_latent_model(folder: Path, model_type: str) -> str:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def kernel_of_equal_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa as the flash kernels are: it would raise on values narrower than keys."""
    attend = select_kernel("sdpa", "cpu").attend

    def equal_widths_only(q, k, v, *args, **kwargs):
        assert k.shape[-1] == v.shape[-1]
        return attend(q, k, v, *args, **kwargs)

    monkeypatch.setitem(KERNELS, "sdpa", replace(KERNELS["sdpa"], narrow_values=False))
    monkeypatch.setattr("verl_pg_plugin.attention.kernels.sdpa.attend", equal_widths_only)


@pytest.mark.usefixtures("process_group", "kernel_of_equal_widths")
@pytest.mark.parametrize("model_type", LATENT_TYPES)
def test_padded_values_are_exact_whole_and_in_carried_parts(tmp_path: Path, model_type: str) -> None:
    path = save_latent_model(tmp_path, model_type)
    batch = make_batch(ONE_GROUP, max_token_len_per_gpu=36)
    expected = run_reference(path, batch, actor_loss())
    assert_same(run_engine(carrying_engine(path), batch, actor_loss()), expected)
    whole = make_batch(ONE_GROUP)
    assert_same(run_engine(make_engine(path, packed=True), whole, actor_loss()), expected)


@pytest.mark.parametrize("name", [name for name, spec in KERNELS.items() if not spec.narrow_values])
def test_every_kernel_that_wants_equal_widths_gets_them_and_its_output_is_cut(name: str) -> None:
    seen = []

    def attend(q, k, v, *args, **kwargs):
        seen.append(v)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    q, k, v = torch.randn(5, 4, 24), torch.randn(5, 2, 24), torch.randn(5, 2, 12)
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    out = Kernel(name, "", attend)(q, k, v, lengths, lengths, 5, 5, softmax_scale=1.0)
    assert seen[0].shape == k.shape
    assert torch.equal(seen[0][..., 12:], torch.zeros(5, 2, 12)), "what is added must not change a score or an output"
    assert torch.equal(out, v.repeat_interleave(2, dim=1))


def run_on_rank(rank: int, path: str) -> Result:
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    return run_engine(engine, make_batch(ONE_GROUP, sp_size=2), actor_loss())


@pytest.mark.slow
def test_rows_spread_over_two_ranks(tmp_path: Path) -> None:
    path = save_latent_model(tmp_path, "deepseek_v3")
    expected = run_reference(path, make_batch(ONE_GROUP), actor_loss())
    for result in on_ranks(2, run_on_rank, path):
        assert_same(result, expected)
