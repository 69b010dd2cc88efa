"""RabbitMQ: a quorum queue of one node.

Messages are persistent; a batch is published without waits between its messages, and is produced when the broker has confirmed all of
them. Consumers are sent up to a batch of messages ahead (`prefetch`) and acknowledge a batch at once (`multiple`). The broker does not
answer an acknowledgement, so it is done when it is sent.

`rabbitmq-quorum` is driven by pika with its asyncio connection, the fastest of the Python clients: it takes a fifth of aiormq's (aio-pika)
processor time in batches, half of it with single messages. `rabbitmq-quorum-raw` by prepared frames on our own protocol implementation.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
from pika import frame, spec
from pika.adapters.asyncio_connection import AsyncioConnection

from bench.processes import free_port, listening, program, stopped_at_the_end
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

_SYNCED = "An item is confirmed when the queue's log (of one node here) has it and is synced. Acknowledgements are not confirmed."
GUARANTEES = {"rabbitmq-quorum": _SYNCED, "rabbitmq-quorum-raw": _SYNCED}

QUEUE = "bench"
PREFETCH = 65_535
"""Maximum in AMQP."""
QUIET = 0.05
"""Seconds without a message after which a consumer takes the messages it has: the rest has been sent to other consumers."""

_FRAME = struct.Struct(">BxxII")
"""Kind, length, and of a method its number. No frame here is shorter, since there are no heartbeats."""
_TAG = struct.Struct(">Q")
_CONFIRMED = struct.Struct(">Q?")


def found() -> str | None:
    if _server() is None or program("epmd") is None:
        return "no rabbitmq-server is installed (on Debian: apt-get install rabbitmq-server)"
    return None


def version() -> str:
    """Return the version, from the program's folder: asking the program takes seconds."""
    server = _server()
    return f"RabbitMQ {server.parent.parent.name.rpartition('-')[2]}" if server else "RabbitMQ"


def _server() -> Path | None:
    """The broker's own script: the one on PATH may be Debian's, which changes the user, and so the access to the data's folder."""
    packaged = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    on_path = program("rabbitmq-server")
    return packaged[-1] if packaged else Path(on_path).resolve() if on_path else None


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    """Run the broker with a private port mapper, as Erlang would start a permanent one, on all addresses."""
    server, epmd = _server(), program("epmd")
    assert server is not None
    assert epmd is not None
    port, distribution, mapper = (free_port() for _ in range(3))
    files = {"rabbitmq.conf": f"listeners.tcp.1 = 127.0.0.1:{port}\n", "plugins": "[].\n", "env.conf": ""}
    for file, text in files.items():
        (folder / file).write_text(text)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(mapper),
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "logs"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
    }
    with (folder / "output").open("ab") as output:
        given: dict[str, Any] = {"env": env, "cwd": folder, "stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        names = subprocess.Popen([epmd, "-port", str(mapper), "-address", "127.0.0.1"], **given)
        # The script runs the broker as its child, and ends it when terminated.
        broker = subprocess.Popen([str(server)], **given)
    with stopped_at_the_end(names), stopped_at_the_end(broker):
        # The broker opens this port last.
        listening(port, broker)
        yield Served(f"127.0.0.1:{port}", [broker.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(name.endswith("-raw"), address, work, seconds))


async def _drive(raw: bool, address: str, work: Work, seconds: float) -> Done:
    host, _, port = address.partition(":")
    admin = Pika(work)
    await admin.open(host, int(port))
    # Removes the messages of an earlier slice.
    await admin.renew_queue()
    clients: Sequence[Pika | Raw] = [Raw(work) if raw else Pika(work) for _ in range(work.clients)]
    for client in clients:
        await client.open(host, int(port))
        await client.begin()
    try:
        return await repeat(clients, work, seconds)
    finally:
        for each in (*clients, admin):
            await each.close()


class _Batches(Client, ABC):
    """Published and confirmed messages, and received ones."""

    def __init__(self, work: Work) -> None:
        self._batch, self._payload = work.batch, work.payload
        self._loop = asyncio.get_running_loop()
        self._published = 0
        self._up_to = 0
        self._beyond: set[int] = set()
        self._confirmed: asyncio.Future[None] = self._loop.create_future()
        self._confirmed.set_result(None)
        self._tags: list[int] = []
        self._enough: asyncio.Future[None] = self._loop.create_future()

    @abstractmethod
    def publish(self) -> None:
        """Publish a batch."""

    @abstractmethod
    def acknowledge(self, tag: int) -> None:
        """Acknowledge all messages up to that tag."""

    async def produce(self) -> None:
        self._confirmed = self._loop.create_future()
        self._published += self._batch
        self.publish()
        await self._confirmed

    async def lease(self) -> tuple[int, Any]:
        while (before := len(self._tags)) < self._batch:
            self._enough = self._loop.create_future()
            timer = self._loop.call_later(QUIET, self._resume)
            await self._enough
            timer.cancel()
            if len(self._tags) == before:
                break
        tags, self._tags = self._tags[: self._batch], self._tags[self._batch :]
        return len(tags), tags[-1] if tags else None

    async def complete(self, leased: Any) -> None:
        self.acknowledge(leased)

    def _come(self, tag: int, size: int) -> None:
        if size != self._payload:
            raise RuntimeError(f"a message of {size} bytes in place of {self._payload}")
        self._tags.append(tag)
        if len(self._tags) >= self._batch:
            self._resume()

    def _resume(self) -> None:
        if not self._enough.done():
            self._enough.set_result(None)

    def _confirm(self, tag: int, multiple: bool) -> None:
        if multiple:
            self._up_to = tag
            self._beyond = {each for each in self._beyond if each > tag}
        else:
            self._beyond.add(tag)
        if self._up_to + len(self._beyond) == self._published and not self._confirmed.done():
            self._confirmed.set_result(None)

    def _refused(self, why: str) -> None:
        if not self._confirmed.done():
            self._confirmed.set_exception(RuntimeError(why))


class Pika(_Batches):
    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._body = b"x" * work.payload
        self._properties = pika.BasicProperties(delivery_mode=2)
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def open(self, host: str, port: int) -> None:
        opened = self._loop.create_future()
        self._connection = AsyncioConnection(
            pika.ConnectionParameters(host, port, heartbeat=0),
            on_open_callback=opened.set_result,
            on_open_error_callback=lambda _, error: opened.set_exception(error),
            on_close_callback=self._on_close,
            custom_ioloop=self._loop,
        )
        await opened
        self._channel = await self._answer(lambda done: self._connection.channel(on_open_callback=done))

    async def renew_queue(self) -> None:
        await self._answer(lambda done: self._channel.queue_delete(QUEUE, callback=done))
        arguments = {"x-queue-type": "quorum"}
        await self._answer(lambda done: self._channel.queue_declare(QUEUE, durable=True, arguments=arguments, callback=done))

    async def begin(self) -> None:
        await self._answer(lambda done: self._channel.confirm_delivery(self._on_confirm, callback=done))
        await self._answer(lambda done: self._channel.basic_qos(prefetch_count=min(self._batch, PREFETCH), callback=done))
        await self._answer(lambda done: self._channel.basic_consume(QUEUE, self._on_message, callback=done))

    async def close(self) -> None:
        if not self._closed.done():
            self._connection.close()
        await self._closed

    def publish(self) -> None:
        publish, body, properties = self._channel.basic_publish, self._body, self._properties
        for _ in range(self._batch):
            publish("", QUEUE, body, properties)

    def acknowledge(self, tag: int) -> None:
        self._channel.basic_ack(tag, multiple=True)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._come(method.delivery_tag, len(body))

    def _on_confirm(self, answer: Any) -> None:
        if answer.method.INDEX == spec.Basic.Ack.INDEX:
            self._confirm(answer.method.delivery_tag, answer.method.multiple)
        else:
            self._refused("the broker refused a message")

    def _on_close(self, connection: Any, why: Any) -> None:
        self._closed.set_result(None)
        self._refused(str(why))

    async def _answer(self, ask: Any) -> Any:
        """Return the broker's answer to a call with a callback."""
        answer = self._loop.create_future()
        ask(answer.set_result)
        return await answer


class Raw(_Batches, asyncio.Protocol):
    """The subset of AMQP that this work needs; constant frames are made once, by pika."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        properties = spec.BasicProperties(delivery_mode=2)
        message = [
            frame.Method(1, spec.Basic.Publish(exchange="", routing_key=QUEUE)),
            frame.Header(1, work.payload, properties),
            frame.Body(1, b"x" * work.payload),
        ]
        self._messages = b"".join(each.marshal() for each in message) * work.batch
        self._rest = b""
        self._tag = 0
        self._answered: asyncio.Future[int] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def open(self, host: str, port: int) -> None:
        self._transport, _ = await self._loop.create_connection(lambda: self, host, port)
        self._transport.write(frame.ProtocolHeader().marshal())
        await self._answered
        login = {"mechanism": "PLAIN", "response": "\0guest\0guest", "locale": "en_US", "client_properties": {}}
        await self._ask(0, spec.Connection.StartOk(**login))
        self._transport.write(frame.Method(0, spec.Connection.TuneOk(1, spec.FRAME_MAX_SIZE, 0)).marshal())
        await self._ask(0, spec.Connection.Open("/"))
        await self._ask(1, spec.Channel.Open())

    async def begin(self) -> None:
        await self._ask(1, spec.Confirm.Select())
        await self._ask(1, spec.Basic.Qos(prefetch_count=min(self._batch, PREFETCH)))
        await self._ask(1, spec.Basic.Consume(queue=QUEUE))

    async def close(self) -> None:
        self._transport.close()
        await self._closed

    def publish(self) -> None:
        self._transport.write(self._messages)

    def acknowledge(self, tag: int) -> None:
        self._transport.write(frame.Method(1, spec.Basic.Ack(tag, True)).marshal())

    def connection_lost(self, why: Exception | None) -> None:
        self._closed.set_result(None)
        self._refused(f"the connection ended: {why}")

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= _FRAME.size:
            kind, size, method = _FRAME.unpack_from(data, at)
            end = at + 8 + size
            if end > len(data):
                break
            if kind == spec.FRAME_BODY:
                self._come(self._tag, size)
            elif kind == spec.FRAME_METHOD:
                self._on_method(method, data, at + 11)
            at = end
        self._rest = data[at:]

    def _refused(self, why: str) -> None:
        super()._refused(why)
        if not self._answered.done():
            self._answered.set_exception(RuntimeError(why))

    def _on_method(self, method: int, data: bytes, at: int) -> None:
        if method == spec.Basic.Deliver.INDEX:
            # After the consumer's tag.
            (self._tag,) = _TAG.unpack_from(data, at + 1 + data[at])
        elif method == spec.Basic.Ack.INDEX:
            self._confirm(*_CONFIRMED.unpack_from(data, at))
        elif method in (spec.Basic.Nack.INDEX, spec.Channel.Close.INDEX, spec.Connection.Close.INDEX):
            self._refused("the broker refused a message")
        else:
            self._answered.set_result(method)

    async def _ask(self, channel: int, method: Any) -> None:
        """Send a method, and wait for the broker's answer."""
        self._answered = self._loop.create_future()
        self._transport.write(frame.Method(channel, method).marshal())
        await self._answered
