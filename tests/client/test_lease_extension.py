"""Leases are kept through outages that are shorter than they last. The consumer of single items: `test_lease_manager.py`."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from simulation.loop import Loop
from sluiceway.client import CallError
from sluiceway.client._async.table_loop import TableLoop
from sluiceway.client.answers import Completed, Extended, Ignored, Lease
from sluiceway.client.arrow import LeasedTable
from sluiceway.client.lease_extender import LeaseExtender
from sluiceway.client.protocol import Call


class Pauses(threading.Event):
    """Takes no time, and ends after so many pauses."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self.asked = most, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        return len(self.asked) > self._most


class Away:
    """A client whose first calls fail."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = [*errors]

    def extend(self, *_: object, **options: object) -> Extended:
        if self._errors:
            raise self._errors.pop(0)
        return Extended()


@pytest.mark.parametrize(
    ("errors", "pauses"),
    [
        ([], [20.0, 20.0, 20.0, 20.0]),
        (["unavailable", "outcome_unknown"], [20.0, 1.0, 1.0, 20.0]),
        # A repetition does not help against this one.
        (["forbidden"], [20.0, 20.0, 20.0, 20.0]),
    ],
)
def test_leases_that_could_not_be_extended_are_tried_again_at_once(errors: list[str], pauses: list[float]) -> None:
    """The time of a failed attempt is gone: after another third of it, leases may have run out though the server was soon back."""
    extender = LeaseExtender(Away(*(CallError(code, "away") for code in errors)), "q", "1m")  # type: ignore[arg-type]
    extender._closed = ended = Pauses(3)
    extender.add(["aaaaaaaa.0.L1"])
    assert extender._thread is not None
    extender._thread.join()
    assert ended.asked == pauses


def test_an_error_that_nobody_expects_does_not_end_the_extension() -> None:
    """All leases that are held would run out one after the other, and nothing would say so."""
    extender = LeaseExtender(Away(RuntimeError("planted")), "q", "1m")  # type: ignore[arg-type]
    extender._closed = ended = Pauses(3)
    extender.add(["aaaaaaaa.0.L1"])
    assert extender._thread is not None
    extender._thread.join()
    assert ended.asked == [20.0, 1.0, 20.0, 20.0]


def table_of(leases: int) -> LeasedTable:
    """So many leases of one item each."""
    deadline = datetime(2026, 1, 1, tzinfo=UTC)
    held = [Lease(lease_id=f"aaaaaaaa.0.L{number + 1}", partition=0, count=1, lease_deadline=deadline) for number in range(leases)]
    return LeasedTable("q", "aaaaaaaa", 0, held, pa.table({"payload": [b"x"] * leases}))


class Outage:
    """A server in virtual time, with one lease of a minute. Calls from 19 to 41 s fail with that error."""

    def __init__(self, loop: Loop, error: Exception) -> None:
        self._loop, self._error = loop, error
        self._calls: list[str] = []
        self.deadline = 60_000

    async def attempt(self, call: Call[Any]) -> Any:
        now = self._loop.now
        if 19_000 <= now < 41_000:
            raise self._error
        assert now < self.deadline, "the lease has run out"
        self._calls.append(call.path)
        if call.path == "/v1/queue.extend":
            self.deadline = now + 60_000
            return Extended()
        if call.path == "/v1/queue.complete":
            return Completed(completed=1)
        if self._calls.count(call.path) > 1:
            raise CallError("queue_not_found", "one lease is enough")
        return table_of(1)


@pytest.mark.parametrize("error", [CallError("unavailable", "connection refused"), RuntimeError("nobody expects it")], ids=repr)
def test_a_handler_of_tables_keeps_its_leases_through_an_outage(error: Exception) -> None:
    loop = Loop(Random(0))
    server = Outage(loop, error)
    tables = TableLoop(server.attempt, "q", "me", 60_000, 10_000, True, False, False)

    async def handle(leased: LeasedTable) -> None:
        await asyncio.sleep(100)
        tables.stop(None)

    loop.run_until_complete(tables.run(handle, 10, 1))
    loop.close()
    assert server.deadline > 100_000


class Taken:
    """A server in virtual time, whose first lease of two is gone after 30 s."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.extended: list[list[str]] = []
        self._is_leased = False

    async def attempt(self, call: Call[Any]) -> Any:
        if call.path == "/v1/queue.extend":
            named = json.loads(call.body)["lease_ids"]
            self.extended.append(named)
            gone = [each for each in named if self._loop.now > 30_000 and each.endswith("L1")]
            return Extended(ignored=[Ignored(id=each, reason="expired") for each in gone])
        if call.path == "/v1/queue.complete":
            return Completed(completed=1)
        if self._is_leased:
            raise CallError("queue_not_found", "two leases are enough")
        self._is_leased = True
        return table_of(2)


def test_a_lease_that_is_lost_while_its_table_is_handled_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Random(0))
    server = Taken(loop)
    tables = TableLoop(server.attempt, "q", "me", 60_000, 10_000, True, False, False)

    async def handle(leased: LeasedTable) -> None:
        await asyncio.sleep(90)
        tables.stop(None)

    loop.run_until_complete(tables.run(handle, 10, 1))
    loop.close()
    both, other = ["aaaaaaaa.0.L1", "aaaaaaaa.0.L2"], ["aaaaaaaa.0.L2"]
    assert server.extended == [both, both, other, other]
    assert caplog.text.count("1 leases ended (expired) while their items were handled") == 1
