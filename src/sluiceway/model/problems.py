"""What is wrong: the judge's findings, as instances tell them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from sluiceway.contract.problem_answers import Kind, Severity
from sluiceway.kernel.clock import Millis

_RANKS: Final[Mapping[str, int]] = {"critical": 0, "warning": 1}


class Problem(NamedTuple):
    """One thing that is wrong. `queue_name` empty: no queue in particular. `page`: path of the dashboard. `instance`: who found it."""

    kind: Kind
    severity: Severity
    subject: str
    queue_name: str
    message: str
    cause: str
    command: str
    page: str
    since: Millis
    instance: str = ""


class Problems(NamedTuple):
    """What an instance finds. `watched`: whether it has looked yet."""

    found: tuple[Problem, ...] = ()
    watched: bool = False


class ProblemsSeen(NamedTuple):
    """What all instances find; `silent`: names of those that did not answer."""

    found: tuple[Problem, ...]
    watched: bool
    silent: tuple[str, ...] = ()


def ranked(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems: critical ones first, then the oldest."""
    return sorted(problems, key=lambda each: (_RANKS[each.severity], each.since, each.queue_name, each.kind, each.subject))


def merge(shares: Iterable[Problem]) -> list[Problem]:
    """One problem for each kind and subject: the most severe of the instances' findings, since the earliest."""
    found: dict[tuple[str, str, str], Problem] = {}
    for each in ranked(shares):
        name = (each.kind, each.queue_name, each.subject)
        first = found.setdefault(name, each)
        if each.since < first.since:
            found[name] = first._replace(since=each.since)
    return ranked(found.values())
