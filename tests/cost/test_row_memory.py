"""What carried rows take of a budget follows from the sizes of the model."""

import pytest
import torch
import transformers

from verl_pg_plugin.cost.row_memory import RowMemory

SHAPE_8B = transformers.Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


def memory(keeps_attention: bool = True, checkpointing: bool = True) -> RowMemory:
    return RowMemory.of(SHAPE_8B, torch.bfloat16, checkpointing, keeps_attention)


def test_an_8b_shape_takes_580_kib_a_row_and_432_kib_a_carried_one() -> None:
    assert memory().activations / 1024 == 36 * (8 + 8 + 0.125)
    assert (memory().key_value / 1024, memory().sums / 1024) == (144, 288)
    weights = memory().weights(forward_only=False)
    assert weights.carried == pytest.approx(0.745, abs=0.002)
    assert weights.owed == pytest.approx(0.497, abs=0.002)
    assert weights.recomputing == pytest.approx(8 / 16.125), "the layer's input alone"
    assert memory(keeps_attention=False).weights(forward_only=False).recomputing == 1


def test_log_probs_carry_no_sums() -> None:
    weights = memory().weights(forward_only=True)
    assert weights.carried == weights.owed == pytest.approx(144 / 580.5, abs=0.001)


def test_rows_that_keep_less_make_carried_ones_dearer_and_those_that_keep_all_cheaper() -> None:
    carried = [
        memory(keeps, checkpointing).weights(forward_only=False).carried
        for keeps, checkpointing in ((False, True), (True, True), (True, False))
    ]
    assert carried[0] == pytest.approx(1.5)
    assert carried == sorted(carried, reverse=True)


def test_latent_attention_carries_its_wide_keys_and_narrow_values() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    assert RowMemory.of(config, torch.bfloat16, True, True).key_value == 2 * 4 * (24 + 16) * 2


def copying(kernel: str = "flash_attn_2", checkpointing: bool = True) -> RowMemory:
    return RowMemory.of(SHAPE_8B, torch.bfloat16, checkpointing, keeps_attention=True, kernel=kernel)


@pytest.mark.parametrize(("kernel", "gradients"), [("flash_attn_2", 4 + 16), ("flash_attn_4", 4 + 8)])
def test_a_copied_key_takes_its_value_and_gradients_of_all_query_heads_or_float32_sums(
    kernel: str, gradients: int
) -> None:
    """KiB of 8 key/value heads of 128 and 32 query heads."""
    assert (copying(kernel).copy / 1024, copying(kernel).copy_gradients / 1024) == (4, gradients)
    copies = copying(kernel).copies(forward_only=False)
    assert copies.weight == pytest.approx((4 + gradients) / 580.5)
    assert copies.free == 1 + 6 * 24 / (4 + gradients), "what the MLP's three of 12288 and their gradients take"


@pytest.mark.parametrize(("kernel", "in_place"), [("flash_attn_2", True), ("flash_attn_4", True), ("sdpa", False)])
def test_where_a_backward_reads_trunks_in_place_copies_of_them_take_what_a_forward_needs(
    kernel: str, in_place: bool
) -> None:
    memory = copying(kernel)
    expected = memory.copies(forward_only=True) if in_place else None
    assert memory.copies(forward_only=False).without_gradients == expected
    assert memory.copies(forward_only=True).without_gradients is None


def test_windows_read_no_root_in_place() -> None:
    config = transformers.MistralConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=2, sliding_window=64)
    memory = RowMemory.of(config, torch.bfloat16, checkpointing=True, keeps_attention=True)
    assert memory.copies(forward_only=False).without_gradients is None


def test_copies_of_log_probs_have_no_gradients() -> None:
    copies = copying().copies(forward_only=True)
    assert (copies.weight, copies.free) == (pytest.approx(4 / 580.5), 1 + 3 * 24 / 4)


def test_without_checkpointing_every_layer_keeps_its_copies() -> None:
    memory = copying(checkpointing=False)
    assert memory.copies(forward_only=False).weight == (36 * 4 + 20) * 1024 / memory.activations


def test_where_every_query_head_has_a_key_gradients_have_nowhere_to_widen() -> None:
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=2)
    memory = RowMemory.of(config, torch.bfloat16, checkpointing=True, keeps_attention=True)
    assert memory.copy == memory.copy_gradients == 2 * 512 * 2


def test_a_config_that_names_no_sizes_counts_no_copies() -> None:
    memory = RowMemory.of(transformers.PretrainedConfig(), torch.bfloat16, True, True)
    assert memory.copies(forward_only=False).take(10**6, rows=1) == 0
