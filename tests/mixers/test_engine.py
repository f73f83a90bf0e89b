"""Models with Gated DeltaNet layers through verl's FSDP2 engine, held against every row alone.

float32 itself is not that exact here: the gradients of ``A_log`` and ``dt_bias`` are sums of large terms that nearly
cancel. They are held to what stock transformers in float32 is off from float64 in its worst layer, four times: in which
layer rounding adds up differs between processors.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from verl.utils import tensordict_utils as tu

from tests.engine.ranks import on_ranks
from tests.mixers.hybrids import KINDS, NEARLY_CANCEL, config_of, modeling_file, save_hybrid
from tests.mixers.toy import CONVOLUTION, save_toy_model
from tests.support import (
    Result,
    actor_loss,
    assert_same,
    clone,
    group,
    make_engine,
    run_engine,
    run_reference,
    save_tiny_model,
)
from verl_pg_plugin import architectures
from verl_pg_plugin.architectures import architecture_issues, rmpad_fault
from verl_pg_plugin.engine.verify import MismatchError
from verl_pg_plugin.mixers import MIXERS, count_layers, delta_layer
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = [
    *group(70, [25, 9, 1, 77], 1),
    *group(3, [5, 3], 2),
    *(Sample([1, 2, 3, 4], [5, 6, *tail]) for tail in ([7, 8, 9, 1], [7, 8, 2], [3])),
]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: save_hybrid(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def references(hybrids: dict[str, str]) -> dict[str, tuple[Result, Result]]:
    """Every row alone in float32 and in float64."""
    return {kind: rows_alone(hybrids[kind], kind) for kind in KINDS}


def rows_alone(path: str, kind: str, samples: Sequence[Sample] = SAMPLES) -> tuple[Result, Result]:
    batch = make_batch(samples)
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
def test_every_number_is_that_of_the_row_alone(kind: str, hybrids: dict, references: dict) -> None:
    engine = make_engine(hybrids[kind], packed=True)
    assert_exact(run_engine(engine, make_batch(SAMPLES), actor_loss()), references[kind])
    assert engine.shared_model.layers == {"gated_delta": 3, "attention": 1}


COMPILES = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "options",
    [{"activations": "inputs"}, {"verify": "first"}, pytest.param({"compile_layers": True}, marks=COMPILES)],
    ids=str,
)
def test_options_of_packed_mode_keep_the_numbers(options: dict, hybrids: dict, references: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], packed=True, engine=options)
    assert_exact(run_engine(engine, make_batch(SAMPLES), actor_loss()), references["qwen3_5_text"])


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


def test_chunks_that_carry_nothing_compute_their_prompts(hybrids: dict, references: dict) -> None:
    engine = make_engine(hybrids["qwen3_5_text"], packed=True, engine={"carry": "never"})
    batch = make_batch(SAMPLES, max_token_len_per_gpu=150)
    assert_exact(run_engine(engine, clone(batch), actor_loss()), references["qwen3_5_text"])
    with engine.eval_mode():
        metrics = engine.infer_batch(batch)["metrics"]
    assert metrics["prefix_grouper/chains"] == [0.0]


MINE = ([0, 1, 4, 6, 8], [2, 3, 5, 7])


def run_on_rank(rank: int, path: str) -> Result:
    batch = tu.index_select_tensor_dict(make_batch(SAMPLES), MINE[rank])
    return run_engine(make_engine(path, packed=True), batch, actor_loss())


@pytest.mark.slow
def test_two_ranks_sum_the_gradients_of_all_sequences(hybrids: dict, references: dict) -> None:
    stock, exact = references["qwen3_next"]
    for mine, got in zip(MINE, on_ranks(2, run_on_rank, hybrids["qwen3_next"]), strict=True):
        outputs = {name: [values[row] for row in mine] for name, values in exact.outputs.items()}
        assert_exact(Result(got.outputs, got.gradients), (stock, Result(outputs, exact.gradients)))


def run_under_ulysses(rank: int, path: str) -> list[Result]:
    engine = make_engine(path, packed=True, engine={"ulysses_sequence_parallel_size": 2})
    budgets = (1 << 20, 75)  # of one rank; the second cuts the largest group
    return [run_engine(engine, make_batch(SAMPLES, max_token_len_per_gpu=b, sp_size=2), actor_loss()) for b in budgets]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_tokens_spread_over_two_ranks_keep_the_numbers(kind: str, hybrids: dict, references: dict) -> None:
    for results in on_ranks(2, run_under_ulysses, hybrids[kind]):
        for got in results:
            assert_exact(got, references[kind])


TREE = [
    *group(7, [5, 2, 3], 1),
    *(Sample([1, 2, 3, 4], [5, 6, *tail]) for tail in ([7, 8, 9, 1], [7, 8, 2], [3])),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def with_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, CONVOLUTION.name, CONVOLUTION)


@pytest.mark.parametrize(
    "options", [{"verify": "first"}, pytest.param({"compile_layers": True}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.usefixtures("with_convolutions")
def test_a_mixer_of_twenty_lines_is_exact_through_the_engine(toy: str, options: dict) -> None:
    batch = make_batch(TREE, max_token_len_per_gpu=28)
    engine = make_engine(toy, packed=True, engine=options)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(toy, batch, actor_loss()))
    assert engine.shared_model.layers == {"attention": 2, "convolution": 1}
    assert not engine.shared_model.prefix_cache, "so its groups are not split"


@pytest.mark.usefixtures("with_convolutions")
def test_a_mixer_that_knows_no_ranks_is_refused_under_ulysses(toy: str) -> None:
    with pytest.raises(ValueError, match=r"convolution layers of lfm2: tokens .* over ranks .*_parallel_size=1"):
        make_engine(toy, packed=True, engine={"ulysses_sequence_parallel_size": 2})


def test_a_layer_that_does_not_mix_shared_rows_is_an_error_that_names_its_mixer(
    toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIXERS, CONVOLUTION.name, replace(CONVOLUTION, install=lambda module: None))
    engine = make_engine(toy, packed=True)
    with engine.eval_mode(), pytest.raises(RuntimeError, match="convolution over shared prefixes ran in 0 of 1 layers"):
        engine.infer_batch(make_batch(TREE))


def test_layers_without_a_mixer_are_refused_by_name(toy: str) -> None:
    config = transformers.AutoConfig.from_pretrained(toy)
    assert count_layers(config) == {"attention": 2}
    assert ["conv" in issue.why for issue in architecture_issues(config, trust_remote_code=False)] == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stock rmpad needs flash-attn there")
def test_stock_rmpad_is_wrong_and_warned_of(
    hybrids: dict, references: dict, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, logger="verl_pg_plugin.engine.registration"):
        make_engine(save_tiny_model(tmp_path), packed=False)
        assert not [record for record in caplog.records if record.name == "verl_pg_plugin.engine.registration"]
        engine = make_engine(hybrids["qwen3_next"], packed=False)
    (told,) = [record.getMessage() for record in caplog.records if "rmpad mode computes" in record.getMessage()]
    assert "qwen3_next wrongly" in told
    assert "use_prefix_grouper=True" in told
    got = run_engine(engine, make_batch(SAMPLES), actor_loss()).outputs["log_probs"]
    pairs = zip(got, references["qwen3_next"][1].outputs["log_probs"], strict=True)
    worst = max((a.double() - b).abs().max().item() for a, b in pairs)
    assert worst > 1e-2, "verl has mended it: rmpad_fault can go"


def test_released_checkpoints_are_not_warned_of_where_verls_forward_tells_flas_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, text = transformers.AutoConfig.for_model("qwen3_5"), config_of("qwen3_5_text")
    for fla, device, config, warned in (
        (True, "cuda", released, False),
        (True, "cpu", released, True),
        (True, "cuda", text, True),
        (False, "cuda", released, True),
        (False, "cuda", transformers.AutoConfig.for_model("qwen3"), False),
    ):
        monkeypatch.setattr(architectures, "has_fla", lambda fla=fla: fla)
        assert (rmpad_fault(config, device) is not None) is warned
