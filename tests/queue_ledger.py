"""The checker of the simulated world: what clients were told, held against what is durable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from sluiceway.core.looking import load, open_slices, ready_slices, stats_of
from sluiceway.core.partition import Partition
from sluiceway.core.records import to_array
from sluiceway.core.tickets import Grant, Transfer
from sluiceway.kernel.clock import Millis
from sluiceway.model.items import batch_from_rows, decode_blob
from sluiceway.model.leased import Slice
from sluiceway.model.requests import Fate, Lease, LeaseInfo, Produced, ProduceKey, Settled
from sluiceway.ports.partition_store import Changes, RecordKey, Snapshot

EVERYTHING = 10**9


class Store:
    """One partition in a store: a few dicts and the fence (grant, opening) that may write."""

    def __init__(self, max_attempts: int, keeps_dead: bool) -> None:
        self._options = (max_attempts, keeps_dead)
        self.txn = 0
        self.fence = (0, 0)
        self.header: bytes | None = None
        self.records: dict[RecordKey, bytes] = {}
        self.blobs: dict[int, bytes] = {}
        self._rows: dict[int, list[str]] = {}
        self._seen: Partition | None = None

    def load(self) -> Partition:
        """A machine of its own in the durable state."""
        max_attempts, keeps_dead = self._options
        return load(Snapshot(self.txn, self.header, dict(self.records)), max_attempts=max_attempts, keeps_dead=keeps_dead)

    def look(self) -> Partition:
        """The durable state, to look at only."""
        if self._seen is None:
            self._seen = self.load()
        return self._seen

    def apply(self, changes: Changes, fence: tuple[int, int]) -> bool:
        """Whether the changes landed; what a lower fence brings is shut out."""
        if fence != self.fence:
            return False
        assert changes.txn == self.txn + 1, "a change set that does not follow the last"
        self.txn, self.header, self._seen = changes.txn, changes.header, None
        self.records.update(changes.puts)
        for key in changes.deletes:
            self.records.pop(key, None)
        self.blobs.update(changes.blobs)
        for number in (*changes.blobs, *changes.dropped_blobs):
            self._rows.pop(number, None)
        for number in changes.dropped_blobs:
            del self.blobs[number]
        return True

    def payloads(self, pieces: Sequence[Slice]) -> list[str]:
        """What a consumer would be sent. Every blob must be durable."""
        return [self.row(piece.blob, row) for piece in pieces for row in piece.rows.tolist()]

    def row(self, blob: int, row: int) -> str:
        if blob not in self._rows:
            known = self.look().blobs[blob]
            rows = decode_blob(self.blobs[blob], known.columns)
            self._rows[blob] = [payload.decode() for payload in rows.column("payload").to_pylist()]
        return self._rows[blob][row]


@dataclass(eq=False)
class Batch:
    """One body of a produce, asked for once or, with a key, several times."""

    key: ProduceKey | None
    items: list[Item]
    asking: int = 0
    unknown: bool = False
    answer: Produced | None = None

    @property
    def may_exist(self) -> bool:
        return bool(self.asking) or self.unknown or self.answer is not None

    def rows(self) -> pa.RecordBatch:
        return batch_from_rows([{"payload": item.payload.encode(), **item.when} for item in self.items])


@dataclass(eq=False)
class Item:
    payload: str
    not_before: Millis
    when: dict[str, object]
    batch: Batch = field(init=False)
    seen: bool = False
    ending: int = 0
    """Calls that may end its life and whose outcome is not known (yet)."""
    gone: bool = False
    dying: bool = False
    attempts: int = 0
    held: Held | None = None


@dataclass(eq=False)
class Held:
    """A lease as its consumer knows it. Once it is `loose` its items may be anywhere."""

    partition: int
    number: int
    client_id: str
    lease_key: str | None
    deadline: Millis
    told_at: Millis
    items: dict[int, Item]
    staged: dict[int, str] = field(default_factory=dict)
    loose: bool = False
    uncertain: bool = False

    @property
    def name(self) -> tuple[int, int]:
        return self.partition, self.number


class Ledger:
    """Every item, and every promise about it. A broken one is an AssertionError."""

    def __init__(self, partitions: int, max_attempts: int, keeps_dead: bool) -> None:
        self.max_attempts = max_attempts
        self.keeps_dead = keeps_dead
        self.stores = [Store(max_attempts, keeps_dead) for _ in range(partitions)]
        self.items: dict[str, Item] = {}
        self.batches: list[Batch] = []
        self.leases: dict[tuple[int, int], Held] = {}
        self.buried: dict[int, tuple[int, list[str]]] = {}
        self.dead: Counter[str] = Counter()
        self.tally: Counter[str] = Counter()

    # Produce

    def new_batch(self, key: ProduceKey | None, dues: Sequence[Millis | None]) -> Batch:
        when: list[dict[str, object]] = [{} if due is None else {"enqueue_at": due} for due in dues]
        numbers = range(len(self.items), len(self.items) + len(dues))
        items = [Item(f"i{n}", due or 0, at) for n, due, at in zip(numbers, dues, when, strict=True)]
        batch = Batch(key, items)
        for item in items:
            item.batch = batch
            self.items[item.payload] = item
        self.batches.append(batch)
        return batch

    def produced(self, batch: Batch, answer: Produced) -> None:
        store = self.stores[answer.partition]
        durable = store.look()
        assert answer.items == len(batch.items)
        assert answer.first_offset + answer.items <= durable.header.next, "acknowledged before it was durable"
        if batch.answer is not None:
            assert batch.key is not None, "an unkeyed produce was answered twice"
            assert answer == batch.answer._replace(deduplicated=True), "a repetition has another answer"
            return
        rivals = [other for other in self.batches if other is not batch and batch.key and other.key == batch.key and other.answer]
        assert not rivals, "two bodies were taken under one key"
        if not answer.deduplicated:
            # Nobody can have settled what nobody has been told of yet.
            spots = {payload for payload, _ in self._places(store)}
            assert all(item.payload in spots for item in batch.items), "acknowledged before it was durable"
        batch.answer = answer
        self.tally["produced"] += answer.items

    # Lease

    def granted(self, request: Lease, grants: Sequence[Grant], asked_at: Millis, now: Millis) -> list[Held]:
        """Check an answer; returns the leases that were not known before."""
        assert len({grant.info.partition for grant in grants}) == len(grants) or request.lease_key is not None
        assert len(grants) <= request.max_partitions, "more partitions than were asked for"
        assert sum(grant.info.items for grant in grants) <= request.batch_size, "more items than were asked for"
        if request.lease_key is not None:
            self._check_keyed(request, {grant.info[:2] for grant in grants}, asked_at, now)
        fresh = [self._grant(request, grant, now) for grant in grants]
        return [held for held in fresh if held is not None]

    def _check_keyed(self, request: Lease, answered: set[tuple[int, ...]], asked_at: Millis, now: Millis) -> None:
        # An empty answer: what the call took may have run out before it was durable, and a later call may have taken more since.
        until = now if answered else asked_at - 1
        client_id, lease_key = request.client_id, request.lease_key or ""
        untouched = {
            held.name
            for held in self.leases.values()
            if (held.client_id, held.lease_key) == (client_id, lease_key)
            and not held.loose
            and held.deadline > now
            and held.told_at <= until
        }
        assert untouched <= answered, "a repeated lease key did not find all its leases"
        assert not untouched or answered <= self.leases.keys(), "a repeated lease key took more"
        durable = {
            (number, lease.number)
            for number, store in enumerate(self.stores)
            for lease in store.look().keyed(client_id, lease_key)
            if (lease.deadline or 0) > now and self._is_untouched(number, lease.number)
        }
        assert not answered or durable <= answered, "a lease that the key took was left out of the answer"

    def _is_untouched(self, partition: int, number: int) -> bool:
        held = self.leases.get((partition, number))
        return held is None or not held.loose

    def _grant(self, request: Lease, grant: Grant, now: Millis) -> Held | None:
        info: LeaseInfo = grant.info
        store = self.stores[info.partition]
        lease = store.look().leases.get(info.number)
        assert lease is not None, "a lease was answered before it was durable"
        durable = open_slices(lease)
        assert [s.offsets.tolist() for s in durable] == [s.offsets.tolist() for s in grant.slices]
        assert lease.deadline == info.lease_deadline
        assert lease.client_id == request.client_id
        offsets = [offset for piece in durable for offset in piece.offsets.tolist()]
        assert len(offsets) == info.items > 0
        known = self.leases.get((info.partition, info.number))
        if known is not None:
            assert request.lease_key is not None, "an old lease was given again"
            return None
        items = [self.items[payload] for payload in store.payloads(durable)]
        held = Held(info.partition, info.number, request.client_id, request.lease_key, info.lease_deadline, now, {})
        attempts = [piece.attempts for piece in durable for _ in piece.rows]
        for offset, item, attempt in zip(offsets, items, attempts, strict=True):
            self._serve(item, attempt, held, now)
            held.items[offset] = item
        self.leases[held.name] = held
        self.tally["leased"] += len(items)
        return held

    def _serve(self, item: Item, attempt: int, held: Held, now: Millis) -> None:
        assert item.batch.may_exist, "a phantom: its produce was refused"
        assert not item.gone, "an item came back after it was settled"
        assert not item.dying, "a dead item was served"
        assert item.not_before <= now, "served before it was due"
        assert attempt > item.attempts, "attempts do not grow"
        assert not self.max_attempts or attempt <= self.max_attempts
        other = item.held
        assert other is None or other.loose or other.deadline <= now, "two live leases hold one item"
        item.seen, item.attempts, item.held = True, attempt, held

    # Settle

    def settling(self, held: Held, verdicts: dict[int, str]) -> None:
        """A call is on its way that may end or move these items."""
        held.loose = True
        for offset, verdict in verdicts.items():
            held.items[offset].ending += verdict != "retry"

    def settled(self, held: Held, verdicts: dict[int, str], ignored: set[int], not_before: Millis) -> None:
        """The call has succeeded, for all but the ignored offsets."""
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
        assert answer.total + len(answer.ignored) == asked, "an id was neither settled nor ignored"

    # Dead queue

    def bury(self, effect: Transfer) -> bool:
        """The dead queue takes a transfer; one whose number it had last it has already, a lower one it refuses."""
        number, body = self.buried.get(effect.partition, (0, []))
        store = self.stores[effect.partition]
        if effect.number < number:
            return False
        if effect.number == number:
            return True
        assert effect.number in store.look().transfers, "a transfer was started before it was durable"
        body = store.payloads(effect.slices)
        self.buried[effect.partition] = (effect.number, body)
        self.dead.update(body)
        return True

    # The audit

    def _places(self, store: Store) -> Iterator[tuple[str, str]]:
        durable = store.look()
        yield from ((payload, "ready") for payload in store.payloads(ready_slices(durable, EVERYTHING)))
        for lease in durable.leases.values():
            yield from ((payload, "leased") for payload in store.payloads(open_slices(lease)))
        for lease in durable.transfers.values():
            yield from ((payload, "dying") for payload in store.payloads(open_slices(lease)))
        for due in durable.dues.values():
            yield from ((store.row(due.blob.number, row), "due") for row in to_array(due.rows).tolist())

    def audit(self) -> None:
        """Hold what is durable right now against everything that was ever acknowledged."""
        alive: Counter[str] = Counter()
        dying: Counter[str] = Counter()
        for number, store in enumerate(self.stores):
            for payload, place in self._places(store):
                (dying if place == "dying" else alive)[payload] += 1
            stats = stats_of(store.look(), number)
            assert stats.produced == stats.completed + stats.dead + stats.total + stats.transferring, "the counters do not balance"
        assert alive.keys() | dying.keys() <= self.items.keys()
        for payload, item in self.items.items():
            dead = dying[payload] or self.dead[payload]
            count = alive[payload] + (1 if dead else 0)
            assert dying[payload] <= 1, f"{payload} dies twice"
            assert self.dead[payload] <= 1, f"{payload} was buried twice"
            assert count <= 1, f"{payload} is duplicated"
            if not item.batch.may_exist:
                assert count == 0, f"{payload} exists although its produce was refused"
            if item.gone:
                assert count == 0, f"{payload} exists although it was settled"
            elif item.dying:
                assert dead, f"{payload} was lost on its way to the dead queue"
            elif (item.seen or item.batch.answer) and not item.ending:
                assert count == 1, f"{payload} is lost"


def fate_of(verdict: str, after: Millis) -> Fate:
    if verdict == "retry":
        return Fate("retry", retry_after=after)
    return Fate("dead", reason="bad") if verdict == "dead" else Fate("done")
