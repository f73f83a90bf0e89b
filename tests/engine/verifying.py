"""Groups to verify, and steps of an engine with a fault in its layouts, as a bug would put it there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tensordict import TensorDict

from tests.support import actor_loss, clone, group
from verl_pg_plugin.layout import PackedLayout
from verl_pg_plugin.synthetic import Sample

Fault = Callable[[PackedLayout], PackedLayout]
SAMPLES = [*group(30, [25, 19, 31, 7], 1), *group(18, [22, 24], 2), *group(33, [14], 3)]


ALWAYS = {"verify": "every_1"}
PRECISIONS = {
    name: {"mixed_precision": {"param_dtype": name, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    for name in ("fp32", "bf16", "fp16")
}


def break_layouts(engine: Any, fault: Fault) -> Any:
    """The engine with ``fault`` in every layout that shares tokens."""
    inputs = engine._inputs

    def broken(layout: PackedLayout, *args: Any, **kwargs: Any) -> Any:
        return inputs(fault(layout) if layout.shares_tokens else layout, *args, **kwargs)

    engine._inputs = broken
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


def wrong_kv_row(layout: PackedLayout) -> PackedLayout:
    """Every segment reads its last ancestor's row twice in place of the first."""
    kv_index = layout.kv_index.copy()
    for segment in np.flatnonzero(layout.segment_start):
        start = layout.cu_seqlens_k[segment]
        kv_index[start] = kv_index[start + layout.segment_start[segment] - 1]
    return replace(layout, kv_index=kv_index)


def position_off_by_one(layout: PackedLayout) -> PackedLayout:
    """Segments that continue a prefix start one position late."""
    late = np.repeat(layout.segment_start > 0, np.diff(layout.cu_seqlens_q))
    return replace(layout, position_ids=layout.position_ids + late)


def sibling_visible(layout: PackedLayout) -> PackedLayout:
    """Segments see the one before theirs when both continue the same."""
    keys = np.split(layout.kv_index, layout.cu_seqlens_k[1:-1])
    for segment in range(1, len(keys)):
        start = layout.segment_start[segment]
        if start and layout.segment_parent[segment] == layout.segment_parent[segment - 1]:
            sibling = np.arange(*layout.cu_seqlens_q[segment - 1 : segment + 1])
            keys[segment] = np.concatenate([keys[segment][:start], sibling, keys[segment][start:]])
    return replace(
        layout, kv_index=np.concatenate(keys), cu_seqlens_k=np.concatenate([[0], np.cumsum([len(k) for k in keys])])
    )


def wrong_head_row(layout: PackedLayout) -> PackedLayout:
    """Responses read the head row after theirs."""
    return replace(layout, response_head=(layout.response_head + 1) % len(layout.head_index))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (wrong_kv_row, position_off_by_one, sibling_visible, wrong_head_row)
}
