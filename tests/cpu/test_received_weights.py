"""A rollout takes the weights of a mixture of experts as verl sends them, expert by expert."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from tests.architectures.tiny_configs import tiny_config
from verl_pg_plugin.cpu.received_weights import copy_weights, received_parameters, received_weights


def random_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=torch.float32)


def test_what_a_trainer_sends_arrives_in_every_expert_one_by_one() -> None:
    trained, rollout = random_model(1), random_model(2)
    sent = dict(unfuse_moe_params(trained.named_parameters(), "qwen3_moe"))
    assert any(".experts.7.up_proj" in name for name in sent)
    assert received_parameters(rollout) == set(sent)
    for name, tensor in sent.items():
        copy_weights(received_weights(rollout), {name: tensor.detach()})
    for name, weight in trained.state_dict().items():
        assert torch.equal(rollout.state_dict()[name], weight), name


def test_another_shape_is_refused_and_not_broadcast() -> None:
    model = random_model(1)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is \(1,\), the model has \(32,\)"):
        copy_weights(received_weights(model), {"model.norm.weight": torch.zeros(1)})
