"""Remote demand: consumers that wait here for items on other instances.

One long poll to each other instance names the queues wanted here, and returns the loads there. `core/queue/remote_items.py` decides what
polls name and which leases get which offer, `core/queue/poll_line.py` which of the others' polls end here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from sluiceway.adapters import system
from sluiceway.core.queue.poll_line import PollLine
from sluiceway.core.queue.remote_items import POLL, RemoteItems, Wish, after_failure, poll_time
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.peers import Load, Poll, Polled
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

log = logging.getLogger(__name__)

MARGIN: Millis = 2_000
"""Extra time to wait for the answer to a poll."""
AFTER_NOTHING: Millis = 10
"""Delay before the next poll of an instance whose offered items were gone when they were fetched."""


class WaitingLease(Wish):
    """One waiting lease. `offer` resolves to an instance with items; `over` is set once the lease was asked for there, or need not be."""

    def __init__(self, incarnation: str, batch_size: int) -> None:
        super().__init__(incarnation, batch_size)
        self.offer: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.got = False


class Demand:
    """Queues wanted here, and the loads of other instances. `follow` the members of the cluster; `stop` at the end.

    `shares` finds this instance's share of a queue, `owners` the other instances that own partitions of it. `name` is this instance's.
    """

    def __init__(
        self,
        transport: Transport,
        shares: Callable[[str], QueueDriver | None],
        owners: Callable[[str], Iterable[Peer]],
        name: Callable[[], str],
    ) -> None:
        self._transport = transport
        self._shares = shares
        self._owners = owners
        self._name = name
        self._items = RemoteItems()
        self._polls: dict[Peer, asyncio.Task[None]] = {}
        self._news: dict[Peer, asyncio.Event] = {}
        """Set when a poll of that instance no longer names what it should."""
        self._left: dict[Peer, asyncio.Future[Polled]] = {}
        """Polls that another one has followed: it ends them, and their answers are ignored."""
        self._line = PollLine()
        self._held: dict[str, asyncio.Future[None]] = {}
        """The other instances' polls that wait here."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loads: dict[str, tuple[Load, Millis]] = {}
        """Loads of the shares here, and when each was computed. Polls of a large cluster ask for all of them often."""

    # ---- waiting leases ---------------------------------------------------------------------------------------

    def loads(self, incarnation: str) -> dict[Peer, Load]:
        """Last reported loads of the queue's shares on other instances."""
        return self._items.loads(incarnation)

    def busy(self, incarnation: str) -> dict[Peer, int]:
        """Last reported busy share of the queue on each other instance that has reported; 0 if it did not name the queue."""
        return self._items.busy(incarnation)

    def wish(self, incarnation: str, batch_size: int) -> WaitingLease:
        """Register a waiting lease. The caller must pass it to `end`."""
        wish = WaitingLease(incarnation, batch_size)
        if self._items.wish(wish):
            self.moved(incarnation)
        if wish.offered is not None:
            wish.offer.set_result(wish.offered)
        return wish

    def end(self, wish: WaitingLease, got: bool | None) -> None:
        """Unregister a lease that no longer waits. `got`: whether the instance that it was offered has served it; None: was not asked."""
        wish.got = bool(got)
        wish.over.set()
        if not wish.offer.done():
            wish.offer.cancel()
        self._poll_anew(self._items.end(wish, got, system.steady()))

    # ---- polls of other instances -----------------------------------------------------------------------------

    def follow(self, peers: Iterable[Peer], *, moved: bool = False) -> None:
        """Poll exactly these instances from now on. `moved`: partitions have other owners."""
        there = set(peers)
        if there != self._polls.keys():
            self._follow(sorted(there))
        if moved:
            for incarnation in self._items.wanted():
                self.moved(incarnation)

    def _follow(self, peers: list[Peer]) -> None:
        for peer in sorted(self._polls.keys() - set(peers)):
            self._polls.pop(peer).cancel()
            del self._news[peer]
        self._items.follow(peers)
        for peer in peers:
            if peer not in self._polls:
                self._news[peer] = asyncio.Event()
                self._polls[peer] = asyncio.create_task(self._keep_polling(peer))

    def moved(self, incarnation: str) -> None:
        """The queue, if it is wanted here, has other owners, or may have."""
        if self._items.is_wanted(incarnation):
            self._poll_anew(self._items.unasked(incarnation, self._owners(incarnation)))

    async def stop(self) -> None:
        polls: list[asyncio.Future[Any]] = [*self._polls.values(), *self._left.values()]
        self.follow(())
        for poll in self._left.values():
            poll.cancel()
        for timer in self._timers.values():
            timer.cancel()
        if polls:
            await asyncio.wait(polls)

    def _poll_anew(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._news[peer].set()

    async def _keep_polling(self, peer: Peer) -> None:
        while True:
            try:
                polled = await self._poll(peer)
                if polled is not None:
                    await self._offer(peer, polled.loads)
            except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
                log.debug("instance %s does not answer: %s", peer.name, error)
                await self._pause(peer)
            except Exception:
                log.exception("polling instance %s failed", peer.name)
                await self._pause(peer)

    async def _pause(self, peer: Peer) -> None:
        self._items.failed(peer)
        await asyncio.sleep(after_failure(len(self._polls)) / 1000)

    async def _poll(self, peer: Peer) -> Polled | None:
        """Poll the peer once; None if the next poll should name other queues."""
        news = self._news[peer]
        news.clear()
        # Spread over time: the polls of a large cluster would otherwise all end at once.
        wait = round(poll_time(len(self._polls)) * (0.5 + system.chance()))
        request = Poll(self._items.asks(peer, system.steady()), wait, self._name())
        poll = asyncio.ensure_future(self._transport.ask(peer.address, request, wait + MARGIN))
        more = asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait((poll, more), return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                polled: Polled = poll.result()
                return polled
            if peer not in self._left:
                # Cancelling it would cost the connection, and the next poll ends it.
                self._left[peer] = poll
                poll.add_done_callback(partial(self._done, peer))
            return None
        finally:
            more.cancel()
            if self._left.get(peer) is not poll:
                poll.cancel()

    def _done(self, peer: Peer, poll: asyncio.Future[Polled]) -> None:
        del self._left[peer]
        if not poll.cancelled():
            # Marks the error as retrieved: the next poll reports it, too.
            poll.exception()

    async def _offer(self, peer: Peer, loads: Mapping[str, Load]) -> None:
        """Offer the peer's items to as many waiting leases as they can serve. Returns once those have fetched them."""
        told = [wish for wish in self._items.answered(peer, loads) if isinstance(wish, WaitingLease)]
        for wish in told:
            wish.offer.set_result(peer)
        for wish in told:
            await wish.over.wait()
        if told and not any(wish.got for wish in told):
            await asyncio.sleep(AFTER_NOTHING / 1000)

    # ---- answers to other instances ---------------------------------------------------------------------------

    async def answer(self, poll: Poll, drivers: Iterable[QueueDriver]) -> Polled:
        """Answer another instance's poll with the shares that have load or take produces: when it is told of ready items, after
        `poll.wait`, or when the instance polls again."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end(poll.asker)
        self._held[poll.asker] = over
        turned = self._line.join(poll.asker, poll.wanted)
        try:
            for incarnation in turned:
                driver = self._shares(incarnation)
                if driver is not None and self._load(driver, system.steady()).ready:
                    self.look(incarnation)
            async with asyncio.timeout(poll.wait / 1000):
                await over
        except TimeoutError:
            pass
        finally:
            if self._held.get(poll.asker) is over:
                del self._held[poll.asker]
                self._line.leave(poll.asker)
        now = system.steady()
        loads = {driver.record.incarnation: self._load(driver, now) for driver in drivers}
        self._loads = {incarnation: self._loads[incarnation] for incarnation in loads}
        return Polled({incarnation: load for incarnation, load in loads.items() if load.ready or load.busy or load.emptiest is not None})

    def look(self, incarnation: str) -> None:
        """Tell of the queue's ready items, if there are some and polls wait for them. Called after each of the queue's cycles."""
        self._loads.pop(incarnation, None)
        if not self._line.waits(incarnation):
            return
        driver, now = self._shares(incarnation), system.steady()
        for asker in self._line.tell(incarnation, driver.queue.ready if driver is not None else 0, now):
            self._end(asker)
        again = self._line.next_look(incarnation)
        if again is not None and incarnation not in self._timers:
            self._timers[incarnation] = asyncio.get_running_loop().call_later(max(0, again - now) / 1000, self._look_again, incarnation)

    def _load(self, driver: QueueDriver, now: Millis) -> Load:
        """The share's load, as it was a second ago at most."""
        known = self._loads.get(driver.record.incarnation)
        if known is None or now - known[1] > POLL:
            known = self._loads[driver.record.incarnation] = driver.queue.load(), now
        return known[0]

    def _look_again(self, incarnation: str) -> None:
        del self._timers[incarnation]
        self.look(incarnation)

    def _end(self, asker: str) -> None:
        over = self._held.pop(asker, None)
        if over is not None and not over.done():
            over.set_result(None)
