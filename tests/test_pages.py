"""Pages match the code."""

import re
import subprocess
import sys
from pathlib import Path

from verl_pg_plugin.config.options import OPTION_NAMES
from verl_pg_plugin.engine.metrics import TOTALS, mini_batch_metrics

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
CODE = "".join(path.read_text() for path in (ROOT / "verl_pg_plugin").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]


def test_relative_links_lead_to_files():
    """``mkdocs build --strict`` checks headings too."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|\.\./\.\./actions/)([^)\s]+)\)", page.read_text()):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_options_in_pages_can_be_pasted_into_a_command():
    """Without ``++`` an option is a Hydra error; names of metrics and of the section have none."""
    bare = re.compile(rf"(?<!\+)(?<!\w)(?<!/)(?<!engine\.)prefix_grouper\.({'|'.join(OPTION_NAMES)})=")
    assert {page.name: names for page in PAGES if (names := bare.findall(page.read_text()))} == {}


def test_options_page_is_current_and_has_each_once() -> None:
    command = [sys.executable, ROOT / "scripts/upkeep/make_options_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"^\| `(\w+)` \| `", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert named == list(OPTION_NAMES)


def test_every_metric_of_the_code_is_described_once() -> None:
    figures = (
        *TOTALS,
        *("prompt_groups", "tokens_of_groups", "micro_batches", "forward", "forward_alone", "cached_bytes"),
        *("verify_max_error", "host_bytes"),
    )
    metrics = mini_batch_metrics([dict.fromkeys(figures, 1.0)], sp_size=1, kernel="NAME")
    written = [name.removeprefix("prefix_grouper/") for name in metrics]
    written += re.findall(r'"prefix_grouper/([a-z_/]+)"', CODE)
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = [row.split("|")[1] for row in page[page.index("| metric |") :].splitlines()[2:] if row.startswith("|")]
    for name in set(written):
        assert sum(bool(re.search(rf"[`/]{re.escape(name)}`", cell)) for cell in names) == 1, name
    assert len(set(written)) > 20


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    code = re.sub(r'" *\n *f?"', "", CODE)  # join adjacent literals
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Figures")[0]
    cells = re.findall(r"^\| (`.+?`) \| ", page, re.MULTILINE)
    assert len(cells) > 14
    for quoted in (quoted for cell in cells for quoted in re.findall("`([^`]+)`", cell)):
        parts = [part.strip() for part in re.split(r"\.\.\.|\bN\b", quoted)]
        assert max(map(len, parts)) > 12, f"{quoted!r} is too short to search for"
        assert all(part in code for part in parts), quoted


def test_the_walk_of_a_mini_batch_names_what_its_files_define() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    stops = re.findall(r"`(\w+/\w+\.py): (\w+)`", page)
    assert len(stops) > 22
    for file, name in stops:
        assert re.search(rf"^ *(def|class) {name}\b", (ROOT / "verl_pg_plugin" / file).read_text(), re.M), (file, name)
