"""Leases in a cluster: from this instance's share of the queue, or from another instance's share that has items."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

from sluiceway.adapters import system
from sluiceway.cluster.remote_demand import Demand
from sluiceway.cluster.router import ANSWER_MARGIN, NO_WAIT, Router, plain
from sluiceway.core.partition.key_slots import home_of
from sluiceway.core.queue.queue_rate import REMOTE
from sluiceway.core.queue.routing import HERE, Peer, by_owner
from sluiceway.core.queue.tickets import Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.peers import FindLeases, LeaseAnywhere
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import RELEASE, Lease, Leased, ProduceKey, Selection, Settle
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError

log = logging.getLogger(__name__)

AT_ONCE = 0.002
"""Seconds for a lease to be served from here before other instances are asked."""
BEING_WRITTEN: Millis = 100
"""Maximum wait of a lease for items being written here. A slower partition may hang, and other instances may have items."""
IN_FLIGHT: Millis = 800
"""Minimum time for another instance to answer, also if the call's own time ends before. With ANSWER_MARGIN it is the second that a call may
take longer while a commit is in flight for it."""
LOOK: Millis = 500
"""Interval between two looks at whether an instance that has not answered yet still owns partitions of the queue."""
LATE: Millis = 5_000
"""How long after that an answer may come for its leases to be given back."""
GIVE_BACK: Millis = 5_000
AGAIN: Millis = 50
"""Delay before unanswered requests about a key's leases are repeated."""
GRACE: Millis = 200
"""Extra time that a call waits for another one with its key, which may be about to end."""
_LEASED_NOTHING = frozenset(("not_here", "queue_not_found", "too_many_requests"))
"""Errors by which an instance says that it has leased nothing, and has nothing under the lease's key."""


class _KeyLock:
    """Serialises the calls with one key, and counts them."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = asyncio.Lock()


class RemoteLeases:
    """Leases of a cluster's queues. `router` reaches the shares of other instances, `demand` knows which of them have items."""

    def __init__(self, router: Router, demand: Demand) -> None:
        self._router = router
        self._demand = demand
        self._keys: defaultdict[tuple[str, str, str], _KeyLock] = defaultdict(_KeyLock)
        self._returning: set[asyncio.Task[None]] = set()

    async def lease(self, record: QueueRecord, share: QueueDriver, request: Lease, payload: bool) -> Leased:
        """Lease up to `batch_size` items, from this share if it has some, else from another. Waits as long as the request allows."""
        if request.partition is not None:
            # Only its owner knows its state, including the key.
            only: Leased = await self._router.owner_of(record, request.partition, request, payload, repeats=request.lease_key is not None)
            return only
        if request.lease_key is None:
            return await self._anywhere(record, share, request, payload)
        # One instance at a time takes the leases of a key, so that a repetition finds them wherever they are.
        deadline = system.now() + request.request_timeout
        while True:
            request = replace(request, request_timeout=max(0, deadline - system.now()))
            owner = self.home(record, request)
            try:
                if owner is HERE:
                    return await self.keyed(record, share, request, payload)
                return cast(Leased, await self._router.ask(record, owner, LeaseAnywhere(request), payload))
            except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
                # Whatever that instance has done, it answers a repetition under the key with the same leases.
                moved = not isinstance(error, SluicewayError) or error.code == "not_here"
                if not moved or system.now() >= deadline:
                    raise plain(error) from error
                self._router.look()
            await asyncio.sleep(AGAIN / 1000)

    def home(self, record: QueueRecord, request: Lease) -> Peer | None:
        """Return the instance that takes the leases of the request's key: the owner of the home of produces with it. None: no owner."""
        share, key = self._router.share(record), ProduceKey(f"{request.client_id}\n{request.lease_key}")
        number = home_of(share.record, key)
        owner = None if number == MOVING else self._router.owner(record, number)
        # A partition learns first that it is no longer their home: by an old record two instances might take leases under one key.
        return None if owner is HERE and share.refuses(number, key) else owner

    # ---- without a key ----------------------------------------------------------------------------------------

    async def _anywhere(self, record: QueueRecord, share: QueueDriver, request: Lease, payload: bool) -> Leased:
        deadline, waits = system.now() + request.request_timeout, request.request_timeout > 0
        ticket = share.submit(request, payload)
        answer: asyncio.Future[Leased] = ticket.waiter.future
        try:
            await self._soon(share, ticket, answer)
            while not answer.done():
                leased = await self._offered(record, share, ticket, answer, request, payload, deadline)
                if leased is not None:
                    return leased
                if answer.cancelled():
                    # It was withdrawn for an offer that yielded no items.
                    request = replace(request, request_timeout=max(0, deadline - system.now()))
                    ticket = share.submit(request, payload)
                    answer = ticket.waiter.future
            own = answer.result()
        except BaseException:
            share.abandon(ticket)
            raise
        if own.leases or waits:
            return own
        return await self._of_others(record, request, payload, deadline + NO_WAIT)

    async def _soon(self, share: QueueDriver, ticket: Ticket, answer: asyncio.Future[Leased]) -> None:
        """Wait until the lease is answered here, or until it is time to ask other instances."""
        until = system.steady() + BEING_WRITTEN
        while True:
            await asyncio.wait((answer,), timeout=AT_ONCE)
            if answer.done() or not share.queue.will_serve(ticket) or system.steady() >= until:
                return

    async def _offered(
        self,
        record: QueueRecord,
        share: QueueDriver,
        ticket: Ticket,
        answer: asyncio.Future[Leased],
        request: Lease,
        payload: bool,
        deadline: Millis,
    ) -> Leased | None:
        """Wait until the lease is answered here, or another instance has items. Returns the leases fetched from there; None: none."""
        wish = self._demand.wish(record.incarnation, request.batch_size)
        leased, was_asked = None, False
        try:
            await asyncio.wait((answer, wish.offer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and share.queue.withdraw(ticket):
                answer.cancel()
                was_asked = True
                leased = await self._fetch(record, wish.offer.result(), request, payload, deadline, IN_FLIGHT)
            if leased is None:
                # The withdrawal cancelled it; otherwise its items are on the way. With leases in hand nothing is awaited: a caller that
                # goes at that moment would leave them to their deadline.
                await asyncio.wait((answer,))
        finally:
            self._demand.end(wish, leased is not None if was_asked else None)
        return leased

    async def _of_others(self, record: QueueRecord, request: Lease, payload: bool, deadline: Millis) -> Leased:
        """Serve a lease that does not wait from one of the other instances, fullest first."""
        loads = self._demand.loads(record.incarnation)
        others = [peer for peer in self._router.owners(record) if peer is not HERE]
        for peer in sorted(others, key=lambda peer: -loads[peer].ready if peer in loads else 0):
            leased = await self._fetch(record, peer, request, payload, deadline)
            if leased is not None:
                return leased
        return Leased([])

    async def _fetch(
        self, record: QueueRecord, peer: Peer, request: Lease, payload: bool, deadline: Millis, least: Millis = 0
    ) -> Leased | None:
        """Lease the instance's ready items; None: it has none, does not answer by the deadline, nor within `least` ms, or has lost its
        partitions of the queue meanwhile.

        Items that arrive later, or after a cancellation, are given back: nobody else gets them while they are leased.
        """
        within = max(0, deadline - system.now())
        # With a limit, the other instance may have items, and tokens or a quota for them within a moment.
        patience = REMOTE if record.rate is not None else BEING_WRITTEN if record.concurrency else 0
        waits = min(within, request.request_timeout, patience)
        # Under a key the leases are found again.
        late = LATE if request.lease_key is None else 0
        within = max(within, least)
        asking = self._router.ask(record, peer, replace(request, request_timeout=waits), payload, within + late)
        fetching = asyncio.ensure_future(asking)
        try:
            if late:
                await self._answered(record, peer, fetching, within + ANSWER_MARGIN)
            else:
                await asyncio.wait((fetching,))
            if not fetching.done():
                self._expect_late(record, peer, request, fetching)
                return None
            leased: Leased = fetching.result()
            if request.lease_key is not None:
                # Otherwise a repetition of this call would not look there.
                with contextlib.suppress(SluicewayError):
                    await self._router.know(record, [lease.partition for lease in leased.leases])
        except asyncio.CancelledError:
            self._expect_late(record, peer, request, fetching)
            raise
        except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
            log.debug("nothing was fetched from instance %s: %s", peer.name, error)
            if request.lease_key is not None and _may_have_leased(error):
                # So no other instance may lease more under this key. The client does not learn of the first ones, unless it repeats the
                # call, and then it would get both.
                raise plain(error) from error
            return None
        return leased if leased.leases else None

    async def _answered(self, record: QueueRecord, peer: Peer, fetching: asyncio.Future[Leased], within: Millis) -> None:
        """Wait for the answer, `within` ms at most, and only while the instance has partitions of the queue: what one that is frozen had is
        served elsewhere, perhaps here."""
        until = system.steady() + within
        while not fetching.done() and (left := until - system.steady()) > 0:
            await asyncio.wait((fetching,), timeout=min(left, LOOK) / 1000)
            if not (fetching.done() or self._has_partitions(record, peer)):
                return

    def _has_partitions(self, record: QueueRecord, peer: Peer) -> bool:
        with contextlib.suppress(SluicewayError):
            return peer in self._router.owners(record)
        return False

    def _expect_late(self, record: QueueRecord, peer: Peer, request: Lease, fetching: asyncio.Future[Leased]) -> None:
        """Give back what the answer brings, when it comes."""
        task = asyncio.create_task(self._give_back(record, peer, request, fetching))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _give_back(self, record: QueueRecord, peer: Peer, request: Lease, fetching: asyncio.Future[Leased]) -> None:
        """Release the leases of a client that has gone or was answered. If this fails, they run out."""
        with contextlib.suppress(PeerRefusedError, PeerUnknownError, SluicewayError):
            leased = await fetching
            if leased.leases and request.lease_key is None:
                selections: dict[int, list[Selection]] = {}
                for lease in leased.leases:
                    selections.setdefault(lease.partition, []).append(Selection(RELEASE, lease=lease.number))
                await self._router.ask(record, peer, Settle(selections, GIVE_BACK))

    # ---- with a key -------------------------------------------------------------------------------------------

    async def keyed(self, record: QueueRecord, share: QueueDriver, request: Lease, payload: bool) -> Leased:
        """Return the key's leases, wherever they are; if there are none, lease from any instance that has items."""
        assert request.lease_key is not None
        name = (record.incarnation, request.client_id, request.lease_key)
        deadline = system.now() + request.request_timeout
        async with self._one_at_a_time(name, request.request_timeout):
            while True:
                try:
                    holders = await self._holders(record, request, deadline)
                    break
                except SluicewayError:
                    if system.now() >= deadline:
                        raise
                    self._router.look()
                    await asyncio.sleep(AGAIN / 1000)
            if not holders:
                return await self._anywhere(record, share, replace(request, request_timeout=max(0, deadline - system.now())), payload)
            found = [await self._again(record, peer, request, payload) for peer in holders]
            return Leased([lease for each in found for lease in each.leases], [batch for each in found for batch in each.batches])

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self, name: tuple[str, str, str], patience: Millis) -> AsyncIterator[None]:
        """Hold the key's lock. Raises `unavailable` if another call with the key takes longer than `patience` ms and GRACE."""
        key = self._keys[name]
        key.calls += 1
        try:
            try:
                async with asyncio.timeout((patience + GRACE) / 1000):
                    await key.lock.acquire()
            except TimeoutError:
                raise SluicewayError("unavailable", "another call with this lease_key is in progress; try again") from None
            try:
                yield
            finally:
                key.lock.release()
        finally:
            key.calls -= 1
            if not key.calls:
                del self._keys[name]

    async def _holders(self, record: QueueRecord, request: Lease, deadline: Millis) -> list[Peer]:
        """Return the instances that have leases under the key. Raises `unavailable` if that cannot be known."""
        assert request.lease_key is not None
        owned = by_owner(sorted(self._router.share(record).numbers), lambda number: self._router.owner(record, number))
        peers = sorted(peer for peer in owned if peer is not None)
        if None in owned:
            raise SluicewayError("unavailable", "a partition that may hold this key's leases has no owner at the moment")
        # With the partitions' numbers, so that an instance that lost one says so, and does not skip its leases.
        asked = ((peer, FindLeases(request.client_id, request.lease_key, tuple(owned[peer]))) for peer in peers)
        try:
            within = max(0, deadline - system.now()) if request.request_timeout else NO_WAIT
            counts = await asyncio.gather(*(self._router.ask(record, peer, each, within=within) for peer, each in asked))
        except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
            raise SluicewayError("unavailable", f"a partition that may hold this key's leases is not available: {plain(error)}") from error
        return [peer for peer, count in zip(peers, counts, strict=True) if count]

    async def _again(self, record: QueueRecord, peer: Peer, request: Lease, payload: bool) -> Leased:
        """Fetch the share's leases under the key. Raises `unavailable` if there are none: the partitions have just moved."""
        known = replace(request, request_timeout=0, batch_size=0)
        try:
            leased = cast(Leased, await self._router.ask(record, peer, known, payload))
        except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
            raise plain(error) from error
        if not leased.leases:
            raise SluicewayError("unavailable", "the leases of this key are moving to another instance, or have just run out; try again")
        return leased


def _may_have_leased(error: Exception) -> bool:
    """Whether an instance that was asked under a key may have leases under it nevertheless: also `unavailable` says that they may be in a
    partition that is not open, or are taken and cannot be read."""
    return not isinstance(error, PeerRefusedError) and not (isinstance(error, SluicewayError) and error.code in _LEASED_NOTHING)
