"""A real server with two backends, between which a queue's partitions can be moved, and streams of its queues."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.capture.lineage import QueueLineage
from sluiceway.client import AsyncClient
from sluiceway.instance.service import Service
from sluiceway.model.backends import MemoryBackend
from tests.cluster.rebalance_rig import affinities
from tests.instance.instance_rig import Store
from tests.server.server_running import Running, eventually, running

SIDES = ("left", "right")
_names = itertools.count()


def two_backends(folder: Path) -> Service:
    disk = MemoryDisk()
    backends = {name: MemoryBackend(partition_affinity=float(name == SIDES[0])) for name in SIDES}
    return Service(folder, backends, open_store=lambda *_: Store(folder, MemoryPartitionStore(disk)))


@contextlib.contextmanager
def two_sided(folder: Path) -> Iterator[Running]:
    """A server whose queues can be rebalanced from one backend to the other."""
    with running(folder, make=two_backends) as served:
        yield served


class Cuttable(httpx.AsyncBaseTransport):
    """A real connection that can be cut. `lose`: paths of calls whose next answer is lost on its way back."""

    def __init__(self) -> None:
        self._real = httpx.AsyncHTTPTransport()
        self.is_cut = False
        self.lose: list[str] = []
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request.url.path)
        if self.is_cut:
            raise httpx.ConnectError("cut")
        response = await self._real.handle_async_request(request)
        if request.url.path in self.lose:
            self.lose.remove(request.url.path)
            await response.aread()
            raise httpx.ReadError("lost")
        return response

    async def aclose(self) -> None:
        await self._real.aclose()


class Place:
    """A queue on that server, and a capture of it."""

    def __init__(self, served: Running, partitions: int, **settings: Any) -> None:
        self.served = served
        self.queue = served.queue(requested_partitions=partitions, **settings)
        self.made = 0
        self.transports: list[Cuttable] = []

    def open(self, capture: str = "capture/test", **options: Any) -> QueueLineage:
        """The stream, as another process would open it."""
        transport = Cuttable()
        self.transports.append(transport)
        client = AsyncClient(self.served.url, client_id=capture, retry_for="500ms", transport=transport)
        return QueueLineage(client, self.queue, **{"wait": "50ms", **options})

    def produce(self, count: int, **fields: Any) -> list[str]:
        """So many items, each by a call of its own."""
        found = [f"record-{next(_names)}" for _ in range(count)]
        for name in found:
            self.served.produce(self.queue, name, **fields)
        self.made += count
        return found

    def rebalance(self, partitions: int, drain: str = "natural", *, other_side: bool = False) -> str:
        """Begin one; returns its id once all that is new is in use."""
        if other_side:
            backend = self.info()["partitions"][-1]["backend"]
            affinities(self.served.service, **{name: float(name != backend) for name in SIDES})
        found = self.served.ask("queue.rebalance", queue_name=self.queue, requested_partitions=partitions, drain=drain)
        eventually(lambda: self.rebalanced(found["id"])["step"] in ("drain", "finish"))
        return str(found["id"])

    def rebalanced(self, id: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.served.ask("rebalances.get", id=id)
        return found

    def ended(self, id: str) -> bool:
        return self.rebalanced(id)["ended_at"] is not None

    def info(self) -> Any:
        return self.served.ask("queues.info", queue_name=self.queue)

    def count(self, name: str) -> int:
        return self.served.totals(self.queue)[name]


def names(records: pa.RecordBatch) -> list[str]:
    return [payload.decode() for payload in records.column("payload").to_pylist()]


async def aside(work: Any, *args: Any, **fields: Any) -> Any:
    """A blocking call, while the loop goes on."""
    return await asyncio.to_thread(work, *args, **fields)
