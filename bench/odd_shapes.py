"""`python -m bench odd_shapes`: a real server under a million small leases, their mass expiry, ten thousand partitions, thousands of queues
that come and go, idempotency keys, and consumers that wait. For each: the start, the memory, and what a produce to another queue takes.

Each shape has a fresh data directory. The leases that a start has to load are made by an instance in a process of its own, without HTTP,
which leaves the same data; everything else goes over HTTP. Exit code 1 if an aim was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from bench.hard import BULK, CALL, LONG, Bench
from sluiceway.bench.figures import Figure, progress, shown, table, write_page
from sluiceway.bench.load import ARROW, Connection, arrow_body
from sluiceway.bench.servers import SLUICEWAY, Server, handles, peak, resident, server
from sluiceway.instance.service import Service
from sluiceway.model.requests import QueueSpec

CALLERS = 64
PROBE_EVERY = 0.005
"""Seconds between two produces of the probe."""
PROBES = 1_000
"""Produces that are measured while nothing else goes on."""
LEAD = 5.0
"""Seconds until leases run out, beside those for setting their deadline."""
SETTLE = 1.0
"""Seconds for a server to settle."""
PARTITIONS_OF_A_QUEUE = 1_000
QUIET, BUSY = 50, 100
"""Aims for the 99th percentile of a produce, in milliseconds: beside what is there already, and while it comes or goes."""


class Shape(NamedTuple):
    """`run` takes a folder and a size. `size`: the full one, for which the aims are."""

    run: Callable[[Path, int], list[Figure]]
    size: int


class Probe:
    """Produces one item after the other to a queue, and notes how long each took. The queue `other` is made for it."""

    def __init__(self, url: str, queue: str = "other") -> None:
        self._connection = Connection(url)
        self._queue = queue
        self._body = json.dumps({"queue_name": queue, "items": [{"utf8": "x"}]}).encode()
        self.seconds: list[float] = []

    async def begin(self) -> None:
        await self._connection.open()
        if self._queue == "other":
            try:
                await post(self._connection, "queues.create", queue_name="other", requested_partitions=1)
            except RuntimeError as error:
                if "queue_exists" not in str(error):
                    raise
        for _ in range(20):
            await self._connection.post("/v1/queue.produce", self._body)

    async def end(self) -> None:
        await self._connection.close()

    async def once(self) -> None:
        began = time.perf_counter()
        await self._connection.post("/v1/queue.produce", self._body)
        self.seconds.append(time.perf_counter() - began)

    async def at_rest(self) -> None:
        """Measure while nothing else is done."""
        for _ in range(PROBES):
            await self.once()

    async def during(self, work: Awaitable[Any]) -> None:
        """Measure while the work goes on."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.once()
            await asyncio.sleep(PROBE_EVERY)
        await task

    def figures(self, about: str, when: str, aim: float | None = None) -> list[Figure]:
        """What the produces took, which are then forgotten. `aim`: of the 99th percentile, in milliseconds."""
        taken, self.seconds = np.array(self.seconds) * 1e3, []
        median, late = np.percentile(taken, [50, 99])
        what = "a produce" if self._queue == "other" else "a produce to that queue"
        return [
            Figure(about, f"{what} {when}: median", float(median), "ms"),
            Figure(about, f"{what} {when}: p99", float(late), "ms", aim),
            Figure(about, f"{what} {when}: slowest of {len(taken):,}", float(taken.max()), "ms"),
        ]


@asynccontextmanager
async def probing(url: str, queue: str = "other") -> AsyncIterator[Probe]:
    probe = Probe(url, queue)
    await probe.begin()
    try:
        yield probe
    finally:
        await probe.end()


async def post(connection: Connection, call: str, **fields: Any) -> Any:
    return json.loads(await connection.post(f"/v1/{call}", json.dumps(fields).encode()))


async def leased(connection: Connection) -> int:
    """Items of the queue `q` that are leased."""
    return sum(each["partitions"][0]["total_leased"] for each in (await post(connection, "queue.stats", queue_name="q"))["logical_queues"])


def aim_at(full: bool, value: float) -> float | None:
    """An aim holds for the full size only."""
    return value if full else None


# ---- leases ---------------------------------------------------------------------------------------------------


def make_leases(folder: Path, items: int) -> None:
    """Lease so many items one by one, in one partition, for an hour. For a process of its own."""

    async def make() -> None:
        service = Service(folder)
        await service.start()
        await service.create_queue(QueueSpec("q", 1))
        bench = Bench(service)
        for rows in (BULK, 1):
            await bench.produce(items // rows * rows - bench.total("produced"), rows, 1)
        await bench.lease(items, 1)
        await service.stop()

    assert LONG >= 3_600_000
    uvloop.run(make())


def leases(folder: Path, size: int) -> list[Figure]:
    """A server starts with live leases of one item each."""
    progress(f"leases: {size:,} are made")
    maker = multiprocessing.get_context("spawn").Process(target=make_leases, args=(folder, size))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RuntimeError("the leases were not made")
    progress("leases: the server starts")
    with server(SLUICEWAY, folder) as running:
        ready = running.start
        about, full = f"{size:,} live leases of one item", size >= SHAPES["leases"].size
        memory, most = resident(running.pid), peak(running.pid)

        async def look() -> list[Figure]:
            connection = Connection(running.url)
            await connection.open()
            if (live := await leased(connection)) != size:
                raise RuntimeError(f"{live:,} are leased")
            found: list[Figure] = []
            for queue in ("other", "q"):
                async with probing(running.url, queue) as probe:
                    await probe.during(asyncio.sleep(10 * SETTLE))
                    found += probe.figures(about, "beside them", aim_at(full, 50))
            await connection.close()
            return found

        return [
            Figure(about, "start, until requests are taken", ready, "s", aim_at(full, 5)),
            Figure(about, "memory after the start", memory / 1e6, "MB", aim_at(full, 500)),
            Figure(about, "memory at most while it starts", most / 1e6, "MB"),
            *uvloop.run(look()),
        ]


def expiry(folder: Path, size: int) -> list[Figure]:
    """Leases of one item each run out at one moment."""
    with server(SLUICEWAY, folder) as running:
        return uvloop.run(_expiry(running, size))


async def _expiry(running: Server, size: int) -> list[Figure]:
    about, full = f"{size:,} leases of one item run out together", size >= SHAPES["expiry"].size
    connections = [Connection(running.url) for _ in range(CALLERS)]
    for each in connections:
        await each.open()
    control = connections[0]
    await post(control, "queues.create", queue_name="q", requested_partitions=1)
    for start in range(0, size, BULK):
        await control.post("/v1/queue.produce?queue_name=q", arrow_body(min(BULK, size - start), 100), ARROW)
    progress(f"expiry: {size:,} are leased")
    began = time.perf_counter()
    ids = await _lease_all(connections, size)
    made, before = time.perf_counter() - began, resident(running.pid)
    if (live := await leased(control)) != size:
        raise RuntimeError(f"{live:,} are leased")
    async with probing(running.url) as probe, probing(running.url, "q") as same:
        await probe.at_rest()
        found = probe.figures(about, "before")
        progress("expiry: all get the same deadline")
        deadline = await _set_deadline(control, ids)
        while time.time() < deadline - SETTLE:
            # Often enough for the server not to close their connections.
            await asyncio.gather(probe.once(), same.once(), leased(control), asyncio.sleep(0.1))
        probe.seconds, same.seconds = [], []

        async def until_back() -> None:
            while True:
                await asyncio.sleep(0.1)
                if not await leased(control):
                    return

        began = time.perf_counter()
        going = asyncio.ensure_future(until_back())
        await asyncio.gather(probe.during(going), same.during(going))
        found += probe.figures(about, "meanwhile", aim_at(full, 50)) + same.figures(about, "meanwhile", aim_at(full, 50))
        found.append(Figure(about, "until all are back", time.perf_counter() - began - SETTLE, "s"))
    for each in connections:
        await each.close()
    return [
        Figure(about, "to make them, one call each", made, "s"),
        Figure(about, "memory before", before / 1e6, "MB"),
        *found,
        Figure(about, "memory at most", peak(running.pid) / 1e6, "MB"),
    ]


async def _lease_all(connections: list[Connection], size: int) -> list[str]:
    """Lease so many items of the queue `q` one by one. Returns the ids of the leases."""
    left, ids = size, list[str]()

    async def lease(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            fields = {"queue_name": "q", "client_id": "bench", "lease_timeout": "1h", "request_timeout": "30s", "payload": False}
            ids.extend(each["lease_id"] for each in (await post(connection, "queue.lease", **fields))["leases"])

    await asyncio.gather(*map(lease, connections))
    return ids


async def _set_deadline(connection: Connection, ids: list[str]) -> float:
    """Let all of the leases run out at the same time, which is returned."""

    async def extend(some: list[str], timeout: float) -> None:
        await post(connection, "queue.extend", queue_name="q", lease_ids=some, lease_timeout=f"{round(timeout * 1_000)}ms")

    began = time.perf_counter()
    await extend(ids[:CALL], 3_600)
    # Twice what it takes to set it on all of them.
    deadline = time.time() + LEAD + 2 * (time.perf_counter() - began) * len(ids) / CALL
    for start in range(0, len(ids), CALL):
        await extend(ids[start : start + CALL], deadline - time.time())
    return deadline


# ---- partitions, queues, keys, waiting consumers ---------------------------------------------------------------


def partitions(folder: Path, size: int) -> list[Figure]:
    """A server starts with so many partitions."""
    about, full = f"{size:,} partitions", size >= SHAPES["partitions"].size

    async def make(url: str) -> list[Figure]:
        connection = Connection(url)
        await connection.open()
        async with probing(url) as probe:

            async def create() -> None:
                for number, start in enumerate(range(0, size, PARTITIONS_OF_A_QUEUE)):
                    count = min(PARTITIONS_OF_A_QUEUE, size - start)
                    await post(connection, "queues.create", queue_name=f"q{number}", requested_partitions=count)

            began = time.perf_counter()
            await probe.during(create())
            made = Figure(about, "to make them", time.perf_counter() - began, "s")
            found = probe.figures(about, "while they are made", aim_at(full, BUSY))
        await connection.close()
        return [made, *found]

    progress(f"partitions: {size:,} are made")
    with server(SLUICEWAY, folder) as running:
        found = uvloop.run(make(running.url))
    progress("partitions: the server starts")
    with server(SLUICEWAY, folder) as running:
        found.append(Figure(about, "start, until requests are taken", running.start, "s", aim_at(full, 20)))
        found.append(Figure(about, "memory after the start", resident(running.pid) / 1e6, "MB", aim_at(full, 1_000)))
        found.append(Figure(about, "open files", handles(running.pid), "", aim_at(full, 600)))
        return found + uvloop.run(_at_rest(running.url, about, full))


async def _at_rest(url: str, about: str, full: bool) -> list[Figure]:
    async with probing(url) as probe:
        await probe.at_rest()
        return probe.figures(about, "beside them", aim_at(full, QUIET))


def queues(folder: Path, size: int) -> list[Figure]:
    """Queues are made, used once and deleted."""
    about, full = f"{size:,} queues made and deleted", size >= SHAPES["queues"].size

    async def come_and_go(running: Server) -> list[Figure]:
        connections = [Connection(running.url) for _ in range(8)]
        for each in connections:
            await each.open()
        numbers = iter(range(size))

        async def one(connection: Connection) -> None:
            for number in numbers:
                name = f"q{number}"
                # Without the dead queue that it would get otherwise, which would stay.
                await post(connection, "queues.create", queue_name=name, requested_partitions=1, dead_queue=None)
                await post(connection, "queue.produce", queue_name=name, items=[{"utf8": "x"}])
                await post(connection, "queues.delete", queue_name=name, force=True)

        async with probing(running.url) as probe:
            await asyncio.gather(*(post(connections[0], "queues.list"), asyncio.sleep(SETTLE)))
            memory, files, kept = resident(running.pid), handles(running.pid), _files(folder)
            began = time.perf_counter()
            await probe.during(asyncio.gather(*map(one, connections)))
            seconds = time.perf_counter() - began
            found = probe.figures(about, "meanwhile", aim_at(full, BUSY))
            await asyncio.sleep(SETTLE)
            for each in connections:
                await each.close()
            return [
                Figure(about, "each, made, used and deleted", seconds / size * 1e3, "ms"),
                *found,
                Figure(about, "memory more than before", (resident(running.pid) - memory) / 1e6, "MB", aim_at(full, 25)),
                Figure(about, "open files more than before", handles(running.pid) - files, "", aim_at(full, 0)),
                Figure(about, "files more than before", _files(folder) - kept, "", aim_at(full, 0)),
            ]

    with server(SLUICEWAY, folder) as running:
        found = uvloop.run(come_and_go(running))
    with server(SLUICEWAY, folder) as running:
        return [*found, Figure(about, "start afterwards", running.start, "s", aim_at(full, 5))]


def _files(folder: Path) -> int:
    return sum(1 for each in folder.rglob("*") if each.is_file())


def keys(folder: Path, size: int) -> list[Figure]:
    """A queue remembers idempotency keys."""
    about, full = f"{size:,} idempotency keys", size >= SHAPES["keys"].size

    async def use(running: Server) -> list[Figure]:
        connections = [Connection(running.url) for _ in range(CALLERS)]
        for each in connections:
            await each.open()
        await post(connections[0], "queues.create", queue_name="q", requested_partitions=1)
        numbers = iter(range(size))

        async def one(connection: Connection) -> None:
            for number in numbers:
                await post(connection, "queue.produce", queue_name="q", items=[{"utf8": "x"}], idempotency_key=f"key-{number}")

        async with probing(running.url) as probe:
            began = time.perf_counter()
            await probe.during(asyncio.gather(*map(one, connections)))
            seconds = time.perf_counter() - began
            found = probe.figures(about, "while they come", aim_at(full, BUSY))
        for each in connections:
            await each.close()
        return [Figure(about, "a second", size / seconds, ""), *found]

    progress(f"keys: {size:,} are used")
    with server(SLUICEWAY, folder) as running:
        found = uvloop.run(use(running))
    with server(SLUICEWAY, folder) as running:
        found.append(Figure(about, "start, until requests are taken", running.start, "s", aim_at(full, 5)))
        found.append(Figure(about, "memory after the start", resident(running.pid) / 1e6, "MB", aim_at(full, 500)))
        return found + uvloop.run(_at_rest(running.url, about, full))


def polls(folder: Path, size: int) -> list[Figure]:
    """Consumers wait for items of an empty queue, and all are answered."""
    about, full = f"{size:,} consumers that wait", size >= SHAPES["polls"].size
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(most, 65_536), hard))

    async def wait(running: Server) -> list[Figure]:
        control = Connection(running.url)
        await control.open()
        await post(control, "queues.create", queue_name="q", requested_partitions=1)
        async with probing(running.url) as probe:
            await probe.at_rest()
            found = probe.figures(about, "before they come")
            memory, began = resident(running.pid), time.perf_counter()
            waiting = [Connection(running.url) for _ in range(size)]
            for each in waiting:
                await each.open()
            answers = [
                asyncio.ensure_future(post(each, "queue.lease", queue_name="q", client_id=f"c{number}", request_timeout="15m"))
                for number, each in enumerate(waiting)
            ]
            await probe.during(_until_waiting(control, size))
            found += probe.figures(about, "while they come", aim_at(full, BUSY))
            found.append(Figure(about, "until all wait", time.perf_counter() - began, "s"))
            await probe.at_rest()
            found += probe.figures(about, "beside them", aim_at(full, QUIET))
            more = (resident(running.pid) - memory) / size / 1e3
            began = time.perf_counter()
            await control.post("/v1/queue.produce?queue_name=q", arrow_body(size, 100), ARROW)
            await probe.during(asyncio.gather(*answers))
            found += probe.figures(about, "while all are answered", aim_at(full, 250))
            found.append(Figure(about, "until all have their item", time.perf_counter() - began, "s", aim_at(full, 10)))
        for each in [*waiting, control]:
            await each.close()
        return [Figure(about, "memory, each", more, "KB", aim_at(full, 20)), *found]

    with server(SLUICEWAY, folder) as running:
        found = uvloop.run(wait(running))
    with server(SLUICEWAY, folder) as running:
        return [*found, Figure(about, "start afterwards", running.start, "s", aim_at(full, 5))]


async def _until_waiting(control: Connection, size: int) -> None:
    while True:
        await asyncio.sleep(0.05)
        if (await post(control, "queue.stats", queue_name="q"))["logical_queues"][0]["lease_waiting"] >= size:
            return


SHAPES = {
    "leases": Shape(leases, 1_000_000),
    "expiry": Shape(expiry, 150_000),
    "partitions": Shape(partitions, 10_000),
    "queues": Shape(queues, 5_000),
    "keys": Shape(keys, 200_000),
    "polls": Shape(polls, 2_000),
}


def page_of(shapes: dict[str, Any]) -> str:
    """Render Markdown: a table of all figures, in the order of SHAPES, and on what they were measured."""
    there = {name: shapes[name] for name in SHAPES if name in shapes}
    machines = dict.fromkeys(each["machine"].partition(", load ")[0] for each in there.values())
    loads = ", ".join(f"`{name}` {each['machine'].partition(', load ')[2]}" for name, each in there.items())
    lines = [
        f"{'; '.join(machines)}. Load of the machine, with that of the measurement: {loads}.",
        "",
        "| | | | aim |",
        "| --- | --- | --- | --- |",
    ]
    for shape in there.values():
        about = ""
        for each in shape["figures"]:
            aim = "" if each["aim"] is None else f"≤ {each['aim']:g} {each['unit']}{', missed' if each['missed'] else ''}"
            lines.append(
                f"| {'' if each['about'] == about else each['about']} | {each['name']} | {shown(each['value'])} {each['unit']} | {aim} |"
            )
            about = each["about"]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench odd_shapes", description=__doc__)
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="which to measure; all of them, if none is named")
    parser.add_argument("--page", type=Path, help="put the table into this page, such as docs/explanation/performance.md")
    parser.add_argument("--share", type=float, default=1.0, help="of the full size; the aims are for all of it")
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results/odd_shapes.json"), help="shapes that were not measured stay in it"
    )
    given = parser.parse_args(arguments)
    measured: dict[str, list[Figure]] = {}
    for name in given.shapes or SHAPES:
        with tempfile.TemporaryDirectory(prefix="sluiceway-odd-") as folder:
            measured[name] = SHAPES[name].run(Path(folder) / "data", max(1, round(SHAPES[name].size * given.share)))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[1]:.1f}"
    before = json.loads(given.output.read_text())["shapes"] if given.output.exists() else {}
    now = {name: {"machine": machine, "figures": [each.document() for each in figures]} for name, figures in measured.items()}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({"shapes": before | now}, indent=2, ensure_ascii=False) + "\n")
    if given.page:
        write_page(given.page, "odd shapes", page_of(before | now))
    figures = [each for found in measured.values() for each in found]
    print(f"{table(figures)}\n{machine}")
    missed = sum(figure.missed for figure in figures)
    progress(f"{missed} aims missed" if missed else "every aim met")
    return int(missed > 0)
