"""NATS JetStream: a work-queue stream on files, with one durable pull consumer and explicit acknowledgements; through nats-py.

A batch is published without waits in between (nats-py sends all pending messages in one write), and all its confirmations are awaited.
Items are acknowledged one by one, as a pull consumer over a work queue must, and the last one with a request (`ack_sync`): a connection's
messages are handled in order.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.processes import free_port, listening, output_of, program, stopped_at_the_end
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

GUARANTEES = {
    "nats": "An item is confirmed when it is in the stream's file, which is synced every two minutes: a crash of the machine loses these.",
    "nats-sync-always": "An item is confirmed when it is written to the stream's file and the file is synced to the disk.",
}
ALWAYS = (2, 10)
"""First version with `sync_interval: always`."""
PATIENCE = 5.0
"""Seconds that a lease waits for items."""
MAX_PENDING = 1_000_000
"""Limit on delivered, unacknowledged items: as many as the clients may hold."""


def found() -> str | None:
    import nats

    assert nats
    return None if program("nats-server") else "no nats-server (Debian: nats-server)"


def version() -> str:
    return output_of("nats-server", "--version")


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    numbers = re.search(r"v?(\d+)\.(\d+)\.", version())
    if name == "nats-sync-always" and numbers and (int(numbers[1]), int(numbers[2])) < ALWAYS:
        raise RuntimeError(f"{version()} has no `sync_interval: always`; {ALWAYS[0]}.{ALWAYS[1]} has")
    port = free_port()
    interval = "sync_interval: always" if name == "nats-sync-always" else ""
    settings = folder / "server.conf"
    settings.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}"\n{interval}\n}}\n')
    process = subprocess.Popen([str(program("nats-server")), "-c", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with stopped_at_the_end(process):
        listening(port, process)
        yield Served(f"nats://127.0.0.1:{port}", [process.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(address, work, seconds))


async def _drive(address: str, work: Work, seconds: float) -> Done:
    import nats
    from nats.js import api

    connections = [await nats.connect(address) for _ in range(work.clients)]
    stream = connections[0].jetstream()
    # A fresh stream for each slice, so that no slice meets another one's items.
    await stream.add_stream(name="bench", subjects=["bench"], retention=api.RetentionPolicy.WORK_QUEUE, storage=api.StorageType.FILE)
    consumer = api.ConsumerConfig(durable_name="bench", ack_policy=api.AckPolicy.EXPLICIT, max_ack_pending=MAX_PENDING, max_waiting=1_000)
    await stream.add_consumer("bench", consumer)
    clients = [Nats(each, work) for each in connections]
    for client in clients:
        await client.subscribe()
    done = await repeat(clients, work, seconds)
    await stream.delete_stream("bench")
    for each in connections:
        await each.close()
    return done


class Nats(Client):
    """Client with callbacks for confirmations and items: nats-py's own `publish` and `fetch` have a timer and a task for each message."""

    def __init__(self, connection: Any, work: Work) -> None:
        self._connection, self._work = connection, work
        self._payload = b"x" * work.payload
        self._confirmations, self._items = connection.new_inbox(), connection.new_inbox()
        self._loop = asyncio.get_running_loop()
        self._missing = 0
        self._leased: list[str] = []
        self._size = 0
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._pull = json.dumps({"batch": work.batch, "expires": int(PATIENCE * 1e9)}).encode()

    async def subscribe(self) -> None:
        await self._connection.subscribe(self._confirmations, cb=self._on_confirmation)
        await self._connection.subscribe(self._items, cb=self._on_item)

    async def _on_confirmation(self, message: Any) -> None:
        if b'"error"' in message.data or not message.data:
            self._done.set_exception(RuntimeError(f"not published: {message.data!r} {message.headers}"))
        self._missing -= 1
        if not self._missing and not self._done.done():
            self._done.set_result(None)

    async def _on_item(self, message: Any) -> None:
        if message.data:
            self._leased.append(message.reply)
            self._size += len(message.data)
        # A message without data means that no more items came in time.
        if (not message.data or len(self._leased) == self._work.batch) and not self._done.done():
            self._done.set_result(None)

    async def produce(self) -> None:
        self._missing, self._done = self._work.batch, self._loop.create_future()
        for _ in range(self._work.batch):
            await self._connection.publish("bench", self._payload, self._confirmations)
        await self._done

    async def lease(self) -> tuple[int, Any]:
        await self._begin_pull()
        return await self._pulled()

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        await self._begin_pull()
        await self.complete(leased)
        return await self._pulled()

    async def _begin_pull(self) -> None:
        self._leased, self._size, self._done = [], 0, self._loop.create_future()
        await self._connection.publish("$JS.API.CONSUMER.MSG.NEXT.bench.bench", self._pull, self._items)

    async def _pulled(self) -> tuple[int, Any]:
        await self._done
        if self._size != len(self._leased) * self._work.payload:
            raise RuntimeError(f"{self._size} bytes of payload leased in {len(self._leased)} items")
        return len(self._leased), self._leased

    async def complete(self, leased: Any) -> None:
        for reply in leased[:-1]:
            await self._connection.publish(reply, b"+ACK")
        await self._connection.request(leased[-1], b"+ACK", timeout=PATIENCE)
