"""Builds the documentation's site: `python tools/docs_site.py ZENSICAL [serve]`. `make docs` calls it.

Puts the pages together in build/docs: those of docs/, documents of the repository (`pages` in docs/site.toml), the generated reference
(tools/docs_reference.py), and an index for each section. Links that leave docs/ are changed: a document that is a page leads there, any
other file is copied beside the pages, and a folder is only named. Then Zensical builds build/site. A page in no section, or a link to
a page or an anchor that is not there, is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import docs_reference

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
SETTINGS = ROOT / "docs" / "site.toml"
ICON = ROOT / "src" / "sluiceway" / "server" / "ui" / "assets" / "icon.svg"
FILES = "files"
"""Folder of the site with the repository's files to which pages link."""

_FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_SECTIONS = {
    "tutorials": ("Tutorials", "Learn Sluiceway by doing. Each tutorial leads to a result, step by step."),
    "guides": ("Guides", "Get a task done. Each guide assumes that you know what a queue, an item and a lease are."),
    "reference": ("Reference", "Look up a command, a key, a call, a class, a metric or an error."),
    "explanation": ("Explanation", "Understand what Sluiceway promises, and what that costs."),
    "project": ("Project", "How Sluiceway is designed, tested and changed. You need none of it to use a queue."),
}


class Site:
    """The pages in `docs` of a folder, by their path there, and Zensical's configuration beside them."""

    def __init__(self, folder: Path) -> None:
        self.settings: dict[str, Any] = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
        self.folder, self.pages = folder, folder / "docs"
        documents = {path: path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
        self._places = documents | {ROOT / path: Path(page) for path, page in self.settings["pages"].items()}
        self.titles: dict[str, str] = {}
        self.summaries: dict[str, str] = {}
        self._files: set[Path] = set()

    def assemble(self) -> None:
        shutil.rmtree(self.pages, ignore_errors=True)
        for path, place in self._places.items():
            self._add(str(place), self._with_links(path.read_text(encoding="utf-8"), path, place))
        for name, text in docs_reference.render().items():
            self._add(f"reference/{name}", _outside_code(text, _for_markdown))
        shutil.copytree(ROOT / "docs" / "images", self.pages / "images")
        shutil.copy(ICON, self.pages / "images")
        shutil.copy(ROOT / "docs" / "site.css", self.pages)
        shutil.copy(docs_reference.OPENAPI, self.pages / "reference")
        for path in self._files:
            target = self.pages / FILES / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        nav = self._nav()
        for folder, (title, purpose) in _SECTIONS.items():
            self._add(f"{folder}/index.md", "\n".join([f"# {title}\n\n{purpose}\n", *self._index(nav[title], folder)]))
            nav[title] = [f"{folder}/index.md", *nav[title]]
        self._configure(nav)

    def _add(self, name: str, text: str) -> None:
        path = self.pages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        assert title, f"{name} has no heading"
        self.titles[name] = title[1].replace("`", "")
        first = re.search(r"^(?=[\w*\[])(?!#).+?(?:\n\n|\Z)", text[title.end() :], re.MULTILINE | re.DOTALL)
        self.summaries[name] = _sentence(first[0]) if first else ""

    def _with_links(self, text: str, path: Path, place: Path) -> str:
        """The text of a document with links that hold on the site, and without what Markdown says differently there."""

        def link(match: re.Match[str]) -> str:
            image, words, target = match.groups()
            name, hash_, anchor = target.partition("#")
            if not name or re.match(r"[a-z]+:", name):
                return match[0]
            there = (path.parent / name).resolve()
            if there in self._places:
                return f"{image}[{words}]({os.path.relpath(self._places[there], place.parent)}{hash_}{anchor})"
            if there.is_relative_to(ROOT / "docs") and there.is_file():
                return f"{image}[{words}]({os.path.relpath(there.relative_to(ROOT / 'docs'), place.parent)}{hash_}{anchor})"
            if not there.is_file():
                return words
            self._files.add(there)
            return f"{image}[{words}]({os.path.relpath(Path(FILES) / there.relative_to(ROOT), place.parent)})"

        return _outside_code(text, lambda prose: _for_markdown(_LINK.sub(link, prose)))

    # ---- navigation -------------------------------------------------------------------------------------------

    def _nav(self) -> dict[str, Any]:
        """The navigation of docs/site.toml. A `*` stands for the pages of its folder that are named nowhere."""
        named = set(_leaves(self.settings["nav"].values()))

        def expanded(entries: Iterable[Any]) -> list[Any]:
            found: list[Any] = []
            for entry in entries:
                if isinstance(entry, dict):
                    found += [{title: expanded(below) if isinstance(below, list) else below} for title, below in entry.items()]
                elif entry.endswith("/*"):
                    here = (name for name in self.titles if name.rpartition("/")[0] == entry[:-2] and name not in named)
                    by_name = entry.startswith(("adr/", "reference/"))
                    found += sorted(here, key=lambda name: name if by_name else self.titles[name].lower())
                else:
                    found.append(entry)
            return found

        nav = {title: expanded(below) if isinstance(below, list) else below for title, below in self.settings["nav"].items()}
        missing = self.titles.keys() - set(_leaves(nav.values()))
        assert not missing, f"in no section of docs/site.toml: {', '.join(sorted(missing))}"
        return nav

    def _index(self, entries: Iterable[Any], folder: str) -> list[str]:
        """Lines of a section's index: each page and what it is for, each subsection with its pages."""
        lines: list[str] = []
        for entry in entries:
            ((title, below),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
            if isinstance(below, list) and len(below) > 9:
                # The first leads to the others, which are too many for a line each.
                rest = [f"[{self.titles[name]}]({os.path.relpath(name, folder)})" for name in _leaves(below[1:])]
                lines += ["", f"## {title}", "", *self._index(below[:1], folder), "", " · ".join(rest)]
            elif isinstance(below, list):
                lines += ["", f"## {title}", "", *self._index(below, folder)]
            else:
                summary = self.summaries[below]
                lines.append(f"* [{title or self.titles[below]}]({os.path.relpath(below, folder)}){f': {summary}' if summary else ''}")
        return lines

    def _configure(self, nav: dict[str, Any]) -> None:
        """Write Zensical's configuration. JSON's strings, numbers and lists are TOML's, but not its objects."""
        project = {
            **self.settings["project"],
            "docs_dir": str(self.pages.relative_to(self.folder)),
            "site_dir": "site",
            "nav": [{title: below} for title, below in self._titled(nav).items()],
        }
        python = project["plugins"]["mkdocstrings"]["handlers"]["python"]
        python["paths"] = [str(ROOT / "src")]
        python["options"]["extensions"] = [str(ROOT / "tools" / "docs_docstrings.py")]
        (self.folder / "zensical.toml").write_text(f"project = {_toml(project)}\n", encoding="utf-8")

    def _titled(self, entries: Any) -> Any:
        if isinstance(entries, dict):
            return {title: self._titled(below) for title, below in entries.items()}
        if isinstance(entries, list):
            return [
                self._titled(entry) if isinstance(entry, dict) else entry if entry.endswith("/index.md") else {self.titles[entry]: entry}
                for entry in entries
            ]
        return entries


def _leaves(entries: Iterable[Any]) -> Iterable[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            yield from _leaves(entry.values() if isinstance(entry, dict) else entry)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with all changed that stands outside of blocks of code."""
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def _for_markdown(prose: str) -> str:
    """GitHub's Markdown as Python-Markdown reads it: in a table's code, a bar needs no backslash; a list begins after a blank line."""
    prose = re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), prose)
    return re.sub(r"^((?![*\s|>#]|\d+\. |<!--).+)\n(?=(?:\* |1\. ))", r"\1\n\n", prose, flags=re.MULTILINE)


def _sentence(paragraph: str) -> str:
    """The first sentence of a paragraph, without links."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.!?]) (?=[A-Z*`])", plain)[0]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    zensical, *command = sys.argv[1:]
    Site(BUILD).assemble()
    flags = command or ["build", "--clean", "--strict"]
    shutil.rmtree(BUILD / "site", ignore_errors=True)
    return subprocess.run([zensical, *flags, "--config-file", str(BUILD / "zensical.toml")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
