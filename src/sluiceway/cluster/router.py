"""Router: any instance takes any request, and serves it from its own share of the queue, from those of others, or from both."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.cluster import produce_by_key
from sluiceway.cluster.meta_watch import MetaWatch
from sluiceway.cluster.ownership import Ownership
from sluiceway.cluster.produce_by_key import Outcome
from sluiceway.cluster.request_context import REQUEST_ID, note
from sluiceway.contract.fields import time_field
from sluiceway.contract.item_answers import ReasonCount, Reasons
from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats, QueueKeys, QueueStats, WaitingKey
from sluiceway.core.partition.key_slots import home_of
from sluiceway.core.queue.key_ranking import busiest, oldest, together
from sluiceway.core.queue.partition_executor import not_here
from sluiceway.core.queue.routing import HERE, Part, Peer, by_owner, names_of, numbers_of, part, stays, taker
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_REASONS
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.inspection import (
    BEGIN,
    Browse,
    BrowsedPage,
    Deleted,
    DeleteItems,
    ItemsPage,
    ListItems,
    MadeReady,
    MovedAway,
    MoveItems,
    RunNow,
    Search,
    SearchedPage,
    SearchedQueue,
)
from sluiceway.model.item_keys import Division, has_keys, has_only_payloads, has_priorities, in_runs
from sluiceway.model.peers import (
    Ask,
    Close,
    Count,
    CountKeys,
    CountReasons,
    Explain,
    FindLeases,
    KeyCount,
    LeaseAnywhere,
    Load,
    Reload,
    RemainingItems,
    ShareKeys,
    ShareReasons,
    ShareRequest,
)
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import (
    BundleCounts,
    Clear,
    Cleared,
    CountBundles,
    Explanation,
    Extend,
    Extended,
    Lease,
    Peek,
    Produce,
    Produced,
    Redrive,
    Redriven,
    Settle,
    Settled,
)
from sluiceway.model.unique_keys import has_unique_keys, unique_rows
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

log = logging.getLogger(__name__)

LOOK_TIMEOUT: Millis = 5_000
"""Timeout of requests without a `request_timeout` of their own."""
AGAIN: Millis = 50
"""Delay before instances that refused are asked again; a change of owners ends it early."""
OLD: Millis = 500
"""Maximum age of the queue records when an instance denies having a partition that it should have."""
ANSWER_MARGIN: Millis = 200
"""Extra time for a peer beyond the `request_timeout`, to transmit its answer. It takes back leases for a caller that is gone."""
NO_WAIT: Millis = 1_000
"""Timeout of a lease that does not wait for items."""
COUNT_TIMEOUT: Millis = 1_000
"""Timeout of counts. Owners that have not answered by then are reported as unavailable: a page of counts is for people."""
KEYS_TIMEOUT: Millis = 5_000
"""The same of keys, whose texts are read from blobs."""

T = TypeVar("T")
Summed = TypeVar("Summed", Settled, Extended, Cleared, BundleCounts, Deleted, MadeReady, MovedAway)
Loads = Mapping[Peer, Load]
Own = Callable[[QueueDriver, ShareRequest, bool], Awaitable[Any]]
"""Answer of this instance's share of a queue, with the items' payload or without."""


class _AwayError(SluicewayError):
    """No instance serves the partition at the moment: the request surely did nothing."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__("unavailable", f"partition {number} is not available: {reason}")


class Router:
    """Sends requests to the owners of their partitions. `shares` finds this instance's share of a queue by its name, `own` asks it.

    Partitions come and go, and keys move, while a request is in flight: lookups use the current record, and the record that comes with a
    request only identifies its queue.
    """

    def __init__(
        self,
        shares: Callable[[str], QueueDriver],
        ownership: Ownership,
        transport: Transport | None,
        own: Own,
        loads: Callable[[str], Loads],
        following: MetaWatch,
    ) -> None:
        self._shares = shares
        self._ownership = ownership
        self._transport = transport
        self._own = own
        self._loads = loads
        self._following = following

    # ---- the current record -----------------------------------------------------------------------------------

    def share(self, record: QueueRecord) -> QueueDriver:
        """Return this instance's share of exactly that queue; it has the current record. Raises queue_not_found."""
        share = self._shares(record.queue_name)
        if share.record.incarnation != record.incarnation:
            raise SluicewayError("queue_not_found", f"queue {record.queue_name!r} was deleted and created again", "queue_name")
        return share

    async def know(self, record: QueueRecord, numbers: Iterable[int], patience: Millis = LOOK_TIMEOUT) -> None:
        """Wait until the record covers these partitions, present or removed. Raises `unavailable` after `patience` ms."""
        share = self.share(record)
        if not share.numbers.issuperset(numbers) and any(number >= share.record.given for number in numbers):
            # Another instance may just have added it.
            await self._following.fresh(patience)

    def look(self) -> None:
        """Read the record again in the background: it may be outdated."""
        self._following.look_soon(OLD)

    async def _is_there(self, record: QueueRecord, number: int, patience: Millis = LOOK_TIMEOUT) -> bool:
        """Whether the queue has the partition now. Raises `unavailable`."""
        await self.know(record, (number,), patience)
        return number in self.share(record).numbers

    # ---- one instance -----------------------------------------------------------------------------------------

    async def ask(
        self,
        record: QueueRecord,
        peer: Peer | None,
        request: ShareRequest | LeaseAnywhere,
        payload: bool = True,
        within: Millis | None = None,
    ) -> Any:
        """Send the request to that instance and return its answer. `within`: timeout in ms; None: that of the request.

        Raises `not_here`, PeerRefusedError, PeerUnknownError, and the errors of the share.
        """
        if peer is None:
            raise not_here(None)
        if peer is HERE:
            assert not isinstance(request, LeaseAnywhere), "that is not for a share"
            answer = await self._own(self.share(record), request, payload)
        else:
            assert self._transport is not None, "an instance that is alone has no peers"
            timeout = (timeout_of(request) if within is None else within) + ANSWER_MARGIN
            answer = await self._transport.ask(peer.address, Ask(record.incarnation, request, payload), timeout, REQUEST_ID.get())
        if not isinstance(request, FindLeases):
            note(peer.address, answer)
        return answer

    def owner(self, record: QueueRecord, number: int) -> Peer | None:
        return self._ownership.owner(record.incarnation, number)

    def owners(self, record: QueueRecord) -> list[Peer]:
        """Return the owners of the queue's partitions, this instance first."""
        found = {self.owner(record, number) for number in self.share(record).numbers} - {None}
        return sorted((peer for peer in found if peer is not None), key=lambda peer: (peer is not HERE, peer))

    async def owner_of(self, record: QueueRecord, number: int, request: Any, payload: bool = True, *, repeats: bool = True) -> Any:
        """Send the request to the partition's owner, following changes of it. `repeats`: the request is idempotent.

        Raises `invalid_request` if the queue has no such partition, or no longer has it.
        """
        return await self._at(record, lambda: number, request, payload, repeats)

    async def _at(self, record: QueueRecord, place: Callable[[], int], request: Any, payload: bool, repeats: bool) -> Any:
        """Send the request to the owner of the partition that `place` returns at the time; MOVING: there is none, so wait for one."""
        deadline = system.now() + timeout_of(request)
        unknown: SluicewayError | None = None
        while True:
            try:
                return await self._attempt(record, place, request, deadline, payload, repeats)
            except SluicewayError as error:
                problem = error
            except produce_by_key.DividedError as error:
                error.unknown = unknown
                raise
            if problem.code == "outcome_unknown":
                unknown = problem
            may_repeat = repeats if problem is unknown else isinstance(problem, _AwayError)
            if not may_repeat or system.now() >= deadline:
                # An attempt that did nothing does not decide the outcome of an earlier one.
                raise unknown or problem
            await self._ownership.changed(min(AGAIN, max(1, deadline - system.now())))

    async def _attempt(
        self, record: QueueRecord, place: Callable[[], int], request: Any, deadline: Millis, payload: bool, repeats: bool
    ) -> Any:
        """As `_at`, once. Raises `_AwayError` if the owner did nothing and another attempt may succeed."""
        while (number := place()) == MOVING:
            if system.now() >= deadline:
                raise SluicewayError("unavailable", "keys of the queue are moving to other partitions; try again")
            await self.share(record).changed(deadline - system.now())
        if not await self._is_there(record, number, max(1, deadline - system.now())):
            raise no_partition(self.share(record).record, number)
        asking = self.ask(record, self.owner(record, number), timed(request, deadline), payload)
        try:
            return await (self._while_owner(record, number, asking) if repeats else asking)
        except PeerRefusedError as error:
            raise _AwayError(number, f"its owner cannot be reached: {error}") from error
        except PeerUnknownError as error:
            raise SluicewayError("outcome_unknown", f"the owner of partition {number} did not answer: {error}") from error
        except SluicewayError as error:
            if error.code != "not_here":
                raise
            self.look()
            raise _AwayError(number, error.detail) from error

    async def _while_owner(self, record: QueueRecord, number: int, asking: Coroutine[Any, Any, Any]) -> Any:
        """Await the answer while that owner has the partition: a frozen owner would keep its callers waiting."""
        owner = self.owner(record, number)
        if owner is HERE:
            return await asking
        asked = asyncio.ensure_future(asking)
        try:
            while not asked.done():
                changed = asyncio.ensure_future(self._ownership.changed(LOOK_TIMEOUT))
                await asyncio.wait((asked, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not asked.done() and self.owner(record, number) != owner:
                    raise PeerUnknownError("it no longer owns the partition")
            return asked.result()
        finally:
            asked.cancel()

    # ---- produce ----------------------------------------------------------------------------------------------

    def produce(self, record: QueueRecord, request: Produce) -> Coroutine[Any, Any, Produced]:
        """Not a coroutine itself, as one costs each produce half a microsecond."""
        share = self.share(record)
        if request.part is not None or request.lives or has_only_payloads(request.batch):
            return self._produce_whole(record, share, request)
        return self._produce_by_columns(record, share, request)

    async def _produce_by_columns(self, record: QueueRecord, share: QueueDriver, request: Produce) -> Produced:
        by_key = has_keys(request.batch) and share.record.goes_by_keys
        by_priority = has_priorities(request.batch) and share.record.priority is not None
        unique = has_unique_keys(request.batch)
        if unique and share.record.unique is None:
            unique = False
            # Dead items keep their unique keys on their way to a dead queue.
            if request.key is None or not request.key.is_system:
                raise _not_unique(share.record, request)
        if unique or (by_key and share.record.keeps_keys_together):
            return await self._produce_by_key(record, share, request)
        if not (by_key or by_priority):
            return await self._produce_whole(record, share, request)
        whole = in_runs(request.batch, by_key, by_priority)
        return produce_by_key.together([whole], [await self._produce_whole(record, share, replace(request, batch=whole.rows))], request)

    async def _produce_whole(self, record: QueueRecord, share: QueueDriver, request: Produce) -> Produced:
        key = request.key
        if request.partition is not None:
            done: Produced = await self.owner_of(record, request.partition, request, repeats=key is not None)
        elif self._ownership.is_alone:
            # The share finds the partition itself, and waits while its key has no home.
            done = await share.ask(request)
        elif key is not None:
            done = await self._at(record, lambda: home_of(self.share(record).record, key), request, True, True)
        else:
            done = await self._produce_anywhere(record, share, request)
        return done

    async def _produce_by_key(self, record: QueueRecord, share: QueueDriver, request: Produce) -> Produced:
        """Store the items where their keys are at home."""
        parts = produce_by_key.parts_of(share.record, request)
        if request.partition is not None and any(each.place not in (request.partition, MOVING) for each, _ in parts):
            raise invalid(
                "partition", f"keys of these items belong to other partitions of {record.queue_name!r}, which keeps keys together"
            )
        stored = await self._store_parts(record, parts)
        return produce_by_key.together([each for each, _ in stored], [outcome for _, outcome in stored], request)

    async def _store_parts(self, record: QueueRecord, parts: Sequence[tuple[Division, Produce]]) -> list[tuple[Division, Outcome]]:
        found = await asyncio.gather(*(self._store_part(record, *each) for each in parts))
        return [each for those in found for each in those]

    async def _store_part(self, record: QueueRecord, division: Division, part: Produce) -> list[tuple[Division, Outcome]]:
        """Store the part where its keys are at home at the time, in several pieces if a rebalance divides them."""
        deadline = system.now() + part.request_timeout

        def home() -> int:
            return produce_by_key.home_of_part(self.share(record).record, part)

        try:
            return [(division, await self._at(record, home, part, True, part.key is not None))]
        except produce_by_key.DividedError as error:
            pieces = produce_by_key.parts_again(self.share(record).record, division, timed(part, deadline))
            stored = await self._store_parts(record, pieces)
            if error.unknown is None:
                return stored
            return [(each, error.unknown if isinstance(outcome, SluicewayError) else outcome) for each, outcome in stored]
        except Exception as error:
            return [(division, error)]

    async def _produce_anywhere(self, record: QueueRecord, share: QueueDriver, request: Produce) -> Produced:
        deadline = system.now() + request.request_timeout
        tried: list[Peer] = []
        full: list[SluicewayError] = []
        problem: Exception = not_here(None)
        while True:
            own = share.queue.load()
            # Looking at all owners costs as much as the rest of the call, and is rarely needed.
            here = not tried and stays(own)
            peer = HERE if here else taker(own, self._loads(record.incarnation), self.owners(record), tried)
            try:
                if peer is not None:
                    done: Produced = await self.ask(record, peer, timed(request, deadline))
                    return done
            except SluicewayError as error:
                if error.code not in ("not_here", "unavailable", "storage_full"):
                    raise
                problem = error
                if error.code == "not_here":
                    self.look()
                elif error.code == "storage_full":
                    full.append(error)
            except PeerRefusedError as error:
                problem = error
            except PeerUnknownError as error:
                raise SluicewayError("outcome_unknown", f"instance {peer.name if peer else ''} did not answer: {error}") from error
            if system.now() >= deadline:
                if full:
                    raise full[-1]
                raise SluicewayError("unavailable", f"no partition took the request within request_timeout: {problem}")
            if peer is None:
                if full and len(full) == len(tried):
                    # All of them: a disk is not emptied while the client waits.
                    raise full[-1]
                tried.clear()
                full.clear()
                await self._ownership.changed(min(AGAIN, max(1, deadline - system.now())))
            else:
                tried.append(peer)

    # ---- calls by id ------------------------------------------------------------------------------------------

    async def settle(self, record: QueueRecord, request: Settle) -> Settled:
        return await self._in_parts(record, request, Settled(ignored=[(name, "unknown") for name in request.foreign]))

    async def extend(self, record: QueueRecord, request: Extend) -> Extended:
        return await self._in_parts(record, request, Extended(ignored=[(name, "unknown") for name in request.foreign]))

    async def delete_items(self, record: QueueRecord, request: DeleteItems) -> Deleted:
        return await self._in_parts(record, request, Deleted(ignored=[(name, "unknown") for name in request.foreign]))

    async def run_now(self, record: QueueRecord, request: RunNow) -> MadeReady:
        return await self._in_parts(record, request, MadeReady(ignored=[(name, "unknown") for name in request.foreign]))

    async def move_items(self, record: QueueRecord, request: MoveItems) -> MovedAway:
        return await self._in_parts(record, request, MovedAway(ignored=[(name, "unknown") for name in request.foreign]))

    async def clear(self, record: QueueRecord, request: Clear) -> Cleared:
        # Items may be in a partition that a rebalance has just added: an older record would leave them.
        await self._following.fresh(request.request_timeout)
        numbers = tuple(sorted(self.share(record).numbers))
        return await self._in_parts(record, replace(request, partitions=numbers), Cleared())

    async def count_bundles(self, record: QueueRecord, request: CountBundles) -> BundleCounts:
        """Count in all partitions. Raises `unavailable` if one of them does not answer."""
        if request.step != "look":
            # Items may be in a partition that a rebalance has just added. By an older record their bundle would be over without them.
            await self._following.fresh(request.request_timeout)
        numbers = tuple(sorted(self.share(record).numbers))
        return await self._in_parts(record, replace(request, partitions=numbers), BundleCounts())

    async def _in_parts(self, record: QueueRecord, request: Part, total: Summed) -> Summed:
        """Send each owner its part. Completed parts stay done; an error says that some are not, or may not be. A move that took effect
        anywhere answers with the ids of the parts that failed: repeated, it could not tell which items it has moved.

        Parts refused by a former owner go to the new one. Items of a removed partition count as settled.
        """
        deadline = system.now() + request.request_timeout
        left = numbers_of(request)
        if self._ownership.is_alone and not isinstance(request, MoveItems) and self.share(record).numbers.issuperset(left):
            try:
                whole: Summed = await self.share(record).ask(request)
                return whole
            except SluicewayError:
                if self.share(record).numbers.issuperset(left):
                    raise
        while left:
            try:
                left = await self._pass_over(record, request, left, total, deadline)
            except SluicewayError as error:
                _give_up(record, request, total, [(left, error)])
                break
            groups = by_owner(left, lambda number: self.owner(record, number))
            asked = [self._part(record, peer, part(request, numbers, max(1, deadline - system.now()))) for peer, numbers in groups.items()]
            # A single part is not worth a task.
            answers = [await _outcome(asked[0])] if len(asked) == 1 else await asyncio.gather(*asked, return_exceptions=True)
            left = []
            failures: list[tuple[list[int], SluicewayError]] = []
            for numbers, answer in zip(groups.values(), answers, strict=True):
                if not isinstance(answer, BaseException):
                    total.add(answer)
                    continue
                gone = [number for number in numbers if number not in self.share(record).numbers]
                again = numbers if _is(answer, "not_here") else gone
                left += again
                if failed := [number for number in numbers if number not in again]:
                    if not isinstance(answer, SluicewayError):
                        raise answer
                    failures.append((failed, answer))
            if failures:
                _give_up(record, request, total, failures)
            if left:
                self.look()
                await self._ownership.changed(min(AGAIN, max(1, deadline - system.now())))
            if system.now() >= deadline and not self.share(record).numbers.isdisjoint(left):
                absent = SluicewayError("unavailable", f"partition {left[0]} has no owner; the call took effect in the other partitions")
                _give_up(record, request, total, [(left, absent)])
                break
        return total

    async def _pass_over(self, record: QueueRecord, request: Part, numbers: list[int], total: Summed, deadline: Millis) -> list[int]:
        """Return the partitions that exist. The items of others are added to `ignored`: they were settled, or never existed."""
        share = self.share(record)
        if share.numbers.issuperset(numbers):
            return numbers
        await self.know(record, numbers, max(1, deadline - system.now()))
        missing = [number for number in numbers if number not in share.numbers]
        removed = [number for number in missing if number < share.record.given]
        never = [number for number in missing if number >= share.record.given]
        settled, unknown = (names_of(request, each, record.incarnation) for each in (removed, never))
        if isinstance(total, Deleted | MadeReady | MovedAway):
            total.ignored += [(name, "gone") for name in settled] + [(name, "unknown") for name in unknown]
        elif not isinstance(total, Cleared | BundleCounts):
            total.ignored += [(name, "settled") for name in settled] + [(name, "unknown") for name in unknown]
        return [number for number in numbers if number in share.numbers]

    async def _part(self, record: QueueRecord, peer: Peer | None, request: Part) -> Any:
        try:
            return await self.ask(record, peer, request)
        except PeerRefusedError as error:
            # Fails at once rather than waiting for a new owner: the client may be about to lose its lease.
            raise SluicewayError("unavailable", f"the owner of partition {numbers_of(request)[0]} cannot be reached: {error}") from error
        except PeerUnknownError as error:
            detail = f"the owner of partition {numbers_of(request)[0]} did not answer: {error}"
            raise SluicewayError("outcome_unknown", detail) from error

    # ---- whole queue ------------------------------------------------------------------------------------------

    async def count(self, record: QueueRecord) -> QueueStats:
        """Count the items of all partitions. Those whose owner does not answer have the state `unavailable` and no counts."""
        owners = self.owners(record)
        answers = await self._ask_all(record, owners, Count(), COUNT_TIMEOUT)
        found = {self._name(peer): each for peer, each in zip(owners, answers, strict=True) if isinstance(each, LogicalQueueStats)}
        record = self.share(record).record
        partitions: dict[str, list[PartitionStats]] = {name: [] for name in found}
        left = {each.partition for each in record.partitions}
        for name, share in found.items():
            # Both owners may report a partition that has just moved, and an instance that lags may report a removed one.
            partitions[name] = [each for each in share.partitions if each.partition in left]
            left -= {each.partition for each in partitions[name]}
        for each in record.partitions:
            if each.partition in left:
                unheard = PartitionStats(partition=each.partition, state="unavailable", backend=each.backend)
                partitions.setdefault(self._name(self.owner(record, each.partition)), []).append(unheard)
        logical_queues = [
            msgspec.structs.replace(
                found.get(name, LogicalQueueStats()), instance=name or None, partitions=sorted(parts, key=lambda part: part.partition)
            )
            for name, parts in partitions.items()
        ]
        return QueueStats(queue_name=record.queue_name, logical_queues=logical_queues)

    async def reasons(self, record: QueueRecord) -> Reasons:
        """Count the items of all partitions by why they died. Lists those whose owner does not answer."""
        answers = await self._ask_all(record, self.owners(record), CountReasons(), COUNT_TIMEOUT)
        shares = [each for each in answers if isinstance(each, ShareReasons)]
        found = Counter[tuple[str, str]]()
        for share in shares:
            for reason, source, count in share.reasons:
                found[reason, source] += count
        there = {number for share in shares for number in share.partitions}
        return Reasons(
            queue_name=record.queue_name,
            items=sum(share.items for share in shares),
            reasons=[
                ReasonCount(reason=reason, source=source or None, items=count) for (reason, source), count in found.most_common(MAX_REASONS)
            ],
            skipped=sorted(number for number in self.share(record).numbers if number not in there),
        )

    async def keys(self, record: QueueRecord, limit: int) -> QueueKeys:
        """The busiest keys of all partitions, and those that wait longest. Lists the partitions whose owner does not answer."""
        answers = await self._ask_all(record, self.owners(record), CountKeys(limit), KEYS_TIMEOUT)
        shares = [each for each in answers if isinstance(each, ShareKeys)]
        found = list(together(each for share in shares for each in share.keys))
        there = {number for share in shares for number in share.partitions}
        return QueueKeys(
            queue_name=record.queue_name,
            waiting=sum(share.waiting for share in shares),
            blocked=sum(share.blocked for share in shares),
            limited=sum(share.limited for share in shares),
            busiest=[_shown(each) for each in busiest(found, limit)],
            oldest=[_shown(each) for each in oldest(found, limit)],
            skipped=sorted(number for number in self.share(record).numbers if number not in there),
        )

    def _name(self, peer: Peer | None) -> str:
        return self._ownership.name if peer is HERE else peer.name if peer is not None else ""

    async def redrive(self, record: QueueRecord, request: Redrive) -> Redriven:
        """Redrive from one owner after the other, up to the limit."""
        deadline = system.now() + request.request_timeout
        total = Redriven()
        for peer in self.owners(record):
            if total.matched >= request.limit:
                break
            try:
                done: Redriven = await self.ask(record, peer, replace(timed(request, deadline), limit=request.limit - total.matched))
            except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
                if total.matched:
                    break
                raise plain(error) from error
            total.matched += done.matched
            total.redriven += done.redriven
            for target, items in done.targets.items():
                total.targets[target] = total.targets.get(target, 0) + items
        return total

    async def reload(self, record: QueueRecord, timeout: Millis) -> None:
        for each in await self._of_each(record, Reload(timeout)):
            if isinstance(each, SluicewayError):
                raise each

    async def close(self, record: QueueRecord, timeout: Millis, but: Container[Peer] = ()) -> dict[Peer, RemainingItems | SluicewayError]:
        """Have all instances except `but` refuse requests to the queue for `timeout` ms. Returns what each has left, or its error."""
        peers = [peer for peer in (HERE, *self._ownership.peers()) if peer not in but]
        return dict(zip(peers, await self._ask_all(record, peers, Close(timeout)), strict=True))

    async def _of_each(self, record: QueueRecord, request: ShareRequest) -> list[Any]:
        return await self._ask_all(record, self.owners(record), request)

    async def _ask_all(self, record: QueueRecord, peers: Iterable[Peer], request: ShareRequest, within: Millis | None = None) -> list[Any]:
        """Return the answer of each instance, or the error in its place."""
        asked = (self.ask(record, peer, request, within=within) for peer in peers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [plain(each) if isinstance(each, BaseException) else each for each in answers]

    async def search(self, record: QueueRecord, request: Search) -> SearchedQueue:
        """Search the partitions in turn, from the place `start` of `partition` on, within the bounds of one request. There may be none."""
        deadline = system.now() + request.request_timeout
        total, items = SearchedQueue(), 0
        numbers = sorted(number for number in self.share(record).numbers if number >= request.partition)
        for number, following in zip(numbers, [*numbers[1:], None], strict=False):
            start = request.start if number == request.partition else BEGIN
            left = replace(request, partition=number, start=start, limit=request.limit - items, rows=request.rows - total.looked_at)
            page = await self._search_one(record, timed(left, deadline))
            if page is None:
                total.skipped.append(number)
                page = SearchedPage()
            total.rows += page.rows
            total.looked_at += page.looked_at
            items += sum(batch.num_rows for batch, _ in page.rows)
            total.next = (number, page.next) if page.next is not None else None if following is None else (following, BEGIN)
            if page.next is not None or items >= request.limit or total.looked_at >= request.rows or system.now() >= deadline:
                break
        return total

    async def _search_one(self, record: QueueRecord, request: Search) -> SearchedPage | None:
        """Search one partition; None: it is not available. One that is broken must not hide what the others have."""
        try:
            page: SearchedPage = await self.ask(record, self.owner(record, request.partition), request)
            return page
        except (PeerRefusedError, PeerUnknownError):
            return None
        except SluicewayError as error:
            if error.code == "not_here":
                self.look()
            if error.code not in ("not_here", "unavailable", "partition_damaged", "outcome_unknown"):
                raise
            return None

    # ---- one partition ----------------------------------------------------------------------------------------

    async def list_items(self, record: QueueRecord, request: ListItems) -> ItemsPage:
        page: ItemsPage = await self.owner_of(record, request.partition, request)
        return page

    async def browse(self, record: QueueRecord, request: Browse) -> BrowsedPage:
        page: BrowsedPage = await self.owner_of(record, request.partition, request)
        return page

    async def explain(self, record: QueueRecord, partition: int, offset: int) -> Explanation:
        try:
            if not await self._is_there(record, partition):
                return _of_none(self.share(record).record, partition)
            found: Explanation = await self.owner_of(record, partition, Explain(partition, offset))
        except SluicewayError as error:
            if error.code not in ("unavailable", "outcome_unknown"):
                raise
            return Explanation("unavailable", error.detail)
        return found

    async def peek(self, record: QueueRecord, request: Peek) -> list[pa.RecordBatch]:
        if request.partition is not None:
            if request.lease is not None and not await self._is_there(record, request.partition):
                # The share here answers that it does not know the lease.
                owner = self.ask(record, HERE, request)
            else:
                owner = self.owner_of(record, request.partition, request)
            found: list[pa.RecordBatch] = await owner
            return found
        batches: list[pa.RecordBatch] = []
        for peer in self.owners(record):
            left = request.limit - sum(batch.num_rows for batch in batches)
            if left <= 0:
                break
            try:
                batches += await self.ask(record, peer, replace(request, limit=left))
            except (PeerRefusedError, PeerUnknownError, SluicewayError) as error:
                raise plain(error) from error
        return batches


def _not_unique(record: QueueRecord, request: Produce) -> SluicewayError:
    """Error for items with unique keys in a queue that would not look at them."""
    row = unique_rows(request.batch).rows[0]
    detail = f"queue {record.queue_name!r} keeps no items unique; set its `unique` to until_settled or while_waiting first"
    return invalid(f"items[{row}].unique_key", detail)


def no_partition(record: QueueRecord, number: int) -> SluicewayError:
    """Error for a partition that the queue does not have."""
    if number < record.given:
        return invalid("partition", f"partition {number} of the queue {record.queue_name!r} was removed by a rebalance")
    return invalid("partition", f"the queue {record.queue_name!r} has no partition {number}")


def _of_none(record: QueueRecord, number: int) -> Explanation:
    """Explanation of an item whose partition the queue does not have."""
    if number < record.given:
        return Explanation("gone", f"its partition {number} was removed by a rebalance when it was empty: the item was settled or moved")
    return Explanation("unknown", "this id was never assigned")


def _give_up(record: QueueRecord, request: Part, total: object, failures: Sequence[tuple[list[int], SluicewayError]]) -> None:
    """Raise the first error; a move that took effect in other partitions records it with the ids."""
    if not isinstance(total, MovedAway):
        raise failures[0][1]
    total.note_failures([(names_of(request, numbers, record.incarnation), error) for numbers, error in failures])


def _is(error: BaseException, code: str) -> bool:
    return isinstance(error, SluicewayError) and error.code == code


def timeout_of(request: Any) -> Millis:
    """Timeout of the request, in ms."""
    timeout: Millis = getattr(request, "request_timeout", LOOK_TIMEOUT)
    return NO_WAIT if timeout == 0 and isinstance(request, Lease | LeaseAnywhere) else timeout


def timed(request: Any, deadline: Millis) -> Any:
    """Return the request with the time left until the deadline as its timeout. A lease that does not wait for items still does not: its
    deadline is for reaching the owner."""
    if isinstance(request, LeaseAnywhere):
        return LeaseAnywhere(timed(request.lease, deadline))
    left = max(0, deadline - system.now())
    return replace(request, request_timeout=left) if getattr(request, "request_timeout", 0) not in (0, left) else request


async def _outcome(asked: Awaitable[T]) -> T | Exception:
    """Return the answer, or the error in its place."""
    try:
        return await asked
    except Exception as error:
        return error


def plain(error: BaseException) -> SluicewayError:
    """Translate the error for a client. An unexpected error, which is a bug, is raised."""
    if isinstance(error, PeerRefusedError):
        return SluicewayError("unavailable", f"an owner of the queue's partitions cannot be reached: {error}")
    if isinstance(error, PeerUnknownError):
        return SluicewayError("outcome_unknown", f"an owner of the queue's partitions did not answer: {error}")
    if isinstance(error, SluicewayError):
        return SluicewayError("unavailable", error.detail) if error.code == "not_here" else error
    raise error


def _shown(key: KeyCount) -> WaitingKey:
    return WaitingKey(
        key=key.text,
        waiting=key.waiting,
        leased=key.leased,
        returned=key.returned,
        oldest_at=time_field(key.oldest_at),
        blocked_by=key.blocked_by,
    )
