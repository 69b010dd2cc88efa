"""What other instances change of the queues is followed here, and what is changed here is told to them."""

from __future__ import annotations

import asyncio
import logging

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE, Catalog
from sluiceway.model.meta import Stamp
from sluiceway.model.peers import Learn
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

log = logging.getLogger(__name__)

LOOK_AGAIN: Millis = 5_000
"""How old what an instance knows of the queues may be when nobody has told it of a change."""
LEARN_TIMEOUT: Millis = 1_000
"""How long a change of a queue waits for the others to follow it. Who does not answer follows a little later."""
BETWEEN: Millis = 50
"""Between two looks that requests ask for: whoever asks for nonsense must not keep the meta store busy."""


class Following:
    """The queues of a `catalog`. `transport` reaches the other instances; None: there are none, so nobody else changes anything."""

    def __init__(self, meta: MetaStore, catalog: Catalog, ownership: Ownership, transport: Transport | None) -> None:
        self._meta = meta
        self._catalog = catalog
        self._ownership = ownership
        self._transport = transport
        self._looked_at: Millis = -BETWEEN
        self._looking: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def tell(self, stamp: Stamp) -> None:
        """Returns when the others follow the commit with that stamp, those that answer soon."""
        await self._ownership.follow(stamp)
        await asyncio.gather(*(self._tell(peer.address, stamp) for peer in self._ownership.peers()))

    async def _tell(self, address: str, stamp: Stamp) -> None:
        assert self._transport is not None, "who is alone has no peers"
        try:
            await self._transport.ask(address, Learn(stamp), LEARN_TIMEOUT)
        except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
            log.info("an instance follows a change of the queues later: %s", error)

    async def watch(self) -> None:
        """Follow what others change, until it is cancelled."""
        async for _ in self._meta.watch(QUEUE):
            await self.follow()

    async def look_again(self) -> None:
        """Look from time to time, until it is cancelled: a hint may be late, and what it is about may not be readable just then."""
        while True:
            await asyncio.sleep(LOOK_AGAIN / 1000)
            await self.follow()

    async def follow(self) -> None:
        """Look now. What cannot be read is followed later."""
        try:
            await self._catalog.follow()
        except SluicewayError as error:
            log.warning("changes of queues are followed later: %s", error)

    def look_soon(self, age: Millis) -> None:
        """Begin a look, unless one has begun within `age`. It is not waited for: the meta store may not answer."""
        if self._transport is not None and system.steady() - self._looked_at >= age:
            self._begin()

    async def fresh(self, patience: Millis) -> None:
        """Returns when the queues are known as they are now, or later. Raises `unavailable`, after `patience` at the latest."""
        if self._transport is not None:
            look = self._begin()
            await asyncio.wait((look,), timeout=patience / 1000)
            if not look.done():
                raise SluicewayError("unavailable", "the meta store did not say in time which partitions the queue has")
            look.result()

    def _begin(self) -> asyncio.Task[None]:
        """A look that has not begun yet: requests that come together share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._look())
            # Nobody may be left to be told of it.
            self._next.add_done_callback(lambda look: look.cancelled() or look.exception())
        return self._next

    async def _look(self) -> None:
        """Until it begins, whoever asks waits for this one."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        await asyncio.sleep(max(0, self._looked_at + BETWEEN - system.steady()) / 1000)
        self._looking, self._next = self._next, None
        self._looked_at = system.steady()
        await self._catalog.follow()

    def stop(self) -> None:
        """Nobody asks any more."""
        for look in (self._looking, self._next):
            if look is not None:
                look.cancel()
