"""docs/support.md has a row for every option of the matrix, and its overrides are taken or refused as it says."""

import re
from pathlib import Path

import pytest
import transformers

from tests.config import config_support
from tests.config.config_support import TINY, compose_config, save_checkpoint
from tests.options.option import split
from tests.options.table import OPTIONS
from verl_pg_plugin.config.preflight import sharing_issues

PAGE = (Path(__file__).parents[2] / "docs/support.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
ROW = re.compile(r"^\| ([^|]+) \| `?([^|]+?)`? \|", re.MULTILINE)
ROWS = [(*row, title) for title in ("Exact", "Rejected") for row in ROW.findall(SECTIONS[title])]


def test_every_option_has_a_row() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert {(option.name, option.override, "Exact") for option in OPTIONS} <= set(ROWS)


@pytest.fixture(scope="module")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that leave nothing to object to."""
    hf_config = transformers.Qwen3Config(**{**TINY, "num_attention_heads": 4})
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("qwen3"), hf_config)
    flags = f"critic.model.path={checkpoint}", "actor_rollout_ref.actor.use_prefix_grouper=True"
    return [*config_support.runnable(checkpoint, checkpoint / "no.parquet"), *flags]


@pytest.mark.parametrize(("override", "status"), [row[1:] for row in ROWS if "=" in row[1]])
def test_override_is_taken_or_refused_before_anything_starts(override: str, status: str, runnable: list[str]) -> None:
    config = compose_config(*runnable, *split(override))
    found = [issue.why for issue in sharing_issues(config) if not issue.is_warning]
    found = [why for why in found if "needs a GPU" not in why]  # the machine's fault
    assert bool(found) == (status == "Rejected"), found
