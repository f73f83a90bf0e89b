"""Groups to verify, and steps of an engine that may have a fault in its layouts."""

from typing import Any

import numpy as np
from tensordict import TensorDict

from tests.engine.steps.broken_layouts import BrokenMode
from tests.support import actor_loss, clone, group
from verl_pg_plugin.synthetic import Sample

SAMPLES = [*group(30, [25, 19, 31, 7], 1), *group(18, [22, 24], 2), *group(33, [14], 3)]
NUM_LOGICAL = sum(len(sample.prompt) + len(sample.response) for sample in SAMPLES)
ALWAYS = {"verify": "every_n", "verify_every": 1}
PRECISIONS = {
    name: {"mixed_precision": {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    for name in ("fp32", "bf16", "fp16")
}


def break_layouts(engine: Any, fault: Any) -> Any:
    """The engine with ``fault`` in every layout that shares rows."""
    mode = engine.sharing
    engine.sharing = BrokenMode(**vars(mode), fault=fault)
    return engine


def infer(engine: Any, batch: TensorDict) -> dict[str, list[float]]:
    with engine.eval_mode():
        return engine.infer_batch(clone(batch))["metrics"]


def update(engine: Any, batch: TensorDict, loss: Any = None) -> dict[str, list[float]]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        return engine.forward_backward_batch(clone(batch), loss or actor_loss())["metrics"]


def random_samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    sizes = [(int(rng.integers(1, 60)), rng.integers(1, 40, size=rng.integers(1, 6)).tolist()) for _ in range(3)]
    return [sample for i, (prompt, responses) in enumerate(sizes) for sample in group(prompt, responses, 10 * seed + i)]
