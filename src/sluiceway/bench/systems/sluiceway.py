"""Ours: one instance with PARTITIONS SQLite partitions.

`sluiceway` is driven by a hand-written HTTP client (`bench/load.py`) that makes its bodies once, and reads only the number and size of
leased items. In Arrow and JSON a whole lease is completed by its id, in protobuf (Querator's messages) each item by its own.
`sluiceway-client` is driven by the Python client for users, with a call of its own for each step. `sluiceway-consumer` is one producer and
one consumer of that client: all clients of the work hand over and get single items, and both gather them into calls.
`sluiceway-workers-2` is two processes that share the data directory and the port, as many as the cores of a peer that uses both; each
connection stays with the process that accepted it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from sluiceway import __version__
from sluiceway.bench.load import ARROW, Connection, arrow_body, head, request
from sluiceway.bench.servers import SLUICEWAY, server, workers
from sluiceway.bench.work import Client, Done, Form, Served, Work, repeat, run, timed, warm_up_of
from sluiceway.client import AsyncClient, AsyncProducer, LeasedItem
from sluiceway.wire.protobuf import message_class

PARTITIONS = 4
_ON_DISK = "An item is confirmed when its transaction is synced to the disk (SQLite, synchronous=FULL); so are leases and completions."
WORKERS = {"sluiceway-workers-2": 2}
"""Number of processes, for systems with more than one."""
GUARANTEES = dict.fromkeys(("sluiceway", "sluiceway-client", "sluiceway-consumer", *WORKERS), _ON_DISK)
PATIENCE = "5s"
"""Maximum wait of a lease: another client may have taken the items that this one produced."""
PROTOBUF = "application/protobuf"


def found() -> str | None:
    return None


def version() -> str:
    return f"Sluiceway {__version__}"


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    arguments = workers(WORKERS[name], folder) if name in WORKERS else ()
    with server(SLUICEWAY, folder / "data", *arguments) as started:
        yield Served(started.url, [started.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    drivers = {"sluiceway-client": _python, "sluiceway-consumer": _gathered}
    return run(drivers.get(name, lean)(address, work, seconds))


async def lean(url: str, work: Work, seconds: float, queue: str | None = None) -> Done:
    """Drive the work by the hand-written client, on that queue or a fresh one, so that no slice meets another one's items."""
    async with lean_clients(url, work, queue) as clients:
        return await repeat(clients, work, seconds)


@asynccontextmanager
async def lean_clients(url: str, work: Work, queue: str | None = None) -> AsyncIterator[list[Client]]:
    """Hand-written clients, each with its connection, on that queue or a fresh one."""
    admin = Connection(url)
    await admin.open()
    name = queue or f"bench-{secrets.token_hex(4)}"
    if queue is None:
        await admin.post("/v1/queues.create", json.dumps({"queue_name": name, "requested_partitions": PARTITIONS}).encode())
    connections = [Connection(url) for _ in range(work.clients)]
    for each in connections:
        await each.open()
    forms: dict[Form, Callable[[Connection, str, Work], Client]] = {"arrow": Arrow, "json": Json, "protobuf": Protobuf}
    yield [forms[work.form](each, name, work) for each in connections]
    for each in connections:
        await each.close()
    if queue is None:
        await admin.post("/v1/queues.delete", json.dumps({"queue_name": name, "force": True}).encode())
    await admin.close()


class Arrow(Client):
    """Client with payloads in columns, both ways."""

    def __init__(self, connection: Connection, queue: str, work: Work) -> None:
        self._connection, self._queue, self._work = connection, queue, work
        self._produce = request(f"/v1/queue.produce?queue_name={queue}", arrow_body(work.batch, work.payload), ARROW)
        self._lease = request("/v1/queue.lease", _lease(queue, work), accept=ARROW)

    async def produce(self) -> None:
        await self._connection.call(self._produce)

    async def lease(self) -> tuple[int, Any]:
        return self._read(await self._connection.call(self._lease))

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        answer = await self._connection.call(*self._next(leased[1]))
        _check_completed(answer, leased[0])
        return self._read(answer)

    def _next(self, leases: list[str]) -> tuple[bytes, bytes]:
        body = _lease(self._queue, self._work, leases)
        return head("/v1/queue.lease", len(body), accept=ARROW), body

    def _read(self, answer: bytes) -> tuple[int, Any]:
        stream = pa.ipc.open_stream(answer)
        about = json.loads(stream.schema.metadata[b"sluiceway"])
        count = sum(lease["count"] for lease in about["leases"])
        column = stream.schema.get_field_index("payload")
        payload = sum(int(offsets[-1]) - int(offsets[0]) for offsets in map(_offsets, (batch.column(column) for batch in stream)))
        _check(payload, count * self._work.payload)
        return count, (count, [lease["lease_id"] for lease in about["leases"]])

    async def complete(self, leased: Any) -> None:
        await _complete(self._connection, self._queue, *leased)


class _Item(msgspec.Struct):
    bytes: str


class _Lease(msgspec.Struct):
    lease_id: str
    count: int


class _Leased(msgspec.Struct):
    leases: list[_Lease]
    items: list[_Item]


_leased = msgspec.json.Decoder(_Leased).decode


class Json(Client):
    def __init__(self, connection: Connection, queue: str, work: Work) -> None:
        self._connection, self._queue, self._work = connection, queue, work
        payload = base64.b64encode(b"x" * work.payload).decode()
        self._size = len(payload)
        body = json.dumps({"queue_name": queue, "items": [{"bytes": payload}] * work.batch}).encode()
        self._produce = request("/v1/queue.produce", body)
        self._lease = request("/v1/queue.lease", _lease(queue, work))

    async def produce(self) -> None:
        await self._connection.call(self._produce)

    async def lease(self) -> tuple[int, Any]:
        return self._read(await self._connection.call(self._lease))

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        body = _lease(self._queue, self._work, leased[1])
        answer = await self._connection.call(head("/v1/queue.lease", len(body)), body)
        _check_completed(answer, leased[0])
        return self._read(answer)

    def _read(self, body: bytes) -> tuple[int, Any]:
        answer = _leased(body)
        count = len(answer.items)
        _check(sum(len(item.bytes) for item in answer.items), count * self._size)
        return count, (count, [lease.lease_id for lease in answer.leases])

    async def complete(self, leased: Any) -> None:
        await _complete(self._connection, self._queue, *leased)


class Protobuf(Client):
    """Client with Querator's messages: it completes items by their ids, and its answers have no count."""

    def __init__(self, connection: Connection, queue: str, work: Work) -> None:
        self._connection, self._queue, self._work = connection, queue, work
        items = [{"bytes": b"x" * work.payload}] * work.batch
        produce = message_class("ProduceRequest")(queue_name=queue, items=items)
        lease = message_class("LeaseRequest")(queue_name=queue, client_id="bench", batch_size=work.batch, request_timeout=PATIENCE)
        self._produce = request("/v1/queue.produce", produce.SerializeToString(), PROTOBUF, PROTOBUF)
        self._lease = request("/v1/queue.lease", lease.SerializeToString(), PROTOBUF, PROTOBUF)
        self._read: Callable[[bytes], Any] = message_class("LeaseAnswer").FromString
        self._complete = message_class("CompleteRequest")

    async def produce(self) -> None:
        await self._connection.call(self._produce)

    async def lease(self) -> tuple[int, Any]:
        items = self._read(await self._connection.call(self._lease)).items
        _check(sum(len(item.bytes) for item in items), len(items) * self._work.payload)
        return len(items), [item.id for item in items]

    async def complete(self, leased: Any) -> None:
        partition = int(leased[0].split(".")[1])
        body = self._complete(queue_name=self._queue, partition=partition, ids=leased).SerializeToString()
        await self._connection.call(head("/v1/queue.complete", len(body), PROTOBUF, PROTOBUF), body)


def _lease(queue: str, work: Work, complete: Sequence[str] = ()) -> bytes:
    """The body of a lease that completes these leases."""
    fields = {"queue_name": queue, "client_id": "bench", "batch_size": work.batch, "request_timeout": PATIENCE}
    return json.dumps({**fields, "complete": {"lease_ids": complete}} if complete else fields).encode()


async def _complete(connection: Connection, queue: str, count: int, leases: list[str]) -> None:
    body = json.dumps({"queue_name": queue, "lease_ids": leases}).encode()
    _check_completed(await connection.call(head("/v1/queue.complete", len(body)), body), count)


def _check_completed(answer: bytes, count: int) -> None:
    if b'"completed":%d,' % count not in answer:
        raise RuntimeError(f"not all of {count} items completed: {answer!r}")


def _offsets(column: pa.BinaryArray) -> memoryview:
    """Offsets of the column's payloads: the start of each, and the end of the last."""
    start = column.offset
    return memoryview(column.buffers()[1]).cast("i")[start : start + len(column) + 1]


def _check(payload: int, expected: int) -> None:
    if payload != expected:
        raise RuntimeError(f"{payload} bytes of payload leased in place of {expected}")


async def _python(url: str, work: Work, seconds: float) -> Done:
    """Drive the work on a fresh queue, by one `AsyncClient` for all clients."""
    queue = f"bench-{secrets.token_hex(4)}"
    async with AsyncClient(url) as client:
        await client.create_queue(queue, requested_partitions=PARTITIONS)
        clients: list[Client] = [
            PythonArrow(client, queue, work) if work.form == "arrow" else Python(client, queue, work) for _ in range(work.clients)
        ]
        done = await repeat(clients, work, seconds)
        await client.delete_queue(queue, force=True)
        return done


class Python(Client):
    """Client with one call of the Python client per API call, in JSON."""

    def __init__(self, client: AsyncClient, queue: str, work: Work) -> None:
        self._client, self._queue, self._work = client, queue, work
        self._items = [b"x" * work.payload] * work.batch

    async def produce(self) -> None:
        await self._client.produce(self._queue, self._items)

    async def lease(self) -> tuple[int, Any]:
        return await self.complete_and_lease(())

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        answer = await self._client.lease(self._queue, batch_size=self._work.batch, request_timeout=PATIENCE, complete_lease_ids=leased)
        _check(sum(len(item.payload) for item in answer.items), len(answer.items) * self._work.payload)
        return len(answer.items), answer.lease_ids

    async def complete(self, leased: Any) -> None:
        await self._client.complete(self._queue, lease_ids=leased)


class PythonArrow(Client):
    """Client with one call of the Python client per API call, in Arrow tables."""

    def __init__(self, client: AsyncClient, queue: str, work: Work) -> None:
        self._client, self._queue, self._work = client, queue, work
        self._rows = pa.ipc.open_stream(arrow_body(work.batch, work.payload)).read_all()

    async def produce(self) -> None:
        await self._client.produce_arrow(self._queue, self._rows)

    async def lease(self) -> tuple[int, Any]:
        return await self.complete_and_lease(())

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        answer = await self._client.lease_arrow(
            self._queue, batch_size=self._work.batch, request_timeout=PATIENCE, complete_lease_ids=leased
        )
        _check(len(answer), sum(lease.count for lease in answer.leases))
        return len(answer), answer.lease_ids

    async def complete(self, leased: Any) -> None:
        await self._client.complete(self._queue, lease_ids=leased)


async def _gathered(url: str, work: Work, seconds: float) -> Done:
    """Drive single items on a fresh queue by one producer and one consumer for all clients."""
    queue = f"bench-{secrets.token_hex(4)}"
    do = _sent if work.kind == "produce" else _handled
    async with AsyncClient(url) as client:
        await client.create_queue(queue, requested_partitions=PARTITIONS)
        async with client.producer(queue) as producer:
            await do(client, producer, queue, work, warm_up_of(seconds))
            with timed():
                began = time.perf_counter()
                items = await do(client, producer, queue, work, seconds)
                done = Done(items, time.perf_counter() - began)
        await client.delete_queue(queue, force=True)
        return done


async def _sent(_client: AsyncClient, producer: AsyncProducer, _queue: str, work: Work, seconds: float) -> int:
    """Have each client hand over items, one at a time, each until it is stored. Returns the number of items."""
    until, payload = time.perf_counter() + seconds, b"x" * work.payload

    async def send() -> int:
        sent = 0
        while time.perf_counter() < until:
            await (await producer.send(payload))
            sent += 1
        return sent

    return sum(await asyncio.gather(*(send() for _ in range(work.clients))))


async def _handled(client: AsyncClient, producer: AsyncProducer, queue: str, work: Work, seconds: float) -> int:
    """Run a consumer whose handlers produce the next item before their own is completed, so that there is always one for each client.

    Returns the number of items, all of them completed.
    """
    until, payload = time.perf_counter() + seconds, b"x" * work.payload
    left, done = work.clients, 0
    consumer = client.consumer(queue)

    async def handle(item: LeasedItem) -> None:
        nonlocal left, done
        _check(len(item.payload), work.payload)
        done += 1
        if time.perf_counter() < until:
            await (await producer.send(payload))
            return
        left -= 1
        if not left:
            consumer.stop()

    for _ in range(work.clients):
        await (await producer.send(payload))
    await consumer.run(handle, concurrency=work.clients, signals=False)
    return done
