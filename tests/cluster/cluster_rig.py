"""Several instances of a cluster in one process: one meta store, one disk of partitions, and what may go wrong on the way to either, and
between the instances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.cluster.ownership import Clustered
from sluiceway.contract.queue_stats import LogicalQueueStats, QueueStats
from sluiceway.core.group.group_records import Parameters, Strategy
from sluiceway.instance.service import Membership, Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.backends import BackendSettings, MemoryBackend
from sluiceway.model.meta import Stamp, View
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import Ask, PeerRequest
from sluiceway.model.requests import Produce, Produced
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer
from tests.instance.instance_rig import PATIENCE, Store, fine, rows

STEADY = Parameters(settle_timeout=20, round_interval=20, beat_interval=100, lease_timeout=60_000, member_timeout=75_000)
"""Nobody's lease runs out, however slow the machine is."""
MORTAL = Parameters(settle_timeout=20, round_interval=20, beat_interval=100, lease_timeout=1_000, member_timeout=1_300)
"""Who falls silent is given up soon. On a slow machine a lease may run out at any time."""


class Gate:
    """A hook at which everybody waits until it is opened."""

    def __init__(self, *, only: Callable[..., bool] = lambda *_: True) -> None:
        self._only = only
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, *call: Any) -> None:
        if self._only(*call):
            self.reached.set()
            await self._open.wait()

    def open(self) -> None:
        self._open.set()


class Meta:
    """One instance's way to the shared meta store, with a hook before each read and commit, and one after a commit that has landed."""

    def __init__(self, store: MemoryMetaStore) -> None:
        self._store = store
        self.on_read: Callable[[Sequence[str]], Awaitable[object]] = fine_always
        self.on_commit: Callable[[Mapping[str, bytes]], Awaitable[object]] = fine_always
        self.on_committed: Callable[[Mapping[str, bytes]], Awaitable[object]] = fine_always

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        await self.on_read([*keys, *prefixes])
        return await self._store.read(keys, prefixes)

    async def refresh(self, view: View, prefix: str) -> View:
        return await self.read(prefixes=[prefix])

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        await self.on_commit({**(puts or {}), **dict.fromkeys(deletes, b"")})
        stamp = await self._store.commit(checks, unchanged, puts, deletes, hint=hint)
        await self.on_committed({**(puts or {}), **dict.fromkeys(deletes, b"")})
        return stamp

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        return self._store.watch(prefix)

    async def close(self) -> None:
        pass

    def hang(self) -> Gate:
        """Nothing that is asked of it from now on is done before the gate is opened."""
        gate = Gate()
        self.on_read = self.on_commit = gate
        return gate

    def cut(self) -> None:
        """Nothing gets there."""

        async def no_read(*_: object) -> None:
            raise StoreUnavailableError("the meta store cannot be reached")

        async def no_commit(*_: object) -> None:
            raise MetaUnknownError("the meta store cannot be reached")

        self.on_read, self.on_commit = no_read, no_commit

    def heal(self) -> None:
        self.on_read = self.on_commit = self.on_committed = fine_always


async def fine_always(*_: object) -> None:
    return None


class Wires:
    """Between the instances, by address. Whatever goes over them is encoded and decoded."""

    def __init__(self) -> None:
        self.instances: dict[str, Service] = {}
        self.refuses: set[str] = set()
        """Addresses that cannot be reached."""
        self.loses: set[str] = set()
        """Addresses that do what they are asked, and whose answers are lost."""
        self.asked: list[tuple[str, PeerRequest]] = []
        self.timeouts: list[tuple[str, Millis]] = []
        """How long what was asked of a share was waited for, at most."""
        self.on_ask: Callable[[str, PeerRequest], Awaitable[object]] = fine_always
        """Before the request comes there."""
        self.on_answer: Callable[[str, PeerRequest], Awaitable[object]] = fine_always
        """On the way back."""

    def __call__(self, secret: str, level: Callable[[], int]) -> Wires:
        return self

    def requests(self, kind: type) -> list[tuple[str, Any]]:
        """Those of that kind that were asked so far, and of whom."""
        found = [(address, asked.request) for address, asked in self.asked if isinstance(asked, Ask)]
        return [(address, request) for address, request in found if isinstance(request, kind)]

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        self.asked.append((address, request))
        if isinstance(request, Ask):
            self.timeouts.append((address, timeout))
        if address in self.refuses or address not in self.instances:
            raise PeerRefusedError("no such host")
        sent = peer.decode_request(peer.encode_request(request))
        try:
            async with asyncio.timeout(timeout / 1000):
                await self.on_ask(address, request)
                answer = await self.instances[address].answer(sent)
                await self.on_answer(address, request)
        except TimeoutError:
            raise PeerUnknownError("no answer in time") from None
        except SluicewayError as error:
            raise peer.decode_error(peer.encode_error(error)) from None
        if address in self.loses:
            raise PeerUnknownError("the answer was lost")
        return peer.decode_answer(request, peer.encode_answer(request, answer))

    async def close(self) -> None:
        pass


class Cluster:
    """Instances are told apart by their names, which are their addresses, too."""

    def __init__(self, folder: Path, parameters: Parameters = STEADY, strategy: Strategy = "rounds") -> None:
        self.folder = folder
        self.meta = MemoryMetaStore()
        self.disk = MemoryDisk()
        self.wires = Wires()
        self.metas: dict[str, Meta] = {}
        self.stores: dict[str, Store] = {}
        self.services: list[Service] = []
        self._parameters, self._strategy = parameters, strategy
        self.backends: dict[str, BackendSettings] = {"default": MemoryBackend()}

    async def start(self, name: str, zone: str = "") -> Service:
        """One more instance; returns when it has its share."""
        service = self.add(name, zone)
        await service.start()
        return service

    def add(self, name: str, zone: str = "") -> Service:
        """One more instance, which is not started."""
        meta = self.metas[name] = Meta(self.meta)
        store = self.stores[name] = Store(self.folder, MemoryPartitionStore(self.disk))
        opening: Callable[[], MetaStore] = lambda: meta  # noqa: E731 - typed
        membership = Membership(opening, self.wires, name, name, self._strategy, self._parameters, zone=zone)
        service = Service(self.folder / name, self.backends, membership=membership, open_store=lambda *_: store)
        self.wires.instances[name] = service
        self.services.append(service)
        return service

    async def leave(self, name: str) -> None:
        """As at a graceful stop."""
        service = self.wires.instances[name]
        await service.hand_over()
        self.wires.instances.pop(name)
        self.services.remove(service)
        await service.stop()

    def die(self, name: str) -> None:
        """From now on it does nothing, and cannot be reached: as if its process had been killed."""
        self.wires.instances.pop(name)
        self.metas[name].cut()
        self.stores[name].die()

    async def stop(self) -> None:
        for meta in self.metas.values():
            meta.heal()
        for store in self.stores.values():
            store.on_open = store.on_apply = store.on_read = store.on_applied = store.on_drop = fine
        await asyncio.gather(*(service.stop() for service in self.services))

    # ---- who has what -----------------------------------------------------------------------------------------

    def owner(self, queue: str, number: int) -> Service:
        """The instance that serves that partition."""
        found = [service for service in self.wires.instances.values() if number in shares(service, queue)]
        assert len(found) == 1, f"partition {number} is served by {len(found)} instances"
        return found[0]

    def name(self, service: Service) -> str:
        """Its address."""
        return next(name for name, each in self.wires.instances.items() if each is service)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, *names: str, parameters: Parameters = STEADY, strategy: Strategy = "rounds"
) -> AsyncIterator[tuple[Cluster, list[Service]]]:
    """These instances, started one after the other; stopped at the end."""
    made = Cluster(folder, parameters, strategy)
    try:
        services = [await made.start(name) for name in names]
        yield made, services
    finally:
        async with asyncio.timeout(PATIENCE):
            await made.stop()


def shares(service: Service, queue: str) -> list[int]:
    """The partitions of the queue that the instance serves."""
    try:
        partitions = service.stats(queue).partitions
    except SluicewayError as error:
        # One that has left serves none any more, though it still knows of the queue: whether it is asked before or after that is chance.
        if error.code != "queue_not_found":
            raise
        return []
    return [each.partition for each in partitions if each.state not in ("unavailable", "error")]


def clustered(service: Service) -> Clustered:
    assert isinstance(service.ownership, Clustered)
    return service.ownership


def lapse(cluster: Cluster, service: Service) -> Gate:
    """Its lease runs out, and it has not been told: as after a freeze. It hears of nothing before the gate is opened."""
    gate = cluster.metas[cluster.name(service)].hang()
    member = clustered(service).member
    member._lease_deadline = 0
    if member._lapse is not None:
        member._lapse.cancel()
    return gate


def blind(service: Service) -> None:
    """From now on it does not notice who owns what; of its own partitions it is told all the same."""
    clustered(service).member._on_look = None


def counts(stats: QueueStats | LogicalQueueStats) -> dict[int, tuple[int, int]]:
    """Of each partition: ready and leased items."""
    return {each.partition: (each.ready, each.total_leased) for each in stats.partitions}


async def never(*_: object) -> Outcome | None:
    """A hook of a store: the commit is lost, and nobody is told."""
    return Outcome.UNKNOWN


def ref(service: Service, queue: str, number: int) -> PartitionRef:
    return PartitionRef(service.queue(queue).incarnation, number)


async def put(service: Service, queue: str, number: int, *payloads: str) -> Produced:
    """Produce into that partition."""
    return await service.produce(queue, Produce(rows(*payloads), 10_000, partition=number))
