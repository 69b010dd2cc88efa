"""The yardstick: the same server with an ordinary row-per-item SQLite store behind it.

Written to be a fair rival: as many database files as partitions, WAL and `synchronous=FULL`, prepared statements with `executemany`,
and all requests that wait on a partition share one transaction, as with the columnar store. What it lacks is the columns: an item is a
row that is inserted, updated and deleted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pyarrow as pa
import uvloop

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.few import in_columns
from sluiceway.model.health import Check
from sluiceway.model.inspection import Browse, BrowsedPage, Deleted, DeleteItems, ItemsPage, ListItems
from sluiceway.model.leased import POSITION
from sluiceway.model.queue import PartitionRecord, QueueRecord, Verb
from sluiceway.model.rebalance import DrainMode, Plan, Rebalance, RebalanceBatch, RebalanceProgress
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    LeaseInfo,
    Peek,
    Produce,
    Produced,
    QueuePatch,
    QueueSpec,
    QueueStats,
    Redrive,
    Redriven,
    Settle,
    Settled,
    WholeQueueStats,
)
from sluiceway.node.instances import Instances
from sluiceway.node.ownership import Static
from sluiceway.server.app import create_app
from sluiceway.server.listeners import bind, url_of
from sluiceway.server.run import Server, announce

SCHEMA = """
create table item (
  offset integer primary key, payload blob not null, enqueued_at integer not null, attempts integer not null, lease integer
);
create index ready on item (offset) where lease is null;
create index leased on item (lease) where lease is not null;
"""

Job = tuple[Callable[[apsw.Connection], Any], "asyncio.Future[Any]"]


class RowPartition:
    """One database. Jobs that arrive while a transaction runs share the next one."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self.ready = 0
        self.leases = 0
        self._offset = 0
        self._jobs: list[Job] = []
        self._running = False
        self._thread = ThreadPoolExecutor(1)
        self._db = apsw.Connection(str(path))
        self._db.execute("pragma journal_mode=wal; pragma synchronous=full;")
        self._db.execute(SCHEMA)

    async def do(self, job: Callable[[apsw.Connection], Any]) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._jobs.append((job, future))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._jobs:
            jobs, self._jobs = self._jobs, []
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, [job for job, _ in jobs])
            for (_, future), result in zip(jobs, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._running = False

    def _transaction(self, jobs: list[Callable[[apsw.Connection], Any]]) -> list[Any]:
        results = []
        with self._db:
            results = [job(self._db) for job in jobs]
        return results

    def insert(self, payloads: list[bytes], now: int) -> Callable[[apsw.Connection], Any]:
        first, self._offset = self._offset, self._offset + len(payloads)
        rows = [(first + n, payload, now) for n, payload in enumerate(payloads)]

        def insert(db: apsw.Connection) -> int:
            db.executemany("insert into item values (?, ?, ?, 0, null)", rows)
            return first

        return insert

    def take(self, count: int) -> Callable[[apsw.Connection], Any]:
        self.leases += 1
        number = self.leases

        def job(db: apsw.Connection) -> tuple[int, list[Any]]:
            rows = db.execute(
                "update item set lease = ?, attempts = attempts + 1 where offset in "
                "(select offset from item where lease is null order by offset limit ?) returning offset, payload, enqueued_at, attempts",
                (number, count),
            ).fetchall()
            return number, sorted(rows)

        return job

    def close_lease(self, number: int) -> Callable[[apsw.Connection], Any]:
        def job(db: apsw.Connection) -> int:
            db.execute("delete from item where lease = ?", (number,))
            return int(db.changes())

        return job


class RowService:
    """What the benchmark asks of a `QueueService`: create, produce, lease at once, complete by lease."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._record: QueueRecord | None = None
        self._partitions: list[RowPartition] = []
        self._turn = 0
        self.instances = Instances(Static(), self.queues)

    async def start(self) -> None:
        self._data.mkdir(parents=True, exist_ok=True)

    async def stop(self) -> None:
        pass

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        now = system.now()
        numbers = range(spec.requested_partitions)
        self._partitions = [RowPartition(self._data / f"rows-{number}.sqlite", number) for number in numbers]
        records = tuple(PartitionRecord(number) for number in numbers)
        self._record = QueueRecord(spec.queue_name, system.new_incarnation(), now, now, spec.lease_timeout, 0, None, "", records)
        return self._record

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        raise _unsupported()

    def queue(self, queue_name: str) -> QueueRecord:
        if self._record is None:
            raise SluicewayError("queue_not_found", f"there is no queue {queue_name!r}", "queue_name")
        return self._record

    async def look_up(self, queue_name: str) -> QueueRecord:
        return self.queue(queue_name)

    def queues(self) -> list[QueueRecord]:
        return [self._record] if self._record else []

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        partition = min(self._partitions, key=lambda each: each.ready)
        payloads = in_columns(request.batch).column("payload").to_pylist()
        partition.ready += len(payloads)
        first = await partition.do(partition.insert(payloads, system.now()))
        return Produced(partition.number, first, len(payloads), False)

    async def lease(self, queue_name: str, request: Lease, payload: bool) -> Leased:
        self._turn += 1
        count = len(self._partitions)
        order = [self._partitions[(self._turn + n) % count] for n in range(count)]
        partition = next((each for each in order if each.ready), None)
        if partition is None:
            return Leased([])
        partition.ready -= min(partition.ready, request.batch_size)
        number, rows = await partition.do(partition.take(request.batch_size))
        if not rows:
            return Leased([])
        info = LeaseInfo(partition.number, number, len(rows), system.now() + 60_000)
        return Leased([info], [_batch(info, rows)])

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        result = Settled()
        for number, selections in request.selections.items():
            for selection in selections:
                if selection.lease is None or request.stage:
                    raise _unsupported()
                partition = self._partitions[number]
                result.completed += await partition.do(partition.close_lease(selection.lease))
        return result

    async def extend(self, queue_name: str, request: Extend) -> Extended:
        raise _unsupported()

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        raise _unsupported()

    async def count(self, queue_name: str) -> WholeQueueStats:
        raise _unsupported()

    def stats(self, queue_name: str) -> QueueStats:
        raise _unsupported()

    def problems(self) -> list[str]:
        return []

    async def checks(self) -> list[Check]:
        return []

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        raise _unsupported()

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        raise _unsupported()

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        raise _unsupported()

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        raise _unsupported()

    async def browse(self, queue_name: str, request: Browse) -> BrowsedPage:
        raise _unsupported()

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        raise _unsupported()

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        raise _unsupported()

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        raise _unsupported()

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        raise _unsupported()

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        raise _unsupported()

    async def plan_rebalance(self, queue_name: str, requested: int | None) -> tuple[str, Plan, QueueRecord]:
        raise _unsupported()

    async def rebalance(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor
    ) -> Rebalance:
        raise _unsupported()

    async def rebalance_many(self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor) -> RebalanceBatch:
        raise _unsupported()

    async def rebalances(self, queue_name: str | None, only_open: bool) -> list[Rebalance]:
        raise _unsupported()

    async def get_rebalance(self, id: str) -> Rebalance:
        raise _unsupported()

    async def cancel_rebalance(self, id: str, by: Actor) -> Rebalance:
        raise _unsupported()

    async def rebalance_progress(self, rebalance: Rebalance) -> RebalanceProgress:
        raise _unsupported()

    async def set_partition(self, queue_name: str, partition: int, paused: bool, by: Actor) -> QueueRecord:
        raise _unsupported()


def _batch(info: LeaseInfo, rows: list[Any]) -> pa.RecordBatch:
    offsets, payloads, times, attempts = zip(*rows, strict=True)
    count = len(rows)
    arrays = [
        pa.array(np.full(count, info.partition, np.int32)),
        pa.array(np.full(count, info.number, np.int64)),
        pa.array(offsets, pa.int64()),
        pa.array(offsets, pa.int64()),
        pa.array(attempts, pa.int32()),
        pa.array(times, pa.timestamp("ms", "UTC")),
        pa.array(payloads, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*POSITION, pa.field("payload", pa.binary(), nullable=False)]))


def _unsupported() -> SluicewayError:
    return SluicewayError("not_found", "the yardstick does not do this")


async def _serve(service: RowService) -> None:
    with bind("127.0.0.1", 0) as sock:
        await service.start()
        try:
            await Server(create_app(service), lambda: announce(url_of(sock))).serve([sock])
        finally:
            await service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sluiceway.bench.rows")
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(RowService(given.data)))


if __name__ == "__main__":
    main()
