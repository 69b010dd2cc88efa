"""`python -m bench bucket_costs`: partitions in a bucket, at the latencies of S3 Standard and of S3 Express: rates, the times of calls,
requests and their price, and takeovers.

The bucket is a process of its own (`bench/bucket_server.py`), and so is the server. Prices are of requests alone, in US dollars: $5 for a
million writes or lists, and $0.40 for a million reads in S3 Standard; $1.13 and $0.03 in S3 Express.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.bench.systems.sluiceway import Arrow, Json
from sluiceway.bench.work import Client, Work, run
from sluiceway.client import AsyncClient, AsyncProducer, LeasedItem
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, RecordKind


class Class(NamedTuple):
    """A class of storage: median and 99th percentile of a request in ms, and dollars of a million writes and of a million reads."""

    name: str
    median: float
    p99: float
    write: float
    read: float


CLASSES = (Class("S3 Standard", 60, 200, 5.0, 0.4), Class("S3 Express", 10, 25, 1.13, 0.03))
SECONDS, WARM_UP = 10.0, 2.0
SINGLES_A_SECOND = 1_000
TAKEOVERS = 100
REF = PartitionRef("aaaaaaaa", 0)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench bucket_costs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--takeovers", type=int, default=TAKEOVERS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures: list[Figure] = []
    for each in CLASSES:
        figures += _rates(each, given.seconds)
        figures += run(_takeovers(each, given.takeovers))
    print(json.dumps([figure.document() for figure in figures], indent=1) if given.json else table(figures))
    return int(any(figure.missed for figure in figures))


# ---- rates ----------------------------------------------------------------------------------------------------


@contextmanager
def bucket(median: float = 0.0, p99: float = 0.0, module: str = "bench.bucket_server") -> Iterator[str]:
    """A bucket for the duration of the block; its URL. `module`: its server's."""
    command = [sys.executable, "-m", module, "--median", str(median), "--p99", str(p99)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _counts(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/-/counts") as answer:
        found: dict[str, int] = json.load(answer)
    return found


def _rates(storage: Class, seconds: float) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="sluiceway-bucket-") as folder, bucket(storage.median, storage.p99) as url:
        config = Path(folder) / "sluiceway.toml"
        keys = 'access_key_id = "bench"\nsecret_access_key = "env:BENCH_SECRET"'
        config.write_text(f'[backends.bucket]\nkind = "s3"\nbucket = "bench"\nregion = "none"\nendpoint = "{url}"\n{keys}\n')
        with _secret(), server(SLUICEWAY, Path(folder) / "data", "--config", str(config)) as started:
            for name, work, partitions in (
                ("batches of 1,000, 8 clients, 4 partitions", Work.named("arrow-1000x100-c8"), 4),
                ("batches of 1,000, 8 clients, 1 partition", Work.named("arrow-1000x100-c8"), 1),
                ("single items, 64 clients, 4 partitions", Work.named("single-cycle-c64"), 4),
                ("single items, 64 clients, 1 partition", Work.named("single-cycle-c64"), 1),
            ):
                progress(f"{storage.name}: {name}")
                figures += run(_cycles(storage, f"{storage.name}, {name}", started.url, url, work, partitions, seconds))
            for partitions in (1, 4):
                progress(f"{storage.name}: {SINGLES_A_SECOND} single items a second, {partitions} partitions")
                figures += run(_paced(storage, started.url, url, partitions, seconds))
    return figures


@contextmanager
def _secret() -> Iterator[None]:
    os.environ["BENCH_SECRET"] = "bench"
    try:
        yield
    finally:
        del os.environ["BENCH_SECRET"]


async def _cycles(storage: Class, about: str, url: str, objects: str, work: Work, partitions: int, seconds: float) -> list[Figure]:
    queue = f"bench-{time.monotonic_ns()}"
    connections = [Connection(url) for _ in range(work.clients)]
    for each in connections:
        await each.open()
    await connections[0].post("/v1/queues.create", json.dumps({"queue_name": queue, "requested_partitions": partitions}).encode())
    kind = Arrow if work.form == "arrow" else Json
    clients: list[Client] = [kind(each, queue, work) for each in connections]
    times: dict[str, list[float]] = {"produce": [], "lease": [], "complete": []}
    await asyncio.gather(*(_cycle(each, time.perf_counter() + WARM_UP, {}) for each in clients))
    before, began = _counts(objects), time.perf_counter()
    items = sum(await asyncio.gather(*(_cycle(each, began + seconds, times) for each in clients)))
    elapsed, after = time.perf_counter() - began, _counts(objects)
    for each in connections:
        await each.close()
    figures = [Figure(about, "items a second", items / elapsed, "")]
    for name, each_time in times.items():
        each_time.sort()
        figures += [
            Figure(about, f"{name}, {part}", each_time[int(len(each_time) * share)] * 1e3, "ms")
            for part, share in (("p50", 0.5), ("p99", 0.99))
        ]
    return figures + _price(storage, about, before, after, items, 0.02 if work.batch == 1_000 else None)


async def _cycle(client: Client, until: float, times: dict[str, list[float]]) -> int:
    done = 0
    while time.perf_counter() < until:
        marks = [time.perf_counter()]
        await client.produce()
        marks.append(time.perf_counter())
        count, leased = await client.lease()
        marks.append(time.perf_counter())
        if count:
            await client.complete(leased)
        marks.append(time.perf_counter())
        done += count
        for name, since, to in zip(times, marks, marks[1:], strict=False):
            times[name].append(to - since)
    return done


async def _paced(storage: Class, url: str, objects: str, partitions: int, seconds: float) -> list[Figure]:
    about = (
        f"{storage.name}, {SINGLES_A_SECOND:,} single items a second, producer and consumer, {partitions} partition{'s' * (partitions > 1)}"
    )
    handled: list[float] = []
    stored: list[float] = []
    async with AsyncClient(url) as client:
        queue = f"bench-{time.monotonic_ns()}"
        await client.create_queue(queue, requested_partitions=partitions)
        consumer = client.consumer(queue, prefetch=1_000)

        all_handled, items = asyncio.Event(), 0

        async def handle(item: LeasedItem) -> None:
            handled.append(time.perf_counter() - float(item.payload))
            if len(handled) == items:
                all_handled.set()

        running = asyncio.create_task(consumer.run(handle, concurrency=64, signals=False))
        async with client.producer(queue) as producer:
            await _send(producer, WARM_UP, [])
            handled.clear()
            before = _counts(objects)
            items = await _send(producer, seconds, stored)
            if len(handled) >= items:
                all_handled.set()
            await all_handled.wait()
            await asyncio.sleep(1)
            after = _counts(objects)
        consumer.stop()
        await running
    figures = []
    for name, times in (("stored", stored), ("handled", handled)):
        times.sort()
        figures += [
            Figure(about, f"from send to {name}, {part}", times[int(len(times) * share)] * 1e3, "ms")
            for part, share in (("p50", 0.5), ("p99", 0.99))
        ]
    return figures + _price(storage, about, before, after, items, 0.08)


async def _send(producer: AsyncProducer, seconds: float, stored: list[float]) -> int:
    """Send items at a steady rate. Returns their number."""
    began, sent, waiting = time.perf_counter(), 0, set()

    async def one() -> None:
        at = time.perf_counter()
        await (await producer.send(repr(at)))
        stored.append(time.perf_counter() - at)

    while (now := time.perf_counter() - began) < seconds:
        while sent < now * SINGLES_A_SECOND:
            task = asyncio.create_task(one())
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            sent += 1
        await asyncio.sleep(0.002)
    await asyncio.gather(*waiting)
    return sent


def _price(storage: Class, about: str, before: dict[str, int], after: dict[str, int], items: int, aim: float | None) -> list[Figure]:
    """Requests and dollars of a million items. The aim is for S3 Standard."""
    made = {name: (after.get(name, 0) - before.get(name, 0)) * 1e6 / items for name in ("put", "list", "get", "bytes_put", "bytes_got")}
    dollars = ((made["put"] + made["list"]) * storage.write + made["get"] * storage.read) / 1e6
    return [
        Figure(about, "PUTs of a million items", made["put"], ""),
        Figure(about, "LISTs of a million items", made["list"], ""),
        Figure(about, "GETs of a million items", made["get"], ""),
        Figure(about, "written for a million items", made["bytes_put"] / 1e6, "MB"),
        Figure(about, "read for a million items", made["bytes_got"] / 1e6, "MB"),
        Figure(about, "price of a million items", dollars, "$", aim),
    ]


# ---- takeovers ------------------------------------------------------------------------------------------------


def _objects(url: str) -> BucketObjects:
    return in_s3("bench", "takeovers", region="none", endpoint=url, access_key_id="bench", secret_access_key="bench")


async def _takeovers(storage: Class, times: int) -> list[Figure]:
    """Open a partition again and again, after different numbers of cycles since its last checkpoint."""
    about = f"{storage.name}, takeover of a partition"
    progress(about)
    took: list[float] = []
    with bucket(storage.median, storage.p99) as url:
        # Written by a store of its own, which is left behind as by a machine that died.
        owner = BucketPartitionStore(HedgedReads(_objects(url)), 10_000)
        txn = 0
        for number in range(times):
            fence = Fence(1, number + 1, 1)
            began = time.perf_counter()
            snapshot = await owner.open(REF, fence)
            took.append(time.perf_counter() - began)
            assert snapshot.txn == txn
            for _ in range(number % 8):
                txn += 1
                outcome = await owner.apply(REF, Changes(txn, b"header", puts={(RecordKind.LEASE, str(txn % 50)): bytes(200)}), fence)
                assert outcome is Outcome.DONE
            await owner.release(REF)
        await owner.close()
    took.sort()
    return [
        Figure(about, f"of {times}, {part}", took[int(len(took) * share)], "s", 1.0 if part == "p99" else None)
        for part, share in (("p50", 0.5), ("p99", 0.99))
    ]
