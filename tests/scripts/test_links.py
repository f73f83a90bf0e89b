"""A reader who follows a link of a page arrives, on GitHub and on the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "upkeep"))
from check_links import anchors, broken, external, links, pages  # noqa: E402

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_relative_links_lead_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    assert not broken(page)


def test_no_page_is_passed_over() -> None:
    named = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "scripts/README.md", "docs/design.md", "docs/api.md"} <= named
    assert sum(len(links(page.read_text())) for page in PAGES) > 80
    assert "github.com" in external()


def test_no_page_shows_the_marks_of_a_merge() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert marks.search("<<<<<<< HEAD\n")
    assert [page for page in PAGES if marks.search(page.read_text())] == []


def test_a_link_that_leads_nowhere_is_told_with_its_reason(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# It works: `a` & b\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n\n::: package.name\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#twice) [c](gone.md) [d](#here) [e](#there) [f](other.md#no-heading)\n"
        "[g](other.md#it-works-a--b) [h](other.md#package.name) `[i](gone.md)` [j](https://x.org/gone)\n"
    )
    assert anchors(other.read_text()) == {"twice", "package.name"}
    assert [text.partition(":")[0] for text in broken(page)] == [
        "gone.md",
        "#there",
        "other.md#no-heading",
        "other.md#it-works-a--b",
    ]
