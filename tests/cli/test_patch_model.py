"""``python -m verl_pg_plugin patch-model`` on real folders."""

import json
from pathlib import Path

import pytest

from tests.fresh import run_fresh
from tests.support import save_tiny_model
from verl_pg_plugin.__main__ import main
from verl_pg_plugin.cli.patch_model import AUTO_MAP, BACKUP_FILE, MODELING_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "qwen3")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rejected(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which must fail with one line and change nothing."""
    before = contents(folder) if folder.is_dir() else None
    capsys.readouterr()
    assert main(["patch-model", str(folder)]) == 2
    assert before is None or contents(folder) == before
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


PATCHED = """
import torch, transformers as t
load = dict(trust_remote_code=True, dtype=torch.float32)
for folder in ("untied", "tied"):
    model = t.AutoModelForCausalLM.from_pretrained(folder, **load)
    value = t.AutoModelForTokenClassification.from_pretrained(folder, **load)
    assert type(model).__name__ == "Qwen3ForCausalLM" and "transformers_modules" in type(model).__module__
    assert type(value).__name__ == "Qwen3ForValue"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (folder == "tied")
    ids = torch.arange(12).view(2, 6)
    model.save_pretrained(folder + "/saved")
    again = t.AutoModelForCausalLM.from_pretrained(folder + "/saved", **load)
    assert torch.equal(again(ids).logits, model(ids).logits)
"""
REGISTERED = """
import transformers as t
import verl_pg_plugin.models.register_on_import
verl_pg_plugin.models.register()
causal = t.AutoModelForCausalLM.from_pretrained("registered")
value = t.AutoModelForTokenClassification.from_pretrained("registered")
assert type(causal).__module__ == "verl_pg_plugin.models.qwen3.modeling_qwen3", type(causal)
assert type(value).__name__ == "Qwen3ForValue", type(value)
"""


def test_patched_and_registered_checkpoints_load_in_a_new_process(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("untied", "tied", "registered"):
        save_tiny_model(tmp_path / folder, "qwen3", tie_word_embeddings=folder == "tied")
    before = contents(tmp_path / "registered")
    assert main(["patch-model", "untied"]) == main(["patch-model", "tied"]) == 0
    for ended in run_fresh([(PATCHED, {}), (REGISTERED, {})]):
        assert ended.returncode == 0, ended.stderr
    assert contents(tmp_path / "registered") == before


def undo(folder: Path) -> None:
    (folder / MODELING_FILE).unlink()
    (folder / BACKUP_FILE).rename(folder / "config.json")


@pytest.mark.parametrize("linked", [False, True], ids=["file", "link into a download cache"])
def test_patching_again_updates_and_undo_restores(folder, tmp_path_factory, linked) -> None:
    blob = tmp_path_factory.mktemp("cache") / "blob"
    if linked:
        (folder / "config.json").rename(blob)
        (folder / "config.json").symlink_to(blob)
    before = contents(folder)
    assert main(["patch-model", str(folder)]) == 0
    patched = contents(folder)
    assert json.loads(patched["config.json"])["auto_map"] == AUTO_MAP
    assert not linked or blob.read_bytes() == before["config.json"]
    for older in (b"# of an older release\n", patched[MODELING_FILE]):
        (folder / MODELING_FILE).write_bytes(older)
        assert main(["patch-model", str(folder)]) == 0
        assert contents(folder) == patched
    undo(folder)
    assert contents(folder) == before
    assert (folder / "config.json").is_symlink() == linked


def test_copies_without_a_backup_are_updated(folder, capsys) -> None:
    assert main(["patch-model", str(folder)]) == 0
    (folder / BACKUP_FILE).unlink()
    patched = contents(folder)
    (folder / MODELING_FILE).write_bytes(patched[MODELING_FILE] + b"# of an older release\n")
    edit_config(folder, auto_map=dict([*AUTO_MAP.items()][:1]))  # as transformers saves it
    assert main(["patch-model", str(folder)]) == 0
    assert contents(folder) == patched, "no backup of a patched config"
    assert "and AutoModelForCausalLM and AutoModelForTokenClassification from auto_map" in capsys.readouterr().out


def test_other_auto_map_entries_are_kept_and_foreign_models_rejected(folder, capsys) -> None:
    edit_config(folder, auto_map={"AutoTokenizer": ["mine.Tokenizer", None]})
    assert main(["patch-model", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoTokenizer"] == ["mine.Tokenizer", None]
    edit_config(folder, auto_map={"AutoModelForCausalLM": "mine.Model"})
    assert "already points to mine.Model" in rejected(folder, capsys)


def test_other_checkpoints_and_foreign_modeling_files_are_rejected(tmp_path: Path, capsys) -> None:
    assert "has no config.json. Fix: pass the folder" in rejected(tmp_path / "nowhere", capsys)
    llama = "model_type is 'llama', not 'qwen3'; other architectures need no patch in packed mode "
    llama += "(actor_rollout_ref.model.use_remove_padding=True)"
    for content, why in (("{", "is not JSON"), ('{"model_type": "llama"}', llama)):
        (tmp_path / "config.json").write_text(content)
        assert why in rejected(tmp_path, capsys)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / MODELING_FILE).write_text("# mine\n")
    assert "patch-model did not write it" in rejected(tmp_path, capsys)


def test_a_full_disk_leaves_a_checkpoint_that_can_be_patched_again(folder, capsys, monkeypatch) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    before = contents(folder)
    monkeypatch.setattr(Path, "replace", full)
    assert main(["patch-model", str(folder)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert before.items() <= contents(folder).items()
    monkeypatch.undo()
    assert main(["patch-model", str(folder)]) == 0
    undo(folder)
    assert contents(folder) == before
