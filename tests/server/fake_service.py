"""A service that does nothing but note what it is asked and give the answers it was told to, behind the real HTTP server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pyarrow as pa
import uvloop

from sluiceway.contract.queue_settings import Verb
from sluiceway.contract.queue_stats import LogicalQueueStats, QueueStats
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.group.group_records import Pin, SealedRound, Strategy
from sluiceway.core.queue.routing import Peer
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.health import Check
from sluiceway.model.inspection import Browse, BrowsedPage, Deleted, DeleteItems, ItemsPage, ListItems
from sluiceway.model.instances import Belonging, ClusterInfo
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance, RebalanceBatch, RebalanceProgress
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    Peek,
    Produce,
    Produced,
    QueuePatch,
    QueueSpec,
    Redrive,
    Redriven,
    Settle,
    Settled,
)
from sluiceway.server.app import Fittings, create_app
from sluiceway.server.listeners import bind, url_of
from sluiceway.server.run import Server
from sluiceway.server.tls import TlsFiles
from tests.server.server_process import PATIENCE

NOW = 1_700_000_000_000
RECORD = QueueRecord("q", "k7f3q2ma", NOW, NOW, tuple(PartitionRecord(n) for n in range(3)))


class FakeInstances:
    """One instance `i-1` at `http://i-1`, which has partition 0; nobody has the others. `script` as that of the service."""

    def __init__(self) -> None:
        self.script: list[object] = []
        self.owners = {0: Peer("i-1", "http://i-1")}

    def owner(self, record: QueueRecord, partition: int) -> Peer | None:
        return self.owners.get(partition)

    def elsewhere(self, record: QueueRecord, partitions: Iterable[int]) -> str | None:
        return "http://i-1" if {*partitions} == {0} else None

    def cluster(self) -> ClusterInfo:
        return cast(ClusterInfo, self.script.pop(0))

    async def with_loads(self) -> ClusterInfo:
        return self.cluster()

    async def rounds(self, limit: int) -> Sequence[SealedRound]:
        return cast("Sequence[SealedRound]", self.script.pop(0))[:limit]

    async def why(self, record: QueueRecord, partition: int) -> Belonging:
        return cast(Belonging, self.script.pop(0))

    async def redefine(
        self, times: Mapping[str, Millis], strategy: Strategy | None, by: Actor, load_moves: int | None = None
    ) -> ClusterInfo:
        self.script.append((times, strategy))
        return cast(ClusterInfo, self.script.pop(0))


class FakeService:
    """One queue `q`. `asked` has the requests, newest last; `script` what is answered to the next ones, first in, first out.

    `changed_by` has who asked for each change.
    """

    def __init__(self) -> None:
        self.record = RECORD
        self.asked: list[object] = []
        self.script: list[object] = []
        self.changed_by: list[Actor] = []
        self.instances = FakeInstances()

    def _answer(self, request: object) -> Any:
        self.asked.append(request)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def queue(self, queue_name: str) -> QueueRecord:
        if queue_name != self.record.queue_name:
            raise SluicewayError("queue_not_found", f"there is no queue {queue_name!r}", "queue_name")
        return self.record

    async def look_up(self, queue_name: str) -> QueueRecord:
        return self.queue(queue_name)

    def queues(self) -> list[QueueRecord]:
        return [self.record]

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        self.changed_by.append(by)
        return cast(QueueRecord, self._answer(spec))

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        self.changed_by.append(by)
        return cast(QueueRecord, self._answer(patch))

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        self.changed_by.append(by)
        self.queue(queue_name)
        before = set(self.record.paused)
        after = before | set(verbs) if paused else before - set(verbs)
        self.record = msgspec.structs.replace(self.record, paused=tuple(sorted(after, reverse=True)))
        return self.record

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        self.changed_by.append(by)
        self._answer((queue_name, force))

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        return cast(Produced, self._answer(request))

    async def lease(self, queue_name: str, request: Lease, payload: bool) -> Leased:
        return cast(Leased, self._answer(request))

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        return cast(Settled, self._answer(request))

    async def complete_and_lease(
        self, queue_name: str, request: Settle, leasing: Coroutine[Any, Any, Leased]
    ) -> tuple[Leased, Settled | None]:
        return await leasing, cast(Settled, self._answer(request))

    async def extend(self, queue_name: str, request: Extend) -> Extended:
        return cast(Extended, self._answer(request))

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        return cast("list[pa.RecordBatch]", self._answer(request))

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        self.changed_by.append(by)
        self.queue(queue_name)
        return cast(Cleared, self._answer(request))

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        self.changed_by.append(by)
        self.queue(queue_name)
        return cast(Redriven, self._answer(request))

    async def browse(self, queue_name: str, request: Browse) -> BrowsedPage:
        return cast(BrowsedPage, self._answer(request))

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        return cast(ItemsPage, self._answer(request))

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        self.changed_by.append(by)
        return cast(Produced, self._answer(request))

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        self.changed_by.append(by)
        return cast(Deleted, self._answer(request))

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        self.changed_by.append(by)
        self._answer((queue_name, timeout))

    async def plan_rebalance(self, queue_name: str, requested: int | None) -> tuple[str, Plan, QueueRecord]:
        return cast("tuple[str, Plan, QueueRecord]", self._answer((queue_name, requested)))

    async def rebalance(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor
    ) -> Rebalance:
        self.changed_by.append(by)
        return cast(Rebalance, self._answer((queue_name, requested, drain, rate, plan_id)))

    async def rebalance_many(self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor) -> RebalanceBatch:
        self.changed_by.append(by)
        return cast(RebalanceBatch, self._answer((match, requested, drain, rate)))

    async def rebalances(self, queue_name: str | None, only_open: bool) -> list[Rebalance]:
        return cast("list[Rebalance]", self._answer((queue_name, only_open)))

    async def get_rebalance(self, id: str) -> Rebalance:
        return cast(Rebalance, self._answer(id))

    async def cancel_rebalance(self, id: str, by: Actor) -> Rebalance:
        self.changed_by.append(by)
        return cast(Rebalance, self._answer(("cancel", id)))

    async def rebalance_progress(self, rebalance: Rebalance) -> RebalanceProgress:
        return cast(RebalanceProgress, self._answer(("progress", rebalance.id)))

    async def set_partition(self, queue_name: str, partition: int, paused: bool, by: Actor) -> QueueRecord:
        self.changed_by.append(by)
        return cast(QueueRecord, self._answer((queue_name, partition, paused)))

    async def pin_partition(self, queue_name: str, partition: int, where: Pin | None, by: Actor) -> None:
        self.changed_by.append(by)
        self._answer((queue_name, partition, where))

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        return cast(Explanation, self._answer((partition, offset)))

    async def count(self, queue_name: str) -> QueueStats:
        return QueueStats(queue_name=queue_name, logical_queues=[msgspec.structs.replace(self.stats(queue_name), instance="i-1")])

    def stats(self, queue_name: str) -> LogicalQueueStats:
        return cast(LogicalQueueStats, self._answer(queue_name))

    def problems(self) -> list[str]:
        return []

    async def checks(self) -> list[Check]:
        return []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@contextmanager
def serving(service: FakeService, fittings: Fittings | None = None, tls: TlsFiles | None = None) -> Iterator[str]:
    """The URL of a server over that service, until the block ends."""
    ready = threading.Event()
    sock = bind("127.0.0.1", 0)
    server = Server(create_app(cast(Service, service), fittings), ready.set, tls=tls)

    def life() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve([sock]))

    thread = threading.Thread(target=life, name="server")
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield url_of(sock, tls is not None)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
