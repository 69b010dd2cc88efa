"""Redis Streams with one consumer group: XADD, XREADGROUP, then XACK and XDEL.

A batch of XADDs is one pipeline without a transaction, as are XACK and XDEL with all ids. `redis-everysec` and `redis-always` are driven by
redis-py with hiredis on uvloop, the usual client of Python programs; `…-raw` by prepared bytes on our own protocol implementation, the
counterpart of our hand-written HTTP: nothing in Python can be faster. There are no snapshots (`save ""`): only the log is written.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.pipeline import Pipeline
from bench.processes import free_port, listening, output_of, program, stopped_at_the_end
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

_GUARANTEES = {
    "redis-everysec": "An item is confirmed when it is in the log, which is synced once a second: a crash of the machine loses up to that.",
    "redis-always": "An item is confirmed when the log is synced to the disk; commands that arrive together share a sync.",
}
GUARANTEES = {name + raw: said for name, said in _GUARANTEES.items() for raw in ("", "-raw")}
PATIENCE = 5_000
"""Milliseconds that a lease waits for items."""
GROUP = b"bench"


def found() -> str | None:
    import hiredis
    import redis

    assert hiredis
    assert redis
    return None if program("redis-server") else "no redis-server (Debian: redis-server)"


def version() -> str:
    return output_of("redis-server", "--version").partition(" sha")[0]


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    port = free_port()
    policy = "always" if "always" in name else "everysec"
    durable = ["--appendonly", "yes", "--appendfsync", policy, "--save", ""]
    command = [str(program("redis-server")), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *durable]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with stopped_at_the_end(process):
        listening(port, process)
        yield Served(str(port), [process.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(name.endswith("-raw"), int(address), work, seconds))


async def _drive(raw: bool, port: int, work: Work, seconds: float) -> Done:
    from redis.asyncio import Redis

    admin = Redis(port=port, single_connection_client=True)
    # A fresh stream for each slice, so that no slice meets another one's items.
    await admin.delete("bench")
    await admin.xgroup_create("bench", "bench", mkstream=True)
    if raw:
        loop = asyncio.get_running_loop()
        raws = [(await loop.create_connection(lambda: Raw(work), "127.0.0.1", port))[1] for _ in range(work.clients)]
        done = await repeat(raws, work, seconds)
        for each in raws:
            each.close()
    else:
        connections = [Redis(port=port, single_connection_client=True) for _ in range(work.clients)]
        clients: list[Client] = [Python(await each.initialize(), number, work) for number, each in enumerate(connections)]
        done = await repeat(clients, work, seconds)
        for each in connections:
            await each.aclose()
    await admin.delete("bench")
    await admin.aclose()
    return done


class Python(Client):
    def __init__(self, redis: Any, number: int, work: Work) -> None:
        self._redis, self._work = redis, work
        self._name = f"client-{number}"
        self._fields = {b"p": b"x" * work.payload}

    async def produce(self) -> None:
        if self._work.batch == 1:
            await self._redis.xadd("bench", self._fields)
            return
        pipeline = self._redis.pipeline(transaction=False)
        for _ in range(self._work.batch):
            pipeline.xadd("bench", self._fields)
        await pipeline.execute()

    async def lease(self) -> tuple[int, Any]:
        return self._read(await self._redis.xreadgroup("bench", self._name, {"bench": ">"}, count=self._work.batch, block=PATIENCE))

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xack("bench", "bench", *leased)
        pipeline.xdel("bench", *leased)
        pipeline.xreadgroup("bench", self._name, {"bench": ">"}, count=self._work.batch, block=PATIENCE)
        *done, answer = await pipeline.execute()
        _check_done(done, leased)
        return self._read(answer)

    def _read(self, answer: Any) -> tuple[int, Any]:
        if not answer:
            return 0, []
        entries = answer[0][1]
        _check(sum(len(fields[b"p"]) for _, fields in entries), len(entries), self._work)
        return len(entries), [entry for entry, _ in entries]

    async def complete(self, leased: Any) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xack("bench", "bench", *leased)
        pipeline.xdel("bench", *leased)
        _check_done(await pipeline.execute(), leased)


class Raw(Pipeline[Any], Client):
    """RESP with minimal overhead over the socket."""

    def __init__(self, work: Work) -> None:
        import hiredis

        super().__init__()
        self._work = work
        self._pack = hiredis.pack_command
        self._reader = hiredis.Reader()
        self._produce = self._pack((b"XADD", b"bench", b"*", b"p", b"x" * work.payload)) * work.batch
        self._lease = self._pack(
            # The parser requires options in this order.
            (b"XREADGROUP", b"GROUP", GROUP, b"%d" % id(self), b"COUNT", work.batch, b"BLOCK", PATIENCE, b"STREAMS", b"bench", b">")
        )

    def read(self, data: bytes) -> list[Any]:
        self._reader.feed(data)
        answers = []
        while (answer := self._reader.gets()) is not False:
            answers.append(answer)
        return answers

    async def produce(self) -> None:
        answers = await self.call(self._produce, self._work.batch)
        if not isinstance(answers[-1], bytes):
            raise RuntimeError(f"XADD: {answers[-1]!r}")

    async def lease(self) -> tuple[int, Any]:
        (answer,) = await self.call(self._lease)
        return self._entries(answer)

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        *done, answer = await self.call(self._acknowledges(leased) + self._lease, 3)
        _check_done(done, leased)
        return self._entries(answer)

    def _entries(self, answer: Any) -> tuple[int, Any]:
        if answer is None:
            return 0, []
        entries = answer[0][1]
        _check(sum(len(fields[1]) for _, fields in entries), len(entries), self._work)
        return len(entries), [entry for entry, _ in entries]

    async def complete(self, leased: Any) -> None:
        _check_done(await self.call(self._acknowledges(leased), 2), leased)

    def _acknowledges(self, leased: list[bytes]) -> bytes:
        return bytes(self._pack((b"XACK", b"bench", GROUP, *leased)) + self._pack((b"XDEL", b"bench", *leased)))


def _check_done(answers: list[Any], leased: Any) -> None:
    if answers != [len(leased)] * 2:
        raise RuntimeError("not all acknowledged and deleted")


def _check(payload: int, count: int, work: Work) -> None:
    if payload != count * work.payload:
        raise RuntimeError(f"{payload} bytes of payload leased in {count} items")
