"""The blocks of code of a page of docs/.

A comment right before a block says how it is run:

    <!-- not run: REASON -->                it is not
    <!-- run: in the background -->         it goes on until the last block, or until the same is started again
    <!-- run: until it prints this -->      again and again, until it prints the block of text after it

What a page takes for granted, such as a queue or a function of the reader's, is in a comment of its own, which runs in its place:

    <!-- setup: sh
    sluiceway queue create orders
    -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

Mode = Literal["once", "in the background", "until it prints this"]
RUN = ("python", "sh")
FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
"""How a block begins that is written into a file of that name, in place of being run."""

_MODES: Final[Mapping[str, Mode]] = {"in the background": "in the background", "until it prints this": "until it prints this"}
_FENCE = re.compile(
    r"^(?:<!-- (?P<how>(?:not )?run): (?P<words>[^\n]*?) -->\n+)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$"
    r"|^<!-- setup: (?P<setup>sh|python)\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: where its code stands in the page (line, counted from 1), and where its output does, or would (characters).

    `reason`: why it is not run. `shown`: the block of text right after it, which is what it prints.
    """

    language: str
    code: str
    line: int
    shown: str | None
    start: int
    end: int
    mode: Mode = "once"
    reason: str | None = None


def fences(page: str) -> list[Block]:
    """All blocks between fences, of whatever language, and in comments of setup."""
    matches = list(_FENCE.finditer(page))
    found = []
    for fence, after in zip_longest(matches, matches[1:]):
        language, code, part = (fence["setup"], fence["hidden"], "hidden") if fence["setup"] else (fence["language"], fence["code"], "code")
        output = after if after and after["language"] == "text" and not page[fence.end() : after.start()].strip() else None
        start, end = output.span("code") if output else (fence.end(), fence.end())
        line = page.count("\n", 0, fence.start(part)) + 1
        reason = fence["words"] if fence["how"] == "not run" else None
        mode = _mode(fence["words"], line) if fence["how"] == "run" else "once"
        found.append(Block(language, code, line, output["code"] if output else None, start, end, mode, reason))
    return found


def _mode(words: str, line: int) -> Mode:
    if words not in _MODES:
        raise ValueError(f"line {line}: a block cannot be run {words!r}")
    return _MODES[words]


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run, or are written into a file."""
    return [block for block in fences(page) if (block.language in RUN or FILE.match(block.code)) and block.reason is None]


def without_code(page: str) -> str:
    """The page without its blocks between fences, and without comments."""
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$|^<!--.*?-->$", "", page, flags=re.MULTILINE | re.DOTALL)


_VARYING = (
    (r"\b[0-9a-z]{8}\.\d+\.\d+\b", "ID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"Spark \d+\.\d+\.\d+ in [\d.]+ s", "Spark VERSION in N s"),
    (r"Java \d+ from .*?, Python", "Java N from SOMEWHERE, Python"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    # Tables are as wide as what is in them.
    (r"[ \-]+", " "),
    (r" *\| *", "|"),
    (r" +$", ""),
)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.strip()
