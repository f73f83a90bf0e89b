"""Multimodal checkpoints train on text; a batch with images is refused where the model cannot share them."""

from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from verl.utils import tensordict_utils as tu

from tests.architectures.test_every_model import SAMPLES
from tests.architectures.tiny_configs import save_causal, tiny_config
from tests.support import actor_loss, check_exact, make_engine, save_adapter
from verl_pg_plugin.engine.batch import read_sequences
from verl_pg_plugin.issue import BatchError
from verl_pg_plugin.modalities import TEXT_PARTS, modality_of

TYPES = sorted(TEXT_PARTS.keys() & transformers.CONFIG_MAPPING.keys())


@pytest.mark.parametrize("model_type", [*TYPES, "glm4v"])
def test_batches_with_images_are_refused_with_their_row(model_type: str) -> None:
    modality, batch = modality_of(tiny_config(model_type)), make_batch(SAMPLES[:3])
    rows = [{"mm_token_type_ids": torch.zeros(1, 4), "pixel_values": None}, {}, {}]
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", rows)
    assert len(read_sequences(batch, modality).lengths) == 3
    rows[1] = {"pixel_values_videos": torch.ones(1)}
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", rows)
    causes = {"glm4v": "which packed mode does not pass", "mistral3": "and images of Mistral 3 are not implemented"}
    cause = causes.get(model_type, "and tokens of an image see later ones")
    with pytest.raises(BatchError, match=f"sequence 1: the processor returns pixel_values_videos, {cause}"):
        read_sequences(batch, modality)


def test_adapters_are_exact(tmp_path: Path) -> None:
    path = save_causal(tmp_path, "gemma3")
    adapter = save_adapter(transformers.AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter", rank=2)
    model = {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear", "lora_adapter_path": adapter}
    check_exact(make_engine(path, model=model), path, make_batch(SAMPLES), adapter=adapter)


def test_the_encoder_gets_no_gradient_and_keeps_its_attention_and_names(tmp_path: Path) -> None:
    path = save_causal(tmp_path, "mistral3")
    engine = make_engine(path)
    assert not engine.verifier.enabled
    assert engine.module.config.vision_config._attn_implementation == "sdpa"
    stock = transformers.AutoModelForImageTextToText.from_pretrained(path)
    assert engine.module.state_dict().keys() == stock.state_dict().keys()
    with engine.train_mode():
        engine.forward_backward_batch(make_batch(SAMPLES), actor_loss())
        assert engine.optimizer_step() > 0
    encoder = {name: weight for name, weight in engine.module.named_parameters() if "vision_tower" in name}
    assert encoder
    before = stock.state_dict()
    assert all(torch.equal(weight.full_tensor(), before[name]) for name, weight in encoder.items())
