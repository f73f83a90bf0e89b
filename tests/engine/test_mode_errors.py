"""An option or model that a mode does not support is refused when the engine is built, with the way out."""

from pathlib import Path

import peft
import pytest
import torch
import transformers
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.support import make_engine, save_tiny_model
from verl_pg_plugin.engine.prepare import prepare_model
from verl_pg_plugin.modalities import TEXT

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(("remove_padding", "sharing"), [(True, True), (False, True), (True, False), (False, False)])
def test_two_flags_select_the_mode(qwen3: str, remove_padding: bool, sharing: bool) -> None:
    engine = make_engine(qwen3, packed=sharing, padded=not remove_padding)
    assert (type(engine) is FSDPEngineWithLMHead) == (not sharing)
    assert getattr(engine, "packed", None) == (remove_padding if sharing else None)


def test_unsupported_options_are_named_at_once(qwen3: str) -> None:
    """By the rules of tests/config/test_rules.py, which the engine asks."""
    named = r"use_dynamic_bsz.*use_fused_kernels.*pad_to_length.*use_prefix_grouper=False"
    model = {"use_remove_padding": False, "use_fused_kernels": True}
    with pytest.raises(ValueError, match=named):
        make_engine(qwen3, engine={"pad_to_length": True}, model=model)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_dropout_is_refused_in_every_mode_that_shares(tmp_path: Path, padded: bool) -> None:
    path = save_tiny_model(tmp_path, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1.*override_config\.attention_dropout=0\.0"):
        make_engine(path, padded=padded)


def test_dropout_of_an_adapter_is_refused(qwen3: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    lora = {"lora_rank": 4, "lora_adapter_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"lora_dropout.*p=0\.1.*use_prefix_grouper=False"):
        make_engine(qwen3, model=lora)


def test_architecture_outside_the_attention_interface_is_named() -> None:
    with torch.device("meta"):
        module = transformers.BloomForCausalLM(transformers.BloomConfig(attention_dropout=0.0))
    with pytest.raises(ValueError, match=r"BloomForCausalLM does not go through.*use_prefix_grouper=False"):
        prepare_model(module, TEXT, compiles=False)
