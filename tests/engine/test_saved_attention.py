"""Gradient checkpointing recomputes attention when asked to, keeps it otherwise, and gives one gradient."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn
from verl_pg_plugin.batching.chain_cuts import CarryWeights
from verl_pg_plugin.engine.saved_attention import SavedAttention

from tests.architectures.tiny_configs import tiny_config
from tests.engine.carried_cases import carrying, carrying_engine
from tests.modalities.picture_cases import MIXED
from tests.modalities.tiny_vision import KINDS, load, picture_batch, save_vision_model
from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.attention.kernels import KERNELS
from verl_pg_plugin.engine import saved_attention
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS = 3
SAMPLES = [*group(11, [5, 9], 1), *group(7, [6, 4], 2)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS)


class CountForwards(TorchDispatchMode):
    """Counts what reaches the kernel; an output that checkpointing kept does not."""

    def __init__(self, operators: tuple[str, ...] = KERNELS["sdpa"].saved_ops) -> None:
        super().__init__()
        self.operators, self.calls = operators, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.name() in self.operators
        return func(*args, **(kwargs or {}))


def test_an_operator_that_a_release_renamed_is_an_error(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "sdpa", replace(KERNELS["sdpa"], saved_ops=("aten::no_such_attention",)))
    with pytest.raises(RuntimeError, match=r"no operator aten::no_such_attention.*recompute_attention=True"):
        make_engine(qwen3, packed=True)


@pytest.mark.parametrize(("recompute", "passes"), [(False, 1), (True, 2)])
def test_attention_runs_as_often_as_asked(qwen3: str, recompute: bool, passes: int) -> None:
    engine = make_engine(qwen3, packed=True, engine={"recompute_attention": recompute})
    segments = 2 + len(SAMPLES)  # a prefix per group, a segment per response
    batch = make_batch(SAMPLES)
    with engine.train_mode(), CountForwards() as kernel:
        engine.forward_backward_batch(clone(batch), actor_loss())
    assert kernel.calls == passes * LAYERS * segments
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_torch_looks_at_no_operator_of_a_layer_but_its_kernels(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks, in the forward and the recomputation, and small models wait for it anyway."""
    policy, seen = saved_attention._policy, Counter()

    def counting(saved: tuple[str, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen[op.name()] += 1
        return policy(saved, ctx, op, *args, **kwargs)

    monkeypatch.setattr(saved_attention, "_policy", counting)
    engine = make_engine(qwen3, packed=True)
    run_engine(engine, make_batch(SAMPLES), actor_loss())
    assert sum(seen[name] for name in KERNELS["sdpa"].saved_ops) >= LAYERS * (2 + len(SAMPLES))
    assert not {"aten::mm", "aten::silu", "aten::mean.dim", "aten::index_select"} & seen.keys()


def test_a_layer_that_attends_twice_keeps_both_results() -> None:
    """As those of LongCat Flash do; torch's modes count from where they are entered."""
    saved = SavedAttention("sdpa")
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        attend = partial(F.scaled_dot_product_attention, is_causal=True)
        return saved.kernel(attend, *[saved.kernel(attend, *[x.sin()] * 3).cos()] * 3).sin()

    gradients = []
    for context_fn, runs in ((noop_context_fn, 4), (saved.contexts, 2)):
        with CountForwards() as kernel:
            out = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
            gradients.append(torch.autograd.grad(out.sum(), x)[0])
        assert kernel.calls == runs
    assert torch.equal(*gradients)
    assert saved.running is None


def test_a_model_whose_layers_attend_twice_is_exact_and_its_mlps_alone_are_not_kept(tmp_path: Path) -> None:
    """LongCat Flash, with values as wide as keys: a CPU's kernel has no results to keep where they are narrower."""
    torch.manual_seed(0)
    config = tiny_config("longcat_flash", v_head_dim=24)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    batch, calls = make_batch(SAMPLES), []
    expected = run_reference(str(tmp_path), batch, actor_loss())
    for recompute in (False, True):
        engine = make_engine(str(tmp_path), packed=True, engine={"recompute_attention": recompute})
        with CountForwards() as kernel:
            assert_same(run_engine(engine, batch, actor_loss()), expected)
        calls.append(kernel.calls)
    assert 0 < calls[0] < calls[1]
    with pytest.raises(ValueError, match=r"keep_activations=mlp: LongcatFlashDecoderLayer has no self_attn.*set "):
        make_engine(str(tmp_path), packed=True, engine={"keep_activations": "mlp"})


def test_what_a_failed_layer_has_begun_ends_with_its_mini_batch(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 leaves the layer no sooner than the exception is forgotten."""
    engine = make_engine(qwen3, packed=True)
    saved, batch = engine.shared_model.saved_attention, make_batch(SAMPLES)
    with monkeypatch.context() as patched:
        patched.setattr(type(saved.contexts()[0]), "__exit__", lambda self, *_: None)
        patched.setattr(engine.module.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with engine.train_mode(), pytest.raises(ZeroDivisionError):
            engine.forward_backward_batch(clone(batch), actor_loss())
    assert saved.running is None
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_blocks_of_a_tower_keep_their_attention_too(tmp_path: Path) -> None:
    path = save_vision_model(tmp_path, KINDS[0])
    batch, calls = picture_batch(load(path), MIXED), []
    for recompute in (False, True):
        engine = make_engine(path, packed=True, engine={"recompute_attention": recompute})
        with engine.train_mode(), CountForwards() as kernel:
            engine.forward_backward_batch(clone(batch), actor_loss())
        calls.append(kernel.calls)
    assert 2 * calls[0] == calls[1]


def test_the_owner_of_a_long_prompt_makes_room_for_what_it_is_owed_and_stays_exact(
    qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = carrying_engine(qwen3, CarryWeights(carried=0.2, owed=0.5, recomputing=0.5))
    batch = make_batch(group(33, [3, 4, 2, 4], 7), max_token_len_per_gpu=38)
    calls = []
    for dropped in (SavedAttention.dropped, lambda self: nullcontext()):
        monkeypatch.setattr(SavedAttention, "dropped", dropped)
        with engine.train_mode(), carrying(engine), CountForwards() as kernel:
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(clone(batch), actor_loss())
        calls.append(kernel.calls)
    assert calls[0] == calls[1] + LAYERS  # the owner's one segment, once more
    monkeypatch.undo()
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))
