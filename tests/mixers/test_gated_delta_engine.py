"""Models with Gated DeltaNet layers through verl's FSDP2 engine, held against every row alone.

float32 itself is not that exact here: the gradients of ``A_log`` and ``dt_bias`` are sums of large terms that nearly
cancel. They are held to what stock transformers in float32 is off from float64 in its worst layer, four times: in which
layer rounding adds up differs between processors.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from verl.utils import tensordict_utils as tu
from verl_pg_plugin.engine.steps.verify import MismatchError

from tests.architectures.outcome import record_outcome
from tests.engine.ranks import on_ranks
from tests.mixers.hybrids import KINDS, modeling_file, save_hybrid
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
)
from verl_pg_plugin.mixers import delta_layer
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [
    *group(70, [25, 9, 1, 77], 1),
    *group(3, [5, 3], 2),
    *(Sample([1, 2, 3, 4], [5, 6, *tail]) for tail in ([7, 8, 9, 1], [7, 8, 2], [3])),
]
NEARLY_CANCEL = ("A_log", "dt_bias", "in_proj_ba.weight", "in_proj_a.weight", "in_proj_b.weight")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_hybrid(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def references(hybrids: dict[str, str]) -> dict[str, tuple[Result, Result]]:
    """Every row alone in float32 and in float64."""
    return {kind: rows_alone(hybrids[kind], kind) for kind in KINDS}


def rows_alone(path: str, kind: str) -> tuple[Result, Result]:
    batch = make_batch(SAMPLES)
    stock, load_stock = run_reference(path, batch, actor_loss()), transformers.AutoModelForCausalLM.from_pretrained

    def load(path: str, **options: Any) -> Any:
        weights = load_stock(path, dtype=torch.float32).state_dict()
        config = transformers.AutoConfig.from_pretrained(path)
        config._attn_implementation = "eager"
        model = getattr(modeling_file(kind, torch.float64), KINDS[kind][0])(config).double()
        model.set_experts_implementation("eager")
        model.load_state_dict(weights)
        return model

    with patch.object(transformers.AutoModelForCausalLM, "from_pretrained", load):
        return stock, run_reference(path, batch, actor_loss(), torch.float64)


def assert_exact(got: Result, references: tuple[Result, Result]) -> None:
    stock, exact = references
    assert got.gradients.keys() == exact.gradients.keys()
    plain = {name: w for name, w in got.gradients.items() if not name.endswith(NEARLY_CANCEL)}
    assert_same(Result(got.outputs, plain, got.loss), Result(exact.outputs, {n: exact.gradients[n] for n in plain}))
    for suffix in NEARLY_CANCEL:
        names = [name for name in exact.gradients if name.endswith(suffix)]
        of_stock = max((relative_error(stock, exact, name) for name in names), default=0.0)
        for name in names:
            error = relative_error(got, exact, name)
            assert error <= max(1e-5, 4 * of_stock), f"{name}: off by {error:.3g}, stock's worst {of_stock:.3g}"


def relative_error(got: Result, exact: Result, name: str) -> float:
    """Of a parameter's gradient, by its largest element."""
    want = exact.gradients[name]
    return ((got.gradients[name].double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_that_of_the_row_alone(
    kind: str, hybrids: dict, references: dict, record_property: Any
) -> None:
    engine = make_engine(hybrids[kind], packed=True)
    assert_exact(run_engine(engine, make_batch(SAMPLES), actor_loss()), references[kind])
    assert engine.shared_model.layers == {"gated_delta": 3, "attention": 1}
    record_outcome(record_property, kind)


BUDGET = {"max_token_len_per_gpu": 180}
COMPILES = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"static_rows": True}, BUDGET),
        ({"min_dedup_ratio": 1.3}, BUDGET),
        ({"recompute_attention": True}, {}),
        ({"keep_activations": "all"}, {}),
        ({"verify": "first"}, {}),
        pytest.param({"compile_layers": True}, {}, marks=COMPILES),
        pytest.param({"compile_layers": True, "static_rows": True}, BUDGET, marks=COMPILES),
    ],
    ids=str,
)
def test_options_of_packed_mode_keep_the_numbers(options: dict, batch: dict, hybrids: dict, references: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], packed=True, engine=options)
    assert_exact(run_engine(engine, make_batch(SAMPLES, **batch), actor_loss()), references["qwen3_5_text"])


def test_without_the_state_handed_down_verify_mode_stops_the_run(hybrids: dict) -> None:
    def forget(state: torch.Tensor, num_children: torch.Tensor, total: int) -> torch.Tensor:
        return state.new_zeros(total, *state.shape[1:])

    engine = make_engine(hybrids["qwen3_next"], packed=True, engine={"verify": "first"})
    with (
        patch.object(delta_layer._HandDown, "apply", forget),
        engine.eval_mode(),
        pytest.raises(MismatchError, match="shared prefixes"),
    ):
        engine.infer_batch(make_batch(SAMPLES))


def test_a_group_beyond_the_budget_is_cut_and_each_part_computes_its_prompt(hybrids: dict, references: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], packed=True)
    batch = make_batch(SAMPLES, max_token_len_per_gpu=150)
    assert engine._carry_policy(forward_only=True) is None
    assert_exact(run_engine(engine, clone(batch), actor_loss()), references["qwen3_5_text"])
    with engine.eval_mode():
        metrics = engine.infer_batch(batch)["metrics"]
    assert metrics["prefix_grouper/chains"] == [0.0]


ROWS_OF_RANKS = [[0, 1, 4, 6, 8], [2, 3, 5, 7]]


def run_on_rank(rank: int, path: str) -> Result:
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES), ROWS_OF_RANKS[rank])
    return run_engine(make_engine(path, packed=True), batch, actor_loss())


@pytest.mark.slow
def test_two_ranks_sum_the_gradients_of_all_rows(hybrids: dict, references: dict) -> None:
    stock, exact = references["qwen3_next"]
    for mine, got in zip(ROWS_OF_RANKS, on_ranks(2, run_on_rank, hybrids["qwen3_next"]), strict=True):
        outputs = {name: [values[row] for row in mine] for name, values in exact.outputs.items()}
        assert_exact(Result(got.outputs, got.gradients), (stock, Result(outputs, exact.gradients)))


def test_rows_spread_over_ranks_are_refused_by_name(hybrids: dict) -> None:
    with pytest.raises(ValueError, match=r"gated_delta layers of qwen3_next .*fix: .*sequence_parallel_size=1"):
        make_engine(hybrids["qwen3_next"], packed=True, engine={"ulysses_sequence_parallel_size": 2})


def test_padded_groups_are_refused_by_name(hybrids: dict) -> None:
    with pytest.raises(ValueError, match=r"gated_delta layers of qwen3_next share packed rows only"):
        make_engine(hybrids["qwen3_next"], packed=True, model={"use_remove_padding": False})
