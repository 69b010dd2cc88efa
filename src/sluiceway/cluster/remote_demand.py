"""Remote demand: consumers that wait here for items on other instances.

One long poll to each other instance names the queues wanted here, and returns the loads there. An instance with ready items of a wanted
queue answers at once; then as many of the waiting leases as those items can serve get its offer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sluiceway.adapters import system
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.peers import Load, Poll, Polled
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

log = logging.getLogger(__name__)

POLL: Millis = 1_000
"""Duration of a poll, and so the maximum age of other instances' loads."""
MARGIN: Millis = 2_000
"""Extra time to wait for the answer to a poll."""
AFTER_FAILURE: Millis = 200
MAX_LEFT = 16
"""Maximum number of polls left to end by themselves after the wanted queues changed."""
AFTER_NOTHING: Millis = 10
"""Delay before the next poll of an instance whose offered items were gone when they were fetched."""


class WaitingLease:
    """One waiting lease. `offer` resolves to an instance with items; `over` is set once the lease was asked for there, or need not be."""

    def __init__(self, incarnation: str, batch_size: int) -> None:
        self.incarnation, self.batch_size = incarnation, batch_size
        self.offer: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.got = False


class Demand:
    """Queues wanted here, and the loads of other instances. `follow` the members of the cluster; `stop` at the end."""

    def __init__(self, transport: Transport, shares: Callable[[str], QueueDriver | None]) -> None:
        self._transport = transport
        self._shares = shares
        self._wishes: dict[str, list[WaitingLease]] = {}
        self._loads: dict[Peer, Mapping[str, Load]] = {}
        self._polls: dict[Peer, asyncio.Task[None]] = {}
        self._wanted_more = asyncio.Event()
        self._left: set[asyncio.Future[Polled]] = set()
        """Polls whose answers are ignored."""

    # ---- waiting leases ---------------------------------------------------------------------------------------

    def loads(self, incarnation: str) -> dict[Peer, Load]:
        """Last reported loads of the queue's shares on other instances."""
        return {peer: loads[incarnation] for peer, loads in self._loads.items() if incarnation in loads}

    def busy(self, incarnation: str) -> dict[Peer, int]:
        """Last reported busy share of the queue on each other instance that has reported; 0 if it did not name the queue."""
        return {peer: loads[incarnation].busy if incarnation in loads else 0 for peer, loads in self._loads.items()}

    def wish(self, incarnation: str, batch_size: int) -> WaitingLease:
        """Register a waiting lease. The caller must pass it to `end`."""
        wish = WaitingLease(incarnation, batch_size)
        known = incarnation in self._wishes
        self._wishes.setdefault(incarnation, []).append(wish)
        if not known:
            self._wanted_more.set()
            self._wanted_more = asyncio.Event()
        return wish

    def end(self, wish: WaitingLease, got: bool) -> None:
        """Unregister a lease that no longer waits. `got`: the instance that made the offer has served it."""
        wish.got = got
        wish.over.set()
        if not wish.offer.done():
            wish.offer.cancel()
        waiting = self._wishes.get(wish.incarnation, [])
        if wish in waiting:
            waiting.remove(wish)
            if not waiting:
                del self._wishes[wish.incarnation]

    # ---- polls of other instances -----------------------------------------------------------------------------

    def follow(self, peers: Iterable[Peer]) -> None:
        """Poll exactly these instances from now on."""
        there = set(peers)
        for peer in [peer for peer in self._polls if peer not in there]:
            self._polls.pop(peer).cancel()
            self._loads.pop(peer, None)
        for peer in sorted(there - self._polls.keys()):
            self._polls[peer] = asyncio.create_task(self._keep_polling(peer))

    async def stop(self) -> None:
        polls: list[asyncio.Future[Any]] = [*self._polls.values(), *self._left]
        self.follow(())
        for poll in self._left:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)

    async def _keep_polling(self, peer: Peer) -> None:
        while True:
            try:
                polled = await self._poll(peer)
                if polled is not None:
                    self._loads[peer] = polled.loads
                    await self._offer(peer, polled.loads)
            except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
                self._loads.pop(peer, None)
                log.debug("instance %s does not answer: %s", peer.name, error)
                await asyncio.sleep(AFTER_FAILURE / 1000)
            except Exception:
                log.exception("polling instance %s failed", peer.name)
                await asyncio.sleep(AFTER_FAILURE / 1000)

    async def _poll(self, peer: Peer) -> Polled | None:
        """Poll the peer once; None if another queue is wanted meanwhile."""
        more = asyncio.ensure_future(self._wanted_more.wait())
        wanted = tuple(sorted(self._wishes))
        poll = asyncio.ensure_future(self._transport.ask(peer.address, Poll(wanted, POLL), POLL + MARGIN))
        try:
            await asyncio.wait((poll, more), return_when=asyncio.FIRST_COMPLETED)
            if not poll.done() and len(self._left) < MAX_LEFT:
                # Cancelling it would cost the connection, and it soon ends by itself.
                self._left.add(poll)
                poll.add_done_callback(self._done)
                return None
            polled: Polled | None = poll.result() if poll.done() else None
            return polled
        finally:
            more.cancel()
            if poll not in self._left:
                poll.cancel()

    def _done(self, poll: asyncio.Future[Polled]) -> None:
        self._left.discard(poll)
        if not poll.cancelled():
            # Marks the error as retrieved: the next poll reports it, too.
            poll.exception()

    async def _offer(self, peer: Peer, loads: Mapping[str, Load]) -> None:
        """Offer the peer's items to as many waiting leases as they can serve. Returns once those have fetched them."""
        told: list[WaitingLease] = []
        for incarnation, load in loads.items():
            left = load.ready
            for wish in list(self._wishes.get(incarnation, ())):
                if left <= 0:
                    break
                if not wish.offer.done():
                    wish.offer.set_result(peer)
                    told.append(wish)
                    left -= wish.batch_size
        for wish in told:
            await wish.over.wait()
        if told and not any(wish.got for wish in told):
            await asyncio.sleep(AFTER_NOTHING / 1000)

    # ---- answers to other instances ---------------------------------------------------------------------------

    async def answer(self, poll: Poll, drivers: Iterable[QueueDriver]) -> Polled:
        """Answer another instance's poll with the shares that have load or take produces, as soon as a wanted one has ready items."""
        turned = asyncio.Event()
        wanted = [driver for driver in map(self._shares, poll.wanted) if driver is not None]
        deadline = system.steady() + poll.wait
        for driver in wanted:
            driver.watchers.add(turned)
        try:
            while not any(driver.queue.load().ready for driver in wanted):
                turned.clear()
                try:
                    async with asyncio.timeout((deadline - system.steady()) / 1000):
                        await turned.wait()
                except TimeoutError:
                    break
        finally:
            for driver in wanted:
                driver.watchers.discard(turned)
        loads = {driver.record.incarnation: driver.queue.load() for driver in drivers}
        return Polled({incarnation: load for incarnation, load in loads.items() if load.ready or load.busy or load.emptiest is not None})
