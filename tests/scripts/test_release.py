"""Releases: one version, links that work on PyPI, and workflows that name existing scripts."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from prepare_release import ON_PYPI, absolute_links, issues, version_of, with_addresses

import verl_pg_plugin

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    ("tag", "changelog", "said"),
    [
        ("v1.2.0", "## 1.2.0 (2026-01-31)\n", 0),
        ("1.2.0", "## 1.2.0 (2026-01-31)\n", 1),
        ("v1.2.0", "## 1.2.0 (unreleased)\n", 1),
        ("v1.2.1", "## 1.1.0 (2026-01-31)\n", 2),
    ],
)
def test_tags_that_do_not_match_version_and_changelog_are_refused(tag: str, changelog: str, said: int) -> None:
    assert len(issues(tag, "1.2.0", changelog)) == said


def test_release_links_versions_and_bounds_of_dependencies() -> None:
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
    readme = (ROOT / "README.md").read_text()
    assert all(of_a_clone in readme for of_a_clone in ON_PYPI)
    project = (ROOT / "pyproject.toml").read_text()
    assert '\nIssues = "https://host/me/it/issues"\n' in with_addresses(project, "https://host/me/it")
    assert verl_pg_plugin.__version__ == version_of(ROOT / "verl_pg_plugin") == version("verl-pg-plugin")
    assert not re.search(r"^version = \"", project, re.MULTILINE)
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(
        r'^    "([A-Za-z0-9_.-]+)(\[.*?\])?([^"]*)",',
        text[text.index("dependencies = [") : text.index("# verl imports")],
        re.MULTILINE,
    )
    listed += re.findall(r'"(flash-attn[^">]*)()([^"]*)"', text)
    bounded = {name: bounds for name, _, bounds in listed if name != "verl-pg-plugin"}
    assert len(bounded) > 25
    assert [name for name, bounds in bounded.items() if ">=" not in bounds] == []
    # Installed packages are not exchanged; runs outside of the extra "tested" log it.
    open_above = [name for name, bounds in bounded.items() if "<" not in bounds]
    assert open_above == ["verl", "transformers", "torch"]
    assert all(re.search(rf'tested = \[.*"{name}<', text) for name in open_above)


def test_build_folders_are_ignored_and_extras_build_nothing() -> None:
    assert "build/" in (ROOT / ".gitignore").read_text().splitlines()
    # flash-attn has a source package only, which pip cannot build in isolation: it reads the installed torch.
    assert not re.search(r'"flash-attn[><=~"]', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_can_be_read_and_run_existing_scripts(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert {"name", "jobs", True} <= workflow.keys()  # YAML reads "on" as a boolean
    for script in re.findall(r"scripts/[\w/]+\.(?:sh|py)", path.read_text()):
        assert (ROOT / script).is_file(), script
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    piped = any(re.search(r"(?<!\|)\|(?!\|)", step.get("run", "")) for step in steps)
    # GitHub's default shell, bash -e, ignores failures before a pipe; a named shell does not.
    assert not piped or workflow["defaults"]["run"]["shell"] == "bash"
