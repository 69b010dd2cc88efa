"""What the partition machine is judged by: a naive model with one object an item."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.records import MOVED, Header
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP, KEY_WINDOW, MAX_CLOCK_STEP
from sluiceway.model.requests import DONE, MOVE_GROUP, RELEASE, TRANSFER_GROUP, Disposition, MovedItem, ProduceKey, Settled
from tests.core.core_model import Row
from tests.core.partition_spots import Place, Spot, spots_of

LIVE: tuple[Place, ...] = ("ready", "leased", "due", "dying")


@dataclass
class Item:
    """One item. `offset` None: it has one of its own choosing or none, see `Model.adopt`; `attempts` are those before its present lease."""

    origin: int
    row: Row
    place: Place
    offset: int | None
    attempts: int = 0
    number: int | None = None
    due_at: Millis | None = None
    reason: str = ""
    target: str | None = None
    staged: Disposition | None = None
    expires_at: Millis = 0
    max_lease_size: int = 0
    """The largest lease that may hold it; 0: any."""
    enqueued_at: Millis = 0


@dataclass
class ModelLease:
    """A lease and what became of its items: how each that has left it did, by its offset there."""

    client_id: str
    deadline: Millis
    lease_key: str | None
    dispositions: dict[int, IgnoredReason] = field(default_factory=dict)

    @property
    def is_told_apart(self) -> bool:
        """Whether not all of it was completed. Only then is it stored when it is over."""
        return any(disposition != "completed" for disposition in self.dispositions.values())

    def how(self) -> IgnoredReason:
        """What is said of the lease once it is over."""
        dispositions = set(self.dispositions.values())
        return "expired" if "expired" in dispositions else "released" if "released" in dispositions else "completed"


class Group(NamedTuple):
    sequence: int
    keys: dict[str, tuple[list[Row], int]]
    used_at: Millis


@dataclass
class Model:
    """The same contract as `Partition`, item by item. It does not foresee the new offsets of items that are put back: it adopts them."""

    rules: Rules
    remembers: int
    """Leases that are remembered after their end."""
    items: dict[int, Item] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    closed: dict[int, ModelLease] = field(default_factory=dict)
    header: Header = field(default_factory=Header)
    lease_of: dict[int, int] = field(default_factory=dict)
    """The lease that each offset was ever in."""
    floor: int = 0
    """Offsets that are adopted must be at least this: the machine's `next` before the step."""
    lone: dict[str, tuple[list[Row], int, Millis]] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    def at(self, *places: Place) -> list[Item]:
        return [item for item in self.items.values() if item.place in places]

    def ready(self) -> list[Item]:
        return sorted(self.at("ready"), key=lambda item: item.offset or 0)

    def leasable(self, now: Millis) -> list[Item]:
        """What comes before the first item that has expired: called back from its way to the dead queue, it waits for the next tick."""
        return list(takewhile(lambda item: not 0 < item.expires_at <= now, self.ready()))

    def leased(self, number: int | None = None) -> list[Item]:
        found = [item for item in self.at("leased") if number is None or item.number == number]
        return sorted(found, key=lambda item: item.offset or 0)

    def moment(self, now: Millis) -> Millis:
        """The time that is noted: it goes back only where it was far ahead."""
        if self.header.now < now or self.header.now > now + MAX_CLOCK_STEP:
            self.header.now = now
        return self.header.now

    # Produce

    def produce(self, rows: list[Row], now: Millis, key: ProduceKey | None) -> tuple[int, int, bool] | str:
        """What the machine must answer, or the code of the error that it must raise."""
        seen = self._seen(key, now) if key else None
        if key and seen:
            if seen[0] != rows:
                return "key_conflict"
            self.header.deduplicated += len(rows)
            return seen[1], len(rows), True
        if key and key.group is not None and key.group in self.groups and self.groups[key.group].sequence > key.sequence:
            return "stale_sequence"
        at, first = self.moment(now), self.header.next
        for origin, row in enumerate(rows, first):
            due_at = row.enqueue_at if row.enqueue_at is not None and row.enqueue_at > now else None
            item = self.items[origin] = Item(origin, row, "ready" if due_at is None else "due", origin, due_at=due_at, enqueued_at=at)
            if self.rules.expire_timeout:
                item.expires_at = (due_at or now) + self.rules.expire_timeout
        self.header.next += len(rows)
        self.header.produced += len(rows)
        self._remember(key, rows, first, at)
        return first, len(rows), False

    def _remember(self, key: ProduceKey | None, rows: list[Row], first: int, now: Millis) -> None:
        if key and key.group is None:
            self.lone[key.key] = (rows, first, now)
        elif key and key.group is not None:
            known = self.groups.get(key.group)
            kept = known.keys if known and known.sequence == key.sequence else {}
            self.groups[key.group] = Group(key.sequence, {**kept, key.key: (rows, first)}, now)

    def arrive(self, rows: list[Row], lives: list[MovedItem], now: Millis, key: ProduceKey) -> tuple[int, int, bool]:
        """The rows come from another partition, each with a life of its own."""
        self.forget_keys(now)
        at, first = self.moment(now), self.header.next
        for origin, (row, life) in enumerate(zip(rows, lives, strict=True), first):
            item = self.items[origin] = Item(origin, row, "ready", origin, life.attempts, expires_at=life.expires_at)
            item.enqueued_at = life.enqueued_at
            if life.due_at > now:
                item.place, item.due_at = "due", life.due_at
            item.max_lease_size = life.max_lease_size
        self.header.next += len(rows)
        self.header.moved_in += len(rows)
        self._remember(key, rows, first, at)
        return first, len(rows), False

    def _seen(self, key: ProduceKey, now: Millis) -> tuple[list[Row], int] | None:
        self.forget_keys(now)
        if key.group is None:
            known = self.lone.get(key.key)
            return known and known[:2]
        group = self.groups.get(key.group)
        return group.keys.get(key.key) if group and group.sequence == key.sequence else None

    def forget_keys(self, now: Millis) -> None:
        self.lone = {name: known for name, known in self.lone.items() if known[2] + KEY_WINDOW > now}
        self.groups = {
            name: group
            for name, group in self.groups.items()
            if name.startswith((TRANSFER_GROUP, MOVE_GROUP)) or group.used_at + GROUP_KEEP > now
        }

    def remembered(self) -> set[tuple[str, int, str, int, int]]:
        """(record's name, sequence, key, first offset, count)"""
        lone = {(f"k{key}", 0, key, first, len(rows)) for key, (rows, first, _) in self.lone.items()}
        return lone | {
            (f"g{name}", group.sequence, key, first, len(rows))
            for name, group in self.groups.items()
            for key, (rows, first) in group.keys.items()
        }

    # Lease and settle

    def lease(self, number: int, want: int, lease: ModelLease, now: Millis) -> list[Item]:
        """The oldest, as many as are wanted and as each of them bears to be leased together."""
        ready = self.leasable(now)
        self.moment(now)
        fits = [
            n
            for n in range(1, want + 1)
            if n <= len(ready) and all(not item.max_lease_size or n <= item.max_lease_size for item in ready[:n])
        ]
        taken = ready[: max(fits, default=0)]
        for item in taken:
            item.place, item.number = "leased", number
            self.lease_of[item.offset or 0] = number
        self.leases[number] = lease
        self.header.leased += len(taken)
        self.header.lease_number = number
        return taken

    def settle(
        self, offsets: Iterable[int], disposition: Disposition, now: Millis, stage: bool, client_id: str | None
    ) -> tuple[Settled, dict[int, set[IgnoredReason]]]:
        """What must be counted, and which offsets must be ignored, and with what reasons."""
        by_offset = {item.offset: item for item in self.leased()}
        result, found = Settled(), []
        ignored: dict[int, set[IgnoredReason]] = {}
        for offset in offsets:
            item = by_offset.get(offset)
            lease = self.leases.get(self.lease_of.get(offset, 0))
            if item is None:
                ignored[offset] = self.why(offset)
            elif lease is not None and client_id not in (None, lease.client_id):
                ignored[offset] = {"not_yours"}
            else:
                found.append(item)
        if stage:
            for item in found:
                item.staged = None if disposition.verdict == "done" else disposition
            setattr(result, {"done": "completed", "retry": "retried", "dead": "dead"}[disposition.verdict], len(found))
        else:
            self._befall(found, disposition, now, result)
        return result, ignored

    def close(self, number: int, now: Millis) -> Settled:
        result = Settled()
        for item in self.leased(number):
            self._befall([item], item.staged or DONE, now, result)
        return result

    def release(self, number: int, now: Millis) -> Settled:
        result = Settled()
        self._befall(self.leased(number), RELEASE, now, result)
        return result

    def why(self, offset: int) -> set[IgnoredReason]:
        """What may be said of an offset that is not leased. One that never was, and that the line has passed, may be called either."""
        if not 0 <= offset < self.header.next:
            return {"unknown"}
        number = self.lease_of.get(offset)
        if number is None:
            passed = all(offset < (item.offset or 0) for item in self.at("ready"))
            return {"not_leased", "settled"} if passed else {"not_leased"}
        lease = self.leases.get(number) or self.closed.get(number)
        return {lease.dispositions[offset] if lease else "settled"}

    def why_lease(self, number: int) -> IgnoredReason:
        """What is said of a lease that is not live."""
        if number in self.closed:
            return self.closed[number].how()
        return "settled" if 0 < number <= self.header.lease_number else "unknown"

    def _befall(self, items: list[Item], disposition: Disposition, now: Millis, result: Settled) -> None:
        for item in items:
            self.moment(now)
            counts = disposition.verdict != "release"
            if disposition.verdict == "done":
                self.header.completed += 1
                result.completed += 1
                self._leave(item, "completed")
                item.place = "completed"
                continue
            reason = (disposition.reason or "rejected") if disposition.verdict == "dead" else self._dies_of(item, now, counts)
            if reason:
                result.dead += 1
                self._leave(item, "dead")
                self._die(item, reason + (f": {disposition.reason}" if disposition.reason and disposition.verdict == "retry" else ""))
            elif counts:
                self.header.retried += 1
                result.retried += 1
                self._leave(item, "retried")
                item.attempts += 1
                self._put_back(item, self._due_at(item, disposition, now), now)
                item.max_lease_size = 0
            else:
                self.header.released += 1
                result.released += 1
                self._leave(item, "released")
                self._put_back(item, now, now)

    def _leave(self, item: Item, disposition: IgnoredReason) -> None:
        number, offset = item.number, item.offset
        assert number is not None
        assert offset is not None
        self.leases[number].dispositions[offset] = disposition
        item.number, item.staged, item.place = None, None, "ready"
        if not self.leased(number):
            self.closed[number] = self.leases.pop(number)
            while len(self.closed) > self.remembers:
                del self.closed[next(iter(self.closed))]

    def _dies_of(self, item: Item, now: Millis, counts: bool) -> str:
        most = self.rules.max_attempts
        if counts and most and item.attempts + 1 >= most:
            return f"max_attempts {most} reached"
        return "expired while it was leased" if 0 < item.expires_at <= now else ""

    def _due_at(self, item: Item, disposition: Disposition | None, now: Millis) -> Millis:
        if disposition is not None and disposition.retry_at is not None:
            return disposition.retry_at
        backoff, after = self.rules.backoff, None if disposition is None else disposition.retry_after
        if after is None and backoff is not None:
            return now + backoff.after(item.attempts, now)
        return now + (after or 0)

    def _put_back(self, item: Item, due_at: Millis, now: Millis) -> None:
        item.offset = None
        due_at = min(due_at, item.expires_at or due_at)
        item.place, item.due_at = ("due", due_at) if due_at > now else ("ready", None)

    def _die(self, item: Item, reason: str) -> None:
        item.place, item.reason, item.target = ("dying" if self.rules.keeps_dead else "dead"), reason, self.rules.dead_queue
        self.header.dead += not self.rules.keeps_dead

    # Away

    def redrive(self, offsets: Iterable[int], target: str, now: Millis, scheduled: bool) -> list[int]:
        """Which of them must be on their way. A scheduled item goes by its origin, and gets an offset."""
        wanted = set(offsets)
        ready = {item.offset: item for item in self.ready() if item.offset in wanted}
        due = {item.origin: item for item in self.at("due") if scheduled and item.origin in wanted}
        for item in [*ready.values(), *due.values()]:
            self.moment(now)
            item.offset = None if item.place == "due" else item.offset
            item.place, item.reason, item.target = "dying", "", target
        return sorted([*ready, *due])

    def make_ready(self, offsets: Iterable[int], now: Millis) -> list[int]:
        """Which of them must be ready now. They are at the end of the line, under new offsets."""
        wanted = set(offsets)
        due = [item for item in self.at("due") if item.origin in wanted]
        for item in due:
            self.moment(now)
            item.place, item.due_at, item.offset = "ready", None, None
        return sorted(item.origin for item in due)

    def move_out(self, chosen: Iterable[int], limit: int, target: int, scheduled: bool, now: Millis) -> None:
        """These origins were sent to another partition: it must be those that come first, and as many as there may be."""
        taken = [self.items[origin] for origin in chosen]
        if scheduled:
            left = [item for item in self.at("due") if item not in taken]
            assert len(taken) == min(limit, len(taken) + len(left))
            assert max((item.due_at or 0 for item in taken), default=0) <= min((item.due_at or 0 for item in left), default=1 << 60)
        else:
            assert taken == self.leasable(now)[:limit]
        for item in taken:
            self.moment(now)
            item.place, item.reason, item.target = "dying", MOVED, f"#{target}"
            item.offset = None if scheduled else item.offset

    def transferred(self, number: int) -> None:
        for item in self.at("dying"):
            if item.number == number and (item.target or "").startswith("#"):
                item.place = "moved"
                self.header.moved += 1
            elif item.number == number:
                item.place = "dead" if item.reason else "redriven"
                self.header.dead += bool(item.reason)
                self.header.redriven += not item.reason

    def called_back(self, number: int) -> None:
        for item in self.at("dying"):
            if item.number == number:
                item.place, item.number, item.offset, item.reason, item.target = "ready", None, None, "", None
                if item.due_at is not None:
                    item.place = "due"

    def clear(self, ready: bool, scheduled: bool, now: Millis) -> tuple[int, int]:
        self.moment(now)
        dropped, undue = self.at("ready") if ready else [], self.at("due") if scheduled else []
        for item in dropped + undue:
            item.place = "cleared"
            self.header.cleared += 1
        return len(dropped), len(undue)

    def drop(self, offsets: Iterable[int], now: Millis) -> list[int]:
        """Which of them must be dropped. An item that is due later goes by its origin."""
        wanted = set(offsets)
        places = {item.offset: item for item in self.at("ready")} | {item.origin: item for item in self.at("due")}
        dropped = {offset: item for offset, item in places.items() if offset is not None and offset in wanted}
        for item in dropped.values():
            self.moment(now)
            item.place = "cleared"
            self.header.cleared += 1
        return sorted(dropped)

    # Time

    def tick(self, now: Millis) -> int:
        """How many moves there must be: an item that falls due and has expired moves twice."""
        moved = 0
        for _, number in sorted((lease.deadline, number) for number, lease in self.leases.items() if lease.deadline <= now):
            left = self.leased(number)
            for item in left:
                moved += 1
                self.moment(now)
                reason = self._dies_of(item, now, True)
                self._leave(item, "expired")
                if reason:
                    self._die(item, f"{reason}: the lease expired")
                else:
                    item.attempts, item.max_lease_size = item.attempts + 1, max(1, len(left) // 2)
                    self._put_back(item, self._due_at(item, None, now), now)
                    self.header.expired += 1
        for item in self.at("due"):
            if item.due_at is not None and item.due_at <= now:
                self.moment(now)
                item.place, item.due_at, item.offset = "ready", None, None
                moved += 1
        for item in self.at("ready"):
            if 0 < item.expires_at <= now:
                self.moment(now)
                self._die(item, "expired")
                moved += 1
        return moved

    def reloaded(self) -> None:
        """Another owner has only what is stored."""
        self.closed = {number: lease for number, lease in sorted(self.closed.items()) if lease.is_told_apart}

    # Comparison

    def adopt(self, machine: Partition) -> None:
        """Compare every item with where the machine has it; take over the new offsets and the transfer numbers that it chose."""
        spots = list(spots_of(machine))
        where = {spot.origin: spot for spot in spots}
        assert len(where) == len(spots), "an item is in two places"
        live = {item.origin: item for item in self.at(*LIVE)}
        assert where.keys() == live.keys(), "an item is lost, or is a phantom"
        for origin, item in live.items():
            spot = where[origin]
            if item.offset is None and item.place in ("ready", "dying"):
                assert spot.offset is not None
                assert spot.offset >= self.floor
                item.offset = spot.offset
            if item.place == "dying" and item.number is None:
                item.number = spot.number
            offset = item.offset if item.place != "due" else None
            assert spot == Spot(
                origin,
                item.place,
                item.attempts,
                offset,
                item.number,
                item.due_at if item.place in ("due", "dying") else None,
                item.staged,
                item.expires_at,
                item.reason if item.place == "dying" else "",
                item.target,
                item.enqueued_at,
            )
        taken = [spot.offset for spot in spots if spot.offset is not None]
        assert len(set(taken)) == len(taken), "two items have one offset"
        assert max(taken, default=-1) < machine.log.header.next
        self.header.next = self.floor = machine.log.header.next
        # Transfers are numbered among the leases.
        self.header.lease_number = machine.log.header.lease_number

    def compare_counts(self, machine: Partition) -> None:
        header = machine.log.header
        told, expected = msgspec.structs.asdict(header), msgspec.structs.asdict(self.header)
        assert told == {**expected, "head": header.head, "due_number": header.due_number}
        counts = [len(self.at(place)) for place in LIVE]
        transferring = sum(lease.open for lease in machine.transfers.by_number.values())
        assert [machine.log.ready_count, machine.leased_count, machine.log.scheduled_count, transferring] == counts
        gone = header.completed + header.dead + header.cleared + header.redriven + header.moved
        assert header.produced + header.moved_in == gone + sum(counts)
        live = [item.origin for item in self.at(*LIVE)]
        for number, blob in machine.log.blobs.items():
            assert blob.open == sum(number <= origin < number + blob.rows for origin in live) > 0
        assert all(any(number <= origin < number + blob.rows for number, blob in machine.log.blobs.items()) for origin in live)
        self._compare_leases(machine)
        held = {
            (name, record.sequence, key, seen.first_offset, seen.count)
            for name, record in machine.keys.records.items()
            for key, seen in record.seen.items()
        }
        assert held == self.remembered()

    def _compare_leases(self, machine: Partition) -> None:
        shown = {number: (lease.client_id, lease.deadline, lease.lease_key) for number, lease in machine.leases.items()}
        assert shown == {number: (lease.client_id, lease.deadline, lease.lease_key) for number, lease in self.leases.items()}
        numbers = {*self.closed, 0, machine.log.header.lease_number + 1}
        assert [machine.lease_of(number, None) for number in numbers] == [self.why_lease(number) for number in numbers]
