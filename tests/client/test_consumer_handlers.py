"""Handlers that end in unusual ways: no item is completed by that, and no handler's place is lost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

import pytest

from sluiceway.client import AsyncConsumer, DeadItem, Lease, Leased, LeasedItem, RetryItem
from sluiceway.client._async import consumer as consumer_module
from sluiceway.client.answers import Completed, Extended, Released, Retried
from sluiceway.client.handler_threads import HandlerThreads
from sluiceway.client.lease_manager import LeaseManager
from sluiceway.client.protocol import Call

AT = datetime(2026, 1, 31, tzinfo=UTC)
LEASE_TIMEOUT = 60_000
PATIENCE = 20.0


class Server:
    """Serves leases of so many items each, then none, and records the outcomes. `ahead`: by how much its clock was set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *leases: int) -> None:
        self.leases = list(leases)
        self.items = 0
        self.completed: list[str] = []
        self.retried: list[dict[str, Any]] = []
        self.ahead = 0
        monkeypatch.setattr(consumer_module, "_now", lambda: self.ahead + time.monotonic_ns() // 1_000_000)

    async def attempt(self, call: Call[Any]) -> object:
        fields = json.loads(call.body)
        if call.path == "/v1/queue.lease":
            return await self._lease()
        if call.path == "/v1/queue.complete":
            self.completed += fields["ids"]
            return Completed(completed=len(fields["ids"]), ignored=[])
        if call.path == "/v1/queue.retry":
            self.retried += fields["items"]
            return Retried(retried=len(fields["items"]), dead=0, ignored=[])
        if call.path == "/v1/queue.release":
            return Released(released=len(fields["ids"]), ignored=[])
        assert call.path == "/v1/queue.extend"
        return Extended(leases=[])

    async def _lease(self) -> Leased:
        if not self.leases:
            await asyncio.Event().wait()
        ids = [f"k.0.{self.items + number}" for number in range(1, self.leases.pop(0) + 1)]
        self.items += len(ids)
        lease = Lease(lease_id=f"k.0.L{self.items}", partition=0, count=len(ids), lease_deadline=AT)
        items = [LeasedItem(id=each, origin="", partition=0, lease_id=lease.lease_id) for each in ids]
        return Leased(queue_name="q", leases=[lease], items=items)

    def consumer(self, kind: type[AsyncConsumer] = AsyncConsumer) -> AsyncConsumer:
        return kind(self.attempt, "q", "c", LeaseManager(1, 10, LEASE_TIMEOUT, 20, 30_000))


@pytest.mark.parametrize("raised", [DeadItem(ValueError("no such order")), RetryItem(reason=ValueError("no such order"))])  # type: ignore[arg-type]
def test_an_item_is_not_completed_because_its_reason_is_no_text(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    server = Server(monkeypatch, 1)

    async def main() -> None:
        consumer = server.consumer()

        async def handle(item: LeasedItem) -> None:
            consumer.stop()
            raise raised

        await asyncio.wait_for(consumer.run(handle, signals=False), PATIENCE)

    asyncio.run(main())
    assert server.completed == []
    (outcome,) = server.retried
    assert (outcome.get("dead", False), outcome["reason"]) == (isinstance(raised, DeadItem), "ValueError: no such order")


def test_nor_because_there_is_no_memory_for_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, 1)

    def put_back(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(consumer_module, "put_back", put_back)

    async def main() -> None:
        consumer = server.consumer()

        async def handle(item: LeasedItem) -> None:
            consumer.stop()
            raise ValueError

        await asyncio.wait_for(consumer.run(handle, signals=False), PATIENCE)

    asyncio.run(main())
    assert server.completed == []
    assert [each["id"] for each in server.retried] == ["k.0.1"]


def test_items_whose_lease_ran_out_meanwhile_are_not_begun_and_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    server, begun = Server(monkeypatch, 3, 1), list[str]()

    async def main() -> None:
        consumer = server.consumer()

        async def handle(item: LeasedItem) -> None:
            begun.append(item.id)
            if len(begun) == 1:
                # It keeps the event loop busy for that long.
                server.ahead += LEASE_TIMEOUT + 1
            else:
                consumer.stop()

        await asyncio.wait_for(consumer.run(handle, concurrency=1, signals=False), PATIENCE)

    asyncio.run(main())
    assert begun == ["k.0.1", "k.0.4"]
    assert server.completed == ["k.0.1", "k.0.4"]


class LostAtOnce(AsyncConsumer):
    """The first item is lost in the moment in which its handler is about to begin: the answer to an extension says so."""

    was_lost = False

    def _pump(self) -> None:
        super()._pump()
        if self._manager.running and not self.was_lost:
            self.was_lost = True
            now = consumer_module._now()
            self._manager.extended_some(["k.0.L1"], [], now, now)
            super()._pump()


def test_a_handler_that_is_cancelled_before_it_has_begun_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    server, handled = Server(monkeypatch, 1, 1), list[str]()

    async def main() -> None:
        consumer = server.consumer(LostAtOnce)

        async def handle(item: LeasedItem) -> None:
            await asyncio.sleep(0)
            handled.append(item.id)
            consumer.stop()

        await asyncio.wait_for(consumer.run(handle, concurrency=1, signals=False), PATIENCE)

    asyncio.run(main())
    assert handled == server.completed == ["k.0.2"]


def test_threads_that_could_not_be_started_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, start, let_go = HandlerThreads(2), threading.Thread.start, threading.Event()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            threads.submit(str, 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    held: Future[object] = threads.submit(lambda _: let_go.wait(PATIENCE), 1)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    second = threads.submit(str, 2)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert threads.submit(str, 3).result(PATIENCE) == "3"
    let_go.set()
    assert (held.result(PATIENCE), second.result(PATIENCE)) == (True, "2")
    threads.close()
