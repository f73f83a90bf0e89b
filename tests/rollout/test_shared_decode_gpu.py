"""Shared decode inside of vLLM: the op against float64, and log-probs of generated tokens against float32."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.block_tables import uniform_groups
from verl_pg_plugin.rollout import SHARED_DECODE, register_with_vllm
from verl_pg_plugin.rollout.groups import find_groups, max_splits

HAS_VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAS_VLLM and torch.cuda.is_available()), reason="needs a CUDA GPU and vLLM"),
    pytest.mark.timeout(900),
]

CASES = {
    "a few long prompts": (8192, 512, 8, 4),
    "many short prompts": (512, 300, 4, 64),
    "one group of many tiles": (2048, 64, 100, 1),
    "pairs": (1000, 200, 2, 40),
    "long responses": (300, 4096, 8, 4),
    "nothing shared": (2048, 100, 1, 16),
}
HEADS = [(32, 8, 128), (28, 4, 128), (16, 16, 128), (64, 8, 64), (16, 2, 256), (5, 1, 128)]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("H", "G", "D"), HEADS)
@pytest.mark.parametrize("case", CASES)
def test_the_op_is_as_exact_as_flash_attention(case: str, H: int, G: int, D: int, block_size: int) -> None:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    from verl_pg_plugin.rollout import kernels

    generator = torch.Generator().manual_seed(0)
    table, lengths, num_blocks = uniform_groups(*CASES[case], block_size, generator)
    table, lengths = table.cuda(), lengths.cuda()
    R, sinks = len(lengths), torch.randn(H, device="cuda", dtype=torch.bfloat16) if D == 64 else None
    key, value = torch.randn(2, num_blocks, block_size, G, D, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(R, H, D, device="cuda", dtype=torch.bfloat16)
    softcap = 30.0 if H == 28 else 0.0
    starts, scale, programs = torch.arange(R + 1, device="cuda", dtype=torch.int32), D**-0.5, 2 * 132 // G

    def flash_attention(lengths: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attn_varlen_func(
            q=query, k=key, v=value, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=int(lengths.max()),
            seqused_k=lengths, block_table=table, causal=True, softmax_scale=scale, softcap=softcap, s_aux=sinks,
            fa_version=3, return_softmax_lse=True, num_splits=32,
        )  # fmt: skip

    groups, rest_lens, rest_blocks = find_groups(
        table, lengths, block_size, requests_per_tile=kernels.BLOCK_M // (H // G), tile_tokens=kernels.BLOCK_N,
        num_programs=programs, min_saved_tokens=1,
    )  # fmt: skip
    assert bool(groups.num_items[0]) == (CASES[case][2] > 1)
    stock, _ = flash_attention(lengths, table)
    shared, lse = flash_attention(rest_lens, rest_blocks)
    S = max_splits(R, programs, kernels.BLOCK_M // (H // G))
    assert int(groups.num_splits.sum()) <= S
    partials = kernels.Partials(*(torch.full(shape, torch.nan, device="cuda") for shape in ((S, H, D), (S, H))))
    kernels.attend_prefixes(
        query, key, value, table, groups, partials, scale=scale, softcap=softcap, num_programs=programs,
        max_requests=R + 1,
    )  # fmt: skip
    kernels.merge_splits(shared, lse, groups, partials)
    errors = []
    for request in range(0, R, max(1, R // 8)):
        keys, values = (
            part[table[request].long()].flatten(0, 1)[: lengths[request]].double().repeat_interleave(H // G, 1)
            for part in (key, value)
        )
        scores = torch.einsum("hd,khd->hk", query[request].double(), keys) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        exact = torch.einsum("hk,khd->hd", scores.softmax(1), values)
        errors.append([float((out[request] - exact).norm()) for out in (shared, stock)])
    ours, error_of_stock = torch.tensor(errors).norm(dim=0)
    assert ours <= 1.3 * error_of_stock


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of four layers with peaked attention: random weights of ten times the usual size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=8192, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def engine(checkpoint: Path, shared: bool, runner: str, **options: Any) -> Iterator[Any]:
    """Run vLLM in this process for the block, configured as by verl but without compiled layers."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "V2")))
    from vllm import LLM

    register_with_vllm()
    llm = LLM(
        str(checkpoint), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, max_num_seqs=64, seed=0,
        enable_prefix_caching=True, additional_config={SHARED_DECODE: shared}, gpu_memory_utilization=0.3,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]
        },
        **options,
    )  # fmt: skip
    yield llm
    llm.llm_engine.engine_core.shutdown()


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns. A process can start only one engine with sleep mode."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def errors(llm: Any, checkpoint: Path, n: int = 8, prompts: int = 4, seed: int = 0) -> torch.Tensor:
    """Generate, and return the difference of each token's log-prob from a float32 model's."""
    from transformers import Qwen3ForCausalLM
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    requests = [
        {"prompt_token_ids": ids}
        for ids in torch.randint(4096, (prompts, 3000), generator=generator).tolist()
        for _ in range(n)
    ]
    lengths = torch.randint(20, 200, (len(requests),), generator=generator).tolist()  # requests end early
    sampling = [SamplingParams(temperature=1.0, max_tokens=m, ignore_eos=True, logprobs=0, seed=k, detokenize=False)
                for k, m in enumerate(lengths)]  # fmt: skip
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda()
    differences = []
    for output in outputs:
        reply = output.outputs[0]
        tokens = torch.tensor([[*output.prompt_token_ids, *reply.token_ids]]).cuda()
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=len(reply.token_ids) + 1).logits[0, :-1]
        exact = logits.log_softmax(-1).gather(1, tokens[0, -len(reply.token_ids) :, None])[:, 0].cpu()
        got = [logprobs[token].logprob for token, logprobs in zip(reply.token_ids, reply.logprobs, strict=True)]
        differences.append(torch.tensor(got) - exact)
    return torch.cat(differences)


def errors_with_preemption(checkpoint: Path, shared: bool) -> tuple[torch.Tensor, int]:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def spied(self: Any, request: Any, *args: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *args)

    Scheduler._preempt_request = spied
    # 13,760 tokens for 4 prompts of 3,000 tokens and 32 responses of 20 to 200.
    with engine(checkpoint, shared, "V2", num_gpu_blocks_override=860) as llm:
        return errors(llm, checkpoint), len(preempted)


def test_preempted_requests_match_stock_vllm(checkpoint: Path) -> None:
    stock, _ = in_own_process(errors_with_preemption, checkpoint, False)
    ours, preemptions = in_own_process(errors_with_preemption, checkpoint, True)
    assert preemptions
    assert ours.norm() <= 1.1 * stock.norm()


def stock_errors(checkpoint: Path, runner: str) -> torch.Tensor:
    with engine(checkpoint, False, runner) as llm:
        return errors(llm, checkpoint)


def errors_on_two_gpus(checkpoint: Path, shared: bool) -> torch.Tensor:
    with engine(checkpoint, shared, "V2", tensor_parallel_size=2) as llm:
        return errors(llm, checkpoint)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel_ranks_match_stock_vllm(checkpoint: Path) -> None:
    stock, ours = (in_own_process(errors_on_two_gpus, checkpoint, shared) for shared in (False, True))
    assert not torch.equal(stock, ours)  # vLLM loaded the plugin in the process of each rank
    assert ours.norm() <= 1.1 * stock.norm()
    assert ours.abs().max() <= 1.5 * stock.abs().max()


def shared_errors(checkpoint: Path, runner: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return errors after weights are loaded into a running engine, and after it slept."""
    from safetensors.torch import load_file

    from verl_pg_plugin.rollout import shared_decode

    groups, lay_out = [], shared_decode.SharedDecodeBuilder.lay_out

    def spied(*args: Any) -> Any:
        result = lay_out(*args)
        groups.append(result[0])
        return result

    shared_decode.SharedDecodeBuilder.lay_out = spied
    shared_decode.MIN_SAVED_BYTES = shared_decode.MIN_EAGER_BYTES = 0
    weights = load_file(checkpoint / "model.safetensors")
    with engine(checkpoint, True, runner, enable_sleep_mode=True, load_format="dummy") as llm:
        llm.apply_model(lambda model: model.load_weights(weights.items()))
        llm.reset_prefix_cache()
        ours = errors(llm, checkpoint)
        groups.clear()
        errors(llm, checkpoint, prompts=5)  # a batch larger than any graph runs eagerly
        assert any(int(group.num_items[0]) for group in groups)
        llm.sleep(level=1)
        llm.wake_up()
        llm.reset_prefix_cache()
        return ours, errors(llm, checkpoint)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_log_probs_are_as_close_to_float32_as_those_of_stock_vllm(runner: str, checkpoint: Path) -> None:
    stock = in_own_process(stock_errors, checkpoint, runner)
    for ours in in_own_process(shared_errors, checkpoint, runner):
        assert len(ours) == len(stock)
        assert ours.norm() <= 1.1 * stock.norm()
        assert ours.abs().max() <= 1.5 * stock.abs().max()


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({}, ""),
        ({"additional_config": {}}, "not requested"),
        ({"enforce_eager": True}, "no full CUDA graphs"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching=False"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}}, "specul"),
    ],
)
def test_unsupported_engine_options_are_named(checkpoint: Path, options: dict[str, Any], obstacle: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from verl_pg_plugin.rollout.shared_decode import obstacle_in_config

    defaults = {"enable_prefix_caching": True, "additional_config": {SHARED_DECODE: True}}
    args = EngineArgs(str(checkpoint), skip_tokenizer_init=True, **{**defaults, **options})
    why = obstacle_in_config(args.create_engine_config())
    assert why.startswith(obstacle) if obstacle else not why
