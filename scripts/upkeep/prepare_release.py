"""Say whether a tag fits the version and the changelog, and make the README's links work on PyPI.

    python scripts/upkeep/prepare_release.py v1.2.3 --check
    python scripts/upkeep/prepare_release.py v1.2.3 --repository https://github.com/OWNER/NAME
    python scripts/upkeep/prepare_release.py v1.2.3 --notes        # the version's section of the changelog

The second rewrites README.md and pyproject.toml in place: PyPI shows them without the repository around them, so links
to files and images get the address of the tagged commit, and the metadata that of the repository. Needs nothing but
Python.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# On PyPI the plugin comes from there, and not from a clone.
ON_PYPI = {"'./verl_pg_plugin[": "'verl-pg-plugin[", "# a clone's folder, beside": "# beside"}
LINK = re.compile(r"(!\[[^\[\]]*)?\]\((?![a-z]+:|#)([^)]+)\)")


def version_of(package: Path) -> str:
    """``__version__`` of a package, read without importing it.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r'^__version__ = "([^"]+)"$', (package / "__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise ValueError(f"{package}/__init__.py has no __version__")
    return found[1]


def issues(tag: str, version: str, changelog: str) -> list[str]:
    """What speaks against releasing this version under this tag."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag} and __version__ is {version}")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    return found


def section(version: str, changelog: str) -> str:
    """What the changelog says of a version, without its heading."""
    return re.split(rf"^## {re.escape(version)} .*$", changelog, flags=re.MULTILINE)[1].partition("\n## ")[0].strip()


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Markdown whose relative links lead to the tagged files of a repository; images to their raw content."""

    def replaced(link: re.Match[str]) -> str:
        image, target = link.groups()
        kind = "" if target.startswith("../../") else f"{'raw' if image else 'blob'}/{tag}/"  # as GitHub reads it
        return f"{image or ''}]({repository}/{kind}{target.removeprefix('../../')})"

    return LINK.sub(replaced, text)


def with_addresses(pyproject: str, repository: str) -> str:
    """The project's metadata with the addresses of its source, issues and changes first among its URLs."""
    found = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    urls = "".join(f'{name} = "{repository}{path}"\n' for name, path in found.items())
    return pyproject.replace("[project.urls]\n", f"[project.urls]\n{urls}", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="change nothing")
    action.add_argument("--notes", action="store_true", help="write what the changelog says of the version")
    action.add_argument("--repository", help="address of the repository, without a slash at the end")
    args = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    found = issues(args.tag, version_of(ROOT / "verl_pg_plugin"), changelog)
    for issue in found:
        sys.stderr.write(f"error: {issue}\n")
    if not found and args.notes:
        sys.stdout.write(f"{section(args.tag[1:], changelog)}\n")
    if not found and args.repository:
        readme = ROOT / "README.md"
        text = readme.read_text()
        for of_a_clone, of_pypi in ON_PYPI.items():
            text = text.replace(of_a_clone, of_pypi)
        readme.write_text(absolute_links(text, args.repository, args.tag))
        pyproject = ROOT / "pyproject.toml"
        pyproject.write_text(with_addresses(pyproject.read_text(), args.repository))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
