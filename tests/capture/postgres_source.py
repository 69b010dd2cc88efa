"""Tables of a real PostgreSQL server that are read as a change stream."""

from __future__ import annotations

import itertools
import json
from typing import Any

import psycopg

from sluiceway.capture.streams.postgres_slot import PostgresStream, slot_name
from sluiceway.ports.change_stream import Batch, ChangeStream
from sluiceway.testing.change_stream_suite import next_batch
from tests.servers.postgres_server import PostgresServer

SETTINGS = {"wal_level": "logical", "synchronous_commit": "on", "max_replication_slots": "100", "wal_writer_delay": "50ms"}
numbers = itertools.count()


class Source:
    """Tables of a test's own, with a publication that has its name."""

    def __init__(self, server: PostgresServer) -> None:
        self.server, self.name = server, f"c{next(numbers)}"
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Each by itself; the rows of the last. `{name}` in it is the source's name."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.server.dsn(), autocommit=True)
        rows = []
        for statement in statements:
            cursor = self._connection.execute(statement.replace("{name}", self.name).encode())
            rows = cursor.fetchall() if cursor.description else []
        return rows

    def reconnect(self) -> None:
        """After the server was killed."""
        if self._connection is not None:
            self._connection.close()

    def publish(self, *tables: str) -> None:
        for table in tables:
            self.run(f"CREATE TABLE {table}")
        self.run("CREATE PUBLICATION {name} FOR TABLE " + ", ".join(table.partition("(")[0] for table in tables))

    async def begin(self, *tables: str) -> tuple[PostgresStream, str]:
        """Publish the tables, if any are named, and make the slot: a stream, and where reading begins."""
        if tables:
            self.publish(*tables)
        stream = self.stream()
        return stream, await begin(stream)

    def stream(self, port: int | None = None) -> PostgresStream:
        return PostgresStream("cap", self.server.dsn(port), [self.name])

    @property
    def slot(self) -> str:
        return slot_name("cap", self.name)

    def confirmed(self) -> str:
        ((lsn,),) = self.run(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{self.slot}'")
        return str(lsn)

    def drop(self) -> None:
        self.reconnect()
        if self.server.running:
            self.run(f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{self.slot}'")
            self.reconnect()


async def begin(stream: PostgresStream) -> str:
    """Make the slot; where reading begins."""
    (born,) = (await stream.seeds("")).partitions
    return born.start


async def read_records(
    stream: ChangeStream, token: str, position: str, count: int, limit: int = 10_000
) -> tuple[list[dict[str, Any]], str]:
    """So many records from there on, and where reading goes on after them."""
    records: list[dict[str, Any]] = []
    while len(records) < count:
        batch = await next_batch(stream, token, position, limit)
        assert batch.upto is not None
        records, position = records + payloads(batch), batch.upto
    assert len(records) == count
    return records, position


def payloads(batch: Batch) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in batch.records["payload"].to_pylist()]
