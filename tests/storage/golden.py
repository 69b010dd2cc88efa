"""Data in every state that a record can be in: made by a release and kept in `data/`, or made now, and looked at by the code of today.

`python tests/golden.py NAME.tar.gz` keeps what the code of today writes on SQLite, `... NAME.tar.gz DSN` on PostgreSQL.
Do so before a layout changes; data/README.md says what is kept.
"""

from __future__ import annotations

import asyncio
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import psycopg
from psycopg import sql

from sluiceway.adapters import system
from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.adapters.storage.postgres_schema import MIGRATIONS
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.instance.service import Service
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Lease, Leased, Produce, ProduceKey, Selection, Settle
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, PartitionStore
from tests.instance.instance_rig import eventually, payloads, produce, settle, spec

FAR = 4_102_444_800_000
"""2100: what is to be still alive when the data is looked at."""
HOUR = 3_600_000
KEY = ProduceKey("lone", window=FAR)
GROUP_KEY = ProduceKey("g1", "group", 5)
TABLES = ("layout", "partition", "record", "blob")
POSTGRES_SCHEMA = "golden"


async def fill(directory: Path, store: PartitionStore) -> None:
    """Two queues, and items of `q` in every state. What holds afterwards stands in test_migrations.py."""
    service = service_on(directory, store)
    await service.start()
    dead = await service.create_queue(spec("dead"))
    await service.create_queue(spec("q", max_attempts=3, dead_queue="dead"))
    await _finish_some(service)
    await _lease_some(service)
    await _schedule_some(service)
    await produce(service, "q", "k0", key=KEY)
    await produce(service, "q", "k1", "k2", key=GROUP_KEY)
    await _let_some_die_and_stop(service, store, dead.incarnation)


def service_on(directory: Path, store: PartitionStore) -> Service:
    return Service(directory, open_store=lambda *_: store)


async def take(service: Service, count: int, until: int, key: str | None = None, queue: str = "q") -> Leased:
    """Lease the next items until that time."""
    return await service.lease(queue, Lease("consumer", count, 0, until - system.now(), 1, key))


async def settle_some(service: Service, leased: Leased, dispositions: dict[str, Disposition], stage: bool = False) -> None:
    """State the dispositions of those payloads of a lease."""
    (batch,) = map(in_columns, leased.batches)
    at = {payload: batch.column("offset")[row].as_py() for row, payload in enumerate(payloads([batch]))}
    selections = [Selection(disposition, offsets=np.array([at[payload]], np.int64)) for payload, disposition in dispositions.items()]
    settled = await service.settle("q", Settle({0: selections}, 10_000, stage))
    assert settled.total == len(dispositions)


async def _finish_some(service: Service) -> None:
    await produce(service, "q", *(f"a{n}" for n in range(10)))
    await settle(service, "q", await take(service, 10, FAR))
    row = {"kind": "order", "encoding": "text", "reference": "r1", "headers": [("trace", "t1")]}
    batch = batch_from_rows([{**row, "payload": f"b{n}".encode()} for n in range(4)])
    await service.produce("q", Produce(batch, 10_000))
    dispositions = {
        "b0": Disposition("dead", reason="bad"),
        "b1": Disposition("retry"),
        "b2": Disposition("done"),
        "b3": Disposition("retry"),
    }
    await settle_some(service, await take(service, 4, FAR), dispositions)
    await eventually(lambda: service.stats("dead").partitions[0].ready == 1 and not service.stats("q").partitions[0].transferring)


async def _lease_some(service: Service) -> None:
    assert payloads((await take(service, 2, FAR, "key-1")).batches) == ["b1", "b3"]
    await produce(service, "q", *(f"c{n}" for n in range(20)))
    await settle_some(service, await take(service, 10, FAR), {f"c{n}": Disposition("done") for n in (0, 2, 4)})
    staged = {
        "c10": Disposition("dead", reason="broken"),
        "c11": Disposition("retry", retry_at=FAR),
        "c12": Disposition("retry"),
        "c13": Disposition("done"),
    }
    await settle_some(service, await take(service, 5, FAR), staged, stage=True)
    assert payloads((await take(service, 2, system.now() + HOUR // 2)).batches) == ["c15", "c16"]


async def _schedule_some(service: Service) -> None:
    waits = [FAR, FAR, system.now() + HOUR // 2]
    batch = batch_from_rows([{"payload": f"d{n}".encode(), "enqueue_at": at} for n, at in enumerate(waits)])
    await service.produce("q", Produce(batch, 10_000))
    await settle_some(service, await take(service, 1, FAR), {"c17": Disposition("retry", retry_at=FAR)})


async def _let_some_die_and_stop(service: Service, store: PartitionStore, incarnation: str) -> None:
    """They stay on their way, since the dead queue cannot write."""
    apply = store.apply

    async def refuse(ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        return Outcome.REFUSED if ref.incarnation == incarnation else await apply(ref, changes, fence)

    with mock.patch.object(store, "apply", refuse):
        await settle_some(service, await take(service, 1, FAR), {"c18": Disposition("dead", reason="poison")})
        await eventually(lambda: service.stats("dead").partitions[0].failures > 0)
        await service.stop()


def dump(dsn: str) -> str:
    """The layout of today and the rows that it holds, as a script for an empty schema."""
    lines = ["CREATE TABLE layout (version bigint NOT NULL);", *MIGRATIONS]
    with psycopg.connect(dsn, options=f"-c search_path={POSTGRES_SCHEMA}") as connection:
        for table in TABLES:
            for row in connection.execute(sql.SQL("SELECT * FROM {} ORDER BY 1").format(sql.Identifier(table))):
                values = ", ".join(sql.Literal(value).as_string(connection) for value in row)
                lines.append(f"INSERT INTO {table} OVERRIDING SYSTEM VALUE VALUES ({values});")
    lines.append("SELECT setval(pg_get_serial_sequence('partition', 'id'), max(id)) FROM partition;")
    return "\n".join(lines) + "\n"


def keep(archive: Path, dsn: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        store = PostgresPartitionStore(dsn, schema=POSTGRES_SCHEMA) if dsn else SqlitePartitionStore(data / "partitions")
        asyncio.run(fill(data, store))
        if dsn:
            (data / "partitions.sql").write_text(dump(dsn))
        with tarfile.open(archive, "w:gz") as tar:
            # The identity too: a folder without the one that the meta store has noted is not served.
            for file in sorted([*data.rglob("*.sq*"), *data.rglob("identity")]):
                tar.add(file, file.relative_to(data).as_posix(), filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
