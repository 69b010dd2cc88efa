"""RabbitMQ: a quorum queue of one node, through pika.

Messages are persistent; a batch is published without waiting between its messages, and is produced when the broker has confirmed all of
them. Consumers are pushed messages as far as a batch ahead (`prefetch`) and acknowledge a batch at once (`multiple`). The broker does not
answer to an acknowledgement: it is done when it is sent.

pika with its asyncio connection is the quickest of the Python clients: it takes a fifth of aiormq's (aio-pika) processor time in batches,
half of it with single messages.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
from pika.adapters.asyncio_connection import AsyncioConnection

from sluiceway.bench.compare.processes import free_port, listening, program, stopped_at_the_end
from sluiceway.bench.compare.work import Done, Served, Work, repeat, run

GUARANTEES = {
    "rabbitmq-quorum": "An item is confirmed when the queue's log (of one node here) has it and is synced. Acknowledgements are not.",
}

QUEUE = "bench"
PREFETCH = 65_535
"""The most that AMQP can say."""
QUIET = 0.05
"""Seconds without a message after which a consumer takes what it has: the rest has been pushed to others."""


def found() -> str | None:
    if _server() is None or program("epmd") is None:
        return "no rabbitmq-server is installed (on Debian: apt-get install rabbitmq-server)"
    return None


def version() -> str:
    """By the folder of the program: to ask it takes seconds."""
    server = _server()
    return f"RabbitMQ {server.parent.parent.name.rpartition('-')[2]}" if server else "RabbitMQ"


def _server() -> Path | None:
    """The broker's own script: the one on PATH may be Debian's, which changes the user, and with it who may see the data's folder."""
    packaged = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    on_path = program("rabbitmq-server")
    return packaged[-1] if packaged else Path(on_path).resolve() if on_path else None


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    """With a port mapper of its own, as Erlang would start one that stays, on all addresses."""
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
        # The script has the broker as its child, and ends it when it is ended.
        broker = subprocess.Popen([str(server)], **given)
    with stopped_at_the_end(names), stopped_at_the_end(broker):
        # It is the last thing that the broker begins with.
        listening(port, broker)
        yield Served(f"127.0.0.1:{port}", [broker.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(address, work, seconds))


async def _drive(address: str, work: Work, seconds: float) -> Done:
    clients = [_Client(work) for _ in range(work.clients)]
    for client in clients:
        await client.open(address)
    await clients[0].renew_queue()
    for client in clients:
        await client.begin()
    try:
        return await repeat(clients, work, seconds)
    finally:
        for client in clients:
            await client.close()


class _Client:
    def __init__(self, work: Work) -> None:
        self._batch = work.batch
        self._body = b"x" * work.payload
        self._properties = pika.BasicProperties(delivery_mode=2)
        self._unconfirmed: set[int] = set()
        self._published = 0
        self._got: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._confirmed: asyncio.Future[None] = self._loop.create_future()
        self._enough: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def open(self, address: str) -> None:
        host, _, port = address.partition(":")
        opened = self._loop.create_future()
        self._connection = AsyncioConnection(
            pika.ConnectionParameters(host, int(port), heartbeat=0),
            on_open_callback=opened.set_result,
            on_open_error_callback=lambda _, error: opened.set_exception(error),
            on_close_callback=lambda _, why: self._closed.set_result(None),
            custom_ioloop=self._loop,
        )
        await opened
        self._channel = await self._answer(lambda done: self._connection.channel(on_open_callback=done))

    async def renew_queue(self) -> None:
        """What an earlier slice left behind goes."""
        await self._answer(lambda done: self._channel.queue_delete(QUEUE, callback=done))
        arguments = {"x-queue-type": "quorum"}
        await self._answer(lambda done: self._channel.queue_declare(QUEUE, durable=True, arguments=arguments, callback=done))

    async def begin(self) -> None:
        await self._answer(lambda done: self._channel.confirm_delivery(self._on_confirm, callback=done))
        await self._answer(lambda done: self._channel.basic_qos(prefetch_count=min(self._batch, PREFETCH), callback=done))
        await self._answer(lambda done: self._channel.basic_consume(QUEUE, self._on_message, callback=done))

    async def close(self) -> None:
        self._connection.close()
        await self._closed

    async def produce(self) -> None:
        self._confirmed = self._loop.create_future()
        self._unconfirmed = set(range(self._published + 1, self._published + self._batch + 1))
        self._published += self._batch
        publish, body, properties = self._channel.basic_publish, self._body, self._properties
        for _ in range(self._batch):
            publish("", QUEUE, body, properties)
        await self._confirmed

    async def lease(self) -> tuple[int, Any]:
        while len(self._got) < self._batch:
            before = len(self._got)
            self._enough = self._loop.create_future()
            timer = self._loop.call_later(QUIET, self._resume)
            await self._enough
            timer.cancel()
            if len(self._got) == before:
                break
        got, self._got = self._got[: self._batch], self._got[self._batch :]
        if any(size != len(self._body) for _, size in got):
            raise RuntimeError("a message is not of the size that was published")
        return len(got), got[-1][0] if got else None

    async def complete(self, leased: Any) -> None:
        self._channel.basic_ack(leased, multiple=True)

    def _resume(self) -> None:
        if self._enough is not None and not self._enough.done():
            self._enough.set_result(None)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._got.append((method.delivery_tag, len(body)))
        if len(self._got) >= self._batch:
            self._resume()

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.NAME != "Basic.Ack":
            self._confirmed.set_exception(RuntimeError("the broker refused a message"))
        elif method.multiple:
            self._unconfirmed = {tag for tag in self._unconfirmed if tag > method.delivery_tag}
        else:
            self._unconfirmed.discard(method.delivery_tag)
        if not self._unconfirmed and not self._confirmed.done():
            self._confirmed.set_result(None)

    async def _answer(self, ask: Any) -> Any:
        """What the broker answers to a call with a callback."""
        answer = self._loop.create_future()
        ask(answer.set_result)
        return await answer
