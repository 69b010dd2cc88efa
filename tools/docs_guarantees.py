"""Writes the evidence of each promise into docs/explanation/guarantees.md and docs/project/evidence.md: `python tools/docs_guarantees.py`.

guarantees.toml, beside the page, names what stands behind each promise, and figures.json has what the campaigns found
(`tools/record_figure.py` adds to it). With `--check` it writes nothing, and exits with 1 if a page is not current. Either way it exits with
1 if a promise has no evidence, or names a specification, an invariant, a test, a campaign or a conformance case that does not exist.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = "docs/explanation/guarantees.md"
EVIDENCE: Final = "docs/project/evidence.md"

HEAD: Final = """\
# Evidence

Look up what stands behind each promise of the [guarantees](../explanation/guarantees.md), by name. `pytest FILE::NAME` runs a test.
The figures of the campaigns are [in that page](../explanation/guarantees.md#latest-figures).

<!-- tools/docs_guarantees.py generates this page from docs/explanation/guarantees.toml. Edit that file. -->
"""
_PROMISE: Final = re.compile(r"^\*\*(\d+)\. (.+?)\*\*", re.MULTILINE)
_MARK: Final = re.compile(r"(<!-- evidence (\d+) -->\n)(?:(?!\n).*\n)?")
_FIGURES: Final = re.compile(r"(<!-- figures -->\n).*\Z", re.DOTALL)


class WrongEvidenceError(Exception):
    """What guarantees.toml says, and is not so; one line for each."""


class Guarantees:
    """The promises of a checkout with their evidence."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._source: dict[str, Any] = tomllib.loads(self._text("docs/explanation/guarantees.toml"))
        self.promises: dict[int, dict[str, Any]] = {each["number"]: each for each in self._source["promises"]}
        self._campaigns: dict[str, dict[str, Any]] = self._source["campaigns"]
        self._figures: list[dict[str, Any]] = json.loads(self._text("docs/explanation/figures.json"))
        self._page = self._text(PAGE)
        self.titles = {int(number): title.rstrip(".") for number, title in _PROMISE.findall(self._page)}

    def _text(self, name: str) -> str:
        return (self._root / name).read_text(encoding="utf-8")

    # ---- what exists ------------------------------------------------------------------------------------------

    @cached_property
    def invariants(self) -> dict[str, list[str]]:
        """The invariants of each specification: what `Broken` says where it is raised, with … for what differs."""
        modules = dict(re.findall(r'"(\w+)": Spec\("[^"]*", (\w+)\.Rules', self._text("spec/registry.py")))
        return {name: list(_broken(ast.parse(self._text(f"spec/{module}.py")))) for name, module in modules.items()}

    def invariants_of(self, number: int, named: str) -> list[str]:
        """Those that an entry of `specs` names."""
        name, _, words = named.partition(": ")
        found = self.invariants.get(name, [])
        return [each for each in found if words in each] if words else [each for each in found if each.startswith(f"promise {number}:")]

    def wrong(self) -> Iterator[str]:
        """What does not exist, or is missing."""
        if (stated := set(self.titles)) != (known := set(self.promises)):
            yield f"promises of only one of the page and guarantees.toml: {sorted(stated ^ known)}"
        marks = [int(number) for _, number in _MARK.findall(self._page)]
        if marks != [int(number) for number, _ in _PROMISE.findall(self._page)]:
            yield "the page needs a line `<!-- evidence N -->` below each promise N"
        for number, promise in self.promises.items():
            yield from (f"promise {number}: {each}" for each in self._wrong_evidence(number, promise))
        for name, found in self.invariants.items():
            for number in {int(each) for text in found for each in re.findall(r"^promise (\d+):", text)}:
                if name not in self.promises.get(number, {}).get("specs", []):
                    yield f"promise {number}: the specification {name} has an invariant of it"
        yield from self._wrong_campaigns()

    def _wrong_evidence(self, number: int, promise: Mapping[str, Any]) -> Iterator[str]:
        if not promise.get("specs") and not promise.get("tests") and not promise.get("campaigns"):
            yield "no specification, no test, no campaign"
        for each in promise.get("specs", []):
            if not self.invariants_of(number, each):
                yield f"no invariant {each}"
        for each in (*promise.get("tests", []), *promise.get("controls", [])):
            file, _, name = each.partition("::")
            path = self._root / file
            if not path.is_file() or not re.search(rf"^ *(?:async )?def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                yield f"no test {each}"
        for each in promise.get("campaigns", []):
            if each not in self._campaigns:
                yield f"no campaign {each}"
        for each in promise.get("conformance", []):
            if f"| {each} " not in self._text("conformance/README.md"):
                yield f"no conformance case {each}"

    def _wrong_campaigns(self) -> Iterator[str]:
        makefile = self._text("Makefile")
        for name, campaign in self._campaigns.items():
            command = campaign["command"]
            target = re.search(r"\bmake ([\w-]+)", command)
            file = re.search(r"tests/[\w/]+\.py", command)
            module = re.search(r"-m ([a-z][\w.]+\w)", command)
            runs = (
                (target and re.search(rf"^{target[1]}:", makefile, re.MULTILINE))
                or (file and (self._root / file[0]).is_file())
                or (module and self._root.joinpath(*module[1].split("."), "__main__.py").is_file())
            )
            if not runs:
                yield f"campaign {name}: nothing runs as {command}"
            if "page" in campaign and not (self._root / "docs" / "project" / campaign["page"]).is_file():
                yield f"campaign {name}: no page {campaign['page']}"
        for figure in self._figures:
            if figure["campaign"] not in self._campaigns:
                yield f"figures.json: no campaign {figure['campaign']}"

    # ---- what is written --------------------------------------------------------------------------------------

    def last_figure(self, campaign: str) -> dict[str, Any] | None:
        """The last figure of a campaign, if one was recorded."""
        return next((each for each in reversed(self._figures) if each["campaign"] == campaign), None)

    def render(self) -> dict[str, str]:
        """The pages by their path. Raises WrongEvidenceError."""
        if wrong := list(self.wrong()):
            raise WrongEvidenceError("\n".join(wrong))
        page = _MARK.sub(lambda match: f"{match[1]}{self._line(int(match[2]))}\n", self._page)
        page = _FIGURES.sub(lambda match: match[1] + "\n" + self._table(), page)
        sections = (self._section(number) for number in sorted(self.promises))
        return {PAGE: page, EVIDENCE: HEAD + "".join(sections)}

    def _line(self, number: int) -> str:
        promise = self.promises[number]
        parts = [f"Faults {promise['faults']}"] if promise["faults"] else []
        if specs := promise.get("specs"):
            parts.append("specified in " + ", ".join(dict.fromkeys(f"`{each.partition(':')[0]}`" for each in specs)))
        if tests := promise.get("tests"):
            parts.append(f"[{_count(len(tests), 'test')}](../project/evidence.md#promise-{number})")
        campaigns = promise.get("campaigns", [])
        shown = next((each for each in campaigns if self.last_figure(each) is not None), None)
        if shown is not None:
            figure = self.last_figure(shown)
            assert figure is not None
            parts.append(f"{self._campaigns[shown]['title']}: {_short(figure)}")
        if more := len(campaigns) - (shown is not None):
            parts.append(f"{more} more campaign{'s' if more > 1 else ''}" if shown else _count(more, "campaign"))
        return f"<sub>{' · '.join(parts)}</sub>"

    def _section(self, number: int) -> str:
        promise = self.promises[number]
        lines = [f"\n## Promise {number}\n\n{self.titles[number]}.\n"]
        for each in promise.get("specs", []):
            name = each.partition(":")[0]
            found = (text.removeprefix(f"promise {number}: ") for text in self.invariants_of(number, each))
            lines += [f"* Specification `{name}`, in no order of its steps: {text}" for text in found]
        lines += [f"* Test `{each}`" for each in promise.get("tests", [])]
        lines += [f"* Control group `{each}`" for each in promise.get("controls", [])]
        if cases := promise.get("conformance"):
            lines.append(f"* Conformance {', '.join(cases)}")
        lines += [f"* Campaign {self._campaign(each)}" for each in promise.get("campaigns", [])]
        return "\n".join([*lines, ""])

    def _campaign(self, name: str) -> str:
        figure, campaign = self.last_figure(name), self._campaigns[name]
        if figure is None:
            return f"{campaign['title']}: `{campaign['command']}`. No figure was recorded"
        return f"{campaign['title']}: `{figure['command']}`. {_short(figure)}"

    def _table(self) -> str:
        rows = ["| what | command | size | wrong | when |", "| --- | --- | --- | --- | --- |"]
        for name, campaign in self._campaigns.items():
            figure = self.last_figure(name)
            if figure is not None:
                title = f"[{campaign['title']}](../project/{campaign['page']})" if "page" in campaign else campaign["title"]
                rows.append(f"| {title} | `{figure['command']}` | {_size(figure)} | {figure['wrong']} | {_when(figure)} |")
        return "\n".join([*rows, ""])


def _broken(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Broken":
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def _short(figure: Mapping[str, Any]) -> str:
    return f"{figure['size']}, wrong: {figure['wrong']} ({figure['date']}, {figure['commit']})"


def _size(figure: Mapping[str, Any]) -> str:
    seconds = f"{figure['size']} in {figure['seconds']:,.0f} s" if figure["seconds"] else figure["size"]
    return f"{seconds}; {figure['detail']}" if figure["detail"] else str(seconds)


def _when(figure: Mapping[str, Any]) -> str:
    return ", ".join(str(figure[each]) for each in ("date", "commit", "load") if figure[each])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def main() -> int:
    try:
        pages = Guarantees(ROOT).render()
    except WrongEvidenceError as error:
        print(error, file=sys.stderr)
        return 1
    stale = {name: text for name, text in pages.items() if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text}
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} is not current: run python tools/docs_guarantees.py", file=sys.stderr)
        return int(bool(stale))
    for name, text in stale.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
