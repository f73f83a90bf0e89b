"""Check a tag against the version and the changelog, and make the README's links absolute for PyPI.

    python scripts/upkeep/prepare_release.py v1.2.3 --check
    python scripts/upkeep/prepare_release.py v1.2.3 --repository https://github.com/OWNER/NAME
    python scripts/upkeep/prepare_release.py v1.2.3 --notes        # the version's section of the changelog

The second rewrites README.md and pyproject.toml in place: links to files and images get the address of the tagged
commit, and the metadata gets that of the repository. It needs only Python.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Replaces installation from a clone by installation from PyPI.
ON_PYPI = {"install '.[": "install 'verl-pg-plugin[", "From inside a clone of this repository, in": "In"}
LINK = re.compile(r"(!\[[^\[\]]*)?\]\((?![a-z]+:|#)([^)]+)\)")


def version_of(package: Path) -> str:
    """Return ``__version__`` of a package without importing it; ValueError if it has none."""
    match = re.search(r'^__version__ = "([^"]+)"$', (package / "__init__.py").read_text(), re.MULTILINE)
    if not match:
        raise ValueError(f"{package}/__init__.py has no __version__")
    return match[1]


def issues(tag: str, version: str, changelog: str) -> list[str]:
    """Return why this version cannot be released under this tag."""
    messages = []
    if tag != f"v{version}":
        messages.append(f"the tag is {tag} and __version__ is {version}")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", changelog, re.MULTILINE):
        messages.append(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    return messages


def section(version: str, changelog: str) -> str:
    """Return the changelog's section of a version, without its heading."""
    return re.split(rf"^## {re.escape(version)} .*$", changelog, flags=re.MULTILINE)[1].partition("\n## ")[0].strip()


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the tagged files of a repository, images to raw content."""

    def replaced(link: re.Match[str]) -> str:
        image, target = link.groups()
        kind = (
            "" if target.startswith("../../") else f"{'raw' if image else 'blob'}/{tag}/"
        )  # GitHub resolves ../../ to the repository
        return f"{image or ''}]({repository}/{kind}{target.removeprefix('../../')})"

    return LINK.sub(replaced, text)


def with_addresses(pyproject: str, repository: str) -> str:
    """Return the project's metadata with URLs of its source, issues and changelog."""
    paths = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    urls = "".join(f'{name} = "{repository}{path}"\n' for name, path in paths.items())
    return pyproject.replace("[project.urls]\n", f"[project.urls]\n{urls}", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="change nothing")
    action.add_argument("--notes", action="store_true", help="write the changelog's section of the version")
    action.add_argument("--repository", help="address of the repository, without a trailing slash")
    args = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    messages = issues(args.tag, version_of(ROOT / "verl_pg_plugin"), changelog)
    for message in messages:
        sys.stderr.write(f"error: {message}\n")
    if not messages and args.notes:
        sys.stdout.write(f"{section(args.tag[1:], changelog)}\n")
    if not messages and args.repository:
        readme = ROOT / "README.md"
        text = readme.read_text()
        for clone, pypi in ON_PYPI.items():
            text = text.replace(clone, pypi)
        readme.write_text(absolute_links(text, args.repository, args.tag))
        pyproject = ROOT / "pyproject.toml"
        pyproject.write_text(with_addresses(pyproject.read_text(), args.repository))
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
