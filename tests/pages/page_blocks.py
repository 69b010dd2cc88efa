"""The blocks of code of a page of docs/.

A comment right before a block says how it is run:

    <!-- not run: REASON -->                it is not
    <!-- run: in the background -->         it goes on while the later blocks run, and is ended after the last
    <!-- run: until it prints this -->      again and again, until it prints the block of text after it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Mode = Literal["once", "in the background", "until it prints this"]
RUN = ("python", "sh")

_FENCE = re.compile(
    r"^(?:<!-- (?P<how>(?:not )?run): (?P<words>[^\n]*?) -->\n+)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
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
    """All blocks between fences, of whatever language."""
    matches = list(_FENCE.finditer(page))
    found = []
    for fence, after in zip(matches, [*matches[1:], None], strict=True):
        output = after if after and after["language"] == "text" and not page[fence.end() : after.start()].strip() else None
        start, end = output.span("code") if output else (fence.end(), fence.end())
        line = page.count("\n", 0, fence.start("code")) + 1
        reason = fence["words"] if fence["how"] == "not run" else None
        mode = _mode(fence["words"], line) if fence["how"] == "run" else "once"
        found.append(Block(fence["language"], fence["code"], line, output["code"] if output else None, start, end, mode, reason))
    return found


def _mode(words: str, line: int) -> Mode:
    if words == "in the background" or words == "until it prints this":
        return words
    raise ValueError(f"line {line}: a block cannot be run {words!r}")


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run."""
    return [block for block in fences(page) if block.language in RUN and block.reason is None]


def without_code(page: str) -> str:
    """The page without its blocks between fences."""
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", page, flags=re.MULTILINE | re.DOTALL)
