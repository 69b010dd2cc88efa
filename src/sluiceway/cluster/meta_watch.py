"""Watch of the queues in the meta store: follows the changes of other instances, and announces this instance's changes to them."""

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
"""Maximum age of this instance's view of the queues when no hint of a change arrives."""
LEARN_TIMEOUT: Millis = 1_000
"""Maximum wait of a queue change for the other instances to follow it. An instance that does not answer follows a little later."""
BETWEEN: Millis = 50
"""Minimum interval between looks that requests ask for: invalid requests must not keep the meta store busy."""


class MetaWatch:
    """Keeps a `catalog` current. `transport` reaches the other instances; None: there are none, so no other process changes queues."""

    def __init__(self, meta: MetaStore, catalog: Catalog, ownership: Ownership, transport: Transport | None) -> None:
        self._meta = meta
        self._catalog = catalog
        self._ownership = ownership
        self._transport = transport
        self._looked_at: Millis = -BETWEEN
        self._looking: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def tell(self, stamp: Stamp) -> None:
        """Announce the commit with that stamp. Returns once the other instances follow it, except those that do not answer in time."""
        await self._ownership.follow(stamp)
        await asyncio.gather(*(self._tell(peer.address, stamp) for peer in self._ownership.peers()))

    async def _tell(self, address: str, stamp: Stamp) -> None:
        assert self._transport is not None, "who is alone has no peers"
        try:
            await self._transport.ask(address, Learn(stamp), LEARN_TIMEOUT)
        except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
            log.info("an instance has not followed a change of the queues yet: %s", error)

    async def watch(self) -> None:
        """Follow changes of other instances, until cancelled."""
        async for _ in self._meta.watch(QUEUE):
            await self.follow()

    async def look_again(self) -> None:
        """Look periodically, until cancelled: a hint may be late, or its change not readable at that moment."""
        while True:
            await asyncio.sleep(LOOK_AGAIN / 1000)
            await self.follow()

    async def follow(self) -> None:
        """Look now. If the meta store cannot be read, a later look follows the changes."""
        try:
            await self._catalog.follow()
        except SluicewayError as error:
            log.warning("changes of queues could not be read, will retry: %s", error)
        except Exception:
            # It must not end the watch, or this instance would hear of no change any more.
            log.exception("changes of queues could not be followed, will retry")

    def look_soon(self, age: Millis) -> None:
        """Begin a look unless one has begun within `age` ms. Does not wait for it: the meta store may not answer."""
        if self._transport is not None and system.steady() - self._looked_at >= age:
            self._begin()

    async def fresh(self, patience: Millis) -> None:
        """Wait for a look that begins after this call. Raises `unavailable`, after `patience` ms at the latest."""
        if self._transport is not None:
            look = self._begin()
            await asyncio.wait((look,), timeout=patience / 1000)
            if not look.done():
                raise SluicewayError("unavailable", "the meta store did not return the queue's partitions in time")
            look.result()

    def _begin(self) -> asyncio.Task[None]:
        """Return a look that has not begun yet: concurrent requests share it."""
        if self._next is None:
            self._next = asyncio.create_task(self._look())
            # Every waiter may have gone: mark its exception as retrieved.
            self._next.add_done_callback(lambda look: look.cancelled() or look.exception())
        return self._next

    async def _look(self) -> None:
        """Run a look. Requests that come before it begins wait for this one."""
        if self._looking is not None:
            await asyncio.wait((self._looking,))
        await asyncio.sleep(max(0, self._looked_at + BETWEEN - system.steady()) / 1000)
        self._looking, self._next = self._next, None
        self._looked_at = system.steady()
        await self._catalog.follow()

    def stop(self) -> None:
        """Cancel the looks, at shutdown."""
        for look in (self._looking, self._next):
            if look is not None:
                look.cancel()
