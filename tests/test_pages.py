"""Pages use one word for one thing, have no history, and match the code."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import make_options_page
import pytest

from verl_pg_plugin.config import options
from verl_pg_plugin.config.options import OPTION_NAMES, PrefixGrouperOptions
from verl_pg_plugin.engine.metrics import TOTALS, mini_batch_metrics

ROOT = Path(__file__).parents[1]
GENERATED = {"options.md", "models.md"}
"""Made by `scripts/upkeep/make_options_page.py` and `scripts/make_models_table.py`."""
DOCS = sorted((ROOT / "docs").glob("*.md"))
CODE = "".join(path.read_text() for path in (ROOT / "verl_pg_plugin").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]

HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
ONE_WORD_FOR_ONE_THING = {  # what must not be written: what to write
    r"\(log\)": "a figure with its command",
    r"no longer|used to be|previously|any more\b": "what is, not what was",
    r"asked were|\baim:|\btarget of": "what was measured",
    r"\btries?\b|\btrunks?\b": "prefix tree, shared prefix",
    r"\bdearest\b|\bcheapest parts?\b": "most expensive",
    r"\bhuggingface-cli\b": "hf",
    r"\bkept layers?\b|\bheld bytes\b": "activation levels, saved bytes",
    r"\bcopied keys\b": "gathered KV",
    r"\btowers?\b|\bpictures?\b": "vision encoder, image",
    r"\bpacked rows?\b|\bphysical rows?\b": "packed token",
    r"\b[248]B shape\b|\bshape of Qwen": "config",
    r"\bdoors?\b|\bseams?\b": "entry points, extension points",
}


def prose(page: Path) -> str:
    """A page without code, tables, headings, images and addresses of links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [x for x in text.splitlines() if not x.startswith(("|", "#", "    ", "!", ":::", "<"))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    return re.sub(r"`[^`]*`", "code", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_one_word_for_one_thing_and_have_no_history(page):
    assert HASH.findall(re.sub(r"https?://\S+", "", page.read_text())) == []
    text = prose(page) if page.name in GENERATED else re.sub(r"\]\([^)]*\)|`[^`]*`", "", page.read_text())
    assert {word: use for word, use in ONE_WORD_FOR_ONE_THING.items() if re.search(word, text, re.IGNORECASE)} == {}


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


def test_undescribed_options_stop_the_page(monkeypatch) -> None:
    @dataclass(frozen=True)
    class More(PrefixGrouperOptions):
        new: int = 0

    monkeypatch.setattr(options, "OPTION_NAMES", (*OPTION_NAMES, "new"))
    monkeypatch.setattr(make_options_page, "PrefixGrouperOptions", More)
    More.__doc__ = PrefixGrouperOptions.__doc__
    with pytest.raises(SystemExit, match=r"^new: not described\. Fix: "):
        make_options_page.page()
    More.__doc__ = PrefixGrouperOptions.__doc__.replace("\n\n    Raises:", "\n        new: nothing.\n\n    Raises:")
    with pytest.raises(SystemExit, match=r"^new: every value is taken\. Fix: "):
        make_options_page.page()


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
