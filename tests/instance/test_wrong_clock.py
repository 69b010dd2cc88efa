"""A server on a machine whose clock is set an hour ahead, and back."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sluiceway.adapters import system
from tests.server.server_running import Running, eventually, running

HOUR = 3_600_000
NOW = "bm93"
"""The payload `now`, as it is served."""


class Wall:
    """The machine's clock: `ahead` milliseconds ahead of the true time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.ahead = 0
        true = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: true() + self.ahead * 1_000_000)

    def start(self) -> None:
        """A process starts, which has a clock of its own."""
        self._monkeypatch.setattr(system, "_clock", system._Clock())


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


def check_clock(server: Running) -> dict[str, Any]:
    (found,) = (each for each in server.http.get("/readyz?verbose").json()["checks"] if each["name"] == "clock")
    return dict(found)


def keeps_time(server: Running, name: str) -> None:
    """What is due in a minute is not served now, and what is retried after some milliseconds is."""
    due = datetime.now(UTC) + timedelta(minutes=1)
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "due", "enqueue_at": due.isoformat()}, {"utf8": "now"}])
    leased = server.lease(name, request_timeout="30s")
    assert [item["bytes"] for item in leased["items"]] == [NOW]
    server.ask("queue.retry", queue_name=name, client_id="c", items=[{"id": leased["items"][0]["id"], "retry_after": "20ms"}])
    again = server.lease(name, request_timeout="30s")
    assert [item["bytes"] for item in again["items"]] == [NOW]
    server.ask("queue.complete", queue_name=name, client_id="c", ids=[again["items"][0]["id"]])
    assert server.totals(name)["scheduled"] == 1
    server.ask("queue.clear", queue_name=name, scheduled=True)
    assert server.totals(name)["total"] == 0


def test_a_clock_that_is_set_ahead_and_back_changes_nothing(tmp_path: Path, wall: Wall) -> None:
    wall.start()
    with running(tmp_path) as server:
        name = server.queue(expire_timeout="50ms")
        other = server.queue()
        wall.ahead = HOUR
        server.produce(other, "x")
        said = check_clock(server)
        assert not said["ok"]
        assert "ahead of the server's time; correct it, or restart the server" in said["detail"]
        assert server.http.get("/readyz").status_code == 200
        wall.ahead = 0
        server.ask("queue.clear", queue_name=other, ready=True)
        keeps_time(server, other)
        server.produce(name, "expires")
        eventually(lambda: server.totals(name)["total"] == 0)
        assert check_clock(server)["ok"]
    wall.start()
    with running(tmp_path) as server:
        keeps_time(server, other)
        assert check_clock(server)["ok"]


def test_a_server_does_not_believe_what_a_clock_that_was_ahead_has_written(
    tmp_path: Path, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    wall.ahead = HOUR
    wall.start()
    with running(tmp_path) as server:
        name = server.queue(expire_timeout="1h")
        server.produce(name, "x")
        server.ask("queue.clear", queue_name=name, ready=True)
    wall.ahead = 0
    wall.start()
    with running(tmp_path) as server:
        said = check_clock(server)
        assert not said["ok"]
        assert f"queue {name}, partition 0 was last written at " in said["detail"]
        assert sum("the clock was wrong then, or is wrong now" in record.message for record in caplog.records) == 1
        keeps_time(server, name)
        # What it writes now is noted at the right time.
    wall.start()
    with running(tmp_path) as server:
        assert check_clock(server)["ok"]
        keeps_time(server, name)
