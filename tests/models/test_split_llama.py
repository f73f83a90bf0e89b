"""The assembled split model against the Llamas it is made of, and its real sizes."""

import sys
from pathlib import Path

import pytest
import torch

from tests.models.models import assemble_script, load, random_ids
from tests.support import save_tiny_model
from verl_pg_plugin.models.split_llama.modeling_split_llama import SplitLlamaConfig, SplitLlamaForCausalLM

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SCRIPT = Path(__file__).parents[2] / "scripts" / "assemble_split_llama.py"


@pytest.mark.parametrize("tied", [False, True])
def test_both_halves_of_one_llama_and_an_identity_adapter_are_that_llama(tmp_path: Path, tied: bool) -> None:
    source = save_tiny_model(tmp_path / "llama", "llama", num_hidden_layers=4, tie_word_embeddings=tied)
    assemble_script().assemble(Path(source), 3, Path(source), 1, tmp_path / "split")
    split, llama = load(str(tmp_path / "split")), load(source, stock=True)
    torch.nn.init.eye_(split.model.adapter.weight)
    input_ids = random_ids(2, 9)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0
    expected = llama(input_ids, attention_mask=mask, use_cache=False).logits
    for options in ({}, {"use_cache": True}):
        got = split(input_ids, attention_mask=mask, **options).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


def test_real_sizes_build_on_the_meta_device_from_a_saved_config(tmp_path: Path) -> None:
    SplitLlamaConfig(LLAMA_8B, LLAMA_70B).save_pretrained(tmp_path)
    config = SplitLlamaConfig.from_pretrained(tmp_path)
    assert config.get_text_config().num_hidden_layers == 32 + 80
    with torch.device("meta"):
        model = SplitLlamaForCausalLM(config)
    assert model.num_parameters() == 77_041_508_352


def test_sources_that_do_not_fit_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    assemble = assemble_script().assemble
    llama = Path(save_tiny_model(tmp_path / "llama", "llama"))
    qwen = Path(save_tiny_model(tmp_path / "qwen", "qwen3"))
    other = Path(save_tiny_model(tmp_path / "other", "llama", vocab_size=50))
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


def test_the_command_assembles_or_names_the_wrong_source_and_exits_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = save_tiny_model(tmp_path / "llama", "llama")
    qwen = save_tiny_model(tmp_path / "qwen", "qwen3")
    layers = ["--first-layers", "1", "--last-layers", "1", "--output", str(tmp_path / "split")]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--first", qwen, "--last", llama, *layers])
    with pytest.raises(SystemExit, match="2"):
        assemble_script().main()
    error = capsys.readouterr().err
    assert "not a Llama checkpoint" in error
    assert error.count("\n") == 1
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--first", llama, "--last", llama, *layers])
    assemble_script().main()
    assert "load it with trust_remote_code=True" in capsys.readouterr().out
    assert load(str(tmp_path / "split")).config.num_hidden_layers == 2
