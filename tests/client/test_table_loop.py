"""The loop over tables, under a clock that only the test moves."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.client import CallError, Lease
from sluiceway.client._async import table_loop
from sluiceway.client._async.table_loop import TableLoop
from sluiceway.client.answers import Completed, Retried
from sluiceway.client.arrow import LeasedTable
from sluiceway.client.protocol import Call

PATIENCE = 10_000
ITEMS = 2_500


class Server:
    """Leases one table, and is away for `away` seconds once that was handled. Each call takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, away: float) -> None:
        self.now = 1_000.0
        self.back_at = 0.0
        self.away = away
        self.calls: list[str] = []
        monkeypatch.setattr(table_loop, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(table_loop, "backoff", lambda failures, roll: 0.0)
        self.loop = TableLoop(self.attempt, "q", "c", 60_000, PATIENCE, True, False, False)

    async def attempt(self, call: Call[Any]) -> object:
        if call.path == "/v1/queue.lease":
            leases = [Lease(lease_id="k7f3q2ma.0.L1", partition=0, count=ITEMS, lease_deadline=datetime(2026, 1, 31, tzinfo=UTC))]
            offsets = pa.table({"partition": pa.repeat(pa.scalar(0, pa.int32()), ITEMS), "offset": pa.array(range(ITEMS), pa.int64())})
            return LeasedTable("q", "k7f3q2ma", None, leases, offsets)
        self.now += 1
        self.calls.append(call.path.removeprefix("/v1/queue."))
        if self.now < self.back_at:
            raise CallError("unavailable", "nobody is there")
        return Completed(completed=ITEMS) if call.path == "/v1/queue.complete" else Retried(retried=1_000, dead=0)

    async def handle(self, leased: LeasedTable, error: Exception | None = None) -> None:
        """A handler that finishes 20 s after the stop."""
        self.loop.stop(25_000)
        self.now += 20
        self.back_at = self.now + self.away
        if error is not None:
            raise error


def test_an_outcome_has_its_time_however_long_after_the_stop_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up with its first failure."""
    server = Server(monkeypatch, away=5)
    asyncio.run(server.loop.run(server.handle, ITEMS, 1))
    assert server.calls == ["complete"] * 5


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(monkeypatch, away=1_000)
    asyncio.run(server.loop.run(server.handle, ITEMS, 1))
    assert server.calls == ["complete"] * 11
    assert "outcomes could not be sent (unavailable)" in caplog.text


def test_it_is_given_up_once_not_for_each_thousand_items(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, away=1_000)

    async def handle(leased: LeasedTable) -> None:
        await server.handle(leased, ValueError("no"))

    asyncio.run(server.loop.run(handle, ITEMS, 1))
    assert server.calls == ["retry"] * 11
