"""The other callers of a soak: operators, dashboards, backups, and clients that leave in the middle; and the whole crew."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import httpx

from tests.campaigns.blackbox.http_clients import MARGIN
from tests.campaigns.blackbox.operation_log import payload_of
from tests.campaigns.kit.lines import HOST, reset
from tests.campaigns.soak.item_books import ItemBook
from tests.campaigns.soak.soak_clients import (
    CALL_TIMEOUT,
    DEAD,
    EVENTS,
    JOBS,
    MOVING,
    PLAN_TIMEOUT,
    QUEUES,
    SHORT,
    SHORT_LIVED,
    SINGLE,
    TICKS,
    Actor,
    Consumer,
    KeyProducer,
    Producer,
    Scene,
    TickConsumer,
    UniqueProducer,
    Waiter,
)

SEARCHED: Final = "deadbeef"
"""A text that hardly any payload has, so that a search looks at all of them."""


class Undertaker(Consumer):
    """Sends dead items back to where they died, and completes some."""

    pause = 6.0

    async def work(self) -> None:
        if self.random.random() < 0.7:
            await self.once("redrive", "queue.redrive", limit=100)
        elif items := await self._lease(50):
            await self._complete(items)


class Rebalancer(Actor):
    """Adds and removes partitions."""

    pause = 50.0

    async def work(self) -> None:
        await self.rest(self.pause / 2)
        fields: dict[str, Any] = {"requested_partitions": self.random.randint(2, 4), "drain": self.random.choice(("natural", "copy"))}
        await self.once("rebalance", "queue.rebalance", ("rebalance_open", "nothing_to_rebalance"), PLAN_TIMEOUT, **fields)


class QueueMaker(Consumer):
    """Creates a queue, uses it once, and deletes it, some with an item left."""

    pause = 3.0

    async def work(self) -> None:
        self.queue = f"{SHORT}-{next(self.numbers)}"
        try:
            await self.until_done("create", "queues.create", ("queue_exists",), **SHORT_LIVED)
            numbers = self.book.new(3)
            items = [{"utf8": payload_of(f"{SHORT}.{number}")} for number in numbers]
            answer = await self.until_done("produce", "queue.produce", items=items, idempotency_key="all")
            if answer.outcome == "done":
                self.book.stored(numbers)
            if taken := await self._lease(self.random.choice((2, 3))):
                await self._complete(taken)
            # What is left goes with the queue.
            self.book.trying(numbers)
            await self.until_done("delete", "queues.delete", ("queue_not_found",), force=True)
        finally:
            self.queue = SHORT

    @property
    def book(self) -> ItemBook:
        return self.scene.books[SHORT]


class Backer(Actor):
    """Backs the server up by the command line, into a new folder each time."""

    pause = 70.0

    async def work(self) -> None:
        await self.rest(self.pause / 2)
        target = self.scene.folder / f"backup-{next(self.numbers)}"
        command = [*self.scene.command, "--url", self.scene.door.url, "backup", str(target)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        # 4: the server was not reached, or a partition is being opened or moved.
        if process.returncode not in (0, 4):
            self.scene.findings.append(f"backup: exit code {process.returncode}: {said.decode(errors='replace')[-300:]}")
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)


class Looker(Actor):
    """Looks at what there is, as operators and dashboards do."""

    pause = 0.7

    async def work(self) -> None:
        looks: Sequence[Callable[[], Any]] = (
            self._stats,
            self._stats,
            self._history,
            self._search,
            self._browse,
            self._problems,
            self._page,
        )
        await self.random.choice(looks)()

    async def _stats(self) -> None:
        await self.once("stats", "queue.stats", queue_name=self.random.choice(list(QUEUES)))

    async def _history(self) -> None:
        await self.once("history", "queue.history", queue_name=self.random.choice(list(QUEUES)))

    async def _search(self) -> None:
        await self.once("search", "queue.search", queue_name=self.random.choice((JOBS, EVENTS)), contains=SEARCHED, limit=10)

    async def _browse(self) -> None:
        """One page, and never the next one: the server keeps what it would show for a while."""
        fields: dict[str, Any] = {"queue_name": self.random.choice((JOBS, EVENTS)), "partition": 0, "limit": 20, "payload": False}
        # Its partition may be opened again while the page is read.
        await self.once("browse", "queue.browse", ("snapshot_gone",), **fields)

    async def _problems(self) -> None:
        await self.scene.pace.turn()
        await self.scene.call("problems", "problems.list", {})

    async def _page(self) -> None:
        path = self.random.choice(("/ui", "/ui/queues", f"/ui/queues/{JOBS}", "/ui/map", "/readyz"))
        await self.scene.pace.turn()
        with suppress(httpx.HTTPError):
            answer = await self.scene.http.get(f"{self.scene.door.url}{path}", timeout=CALL_TIMEOUT + MARGIN)
            if answer.status_code not in (200, 503):
                self.scene.findings.append(f"{path}: {answer.status_code}")


_LEASE: Final = '{"queue_name": "jobs", "client_id": "rude", "batch_size": 3, "request_timeout": "20s"}'


def request(body: str, path: str = "queue.lease") -> bytes:
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


class Rude(Actor):
    """Leaves in the middle: of a request, of a wait, of a stream."""

    pause = 1.0

    async def work(self) -> None:
        whole = request(_LEASE)
        sent, stays = self.random.choice(
            (
                (whole[:40], 0.2),
                (whole[: len(whole) - 20], 0.5),
                (whole, 0.05),
                (whole, 1.5),
                (whole * 3, 0.1),
                (b"GET /v1/events HTTP/1.1\r\nhost: soak\r\n\r\n", 4.0),
                (b"GET /ui/live/queues HTTP/1.1\r\nhost: soak\r\n\r\n", 4.0),
                (b"", 0.5),
            )
        )
        port = httpx.URL(self.scene.door.url).port
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(sent)
                await self.rest(stays)
                if self.random.random() < 0.5:
                    reset(writer)
            finally:
                writer.close()


def crew(scene: Scene) -> list[Actor]:
    """All clients of the soak."""
    return [
        *(Producer(scene, f"p{n}", JOBS) for n in range(4)),
        *(KeyProducer(scene, f"k{n}", EVENTS) for n in range(2)),
        Producer(scene, "m0", MOVING),
        UniqueProducer(scene, "u0", SINGLE),
        *(Consumer(scene, f"c{n}", JOBS) for n in range(5)),
        *(Consumer(scene, f"o{n}", EVENTS) for n in range(4)),
        *(Consumer(scene, f"v{n}", MOVING) for n in range(2)),
        *(Waiter(scene, f"w{n}", JOBS) for n in range(2)),
        Consumer(scene, "s0", SINGLE),
        Undertaker(scene, "r0", DEAD),
        TickConsumer(scene, "t0", TICKS),
        Rebalancer(scene, "b0", MOVING),
        QueueMaker(scene, "q0", SHORT),
        Backer(scene, "a0"),
        *(Looker(scene, f"l{n}", JOBS) for n in range(2)),
        *(Rude(scene, f"x{n}") for n in range(3)),
    ]
