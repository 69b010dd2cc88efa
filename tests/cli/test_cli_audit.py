"""Following the audit trail: each entry once, in whatever order the instances' entries come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluiceway.cli import admin
from sluiceway.cli.session import Session
from sluiceway.client import AuditEntry, AuditPage

START = datetime(2026, 1, 1, tzinfo=UTC)


def entry(second: float, name: str = "") -> AuditEntry:
    at = START + timedelta(seconds=second)
    return AuditEntry(id=f"{int(at.timestamp() * 1000):015d}-{name or second}", at=at, actor="a", action="queues.update")


class Trail:
    """A client that is told at each look what there is by then; when there is nothing more to tell, Ctrl-C is pressed."""

    def __init__(self, *looks: Sequence[AuditEntry]) -> None:
        self._looks = list(looks)

    def list_audit(self, *, pivot: str | None = None, since: datetime | None = None, **_: Any) -> AuditPage:
        if not self._looks:
            raise KeyboardInterrupt
        found = sorted(self._looks.pop(0), key=lambda each: each.id, reverse=True)
        return AuditPage(items=[each for each in found if since is None or each.at >= since])


def followed(monkeypatch: pytest.MonkeyPatch, count: int, *looks: Sequence[AuditEntry], since: datetime | None = None) -> list[float]:
    """The seconds of the entries that are printed: by `audit tail`, or with `since`, by `audit list`."""
    monkeypatch.setattr(admin, "FOLLOW_PAUSE", 0)
    printed: list[float] = []

    def keep(each: AuditEntry, text: str) -> None:
        printed.append((each.at - START).total_seconds())

    session = cast(Session, SimpleNamespace(client=Trail(*looks), as_json=True, print=keep))
    command = cast(Any, admin.tail.callback if since is None else admin.list_audit.callback).__wrapped__
    more: dict[str, Any] = {} if since is None else {"since": since, "until": None}
    with pytest.raises(KeyboardInterrupt):
        command(session, count=count, follow=True, queue_name=None, action=None, actor=None, **more)
    return printed


def test_an_entry_that_comes_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instance's clock lags, or its commit took long: its id is before the last that was told."""
    there = [entry(10)]
    assert followed(monkeypatch, 10, there, [*there, entry(8)], [*there, entry(8), entry(9.5), entry(11)]) == [10, 8, 9.5, 11]


def test_what_was_there_and_was_not_to_be_shown_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [entry(10), entry(9), entry(8)]
    assert followed(monkeypatch, 1, there, there, [*there, entry(12)]) == [10, 12]
    assert followed(monkeypatch, 0, there, there, [*there, entry(12)]) == [12]


def test_each_is_told_once_however_long_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [entry(second) for second in range(0, 300, 20)]
    looks = [several[: number + 1] for number in range(len(several))]
    assert followed(monkeypatch, 10, *looks) == [float(second) for second in range(0, 300, 20)]


def test_an_empty_trail_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a clock that is ahead of the server's by months."""
    assert followed(monkeypatch, 10, [], [], [entry(1)], [entry(1), entry(2)]) == [1, 2]


def test_what_was_before_the_time_that_was_asked_for_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [entry(3), entry(8), entry(10)]
    assert followed(monkeypatch, 10, there, there, [*there, entry(12)], since=START + timedelta(seconds=5)) == [8, 10, 12]
