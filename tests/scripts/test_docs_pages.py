"""The pages say what the code does: options, names of metrics, and links between pages."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import yaml

from verl_pg_plugin.config.options import OPTION_NAMES
from verl_pg_plugin.engine.metrics import TOTALS, mini_batch_metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIGURES = (
    *TOTALS,
    *("prompt_groups", "tokens_of_groups", "micro_batches", "forward", "forward_alone", "copied_keys", "cached_bytes"),
    *("verify_max_error", "host_bytes"),
)
SCRIPT = ROOT / "scripts" / "upkeep" / "make_options_page.py"


def test_the_page_of_options_is_fresh_and_has_each_once() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"^\| `(\w+)` \| `", (DOCS / "options.md").read_text(), re.MULTILINE)
    assert named == list(OPTION_NAMES)


def test_every_metric_that_the_code_writes_is_named_once() -> None:
    code = "".join(path.read_text() for path in (ROOT / "verl_pg_plugin").rglob("*.py"))
    metrics = mini_batch_metrics([dict.fromkeys(FIGURES, 1.0)], sp_size=1, kernel="NAME")
    written = [name.removeprefix("prefix_grouper/") for name in metrics]
    written += re.findall(r'"prefix_grouper/([a-z_/]+)"', code)
    page = (DOCS / "metrics.md").read_text()
    names = [row.split("|")[1] for row in page[page.index("| metric |") :].splitlines()[2:] if row.startswith("|")]
    for name in set(written):
        assert sum(bool(re.search(rf"[`/]{re.escape(name)}`", cell)) for cell in names) == 1, name
    assert len(set(written)) > 20


def pages_of(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry if isinstance(entry, list) else list(entry.values())  # type: ignore[attr-defined]
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_menu_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)  # to which tags of MkDocs are nothing
    menu = pages_of(site["nav"])
    assert sorted(menu) == sorted(path.name for path in DOCS.glob("*.md"))


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "verl_pg_plugin").rglob("*.py"))
    code = re.sub(r'" *\n *f?"', "", code)  # literals that Python joins
    page = (DOCS / "troubleshooting.md").read_text().partition("## Figures")[0]
    cells = re.findall(r"^\| (`.+?`) \| ", page, re.MULTILINE)
    assert len(cells) > 20
    for quoted in (quoted for cell in cells for quoted in re.findall("`([^`]+)`", cell)):
        parts = [part.strip() for part in re.split(r"\.\.\.|\bN\b", quoted)]
        assert max(map(len, parts)) > 12, f"too little to find {quoted!r} by"
        assert all(part in code for part in parts), quoted


def test_pages_of_the_api_name_public_things_that_are_there() -> None:
    for page in ("api.md", "extending.md"):
        text = (DOCS / page).read_text()
        names = re.findall(r"^::: (verl_pg_plugin[\w.]*)", text, re.MULTILINE)
        listed = re.findall(r"^::: (\S+)\n +options: { members: \[(.*)\]", text, re.MULTILINE)
        names += [f"{module}.{member}" for module, members in listed for member in members.split(", ")]
        assert len(names) > 3
        for name in names:
            assert not any(part.startswith("_") for part in name.split("."))
            assert (inspect.getdoc(pkgutil.resolve_name(name)) or "").strip(), f"{name} has no docstring"
