"""Which types are handed float32 angles, with FSDP2 made to recompute layers as that of torch 2.11 and 2.12 does."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.checkpoint import CheckpointError

from tests.architectures.outcome import EXACT, HYBRIDS, outcome_of, supports_checkpointing
from tests.architectures.test_every_model import SAMPLES, engine_of
from tests.architectures.tiny_configs import MODEL_TYPES
from tests.support import actor_loss, run_engine
from verl_pg_plugin.architectures import CHECKPOINTS_FORWARD, FLOAT32_ANGLE_TYPES, fsdp2_recomputes_as_it_ran
from verl_pg_plugin.synthetic import make_batch

pytestmark = pytest.mark.usefixtures("process_group")

BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
QUICK = ["olmo2", "qwen3"]


@pytest.fixture
def recomputed_without_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = FSDPState._cast_forward_inputs

    def cast_in_the_forward_alone(self, args, kwargs):
        return (args, kwargs) if self._training_state == TrainingState.PRE_BACKWARD else cast(self, args, kwargs)

    monkeypatch.setattr(FSDPState, "_cast_forward_inputs", cast_in_the_forward_alone)


@pytest.mark.usefixtures("recomputed_without_casts")
@pytest.mark.parametrize(
    "model_type",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in MODEL_TYPES
        if name not in HYBRIDS
    ],
)
def test_torch_before_2_13_trains_every_type_that_is_not_refused(model_type: str, tmp_path: Path) -> None:
    """A type that fails here and is not in the list would fail in a user's first update."""
    if outcome_of(model_type).status != EXACT or not supports_checkpointing(model_type):
        pytest.skip("is refused, or has no gradient checkpointing")
    engine = engine_of(model_type, tmp_path, BF16)
    fails = pytest.raises(CheckpointError, match="different metadata")
    with fails if model_type in FLOAT32_ANGLE_TYPES and not CHECKPOINTS_FORWARD else nullcontext():
        run_engine(engine, make_batch(SAMPLES), actor_loss())


@pytest.mark.parametrize(("version", "casts"), [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0", True)])
def test_versions_that_cast_again_are_told_apart(version: str, casts: bool) -> None:
    assert fsdp2_recomputes_as_it_ran(version) == (casts or CHECKPOINTS_FORWARD)
