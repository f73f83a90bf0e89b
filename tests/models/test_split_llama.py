"""The assembled split model against the Llamas it is made of."""

from pathlib import Path

import pytest
import torch

from tests.models.models import assemble, load, random_ids
from tests.support import save_tiny_model


@pytest.mark.parametrize("tied", [False, True])
def test_both_halves_of_one_llama_and_an_identity_adapter_are_that_llama(tmp_path: Path, tied: bool) -> None:
    source = save_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=4, tie_word_embeddings=tied)
    assemble(source, 3, source, 1, tmp_path / "split")
    split, llama = load(str(tmp_path / "split")), load(source, stock=True)
    torch.nn.init.eye_(split.model.adapter.weight)
    input_ids = random_ids(2, 9)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    expected = llama(input_ids, attention_mask=mask, use_cache=False).logits
    for options in ({}, {"use_cache": True}):
        got = split(input_ids, attention_mask=mask, **options).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_sources_that_do_not_fit_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    llama = save_tiny_model(tmp_path / "llama", "llama")
    qwen = save_tiny_model(tmp_path / "qwen", "qwen3")
    other = save_tiny_model(tmp_path / "other", "llama", vocab_size=50)
    output = tmp_path / "split"
    with pytest.raises(ValueError, match="not a Llama checkpoint: model_type is 'qwen3'"):
        assemble(llama, 1, qwen, 1, output)
    with pytest.raises(ValueError, match="has 2 layers, cannot take 3"):
        assemble(llama, 3, llama, 1, output)
    with pytest.raises(ValueError, match="vocab_size is 97 and 50"):
        assemble(llama, 1, other, 1, output)
    empty = Path(save_tiny_model(tmp_path / "empty", "llama"))
    (empty / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        assemble(empty, 1, llama, 1, output)
    assert not output.exists()
    assemble(llama, 1, llama, 1, output)
    with pytest.raises(FileExistsError):
        assemble(llama, 1, llama, 1, output)
