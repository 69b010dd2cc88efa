"""Ledger of one queue: every answer to a client is checked against what is durable at that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from simulation.causes import Asks
from simulation.item_history import ItemHistory
from simulation.known_items import Batch, Held, Item, Way
from simulation.promises import check
from simulation.scene import LEASED
from simulation.store import Store
from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.core.partition.queries import open_slices
from sluiceway.core.queue.tickets import Grant, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import ItemId
from sluiceway.model.leased_items import Slice
from sluiceway.model.requests import Lease, LeaseInfo, Produced, ProduceKey, Settled, Verdict

OUTCOME: dict[Verdict, IgnoredReason] = {"done": "completed", "retry": "retried", "dead": "dead", "release": "released"}


class Ledger:
    """Every item ever sent to a queue, and every promise about it. All times are the owner's."""

    def __init__(self, incarnation: str, partitions: int) -> None:
        self.incarnation = incarnation
        self.stores = [Store() for _ in range(partitions)]
        self.items: dict[str, Item] = {}
        self.batches: dict[ProduceKey | None, list[Batch]] = {}
        self.leases: dict[tuple[int, int], Held] = {}
        self.told: dict[str, set[tuple[int, ...]]] = {}
        """Leases granted to each client that was answered in time: no others may ever be taken for it. Each client asks once."""
        self.asks = Asks()
        self.trails = [ItemHistory(incarnation, number, self.items, self.asks, self.leases) for number in range(partitions)]
        for store, trail in zip(self.stores, self.trails, strict=True):
            store.trail = trail
        self.tally: Counter[str] = Counter()

    def clock(self, partition: int, now: Millis) -> Millis:
        """Return the latest time that the partition has acted on: a former owner's clock may have been ahead."""
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

    def arriving(self, key: ProduceKey, items: Sequence[Item], rows: pa.RecordBatch, way: Way) -> Batch:
        """Return the batch of a transfer to this queue, which may be a repetition."""
        if key in self.batches:
            batch = self.batches[key][0]
            check(list(batch.items) == items, "the same transfer has other items when it is repeated")
            return batch
        batch = Batch(key, items, rows, way)
        self.items.update((item.payload, item) for item in items)
        self.batches[key] = [batch]
        return batch

    def produced(self, batch: Batch, answer: Produced) -> None:
        check(answer.items == len(batch.items), "the answer counts other items than were sent")
        if batch.answer is not None:
            check(batch.key is not None, "a produce without a key was answered twice")
            check(answer == batch.answer._replace(deduplicated=True), "a repetition has another answer")
            return
        if batch.key is not None:
            rivals = [other for other in self.batches[batch.key] if other is not batch and other.answer]
            check(not rivals, "two bodies were taken under one key")
        for index, item in enumerate(batch.items):
            if batch.way is not None:
                check(item.payload in batch.way.arrived, "a transfer was acknowledged before it was durable")
            else:
                told = str(ItemId(self.incarnation, answer.partition, answer.first_offset + index))
                check(item.origin is not None, "acknowledged before it was durable")
                check(item.origin == told, f"{item.payload} has another id than its producer was told")
        batch.answer = answer
        self.tally["produced"] += answer.items

    # ---- lease ------------------------------------------------------------------------------------------------

    def granted(self, request: Lease, grants: Sequence[Grant], asked_at: Millis, now: Millis) -> list[Held]:
        """Check a lease answer. Returns the leases that were not known before."""
        check(len({grant.info.partition for grant in grants}) == len(grants) or request.lease_key is not None, "one partition, two leases")
        known = [self.leases.get((grant.info.partition, grant.info.number)) for grant in grants]
        # Once the client has begun to settle leases of a key, a call still waiting with that key may take more.
        if not any(held is not None and held.loose for held in known):
            check(len(grants) <= request.max_partitions, "more partitions than were asked for")
            check(sum(grant.info.items for grant in grants) <= request.batch_size, "more items than were asked for")
        if request.lease_key is not None:
            self._check_keyed(request, {grant.info[:2] for grant in grants}, asked_at, now)
        fresh = [self._grant(request, grant, now) for grant in grants]
        return [held for held in fresh if held is not None]

    def _check_keyed(self, request: Lease, answered: set[tuple[int, ...]], asked_at: Millis, now: Millis) -> None:
        # Leases of a damaged partition are useless, and may be left out.
        # An empty answer: the call's leases may have expired before they were durable, and a later call may have taken more.
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
        """Whether no request has asked for the lease's end, by settling or by an extension to an earlier time."""
        held = self.leases.get((partition, number))
        return held is None or (not held.loose and held.deadline > now)

    def _grant(self, request: Lease, grant: Grant, now: Millis) -> Held | None:
        info: LeaseInfo = grant.info
        store = self.stores[info.partition]
        known = self.leases.get((info.partition, info.number))
        check(known is None or request.lease_key is not None, "an old lease was given again")
        if known is not None and known.loose:
            return None  # the client's own calls in flight decide what is left of it
        lease = store.look().leases.get(info.number)
        check(lease is not None, "a lease was answered that is not durable, or is over")
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
        for piece in durable:
            self._serve(store, piece, held)
        held.offsets = tuple(held.items)
        self.leases[held.name] = held
        self.tally["leased"] += len(offsets)
        return held

    def _serve(self, store: Store, piece: Slice, held: Held) -> None:
        places = store.scene().alive
        for offset, row, sent in zip(piece.offsets.tolist(), piece.rows.tolist(), store.rows_of([piece]), strict=True):
            item, place = self.items[sent.payload], places[sent.payload]
            check(piece.attempts == place.attempts + 1, f"{item.payload} is served with other attempts")
            check(sent.reference == item.reference, f"{item.payload} has lost or changed a column")
            here = str(ItemId(self.incarnation, held.partition, piece.blob + row))
            check((sent.origin or here) == item.origin, f"{item.payload} has another origin")
            held.items[offset] = item

    def lease_answered(self, ticket: Ticket) -> None:
        """Note what the server says that the request took. Any further lease for it would be held by no consumer."""
        request = ticket.request
        if isinstance(request, Lease) and request.lease_key is None:
            self.told[request.client_id] = {grant.info[:2] for grant in ticket.grants}

    # ---- settle -----------------------------------------------------------------------------------------------

    def settled(self, held: Held, verdicts: Mapping[int, set[Verdict]], answer: Settled, ignored: Collection[int]) -> None:
        """Check a successful settle call, for all but the ignored offsets."""
        trail = self.trails[held.partition]
        seen: Counter[str] = Counter()
        for offset, allowed in verdicts.items():
            if offset in ignored:
                continue
            dispositions = trail.dispositions.get(offset)
            check(dispositions is not None, "a settle was answered before it was durable")
            assert dispositions is not None
            # A retry or a release may have been the item's last. An earlier call without an answer may have settled it.
            outcomes = {OUTCOME[verdict] for verdict in allowed} | {"dead"}
            check(held.uncertain or bool(dispositions & outcomes), "a settle did something else than was asked")
            check("expired" not in dispositions, "an item was settled after its lease ran out")
            seen.update(("completed" if "completed" in dispositions else min(dispositions),))
            held.items.pop(offset, None)
        told = {"completed": answer.completed, "retried": answer.retried, "dead": answer.dead, "released": answer.released}
        check(
            held.uncertain or told == {disposition: seen[disposition] for disposition in told},
            f"a settle counts {told}, and {dict(seen)} happened",
        )
        self.tally.update({verdict: told[OUTCOME[verdict]] for verdict in OUTCOME})

    def check_ignored(self, partition: int, client_id: str | None, answer: Iterable[tuple[str, IgnoredReason]]) -> None:
        """Check the reasons given for ignored items of one partition. `client_id`: the call's."""
        store, trail = self.stores[partition], self.trails[partition]
        scene = store.scene()
        live = {place.offset: place for place in scene.alive.values() if place.offset >= 0}
        for name, reason in answer:
            offset = int(name.rpartition(".")[2])
            before = trail.before(offset)
            # The same cycle may have changed it once more.
            then: set[IgnoredReason] = {"not_yours"} if before is not None and client_id not in (None, before) else set()
            allowed: set[IgnoredReason]
            if not 0 <= offset < scene.header.next:
                allowed = {"unknown"}
            elif offset in live and live[offset].kind == LEASED:
                owner = trail.clients[live[offset].lease]
                allowed = {"not_yours"} if client_id is not None and owner != client_id else set()
                # Within a cycle settles come before leases.
                allowed |= {"not_leased"} if live[offset].lease in trail.newest else set()
            elif offset in live:
                allowed = {"not_leased"}
            else:
                allowed = trail.dispositions.get(offset, {"settled", "not_leased"})
            check(reason in allowed | then, f"{name} is said to be {reason}, and is {' or '.join(sorted(allowed)) or 'leased'}")

    def check_lease_ignored(self, held: Held, client_id: str | None, reason: IgnoredReason) -> None:
        """Check the reason given for an ignored lease."""
        if held.number in self.stores[held.partition].scene().leases:
            check(client_id not in (None, held.client_id) and reason == "not_yours", f"a live lease is said to be {reason}")
            return
        trail = self.trails[held.partition]
        if reason == "not_yours" and held.number in trail.old.leases and client_id not in (None, held.client_id):
            return  # the same cycle has ended it
        dispositions = trail.dispositions
        known = [dispositions.get(offset, set()) for offset in held.offsets]
        allowed: set[IgnoredReason] = {"completed", "settled"}
        for end in ("released", "expired"):
            # Certain if it is the only outcome; otherwise several causes could have had the same effect.
            if {end} in known:
                allowed = {end}
            elif any(end in each for each in known):
                allowed.add(end)
        check(reason in allowed, f"a lease is said to be {reason}, and is {' or '.join(sorted(allowed))}")
