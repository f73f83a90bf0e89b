"""What checkpointed layers keep for their backward: attention runs as often as asked, and gives one gradient."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.architectures.tiny_configs import tiny_config
from tests.engine.carried_cases import carrying, carrying_engine
from tests.support import actor_loss, assert_same, clone, group, make_engine, run_engine, run_reference, save_tiny_model
from verl_pg_plugin.attention.kernels import Kernel
from verl_pg_plugin.planning.micro_batches import CacheWeights
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS = 3
SAMPLES = [*group(11, [5, 9], 1), *group(7, [6, 4], 2)]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=LAYERS)


def counted(engine: Any) -> Counter[str]:
    """Forwards of the engine's attention kernel from here on."""
    kernel, calls = engine.kernel, Counter()
    assert isinstance(kernel, Kernel)

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls["forward"] += 1
        return kernel.forward(*args, **kwargs)

    engine.kernel = replace(kernel, forward=forward)
    return calls


def update(engine: Any, batch: Any) -> None:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(clone(batch), actor_loss())


@pytest.mark.parametrize(("activations", "passes"), [("auto", 1), ("attention", 1), ("inputs", 2)])
def test_attention_runs_as_often_as_asked(qwen3: str, activations: str, passes: int) -> None:
    engine = make_engine(qwen3, packed=True, engine={"activations": activations})
    batch, calls = make_batch(SAMPLES), counted(engine)
    update(engine, batch)
    once = calls["forward"]
    with engine.eval_mode():
        engine.infer_batch(clone(batch))
    assert once == passes * (calls["forward"] - once) > 0
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(qwen3, batch, actor_loss()))


def test_a_model_whose_layers_attend_twice_keeps_both_results(tmp_path: Path) -> None:
    """LongCat Flash, with values as wide as keys."""
    config = tiny_config("longcat_flash", v_head_dim=24)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    batch, forwards = make_batch(SAMPLES), []
    expected = run_reference(str(tmp_path), batch, actor_loss())
    for activations in ("attention", "inputs"):
        engine = make_engine(str(tmp_path), packed=True, engine={"activations": activations})
        calls = counted(engine)
        assert_same(run_engine(engine, batch, actor_loss()), expected)
        forwards.append(calls["forward"])
    assert 0 < forwards[0] < forwards[1]


def test_a_chunk_without_room_computes_attention_again_and_stays_exact(qwen3: str) -> None:
    engine = carrying_engine(qwen3, CacheWeights(cached=0.2, published=0.5, recomputing=0.5))
    batch = make_batch(group(33, [3, 4, 2, 4], 7), max_token_len_per_gpu=38)
    assert not all(planned.keeps_attention for planned in engine.plan(clone(batch), forward_only=False).micro_batches)
    with carrying(engine):
        result = run_engine(engine, batch, actor_loss())
    assert_same(result, run_reference(qwen3, batch, actor_loss()))
