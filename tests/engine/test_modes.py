"""Engine and model classes of each mode, and refusals of unsupported models."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.batches import make_batch
from verl.utils import model as verl_model
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.engine.test_exactness import MIXED, PADDED
from tests.models.test_forward import save_qwen3
from tests.own_models import (
    NoKeywordsForCausalLM,
    NoKeywordsInAttentionForCausalLM,
    NoKeywordsInDecoderForCausalLM,
    OwnTableForCausalLM,
    TableInForwardForCausalLM,
    UnnamedExpertsForCausalLM,
    save_own,
)
from tests.support import check_exact, clone, critic_batch, default_loss, group, infer, make_engine, save_tiny_model
from verl_pg_plugin.cli.patch_model import patch
from verl_pg_plugin.engine.prepare import check_no_dropout, prepare_model
from verl_pg_plugin.modalities import TEXT


@pytest.mark.parametrize(("remove_padding", "sharing"), [(True, True), (False, True), (True, False), (False, False)])
def test_two_flags_select_the_mode(qwen3: str, remove_padding: bool, sharing: bool) -> None:
    engine = make_engine(qwen3, packed=sharing, padded=not remove_padding)
    assert (type(engine) is FSDPEngineWithLMHead) == (not sharing)
    assert getattr(engine, "packed", None) == (remove_padding if sharing else None)


def test_dropout_and_a_class_outside_the_attention_interface_are_named() -> None:
    with torch.device("meta"):
        module = transformers.BloomForCausalLM(transformers.BloomConfig(attention_dropout=0.1))
    said = r"attention_dropout=0\.1.*override_config\.attention_dropout=0\.0.*BloomForCausalLM does not go through"
    with pytest.raises(ValueError, match=f"{said}.*use_prefix_grouper=False"):
        prepare_model(module, TEXT, compiles=False)
    with pytest.raises(ValueError, match=r"0 drops out with p=0\.3"):
        check_no_dropout(torch.nn.Sequential(torch.nn.AlphaDropout(0.3)))


def test_a_model_whose_config_has_no_number_of_layers_is_refused() -> None:
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own"

    class OwnModel(transformers.PreTrainedModel):
        config_class = OwnConfig
        _supports_attention_backend = True

        def forward(self, **keywords: object) -> None: ...

    said = r"OwnModel: its config does not say how many layers it has \(\+\+.*override_config.num_hidden_layers=<its"
    with pytest.raises(ValueError, match=said):
        prepare_model(OwnModel(OwnConfig(n_layers=2)), TEXT, compiles=False)


@pytest.mark.parametrize(
    ("model_class", "said"),
    [
        (OwnTableForCausalLM, "own_of_tests: its class looks attention up in its own table. Fix: let it call "),
        (NoKeywordsForCausalLM, "NoKeywordsForCausalLM: NoKeywordsForCausalLM.forward takes no **kwargs"),
        (NoKeywordsInDecoderForCausalLM, "NoKeywordsInDecoderForCausalLM: OwnDecoder.forward takes no **kwargs"),
        (TableInForwardForCausalLM, "TableInForwardForCausalLM: its class looks attention up in its own table. Fix: "),
        (NoKeywordsInAttentionForCausalLM, "NoKeywordsInAttentionForCausalLM: its class does not hand **kwargs to its"),
    ],
)
def test_a_class_that_cannot_receive_the_layout_is_refused(model_class, said, tmp_path: Path) -> None:
    path = save_own(tmp_path, model_class, attn_implementation="eager")
    with pytest.raises(ValueError, match=rf"prefixes cannot be shared in {re.escape(said)}.*use_prefix_grouper=False"):
        infer(make_engine(path), make_batch(group(9, [4, 5], 1)))


def test_a_class_whose_flops_cannot_be_counted_trains_with_one_warning(tmp_path: Path, caplog) -> None:
    path = save_own(tmp_path, UnnamedExpertsForCausalLM)
    result = check_exact(make_engine(path), path, make_batch(MIXED))
    assert "prefix_grouper/flop_ratio" not in result.metrics
    (warning,) = (record.message for record in caplog.records if "FLOPs" in record.message)
    assert warning.startswith("FLOPs of UnnamedExpertsForCausalLM cannot be counted (ValueError: own_of_tests has")
    assert "++actor_rollout_ref.model.override_config.num_experts_per_tok=<experts a token visits>" in warning


@pytest.mark.parametrize("padded", [False, True])
def test_a_value_class_in_the_checkpoint_is_exact(value_model: str, tmp_path: Path, padded: bool) -> None:
    """``Qwen3ForValue`` reads a checkpoint of transformers' classifier."""
    patched = tmp_path / "patched"
    shutil.copytree(value_model, patched)
    patch(patched)
    engine = make_engine(str(patched), padded=padded, model={"trust_remote_code": True}, critic=True)
    assert any(base.__name__ == "Qwen3ForValue" for base in type(engine.module).__mro__)
    check_exact(engine, value_model, critic_batch(MIXED, **(PADDED if padded else {})))


def test_a_critic_of_a_causal_lm_checkpoint_gets_a_new_head_that_learns(tmp_path: Path) -> None:
    engine, batch = make_engine(save_qwen3(tmp_path), critic=True), critic_batch(MIXED)
    losses = []
    for _ in range(3):
        with engine.train_mode():
            losses.append(sum(engine.train_batch(clone(batch), default_loss(batch))["loss"]))
    assert losses[-1] < losses[0]


def test_a_critic_without_a_token_classifier_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "olmo2")
    with pytest.raises(ValueError, match=r"no token classifier for 'olmo2'.*critic\.model\.path"):
        make_engine(path, critic=True)


def test_mode_off_on_a_cpu_gives_the_same_values(value_model: str) -> None:
    """verl alone requires flash-attn, which no CPU has."""
    batch, off = critic_batch(MIXED[:3]), make_engine(value_model, packed=False, critic=True)
    assert verl_model.load_valuehead_model.__module__ == "verl.utils.model", "verl's own loader is put back"
    check_exact(off, value_model, batch)
