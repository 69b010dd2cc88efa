"""What a rule finds, and how its text is written."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.contract.problem_answers import Kind, Severity
from sluiceway.kernel.clock import Millis


class Finding(NamedTuple):
    """What a rule sees in one sample. `since`: when it began, if the rule knows; else it is the first finding.
    `subject` empty: the queue."""

    kind: Kind
    severity: Severity
    message: str
    cause: str
    command: str
    page: str
    since: Millis | None = None
    subject: str = ""


def items(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"


def consumers(count: int, which: str = "") -> str:
    """With the verb that both texts need: `1 consumer has`, `3 other consumers have`."""
    return f"1 {which}consumer has" if count == 1 else f"{count:,} {which}consumers have"


def seconds(span: Millis) -> str:
    """A duration for people: `12 s`, `3 min`, `2 h`."""
    if span < 120_000:
        return f"{span // 1000} s"
    return f"{span // 60_000} min" if span < 7_200_000 else f"{span // 3_600_000} h"


def rate(count: int, span: Millis) -> str:
    """Per second: `51/s`, `0.4/s`."""
    found = count * 1000 / max(1, span)
    return f"{found:,.0f}/s" if found >= 10 else f"{found:.1f}/s"
