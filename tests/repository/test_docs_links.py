"""Every link between files of the repository leads to a file, and to a heading that is there. No network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from tests.pages.page_blocks import without_code

_LINK = re.compile(r"\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|/")


def documents(repository: Path) -> list[Path]:
    found = [
        *repository.glob("*.md"),
        *(path for folder in ("docs", "client", "conformance", "examples", "tests/data") for path in (repository / folder).rglob("*.md")),
    ]
    return sorted(found)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = found.get(slug, 0)
        found[slug] = number + 1
        names.add(f"{slug}-{number}" if number else slug)
    return frozenset(names)


def broken(path: Path) -> Iterator[str]:
    text = without_code(path.read_text(encoding="utf-8"))
    for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "", text)):
        target = match["target"]
        if _ELSEWHERE.match(target):
            continue
        name, _, anchor = unquote(target).partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"{target}: no such heading"


def test_every_link_leads_somewhere(repository: Path) -> None:
    pages = documents(repository)
    assert len(pages) > 100
    assert not {str(page.relative_to(repository)): found for page in pages if (found := list(broken(page)))}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    (tmp_path / "b.md").write_text("# B\n## Two words\n## Two words\n```\n## Not one\n```\n")
    page.write_text("[x](b.md#two-words) [x](b.md#two-words-1) [x](b.md#not-one) [x](c.md) [x](#a) [x](https://x) `[x](no.md)`\n")
    assert list(broken(page)) == ["b.md#not-one: no such heading", "c.md: no such file", "#a: no such heading"]


def test_no_page_stands_outside_of_the_folders(repository: Path) -> None:
    """A page belongs to one of them: what it is for decides which."""
    assert {path.name for path in (repository / "docs").glob("*.md")} <= {"index.md"}
