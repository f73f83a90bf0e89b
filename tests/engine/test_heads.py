"""The head in chunks gives the outputs and gradients of the whole head."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.batches import make_batch
from verl.utils import torch_functional as verl_F

from tests.architectures.tiny_configs import tiny_config
from tests.engine.ranks import check_exact_on_ranks
from tests.support import group, save_tiny_model
from verl_pg_plugin.engine.heads import LogProbHead, LogProbRequest, install_head
from verl_pg_plugin.skeleton import text_skeleton

SAMPLES = [*group(11, [5, 9], 1), *group(7, [6, 4], 2)]


def test_a_tied_head_on_two_ranks_with_temperature_and_all_outputs(tmp_path: Path) -> None:
    """tests/options/test_ranks.py has untied heads."""
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    make = partial(make_batch, SAMPLES, temperature=0.7, calculate_sum_pi_squared=True)
    check_exact_on_ranks(path, make, [[0, 1], [2, 3]], engine={"logits_chunk_size": 4})


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden", None])
def test_gradients_of_a_chunked_head_match_the_whole_head(frozen: str | None) -> None:
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(6, 11), torch.randn(1, 10, 6)
    leaves = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    request = LogProbRequest(torch.arange(10), torch.linspace(0.5, 2, 10), True, True, verl_F.entropy_from_logits)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    whole = request.outputs(torch.nn.functional.linear(hidden, head.weight, head.bias).squeeze(0))
    expected = torch.autograd.grad(whole.square().sum(), wanted)
    with LogProbHead(head, 3).computing(request):
        gradients = torch.autograd.grad(head(hidden).square().sum(), wanted)
    torch.testing.assert_close(gradients, expected)
    with pytest.raises(ZeroDivisionError), LogProbHead(head, 3).computing(request):
        raise ZeroDivisionError
    assert head(hidden).shape == (1, 10, 11), "a request is valid for one block, also one that fails"


def test_a_head_that_is_not_the_last_product_stays_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    adapted = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Sequential(torch.nn.Linear(2, 3)))
    for model, why in (
        (adapted, "the head is a torch.nn.modules.container.Sequential"),
        (text_skeleton(tiny_config("gemma2")), "Gemma2ForCausalLM changes the output of its head"),
    ):
        assert install_head(model, SimpleNamespace(use_fused_kernels=False), 4) is None
        assert why in caplog.text


def test_gradients_of_a_bf16_head_are_summed_over_chunks_in_float32() -> None:
    """Sums of 512 chunks in bf16 would have an error of several rounding steps."""
    generator, head = torch.Generator().manual_seed(0), torch.nn.Linear(8, 16).to(torch.bfloat16)
    hidden = torch.rand(1, 512, 8, generator=generator).to(torch.bfloat16)
    request = LogProbRequest(torch.zeros(512, dtype=torch.int64), 1.0, False, False, verl_F.entropy_from_logits)
    parameters = [head.weight, head.bias]
    whole = request.outputs(logits := torch.nn.functional.linear(hidden, *parameters).squeeze(0))
    assert whole.dtype == torch.float32
    assert replace(request, temperature=0.0).outputs(logits).isfinite().all(), "greedy"
    expected = torch.autograd.grad(whole.sum(), parameters)
    with LogProbHead(head, 1).computing(request):
        gradients = torch.autograd.grad(head(hidden).sum(), parameters)
    for got, want in zip(gradients, expected, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - want.float()).abs().max() <= want.float().abs().max() * 2**-7, "one step of bf16"


def test_the_backward_recomputes_logits_in_the_dtype_of_the_forward() -> None:
    seen = []

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.dtype)
        return verl_F.entropy_from_logits(logits)

    head = torch.nn.Linear(4, 11)
    request = LogProbRequest(torch.arange(6), 1.0, True, False, entropy)
    with LogProbHead(head, 2).computing(request), torch.autocast("cpu", torch.bfloat16):
        outputs = head(torch.randn(1, 6, 4))
    outputs.sum().backward()
    assert seen == [torch.bfloat16] * 6, "three chunks, forward and backward"
