"""Links of the pages: relative ones lead to a file, and to a heading in it; external ones answer.

    python scripts/upkeep/check_links.py                      # relative links and anchors, no network
    python scripts/upkeep/check_links.py --hosts              # the hosts that pages link to, and how often
    python scripts/upkeep/check_links.py --external HOST ...  # asks these hosts, or all, for every page that is linked

An anchor must be what both GitHub and the site (mkdocs) make of a heading. Code is not read for links.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
DOCSTRING = re.compile(r"^::: (\S+)$", re.MULTILINE)  # the site puts a name's docstring here, under its name
FOLDERS = ("", "docs/", "scripts/", ".github/**/")
WEB = ("http://", "https://")


def pages() -> list[Path]:
    """Markdown files of the repository."""
    return sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))


def links(text: str) -> list[str]:
    """Targets of a page, in its order."""
    return LINK.findall(INLINE.sub("", FENCED.sub("", text)))


def anchors(text: str) -> set[str]:
    """Of headings that have the same anchor on GitHub and on the site, and of docstrings, which the site alone has."""
    text = FENCED.sub("", text)
    found, seen = set(DOCSTRING.findall(text)), Counter[str]()
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)|`", lambda match: match.group(1) or "", heading)
        github = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())
        # The second heading of a name is -1 here and _1 there.
        if github == site and not seen[github]:
            found.add(github)
        seen[github] += 1
    return found


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere, and why."""
    wrong = []
    for target in links(page.read_text()):
        if urlsplit(target).scheme:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{target}: there is no {file}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            wrong.append(f"{target}: {file.name} has no heading of this anchor, or another on GitHub than on the site")
    return wrong


def external() -> dict[str, list[str]]:
    """Pages of the web that are linked, by host."""
    found: dict[str, set[str]] = {}
    for page in pages():
        for target in links(page.read_text()):
            if target.startswith(WEB):
                found.setdefault(urlsplit(target).netloc, set()).add(target.partition("#")[0])
    return {host: sorted(found[host]) for host in sorted(found)}


def answers(url: str) -> str | None:
    """Why a page does not answer; None if it does."""
    request = urllib.request.Request(url, headers={"User-Agent": "link check"})
    try:
        with urllib.request.urlopen(request, timeout=20):
            return None
    except (urllib.error.URLError, TimeoutError) as error:
        return str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", action="store_true", help="list the hosts")
    parser.add_argument("--external", nargs="*", metavar="HOST", help="ask these hosts; without a name all of them")
    args = parser.parse_args()
    console = Console(width=150, highlight=False, markup=False)
    if args.hosts:
        for host, urls in external().items():
            console.print(f"{len(urls):4} {host}")
        return 0
    if args.external is None:
        wrong = [f"{page.relative_to(ROOT)}: {text}" for page in pages() for text in broken(page)]
    else:
        found = external()
        asked = [url for host in args.external or found for url in found[host]]
        wrong = [f"{url}: {why}" for url in asked if (why := answers(url)) is not None]
    for text in wrong:
        console.print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
