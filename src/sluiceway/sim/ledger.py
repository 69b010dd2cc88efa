"""What the clients of one queue were told, checked against what is durable at that moment."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from sluiceway.core.looking import open_slices
from sluiceway.core.tickets import Grant, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import ItemId
from sluiceway.model.leased import Slice
from sluiceway.model.requests import Lease, LeaseInfo, Produced, ProduceKey, Settled, Verdict
from sluiceway.sim.checks import check
from sluiceway.sim.items import Batch, Held, Item
from sluiceway.sim.store import Store


class Ledger:
    """Every item of a queue, and every promise about it. All times are its owner's."""

    def __init__(self, incarnation: str, partitions: int, max_attempts: int, keeps_dead: bool) -> None:
        self.incarnation = incarnation
        self.max_attempts = max_attempts
        self.keeps_dead = keeps_dead
        self.stores = [Store(max_attempts, keeps_dead) for _ in range(partitions)]
        self.items: dict[str, Item] = {}
        self.batches: dict[ProduceKey | None, list[Batch]] = {}
        self.leases: dict[tuple[int, int], Held] = {}
        self.told: dict[str, set[tuple[int, ...]]] = {}
        """Of those leases that were answered in time, by client (each asks once): all that may ever be taken for it."""
        self.orders: list[list[tuple[int, int, int]]] = [[] for _ in range(partitions)]
        """Of first-time items, by partition: (lease, lowest, highest offset that its producer was told)."""
        self.tally: Counter[str] = Counter()

    def clock(self, partition: int, now: Millis) -> Millis:
        """The latest time that the partition has acted on: an earlier owner's clock may have been ahead of this one's."""
        return max(now, self.stores[partition].now)

    # ---- produce ----------------------------------------------------------------------------------------------

    def add(self, key: ProduceKey | None, items: Sequence[Item], rows: pa.RecordBatch) -> Batch:
        batch = Batch(key, items, rows)
        for item in items:
            check(item.payload not in self.items, f"{item.payload} comes a second time")
            item.batch = batch
            self.items[item.payload] = item
        self.batches.setdefault(key, []).append(batch)
        return batch

    def produced(self, batch: Batch, answer: Produced) -> None:
        store = self.stores[answer.partition]
        check(answer.items == len(batch.items), "the answer counts other items than were sent")
        check(answer.first_offset + answer.items <= store.look().header.next, "acknowledged before it was durable")
        if batch.answer is not None:
            check(batch.key is not None, "a produce without a key was answered twice")
            check(answer == batch.answer._replace(deduplicated=True), "a repetition has another answer")
            return
        if batch.key is not None:
            rivals = [other for other in self.batches[batch.key] if other is not batch and other.answer]
            check(not rivals, "two bodies were taken under one key")
        if not answer.deduplicated:
            # Nobody can have settled what nobody has been told of yet.
            spots = {payload for payload, _ in store.places()}
            check(all(item.payload in spots for item in batch.items), "acknowledged before it was durable")
        batch.answer = answer
        self.tally["produced"] += answer.items

    # ---- lease ------------------------------------------------------------------------------------------------

    def granted(self, request: Lease, grants: Sequence[Grant], asked_at: Millis, now: Millis) -> list[Held]:
        """Check an answer; returns the leases that were not known before."""
        check(len({grant.info.partition for grant in grants}) == len(grants) or request.lease_key is not None, "one partition, two leases")
        known = [self.leases.get((grant.info.partition, grant.info.number)) for grant in grants]
        # Once a client has begun to settle what a key took, a call that still waits with that key may take more.
        if not any(held is not None and held.loose for held in known):
            check(len(grants) <= request.max_partitions, "more partitions than were asked for")
            check(sum(grant.info.items for grant in grants) <= request.batch_size, "more items than were asked for")
        if request.lease_key is not None:
            self._check_keyed(request, {grant.info[:2] for grant in grants}, asked_at, now)
        fresh = [self._grant(request, grant, now) for grant in grants]
        return [held for held in fresh if held is not None]

    def _check_keyed(self, request: Lease, answered: set[tuple[int, ...]], asked_at: Millis, now: Millis) -> None:
        # Leases of a damaged partition are of no use to anybody, and need not be told of.
        # An empty answer: what the call took may have run out before it was durable, and a later call may have taken more since.
        until = now if answered else asked_at - 1
        client_id, lease_key = request.client_id, request.lease_key or ""
        untouched = {
            held.name
            for held in self.leases.values()
            if (held.client_id, held.lease_key) == (client_id, lease_key)
            and not held.loose
            and self.stores[held.partition].is_sound
            and held.deadline > self.clock(held.partition, now)
            and held.told_at <= until
        }
        check(untouched <= answered, "a repeated lease key did not find all its leases")
        check(not untouched or answered <= self.leases.keys(), "a repeated lease key took more")
        durable = {
            (number, lease.number)
            for number, store in enumerate(self.stores)
            if store.is_sound
            for lease in store.look().keyed(client_id, lease_key)
            if (lease.deadline or 0) > now and self._is_untouched(number, lease.number, now)
        }
        check(not answered or durable <= answered, "a lease that the key took was left out of the answer")

    def _is_untouched(self, partition: int, number: int, now: Millis) -> bool:
        """Nobody has asked for its end: neither by settling nor by an extension to an earlier time."""
        held = self.leases.get((partition, number))
        return held is None or (not held.loose and held.deadline > now)

    def _grant(self, request: Lease, grant: Grant, now: Millis) -> Held | None:
        info: LeaseInfo = grant.info
        store = self.stores[info.partition]
        known = self.leases.get((info.partition, info.number))
        check(known is None or request.lease_key is not None, "an old lease was given again")
        if known is not None and known.loose:
            return None  # what the client itself has in flight decides what is left of it
        lease = store.look().leases.get(info.number)
        check(lease is not None, "a lease was answered before it was durable")
        assert lease is not None
        durable = open_slices(lease)
        offsets = [offset for piece in durable for offset in piece.offsets.tolist()]
        check(
            offsets == [offset for piece in grant.slices for offset in piece.offsets.tolist()], "the answer has other items than the lease"
        )
        check(info.lease_deadline > now, "a lease that is over was answered")
        # An extension may be in flight.
        check(lease.deadline == info.lease_deadline or known is not None, "a lease was answered with another deadline")
        check(lease.client_id == request.client_id, "a lease of somebody else was answered")
        check(len(offsets) == info.items > 0, "a lease of other size than the answer says")
        if known is not None:
            return None
        held = Held(info.partition, info.number, request.client_id, request.lease_key, info.lease_deadline, now, {})
        at = self.clock(info.partition, now)
        firsts: list[int] = []
        for piece in durable:
            self._serve_slice(store, piece, held, at, firsts)
        if firsts:
            check(firsts == sorted(firsts), "items of one lease are out of order")
            self._check_order(info.partition, (info.number, firsts[0], firsts[-1]))
        self.leases[held.name] = held
        self.tally["leased"] += len(offsets)
        return held

    def _serve_slice(self, store: Store, piece: Slice, held: Held, now: Millis, firsts: list[int]) -> None:
        for offset, row, sent in zip(piece.offsets.tolist(), piece.rows.tolist(), store.rows_of([piece]), strict=True):
            item = self.items.get(sent.payload)
            check(item is not None, f"a payload that nobody sent: {sent.payload!r}")
            assert item is not None
            check((sent.reference, sent.origin) == (item.reference, item.origin), f"{item.payload} has lost or changed a column")
            self._serve(item, piece.attempts, held, now)
            held.items[offset] = item
            answer = item.batch.answer
            if answer is not None:
                told = answer.first_offset + item.index
                check((held.partition, piece.blob + row) == (answer.partition, told), f"{item.payload} has changed its origin")
                if piece.attempts == 1 and not item.scheduled:
                    firsts.append(told)

    def _serve(self, item: Item, attempt: int, held: Held, now: Millis) -> None:
        check(item.batch.may_exist, "a phantom: its produce was refused")
        check(not item.gone, f"{item.payload} came back after it was settled")
        check(not item.dying, "a dead item was served")
        check(item.not_before <= now, f"{item.payload} was served before it was due")
        check(attempt > item.attempts, "attempts do not grow")
        check(not self.max_attempts or attempt <= self.max_attempts, "more attempts than are allowed")
        other = item.held
        check(other is None or other.loose or other.deadline <= now, "two live leases hold one item")
        item.seen, item.attempts, item.held = True, attempt, held

    def _check_order(self, partition: int, mine: tuple[int, int, int]) -> None:
        order = self.orders[partition]
        insort(order, mine)
        at = order.index(mine)
        check(at == 0 or order[at - 1][2] < mine[1], "an item was served before one that was produced earlier")
        check(at + 1 == len(order) or mine[2] < order[at + 1][1], "an item was served before one that was produced earlier")

    def lease_answered(self, ticket: Ticket) -> None:
        """The server has said what the request took. What else it took would be leased to nobody."""
        request = ticket.request
        if isinstance(request, Lease) and request.lease_key is None:
            self.told[request.client_id] = {grant.info[:2] for grant in ticket.grants}

    # ---- settle -----------------------------------------------------------------------------------------------

    def settling(self, held: Held, verdicts: Mapping[int, Verdict]) -> None:
        """A call is on its way that may end or move these items."""
        held.loose = True
        for offset, verdict in verdicts.items():
            held.items[offset].ending += verdict != "retry"

    def settled(self, held: Held, verdicts: Mapping[int, Verdict], ignored: set[int], not_before: Millis) -> None:
        """The call has succeeded, for all but the ignored offsets."""
        lease = self.stores[held.partition].look().leases.get(held.number)
        still = set() if lease is None else {offset for piece in open_slices(lease) for offset in piece.offsets.tolist()}
        check(not still & verdicts.keys(), "a settle was answered before it was durable")
        for offset, verdict in verdicts.items():
            item = held.items[offset]
            item.ending -= verdict != "retry"
            if offset in ignored or held.uncertain:
                item.ending += verdict != "retry" and held.uncertain
                continue
            del held.items[offset]
            self.tally[verdict] += 1
            if verdict == "done" or (verdict == "dead" and not self.keeps_dead):
                item.gone = True
            elif verdict == "dead":
                item.dying = True
            else:
                item.not_before = max(item.not_before, not_before)

    @staticmethod
    def check_counts(answer: Settled, asked: int) -> None:
        check(answer.total + len(answer.ignored) == asked, "an id was neither settled nor ignored")

    def origin_of(self, item: Item) -> str | None:
        """The id that its producer was told; None if nobody was told."""
        answer = item.batch.answer
        return None if answer is None else str(ItemId(self.incarnation, answer.partition, answer.first_offset + item.index))
