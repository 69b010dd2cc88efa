"""`python -m bench bucket_costs`: partitions in a bucket, at the latencies of S3 Standard and of S3 Express: rates, the times of calls,
requests and their price, and takeovers.

The bucket is a process of its own (`bench/bucket_server.py`), and so is the server. Prices are of requests alone, in US dollars.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, peak, server
from sluiceway.bench.systems.sluiceway import Arrow, Json
from sluiceway.bench.work import Client, Work, run
from sluiceway.client import AsyncClient, AsyncProducer, LeasedItem
from sluiceway.model.bucket_prices import S3_EXPRESS, S3_STANDARD, BucketPrices
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, RecordKind


class Class(NamedTuple):
    """A class of storage: the prices of its requests, the median and 99th percentile of their durations in ms, and the `commit_window` for
    them."""

    prices: BucketPrices
    median: float
    p99: float
    window: str

    @property
    def name(self) -> str:
        return self.prices.name


CLASSES = (Class(S3_STANDARD, 60, 200, "10ms"), Class(S3_EXPRESS, 10, 25, "2ms"))
SECONDS, WARM_UP = 10.0, 2.0
SINGLES_A_SECOND = 1_000
TAKEOVERS = 50
TAKEN_OVER = 20
PARTS = ("rates", "takeovers", "waiting")
WAITING = 10_000_000
QUEUE = "bench"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench bucket_costs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--takeovers", type=int, default=TAKEOVERS)
    parser.add_argument("--waiting", type=int, default=WAITING, help="items that wait while a server is killed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of these only")
    parser.add_argument("--class", dest="classes", action="append", choices=[each.name for each in CLASSES], help="of these only")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures: list[Figure] = []
    for each in (each for each in CLASSES if each.name in (given.classes or each.name)):
        if "rates" in given.parts:
            figures += _rates(each, given.seconds)
        if "takeovers" in given.parts:
            figures += run(_takeovers(each, given.takeovers))
        if "waiting" in given.parts:
            figures += _waiting(each, given.waiting)
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
        config = _config(storage, Path(folder), url)
        with _secret(), server(SLUICEWAY, Path(folder) / "data", "--config", str(config)) as started:
            for name, work, partitions in (
                ("batches of 1,000, 8 clients, 4 partitions", Work.named("arrow-1000x100-c8"), 4),
                ("batches of 1,000, 8 clients, 1 partition", Work.named("arrow-1000x100-c8"), 1),
                ("single items, 64 clients, 4 partitions", Work.named("single-cycle-c64"), 4),
                ("single items, 64 clients, 1 partition", Work.named("single-cycle-c64"), 1),
            ):
                progress(f"{storage.name}: {name}")
                figures += run(_cycles(storage, f"{storage.name}, {name}", started.url, url, work, partitions, seconds))
            for partitions in (1, 4, 100):
                progress(f"{storage.name}: {SINGLES_A_SECOND} single items a second, {partitions} partitions")
                figures += run(_paced(storage, started.url, url, partitions, seconds))
    return figures


def _config(storage: Class, folder: Path, url: str) -> Path:
    config = folder / "sluiceway.toml"
    keys = 'access_key_id = "bench"\nsecret_access_key = "env:BENCH_SECRET"'
    where = f'kind = "s3"\nbucket = "bench"\nregion = "none"\nendpoint = "{url}"\ncommit_window = "{storage.window}"'
    config.write_text(f"[backends.bucket]\n{where}\n{keys}\n")
    return config


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
    dollars = ((made["put"] + made["list"]) * storage.prices.write + made["get"] * storage.prices.read) / 1e6
    return [
        Figure(about, "PUTs of a million items", made["put"], ""),
        Figure(about, "LISTs of a million items", made["list"], ""),
        Figure(about, "GETs of a million items", made["get"], ""),
        Figure(about, "written for a million items", made["bytes_put"] / 1e6, "MB"),
        Figure(about, "read for a million items", made["bytes_got"] / 1e6, "MB"),
        Figure(about, "price of a million items", dollars, "$", aim),
    ]


# ---- many that wait ----------------------------------------------------------------------------------------------


def _waiting(storage: Class, items: int) -> list[Figure]:
    """Kill a server with that many waiting items in a partition, and start it again."""
    figures: list[Figure] = []
    for work in (Work("produce", "arrow", 1_000, 8, 8), Work("produce", "arrow", 100, 8, 64)):
        about = f"{storage.name}, {items:,} items wait, produced in batches of {work.batch:,}"
        progress(about)
        with tempfile.TemporaryDirectory(prefix="sluiceway-bucket-") as folder, bucket() as url, _secret():
            arguments = Path(folder) / "data", "--config", str(_config(storage, Path(folder), url))
            with server(SLUICEWAY, *arguments) as started:
                run(_fill(started.url, work, items))
                os.kill(started.pid, signal.SIGKILL)
            urllib.request.urlopen(f"{url}/-/latency/{storage.median}/{storage.p99}").close()
            began = time.perf_counter()
            with server(SLUICEWAY, *arguments) as started:
                run(_lease_one(started.url))
                took = time.perf_counter() - began
                figures += [
                    Figure(about, "from the start of the process until one is leased", took, "s", 5.0),
                    Figure(about, "memory of the process, at most", peak(started.pid) / 1e6, "MB", 400.0),
                ]
    return figures


async def _fill(url: str, work: Work, items: int) -> None:
    connections = [Connection(url) for _ in range(work.clients)]
    for each in connections:
        await each.open()
    await connections[0].post("/v1/queues.create", json.dumps({"queue_name": QUEUE, "requested_partitions": 1}).encode())
    batches = iter(range(items // work.batch))

    async def produce(connection: Connection) -> None:
        client = Arrow(connection, QUEUE, work)
        for _ in batches:
            await client.produce()

    await asyncio.gather(*map(produce, connections))
    for each in connections:
        await each.close()


async def _lease_one(url: str) -> None:
    async with AsyncClient(url) as client:
        assert (await client.lease(QUEUE, request_timeout=timedelta(seconds=60))).items


# ---- takeovers ------------------------------------------------------------------------------------------------


def _objects(url: str) -> BucketObjects:
    return in_s3("bench", "takeovers", region="none", endpoint=url, access_key_id="bench", secret_access_key="bench")


async def _takeovers(storage: Class, times: int) -> list[Figure]:
    """Open the partitions of an owner that has died, again and again, after different numbers of cycles."""
    about = f"{storage.name}, {TAKEN_OVER} partitions of a dead owner are opened"
    progress(about)
    each_took: list[float] = []
    all_took: list[float] = []
    refs = [PartitionRef("k7f3q2ma", number) for number in range(TAKEN_OVER)]
    txns = dict.fromkeys(refs, 0)
    with bucket(storage.median, storage.p99) as url:
        for number in range(times):
            # It is left behind, as by a machine that died.
            owner = BucketPartitionStore(HedgedReads(_objects(url)), 10_000)
            # Serving already: it has proved that the bucket is fit.
            await owner.identify(None)
            fence = Fence(1, number + 1, 1)
            began = time.perf_counter()

            async def opens(ref: PartitionRef, owner: BucketPartitionStore = owner, fence: Fence = fence, began: float = began) -> None:
                snapshot = await owner.open(ref, fence)
                each_took.append(time.perf_counter() - began)
                assert snapshot.txn == txns[ref]

            await asyncio.gather(*map(opens, refs))
            all_took.append(time.perf_counter() - began)
            for _ in range(number % 8 * 4):
                ref = refs[number % len(refs)]
                txns[ref] += 1
                changes = Changes(txns[ref], b"header", puts={(RecordKind.LEASE, str(txns[ref] % 50)): bytes(200)})
                assert await owner.apply(ref, changes, fence) is Outcome.DONE
    figures = []
    for name, took in (("one", each_took), ("all", all_took)):
        took.sort()
        figures += [
            Figure(about, f"{name}, {part}", took[int(len(took) * share)], "s", 1.0 if part == "p99" else None)
            for part, share in (("p50", 0.5), ("p99", 0.99))
        ]
    return figures
