"""A process that is a member of a capture over Kafka: BOOTSTRAP CAPTURE NAME DIRECTORY. It leaves in order when its input ends.

Positions and what has arrived are in SQLite files in the directory, the stream is `tasks_rig.from_options`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

import pyarrow as pa

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture.logs.kafka_log import KafkaElection, KafkaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.partition_reader import Habits, PartitionReader
from sluiceway.capture.task_driver import TaskRunner
from tests.capture.tasks_rig import from_options

OPTIONS = {"partitions": "4", "records": "60"}
SESSION, HEARTBEAT = 3_000, 300
BATCH = 3
PAUSE = 0.03
"""Seconds that each batch takes, so that something is going on when a member dies."""


class Arrivals:
    """A `ChangeSink` for several processes: what arrives again is there already."""

    def __init__(self, directory: Path) -> None:
        self._rows = sqlite3.connect(directory / "arrivals.db", timeout=60, isolation_level=None, check_same_thread=False)
        self._rows.execute("PRAGMA journal_mode=WAL")
        self._rows.execute(
            "CREATE TABLE IF NOT EXISTS arrivals (number INTEGER PRIMARY KEY, token, batch, row, payload, UNIQUE (token, batch, row))"
        )

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> None:
        rows = [(partition, batch, number, payload) for number, payload in enumerate(records.column("payload").to_pylist())]
        await asyncio.to_thread(self._insert, rows)
        await asyncio.sleep(PAUSE)

    def _insert(self, rows: list[tuple[str, int, int, bytes]]) -> None:
        self._rows.execute("BEGIN IMMEDIATE")
        self._rows.executemany("INSERT OR IGNORE INTO arrivals (token, batch, row, payload) VALUES (?, ?, ?, ?)", rows)
        self._rows.execute("COMMIT")

    def all(self) -> list[tuple[str, bytes]]:
        """In the order in which they came."""
        return self._rows.execute("SELECT token, payload FROM arrivals ORDER BY number").fetchall()

    async def close(self) -> None:
        self._rows.close()


async def main(bootstrap: str, capture: str, name: str, directory: Path) -> None:
    store = SqliteMetaStore(directory / "positions")
    positions, stream, arrivals = MetaPositions(store, capture), from_options(capture, OPTIONS), Arrivals(directory)
    log = KafkaSyncLog(bootstrap, capture)
    runner = TaskRunner(
        name,
        log=log,
        election=KafkaElection(bootstrap, capture, session_timeout=SESSION, heartbeat=HEARTBEAT),
        positions=positions,
        stream=stream,
        handler=PartitionReader(stream, positions, arrivals, Habits(limit=BATCH)).read,
    )
    running = asyncio.create_task(runner.run())
    await asyncio.wait([running, asyncio.create_task(asyncio.to_thread(sys.stdin.read))], return_when=asyncio.FIRST_COMPLETED)
    runner.stop()
    await running
    await log.close()
    await arrivals.close()
    await store.close()


if __name__ == "__main__":
    bootstrap, capture, name, directory = sys.argv[1:]
    asyncio.run(main(bootstrap, capture, name, Path(directory)))
