"""A prompt of one token without a response computes nothing, and verl gets one unused value for it."""

from functools import partial
from typing import Any

import pytest
from benchmarks.batches import Sample, make_batch
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from tests.engine.carried_cases import ONE_GROUP
from tests.engine.ranks import check_exact_on_ranks
from tests.engine.test_exactness import MIXED, MODES
from tests.support import infer, make_engine, update

ALONE = Sample([7], [])
SAMPLES = [ALONE, *MIXED, ALONE, Sample([MIXED[0].prompt[0]], [])]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(qwen3: str, mode: str) -> Any:
    return make_engine(qwen3, padded=mode != "packed", engine={"verify": "every_1"} if mode == "packed" else {})


@pytest.mark.parametrize("together", [1, len(SAMPLES)])
def test_shapes_loss_and_metrics_match_stock_verl(qwen3: str, engine: Any, mode: str, together: int) -> None:
    batch = make_batch(SAMPLES, **MODES[mode] | {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": together})
    stock, stocks = make_engine(qwen3, packed=False), tu.index_select_tensor_dict(batch, list(range(len(batch))))
    tu.assign_non_tensor(stocks, use_remove_padding=True)
    outputs, expected = (infer(*pair)["model_output"] for pair in ((engine, batch), (stock, stocks)))
    assert outputs.keys() == expected.keys()
    for name, rows in expected.items():
        assert [row.shape for row in outputs[name].unbind()] == [row.shape for row in rows.unbind()], name
    got, expected = update(engine, batch), update(stock, stocks)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    if together > 1:  # else a mean over micro-batches depends on their content
        metrics = reduce_metrics(got.metrics)
        for name, value in reduce_metrics(expected.metrics).items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_mini_batch_of_one_token_prompts_only_has_outputs(engine: Any, mode: str) -> None:
    outputs = infer(engine, make_batch([ALONE, ALONE], **MODES[mode]))["model_output"]
    offsets = {name: values.offsets().tolist() for name, values in outputs.items()}
    assert offsets == {"log_probs": [0, 1, 2], "entropy": [0, 1, 2]}


RANKS: dict[str, dict[str, Any]] = {
    "packed": {"max_token_len_per_gpu": 36},  # the first rank splits a group; the second runs as many prefills
    "padded groups": MODES["padded groups"] | {"micro_batch_size_per_gpu": 3},
}


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_rank_of_one_token_prompts_only_is_exact(qwen3: str, mode: str, strategy: str) -> None:
    make = partial(make_batch, [*ONE_GROUP, *[ALONE] * 9], **RANKS[mode])
    options = {"splits": True} if mode == "packed" else {"padded": True}
    parts = [list(range(len(ONE_GROUP))), list(range(len(ONE_GROUP), len(ONE_GROUP) + 9))]
    check_exact_on_ranks(qwen3, make, parts, strategy=strategy, **options)
