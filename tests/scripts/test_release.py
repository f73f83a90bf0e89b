"""A release can be cut: one version, links that work on PyPI, workflows that name what is there."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import verl_pg_plugin

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "upkeep"))
from prepare_release import absolute_links, objections, section, version_of, with_addresses  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_there_is_one_version() -> None:
    assert verl_pg_plugin.__version__ == version_of(ROOT / "verl_pg_plugin") == version("verl-pg-plugin")
    assert not re.search(r"^version = \"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("tag", "changelog", "said"),
    [
        ("v1.2.0", "## 1.2.0 (2026-01-31)\n", 0),
        ("1.2.0", "## 1.2.0 (2026-01-31)\n", 1),
        ("v1.2.0", "## 1.2.0 (unreleased)\n", 1),
        ("v1.2.1", "## 1.1.0 (2026-01-31)\n", 2),
    ],
)
def test_a_tag_that_does_not_fit_version_and_changelog_is_refused(tag: str, changelog: str, said: int) -> None:
    assert len(objections(tag, "1.2.0", changelog)) == said


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## 1.2.0 (2026-01-31)\n\n### Added\n\n- a\n\n## 1.1.0 (2025-01-31)\n\n- b\n"
    assert section("1.2.0", changelog) == "### Added\n\n- a"
    assert section("1.1.0", changelog) == "- b"


def test_relative_links_lead_to_the_tagged_file_and_others_stay() -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.png) [w](https://x.org/y) [h](#here)"
    assert absolute_links(text, "https://host/me/it", "v1.0.0") == (
        "[a](https://host/me/it/blob/v1.0.0/docs/a.md#b) ![p](https://host/me/it/raw/v1.0.0/docs/p.png) "
        "[w](https://x.org/y) [h](#here)"
    )
    badge = "[![t](../../actions/t.svg)](docs/t.md) [![p](https://x.org/p)](../../actions/t.yml)"
    assert absolute_links(badge, "https://host/me/it", "v1.0.0") == (
        "[![t](https://host/me/it/actions/t.svg)](https://host/me/it/blob/v1.0.0/docs/t.md) "
        "[![p](https://x.org/p)](https://host/me/it/actions/t.yml)"
    )


def test_the_metadata_names_the_repository_that_a_release_comes_from() -> None:
    released = with_addresses((ROOT / "pyproject.toml").read_text(), "https://host/me/it")
    urls = released.split("[project.urls]\n")[1].split("\n\n")[0].splitlines()
    assert 'Source = "https://host/me/it"' in urls
    assert 'Issues = "https://host/me/it/issues"' in urls
    assert any(line.startswith("verl = ") for line in urls)


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(
        r'^    "([A-Za-z0-9_.-]+)(\[.*?\])?([^"]*)",',
        text[text.index("dependencies = [") : text.index("# verl imports")],
        re.MULTILINE,
    )
    listed += re.findall(r'"(flash-attn[^">]*)()([^"]*)"', text)
    bounded = {name: bounds for name, _, bounds in listed if name != "verl-pg-plugin"}
    assert len(bounded) > 25
    unbounded = [name for name, bounds in bounded.items() if not (">=" in bounds and "<" in bounds)]
    assert not unbounded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_be_read_and_runs_scripts_that_are_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert {"name", "jobs", True} <= workflow.keys()  # YAML reads "on" as a boolean
    for script in re.findall(r"scripts/[\w/]+\.(?:sh|py)", path.read_text()):
        assert (ROOT / script).is_file(), script
    piped = False
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        piped |= any(re.search(r"(?<!\|)\|(?!\|)", step.get("run", "")) for step in job["steps"])
    # GitHub's own shell, bash -e, goes on where what is in front of a pipe fails; a shell that is named does not.
    assert not piped or workflow["defaults"]["run"]["shell"] == "bash"
