"""The yardstick: our own server over an ordinary row-per-item SQLite store (`bench/rows.py`), driven as ours is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from sluiceway.bench.compare.systems.sluiceway import PARTITIONS, lean
from sluiceway.bench.compare.work import Done, Served, Work, run
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import server

GUARANTEES = {"sqlite-rows": "An item is a row, and confirmed when its transaction is synced to the disk (synchronous=FULL)."}
QUEUE = "bench"


def found() -> str | None:
    return None


def version() -> str:
    return f"SQLite {apsw.sqlite_lib_version()}"


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    with server("sluiceway.bench.rows", folder) as started:
        asyncio.run(_create(started.url))
        yield Served(started.url, [started.pid])


async def _create(url: str) -> None:
    """Its one queue."""
    connection = Connection(url)
    await connection.open()
    await connection.post("/v1/queues.create", json.dumps({"queue_name": QUEUE, "requested_partitions": PARTITIONS}).encode())
    await connection.close()


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(lean(address, work, seconds, QUEUE))
