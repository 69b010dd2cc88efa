"""Several instances of a cluster in one process: one meta store, one folder of partitions, and a transport that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.core.assignment.group import Parameters
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.backends import SqliteBackend
from sluiceway.model.peers import PeerRequest
from sluiceway.node.service import Membership, Service
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer

QUICK = Parameters(settle_timeout=20, round_interval=20, beat_interval=50, lease_timeout=600, member_timeout=800)


class Wires:
    """Between the instances, by address. Whatever goes over them is encoded and decoded."""

    def __init__(self) -> None:
        self.instances: dict[str, Service] = {}
        self.refuses: set[str] = set()
        """Addresses that cannot be reached."""
        self.loses: set[str] = set()
        """Addresses that do what they are asked, and whose answers are lost."""
        self.asked: list[tuple[str, PeerRequest]] = []

    def __call__(self, secret: str) -> Wires:
        return self

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        self.asked.append((address, request))
        if address in self.refuses or address not in self.instances:
            raise PeerRefusedError("no such host")
        sent = peer.decode_request(peer.encode_request(request))
        try:
            async with asyncio.timeout(timeout / 1000):
                answer = await self.instances[address].answer(sent)
        except TimeoutError:
            raise PeerUnknownError("no answer in time") from None
        except SluicewayError as error:
            raise peer.decode_error(peer.encode_error(error)) from None
        if address in self.loses:
            raise PeerUnknownError("the answer was lost")
        return peer.decode_answer(request, peer.encode_answer(request, answer))

    async def close(self) -> None:
        pass


class Shared(MemoryMetaStore):
    """Closed by nobody."""

    async def close(self) -> None:
        pass


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = Shared()
        self.wires = Wires()

    async def start(self, name: str, meta: MetaStore | None = None, parameters: Parameters = QUICK) -> Service:
        """One more instance, at the address of its name."""
        membership = Membership(lambda: meta or self.meta, self.wires, name, name, parameters=parameters)
        service = Service(
            self.folder / name,
            {"default": SqliteBackend(path=str(self.folder / "partitions"))},
            membership=membership,
            open_store=lambda *_: SqlitePartitionStore(self.folder / "partitions", shared=True),
        )
        self.wires.instances[name] = service
        await service.start()
        return service

    async def leave(self, name: str) -> None:
        service = self.wires.instances[name]
        await service.hand_over()
        del self.wires.instances[name]
        await service.stop()


@contextlib.asynccontextmanager
async def cluster(folder: Path, *names: str) -> AsyncIterator[tuple[Cluster, list[Service]]]:
    """These instances, started together; stopped at the end."""
    made = Cluster(folder)
    services = await asyncio.gather(*(made.start(name) for name in names))
    try:
        yield made, list(services)
    finally:
        async with asyncio.timeout(60):
            await asyncio.gather(*(service.stop() for service in made.wires.instances.values()))
