"""Schedules of a real server that is killed again and again."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.adapters.time_zones import find_zone
from sluiceway.client import Client
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.timetable import MINUTE, Timetable
from sluiceway.kernel.clock import Millis, as_millis, format_time
from tests.server.server_process import PATIENCE, ServerProcess, wait_until

SCHEDULES = 200
MINUTES = 2
SETTLED: Millis = 3_000
"""How long before the end a time was due that has to be there: far longer than it takes to fire it."""


@pytest.mark.slow
def test_a_killed_server_fires_each_time_once(tmp_path: Path) -> None:
    """Every 3 s, wherever it is: before the produce, between it and its record, in mid-start."""
    chance, data = random.Random(1), tmp_path / "data"
    tables, begun = dict[str, Timetable](), dict[str, Millis]()
    with ServerProcess(data) as server, Client(server.url) as client:
        client.create_queue("q")
        for number in range(SCHEDULES):
            name = f"s{number}"
            made = client.create_schedule(name, cron="* * * * *", queue_name="q", item=name, jitter="1m", catch_up="all")
            tables[name] = Timetable(parse_cron("* * * * *"), find_zone("UTC"), name, MINUTE)
            begun[name] = as_millis(made.created_at)
    kills, end = 0, system.now() + (MINUTES + 1) * MINUTE
    while system.now() < end:
        with ServerProcess(data):
            time.sleep(chance.uniform(0, 6))
        kills += 1
    with ServerProcess(data) as server, Client(server.url) as client:
        now = system.now()
        wanted = {(name, format_time(at)) for name, table in tables.items() for at in times(table, begun[name], now - SETTLED)}
        found: Counter[tuple[str, str]] = Counter()

        def all_there() -> bool:
            leased = client.lease("q", batch_size=1_000, lease_timeout="1h")
            headers = [item.headers or {} for item in leased]
            found.update((each["schedule"], each["scheduled_at"]) for each in headers)
            return wanted <= found.keys()

        wait_until(all_there, "every time of every schedule", PATIENCE)
        # Nothing more of these times comes: what a kill left in doubt has been asked for again.
        time.sleep(SETTLED / 1_000)
        all_there()
    assert kills > 20
    assert len(wanted) >= MINUTES * SCHEDULES
    assert [time for time, count in found.items() if count > 1] == []


def times(table: Timetable, after: Millis, until: Millis) -> list[Millis]:
    found = []
    at = table.after(after)
    while at is not None and table.due(at) < until:
        found.append(at)
        at = table.after(at)
    return found
