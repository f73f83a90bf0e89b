"""Pages that a stranger can trust: short, in one set of words, without history, and true to what they quote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"options.md", "models.md"}
"""Made by `scripts/upkeep/make_options_page.py` and `scripts/make_models_table.py`."""
DOCS = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [page for page in DOCS if page.name not in GENERATED]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS]

LONGEST_SENTENCE = 30
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
}


def prose(page: Path) -> str:
    """A page without code, tables, headings, images and addresses of links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [x for x in text.splitlines() if not x.startswith(("|", "#", "    ", "!", ":::", "<"))]
    text = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    return re.sub(r"`[^`]*`", "code", text)


def sentences(page: Path) -> list[str]:
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose(page))
    return [s for text in paragraphs for s in re.split(r"(?<=[.!?:])\s+", " ".join(text.split())) if s]


def words(page: Path) -> int:
    return len(page.read_text().split())


def test_readme_and_docs_keep_to_their_budgets():
    assert words(ROOT / "README.md") <= 900
    assert words(ROOT / "CHANGELOG.md") <= 300
    assert sum(map(words, WRITTEN)) <= 10_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_short_sentences_one_word_for_one_thing_no_history_and_no_commit(page):
    assert HASH.findall(re.sub(r"https?://\S+", "", page.read_text())) == []
    text = prose(page) if page.name in GENERATED else re.sub(r"\]\([^)]*\)|`[^`]*`", "", page.read_text())
    found = {word: instead for word, instead in ONE_WORD_FOR_ONE_THING.items() if re.search(word, text, re.IGNORECASE)}
    assert found == {}
    assert [s for s in sentences(page) if len(s.split()) > LONGEST_SENTENCE] == []


def test_every_relative_link_leads_to_a_file_and_a_heading():
    wrong = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "benchmarks").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:|\.\./\.\./actions/)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
                wrong.append(f"{page.name}: {target}")
    assert not wrong


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`", "", title)).strip().lower().replace(" ", "-") for title in titles}


def test_options_in_pages_are_written_so_that_they_can_be_pasted_into_verls_entry_point():
    """Without ``++`` an option is a Hydra error there; names of metrics and of the section stand alone."""
    from verl_pg_plugin.config.options import PrefixGrouperOptions

    names = "|".join(PrefixGrouperOptions.__dataclass_fields__)
    bare = re.compile(rf"(?<!\+)(?<!\w)(?<!/)(?<!engine\.)prefix_grouper\.({names})=")
    assert {page.name: found for page in PAGES if (found := bare.findall(page.read_text()))} == {}
