"""How late schedules fire on a real server, how long it takes to read 100,000 of them, and what they hold in memory.

    python -m bench.schedule_lateness [--schedules 6000] [--minutes 2] [--burst] [--start 100000]

Schedules of every minute, spread by a jitter of a minute, so that 6,000 of them are 100 firings a second; with `--burst`, all of them at
the beginning of a minute. Lateness: from the due time to the acknowledgement of the produce, by the server's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.bench.servers import SLUICEWAY, resident
from sluiceway.bench.servers import server as running
from sluiceway.client import AsyncClient
from sluiceway.contract.schedule_answers import ScheduleInfo
from sluiceway.core.schedules.timetable import MINUTE
from sluiceway.instance.schedule_catalog import FIRED, INDEX, SCHEDULE, timetable
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import as_millis
from sluiceway.model.meta import MAX_COMMIT_KEYS
from sluiceway.model.record_index import RecordIndex
from sluiceway.model.requests import QueueSpec
from sluiceway.model.schedule_records import Progress, ScheduleRecord

CRONS = ("@hourly", "30 2 * * *", "*/20 * * * *", "0 9 * * mon-fri", "@daily", "0 4 * * sun", "@monthly")
ZONES = ("UTC", "Europe/Berlin", "America/New_York")


def schedule(number: int, cron: str, zone: str = "UTC", jitter: int = 0) -> ScheduleRecord:
    now = system.now()
    return ScheduleRecord(
        name=f"schedule-{number:06}",
        incarnation=f"i{number:07}",
        queue_name="orders",
        cron=cron,
        timezone=zone,
        jitter=jitter,
        catch_up="last",
        item=msgspec.Raw(b'{"utf8":"{\\"job\\": \\"report\\"}","kind":"report"}'),
        paused=False,
        created_at=now,
        updated_at=now,
        after=now,
    )


async def write(data: Path, records: list[ScheduleRecord]) -> None:
    """Put the records into a data directory, without a call for each."""
    meta = SqliteMetaStore(data / "meta.sqlite")
    for at in range(0, len(records), MAX_COMMIT_KEYS // 2):
        puts = {}
        for each in records[at : at + MAX_COMMIT_KEYS // 2]:
            puts[SCHEDULE + each.name] = msgspec.json.encode(each)
            puts[FIRED + each.name] = msgspec.msgpack.encode(Progress(each.incarnation, each.after))
        await meta.commit(puts=puts)
    await meta.commit(puts={INDEX: msgspec.json.encode(RecordIndex(1, len(records)))})
    await meta.close()


async def measure_start(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        service = Service(data)
        await service.start()
        await service.create_queue(QueueSpec("orders", 1))
        await service.stop()
        await write(data, [schedule(number, CRONS[number % len(CRONS)], ZONES[number % len(ZONES)], 60_000) for number in range(count)])
        service = Service(data)
        held, began = resident(os.getpid()), time.perf_counter()
        await service.start()
        started = time.perf_counter() - began
        while len(service.schedule_driver._firings) < count:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        print(
            f"{count:,} schedules: server started in {started:.2f} s, all of them held after {time.perf_counter() - began:.2f} s; "
            f"{(resident(os.getpid()) - held) / 1e6:.0f} MB of memory"
        )
        await service.stop()


async def measure_lateness(count: int, minutes: int, burst: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        records = [schedule(number, "* * * * *", jitter=0 if burst else MINUTE) for number in range(count)]
        with running(SLUICEWAY, data, "--port", "0") as server:
            async with AsyncClient(server.url) as client:
                await client.create_queue("orders")
        await write(data, records)
        tables = {each.name: timetable(each) for each in records}
        with running(SLUICEWAY, data, "--port", "0") as server:
            async with AsyncClient(server.url) as client:
                late: list[float] = []
                begun = system.now() // MINUTE + 1
                for minute in range(minutes):
                    # Firings of the last two seconds may be missed: the next minute's would hide the others.
                    end = (begun + minute + 1) * MINUTE - 2_000
                    await asyncio.sleep(max(0, end - system.now()) / 1_000)
                    for each in await everything(client):
                        fired = each.last_fired
                        if fired is not None and as_millis(fired.scheduled_at) == (begun + minute) * MINUTE:
                            late.append(as_millis(fired.fired_at) - tables[each.name].due(as_millis(fired.scheduled_at)))
        late.sort()
        what = "at once" if burst else f"spread over a minute: {count / 60:.0f} a second"
        print(
            f"{count:,} firings a minute, {what}; {len(late):,} seen in {minutes} minutes. "
            f"Lateness in ms: p50 {late[len(late) // 2]:.0f}, p99 {late[len(late) * 99 // 100]:.0f}, max {late[-1]:.0f}"
        )


async def everything(client: AsyncClient) -> list[ScheduleInfo]:
    found: list[ScheduleInfo] = []
    pivot: str | None = None
    while True:
        page = await client.list_schedules(pivot=pivot, limit=1_000)
        found += page.items
        pivot = page.next
        if pivot is None:
            return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=6_000)
    parser.add_argument("--minutes", type=int, default=2)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--start", type=int, metavar="SCHEDULES", help="measure a start with so many schedules instead")
    given = parser.parse_args()
    if given.start:
        asyncio.run(measure_start(given.start))
    else:
        asyncio.run(measure_lateness(given.schedules, given.minutes, given.burst))


if __name__ == "__main__":
    main()
