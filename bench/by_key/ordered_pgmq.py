"""pgmq with groups: `send_batch` with the header `x-pgmq-group`, one of the grouped reads, and `delete` by ids.

`pgmq` reads by `read_grouped`, which fills a batch from one group before it takes the next (as FIFO queues of SQS do), `pgmq-rr` by
`read_grouped_rr`, which takes one item of each group in turn. pgmq has both since 1.8. Its SQL comes with its Python client, which installs
it; the server is that of `postgres`. The statements are prepared, on the same low-cost client as `postgres`. A message is JSON: a string.

An index on the group's expression is ours: pgmq's own (`create_fifo_index`, on all headers) cannot be used by these reads, and without one
`read_grouped` takes 30 times as long with 8,000 messages in 800 groups, and 140 times as long with 8,000 groups. The table is vacuumed
as often as that of `postgres`. A client that gets nothing asks again after POLL.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg import pq

from bench.by_key.keyed_load import PATIENCE, KeyedClient, KeyedWork, split
from bench.systems import postgres_rows
from bench.systems.postgres_rows import INT8, JSONB, PreparedStatements, binary_array

ORDER = (
    "A message of a group is read when no earlier one of it is hidden, so those of a reader that dies come again, in order. "
    "The next read takes a group up where the settled ones end."
)
READS = {"pgmq": b"read_grouped", "pgmq-rr": b"read_grouped_rr"}
POLL = 0.1
"""Seconds."""
TUNE = (
    "ALTER TABLE pgmq.q_keyed SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, "
    "autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_threshold = -1)"
)
INDEX = "CREATE INDEX ON pgmq.q_keyed (coalesce(headers->>'x-pgmq-group', '_default_fifo_group'), msg_id)"
_VERSION_OF_JSONB = b"\x01"


def found() -> str | None:
    import pgmq

    assert pgmq
    return postgres_rows.found()


def version() -> str:
    from pgmq.install import get_embedded_sql_version

    return f"pgmq {get_embedded_sql_version()}, {postgres_rows.version()}"


@asynccontextmanager
async def clients(name: str, dsn: str, work: KeyedWork) -> AsyncIterator[list[KeyedClient]]:
    from pgmq.install import get_embedded_install_sql

    with psycopg.connect(dsn, autocommit=True) as administrator:
        administrator.execute("DROP SCHEMA IF EXISTS pgmq CASCADE")
        administrator.execute(get_embedded_install_sql())
        administrator.execute("SELECT pgmq.create('keyed')")
        administrator.execute(TUNE)
        administrator.execute(INDEX)
    statements = {
        b"produce": b"SELECT pgmq.send_batch('keyed', $1::jsonb[], $2::jsonb[])",
        b"lease": b"SELECT msg_id, message FROM pgmq.%s('keyed', 60, $1::int)" % READS[name],
        b"complete": b"SELECT pgmq.delete('keyed', $1::int8[])",
    }
    sessions = [PreparedStatements(dsn, statements) for _ in range(2 * work.clients)]
    try:
        yield [Groups(work, number, *sessions[2 * number : 2 * number + 2]) for number in range(work.clients)]
    finally:
        for each in sessions:
            each.close()


class Groups(KeyedClient):
    def __init__(self, work: KeyedWork, number: int, producing: PreparedStatements, leasing: PreparedStatements) -> None:
        self._producing, self._leasing = producing, leasing
        headers = [json.dumps({"x-pgmq-group": key}).encode() for key in work.keys_of(number)]
        self._headers = binary_array(JSONB, [_VERSION_OF_JSONB + each for each in headers])
        self._count = struct.pack(">i", work.batch)

    async def produce(self, payloads: bytes) -> None:
        messages = [_VERSION_OF_JSONB + b'"%s"' % payload for payload in split(payloads)]
        result = await self._producing.run(b"produce", [binary_array(JSONB, messages), self._headers])
        _check(result, len(messages))

    async def lease(self) -> tuple[bytes, Any]:
        until = time.perf_counter() + PATIENCE
        while not (result := await self._leasing.run(b"lease", [self._count])).ntuples:
            if time.perf_counter() > until:
                return b"", None
            await asyncio.sleep(POLL)
        # The read's answer is in any order. Ids rise in the order in which messages were sent, and as bytes sort like numbers.
        rows = sorted((result.get_value(row, 0) or b"", result.get_value(row, 1) or b"") for row in range(result.ntuples))
        # The version and a quote, the payload, a quote.
        return b"".join([message[2:-1] for _, message in rows]), [each for each, _ in rows]

    async def complete(self, leased: Any) -> None:
        _check(await self._leasing.run(b"complete", [binary_array(INT8, leased)]), len(leased))

    async def complete_and_lease(self, leased: Any) -> tuple[bytes, Any]:
        await self.complete(leased)
        return await self.lease()


def _check(result: pq.abc.PGresult, count: int) -> None:
    if result.ntuples != count:
        raise RuntimeError(f"{result.ntuples} of {count} messages")
