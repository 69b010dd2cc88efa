"""Columnar partition: the transitions of a segment log's items.

A pure machine. Each call is one transition with a given `now`; it changes the state in place and notes which records it touched.
`take_changes` then returns everything since the last call as one change set for the store. If that commit does not succeed, the state is
thrown away and loaded anew: there is no undo.

An item is in one of four places: *ready* (from `head` on), in a *lease*, *due* (scheduled beside the line), or in a transfer lease (on its
way to another queue or partition).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from pyroaring import BitMap

from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.contract.queue_settings import Unique
from sluiceway.core.partition.admission import Admission, is_move
from sluiceway.core.partition.blob_builder import NO_BUNDLE, due_times
from sluiceway.core.partition.circuit_breaker import Circuit
from sluiceway.core.partition.closed_leases import ClosedLeases
from sluiceway.core.partition.idempotency_keys import PART, PLACED, KeyMemory, KeyResult, SlotPlace, places_of, slot_rows
from sluiceway.core.partition.key_flows import KeyRules, Taking, behind_in_flows, keyed_among
from sluiceway.core.partition.lease_columns import NO_TEXT, LeaseRows
from sluiceway.core.partition.lease_table import LeaseTable
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.records import (
    EXPIRED_READY,
    HELD,
    RAN_OUT,
    Blob,
    Due,
    Extent,
    LeaseState,
    Part,
    blob_bytes,
    by_part,
    due_bytes,
    extent_bytes,
    from_array,
    lease_bytes,
    pack,
    rows_of_part,
)
from sluiceway.core.partition.repeated_items import RepeatedItems
from sluiceway.core.partition.segment_log import RecordName, SegmentLog
from sluiceway.core.partition.transfers import TransferTable
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import GROUP_KEEP, MAX_LEASE_BYTES, TIMER_BATCH
from sluiceway.model.changes import Changes, RecordKind
from sluiceway.model.item_keys import Runs, hash_of, rows_of_slots
from sluiceway.model.requests import (
    DONE,
    RELEASE,
    BundleCounts,
    CallPart,
    CountBundles,
    Disposition,
    Duplicates,
    Failure,
    MovedItem,
    Offsets,
    ProduceKey,
    Settled,
)
from sluiceway.model.small_batch import Rows
from sluiceway.model.small_batch import digest as digest_of
from sluiceway.model.unique_keys import without_rows

ReturningRows = dict[tuple[int, int, Millis, int, Millis], tuple[Blob, BitMap]]
"""Rows to put back: by blob number, attempts, expiry, `max_lease_size` and due time. All still count as open."""

NOTED_EXPIRIES = 20
"""Leases whose end is noted in one `tick`. Where more run out at once, as after a long stop, their notes say the same and cost time."""


class Placed(NamedTuple):
    """Result of a produce of `items` rows. `partition`: where they are; None: in the partition that was asked. `runs` and `duplicates`: see
    `Produced`."""

    first_offset: int
    items: int
    repeated: bool
    partition: int | None = None
    runs: tuple[tuple[int | None, int, int], ...] = ()
    duplicates: Duplicates = ()


class Intended(NamedTuple):
    """The key's home has noted that the partition `target` takes, or has taken, its items. `intent` is in that `memory`."""

    target: int
    intent: KeyResult
    memory: KeyMemory


class Partition:
    """The state of one partition, and its transitions: the leases over its segment log.

    `log` has the waiting items, `transfers` those that are leaving, `keys` the idempotency keys, `admission` what it accepts.
    """

    def __init__(self, *, max_attempts: int = 0, keeps_dead: bool = False) -> None:
        self.log = SegmentLog()
        self.transfers = TransferTable(self.log)
        self.keys = KeyMemory()
        self.admission = Admission(self.log, self.keys)
        self.leases = LeaseTable(self.log.extents)
        self._key_rules = KeyRules()
        self._unique: Unique | None = None
        self.follow(Rules(max_attempts, keeps_dead))
        self.txn = 0
        self.leased_count = 0
        self.ticked = 0
        """Leases and entries handled by the last `tick`."""
        self.by_key: dict[tuple[str, str], dict[int, None]] = {}
        self._fresh_keys: set[tuple[str, str]] = set()
        """Lease keys that gained live leases since the last commit known to have landed; the store holds none under them."""
        self._left_keys: set[tuple[str, str]] = set()
        """Lease keys that lost their live leases since then; the store may still hold some."""
        self.closed = ClosedLeases()
        self.repeated = RepeatedItems()
        self.grace_until: Millis = 0  # Grace period: no lease runs out earlier, since its client may have been unable to reach an owner.

    def follow(self, rules: Rules) -> None:
        """Follow these rules from now on. Earlier decisions stand."""
        self.max_attempts, self.keeps_dead, self.expire_timeout, self.backoff, self.dead_queue, self.circuit, keys, unique, dead = rules
        self.dead_incarnation = dead
        if keys != self._key_rules:
            self._key_rules = keys
            self.log.follow_keys(keys, self.leases.values())
        if unique != self._unique:
            self._unique = unique
            self.log.follow_unique(unique, self.leases.values())

    @property
    def servable(self) -> int:
        """Items that may be leased now."""
        return self.log.servable

    # ---- produce ----------------------------------------------------------------------------------------------

    def produce(
        self, batch: Rows, now: Millis, key: ProduceKey | None = None, lives: Sequence[MovedItem] = (), bundle: str | None = None
    ) -> Placed:
        """Append the rows; rows due later wait beside the line. `lives` marks rows moved from another partition; `bundle`: the bundle to
        which they belong. Raises `key_conflict`, and what `KeyMemory.find` raises.

        Does not check whether the partition accepts them: see `Admission.refuses`.
        """
        digest = b""
        if key is not None:
            # A move's key is used only by its transfer, so its rows are always the same.
            digest = b"" if is_move(key) else digest_of(batch)
            self.keys.forget_old(now)
            seen = self.keys.find(key)
            if seen is not None and not self.keys.is_sure(key, seen):
                return self._repeat(key, seen, digest)
        placed = self._store(batch, now, lives, bundle)
        if key is not None:
            self.keys.remember(key, KeyResult(digest, placed.first_offset, placed.items), self.log.header.now)
        return placed

    def produce_by_home(
        self, batch: Rows, now: Millis, key: ProduceKey, target: int | None, bundle: str | None = None
    ) -> Placed | Intended:
        """Produce at the key's home. A new key only notes `target` as the partition that takes the rows (None: this one). An earlier intent
        is returned, unless its target surely has nothing.

        Raises what `produce` raises, and `outcome_unknown` for a group's intent older than GROUP_KEEP.
        """
        self.keys.forget_old(now)
        seen = self.keys.find(key)
        if seen is not None and seen.is_intent and not self.keys.is_sure(key, seen):
            assert seen.partition is not None, "an intent names its target"
            if key.group is not None and now - seen.intended_at > GROUP_KEEP:
                detail = f"idempotency_group: the result of key {key.key!r} is no longer remembered; raise idempotency_sequence"
                raise SluicewayError("outcome_unknown", detail)
            return Intended(seen.partition, seen, self.keys)
        if target is None or (seen is not None and not seen.is_intent):
            return self.produce(batch, now, key, bundle=bundle)
        return Intended(target, self.keys.intend(key, batch.num_rows, target, self.log.record_time(now)), self.keys)

    def produce_by_intent(self, batch: Rows, now: Millis, key: ProduceKey, takes: bool, bundle: str | None = None) -> Placed | None:
        """Produce at the target of an intent: the rows are taken once, or refused for good (None).

        `takes`: whether the partition takes items now. If not, it refuses an unknown key, durably.
        """
        self.keys.forget_old(now)
        seen = self.keys.find(key, PLACED)
        if seen is not None and not seen.count:
            return None
        if seen is None and (not takes or self.log.header.shut):
            self.keys.remember(key, KeyResult(b"", None, 0), self.log.record_time(now), PLACED)
            return None
        digest = digest_of(batch)
        if seen is not None:
            return self._repeat(key, seen, digest)
        placed = self._store(batch, now, (), bundle)
        self.keys.remember(key, KeyResult(digest, placed.first_offset, placed.items), self.log.header.now, PLACED)
        return placed

    def produce_part(self, batch: Rows, now: Millis, key: ProduceKey | None, part: CallPart, bundle: str | None = None) -> Placed:
        """Store the rows of a part of a divided call: of a repetition, those of slots of which none are known. Those whose unique key is
        taken are left out. Raises what `produce` raises."""
        if key is None:
            return self._store(batch, now, (), bundle, leaves_out=True)
        self.keys.forget_old(now)
        seen = self.keys.find(key, PART)
        if seen is not None and seen.digest != part.digest:
            raise SluicewayError("key_conflict", f"idempotency_key: {key.key!r} was used for other items", "idempotency_key")
        places = places_of(seen)
        missing = tuple(each for each in part.slots if each[0] not in places)
        known = batch.num_rows - sum(rows for _, rows in missing)
        if missing:
            rows = rows_of_slots(batch, part.slots, {slot for slot, _ in missing}) if known else batch
            # Items of a transfer are never left out: they would be lost.
            placed = self._store(rows, now, (), bundle, leaves_out=not key.is_system)
            parts = (slot_rows(placed.first_offset, missing, placed.duplicates),)
            new = KeyResult(part.digest, placed.first_offset, rows.num_rows, parts=parts)
            if seen is None:
                self.keys.remember(key, new, self.log.header.now, PART)
                return placed
            places |= places_of(new)
            new = msgspec.structs.replace(seen, count=seen.count + new.count, parts=seen.parts + new.parts)
            self.keys.remember(key, new, self.log.header.now, PART)
        if known:
            self.log.header.deduplicated += known
            self.log.changed = True
        return _answer_of([places[slot] for slot, _ in part.slots], not missing)

    def _repeat(self, key: ProduceKey, seen: KeyResult, digest: bytes) -> Placed:
        assert seen.first_offset is not None, "an intent is no answer"
        if seen.digest != digest:
            raise SluicewayError("key_conflict", f"idempotency_key: {key.key!r} was used for other items", "idempotency_key")
        self.log.header.deduplicated += seen.count
        self.log.changed = True
        return Placed(seen.first_offset, seen.count, True, seen.partition)

    def _store(self, batch: Rows, now: Millis, lives: Sequence[MovedItem], bundle: str | None, leaves_out: bool = False) -> Placed:
        log = self.log
        # Also where nothing is stored: that a key is taken must be said under the fence.
        at = log.record_time(now)
        first, items = log.header.next, batch.num_rows
        if lives:
            self.transfers.arrive(batch, lives, now)
            return Placed(first, items, False)
        uniques = log.uniques_of(batch)
        duplicates: Duplicates = ()
        if leaves_out and uniques is not None and log.uniques is not None and (duplicates := log.uniques.duplicates(uniques, first)):
            rows = [row for row, _ in duplicates]
            batch, uniques = without_rows(batch, rows), uniques.without(rows)
            log.header.duplicates += len(rows)
        if count := batch.num_rows:
            bundles = NO_BUNDLE if bundle is None else Runs((0,), (log.bundles.store(hash_of(bundle), count),))
            forming, row = log.forming_for(batch, at, bundles, uniques)
            log.header.next += count
            log.header.produced += count
            log.append_new(forming.blob, row, count, due_times(batch, now), now, self.expire_timeout)
        return Placed(first, items, False, duplicates=duplicates)

    # ---- lease ------------------------------------------------------------------------------------------------

    def lease(
        self,
        want: int,
        client_id: str,
        deadline: Millis,
        now: Millis,
        lease_key: str | None = None,
        room: float = MAX_LEASE_BYTES,
        at_least_one: bool = True,
        before: int | None = None,
        runs: bool = False,
    ) -> LeaseState | None:
        """Lease up to `want` ready items as one lease, the oldest, or by key; fewer if `room` bytes hold no more. None if there are none.

        With `before`, only items at lower offsets; with `runs`, several of a key that are in order.
        """
        log, taking = self.log, Taking(want, room, at_least_one, now, before, runs)
        parts = log.take(taking)
        if not parts:
            return None
        count = taking.count
        log.record_time(now)
        log.header.lease_number += 1
        log.header.leased += count
        self.leased_count += count
        lease = LeaseState(log.header.lease_number, parts, count, client_id, deadline, lease_key, nbytes=taking.nbytes, leased_at=now)
        if lease_key is not None and (name := (client_id, lease_key)) not in self.by_key:
            self._left_keys.discard(name) if name in self._left_keys else self._fresh_keys.add(name)
        self._enter(lease)
        log.touch(RecordKind.LEASE, lease.number)
        return lease

    def _enter(self, lease: LeaseState) -> None:
        """Add a lease to the indexes."""
        self.leases.enter(lease)
        if lease.lease_key is not None:
            self.by_key.setdefault((lease.client_id, lease.lease_key), {})[lease.number] = None

    def restore_lease(self, lease: LeaseState) -> None:
        """Add a lease loaded from storage."""
        lease.leased_at = self.log.header.now
        self._enter(lease)
        self.leased_count += lease.open

    def restore_rows(self, rows: LeaseRows, texts: list[str]) -> None:
        """Add plain leases loaded from storage, before any others."""
        self.leases.restore(rows, texts)
        self.leased_count += int(rows.counts.sum())
        for row in np.flatnonzero(rows.keys != NO_TEXT).tolist():
            name = texts[rows.clients[row]], texts[rows.keys[row]]
            self.by_key.setdefault(name, {})[int(rows.numbers[row])] = None

    def _leave(self, lease: LeaseState) -> None:
        self.leases.remove(lease.number)
        for forgotten in self.closed.add(lease):
            self.log.touch(RecordKind.LEASE, forgotten)
        if lease.lease_key is not None:
            name = (lease.client_id, lease.lease_key)
            del self.by_key[name][lease.number]
            if not self.by_key[name]:
                del self.by_key[name]
                self._fresh_keys.discard(name) if name in self._fresh_keys else self._left_keys.add(name)

    def keyed(self, client_id: str, lease_key: str) -> list[LeaseState]:
        """The live leases taken under this key."""
        return [self.leases[number] for number in self.by_key.get((client_id, lease_key), ())]

    def may_hold(self, name: tuple[str, str]) -> bool:
        """Whether the store may hold live leases under this (client, key), whatever the outcome of the commit in flight."""
        return name in self.by_key or name in self._left_keys

    def keys_landed(self) -> None:
        """Note that the last commit landed: the store holds the leases that are live here."""
        self._fresh_keys, self._left_keys = set(), set()

    def keys_refused(self) -> None:
        """Note that the last commit did not land: forget the lease keys first used in it."""
        for name in self._fresh_keys:
            del self.by_key[name]
        self._fresh_keys = set()

    def lease_of(self, number: int, client_id: str | None) -> LeaseState | IgnoredReason:
        """The live lease (with `client_id`: of that client), or the reason why there is none."""
        lease = self.leases.find(number)
        if lease is None:
            return self.closed.why_lease(number) or ("settled" if 0 < number <= self.log.header.lease_number else "unknown")
        return lease if client_id is None or lease.client_id == client_id else "not_yours"

    def extend(self, lease: LeaseState, deadline: Millis) -> None:
        """Set a live lease's deadline."""
        lease.deadline = deadline
        self.leases.extend(lease.number, deadline)
        self.log.touch(RecordKind.LEASE, lease.number)

    # ---- settle -----------------------------------------------------------------------------------------------

    def settle_offsets(
        self, offsets: Offsets, disposition: Disposition, now: Millis, stage: bool, result: Settled, client_id: str | None = None
    ) -> list[tuple[int, IgnoredReason]]:
        """Apply the disposition to the leased among the (sorted, unique) offsets, or only record it with `stage`. Counts into `result`;
        returns the ignored."""
        ignored: list[tuple[int, IgnoredReason]] = []
        for found, positions in self.in_leases(offsets, ignored, client_id):
            lease = self.leases.unpack(found.number) if stage or len(positions) < found.open else found
            if stage:
                self._stage(lease, positions, disposition)
                result.count(disposition.verdict, len(positions))
            else:
                self._settle(lease, positions, disposition, now, result)
                self._close_if_empty(lease)
        return ignored

    def close_lease(self, lease: LeaseState, now: Millis, result: Settled) -> None:
        """End a lease: staged dispositions take effect, the rest is completed.

        In order, the items of a key behind the first that is put back are released, whatever was staged for them.
        """
        if self._key_rules.order and lease.staged:
            back = BitMap()
            for disposition, positions in lease.staged.items():
                if disposition.verdict == "retry" or (disposition.verdict == "dead" and self._key_rules.blocks):
                    back |= positions - lease.settled
            behind = behind_in_flows(lease, back)
            lease.is_completed = bool(behind)
            self._settle(lease, behind, RELEASE, now, Settled())
        for disposition, positions in lease.staged.items():
            self._settle(lease, positions - lease.settled, disposition, now, result)
        self._settle(lease, lease.open_positions(), DONE, now, result)
        self._close_if_empty(lease)

    def release(self, lease: LeaseState, now: Millis, result: Settled) -> None:
        """End a lease as if never given: its open items are offered again, and staged dispositions are dropped."""
        self._settle(lease, lease.open_positions(), RELEASE, now, result)
        self._close_if_empty(lease)

    def in_leases(
        self, offsets: Offsets, ignored: list[tuple[int, IgnoredReason]], client_id: str | None
    ) -> Iterator[tuple[LeaseState, BitMap]]:
        """Group the offsets by lease, as open positions; the others are added to `ignored`."""
        found: dict[int, tuple[LeaseState, BitMap]] = {}
        for run, place in self.leases.split(offsets):
            if place is None:
                ignored.extend((offset, self._why_ignored(offset)) for offset in run.tolist())
                continue
            lease, part = place
            positions = from_array(run - part.first + part.base)
            theirs = client_id is not None and lease.client_id != client_id
            gone = positions & lease.settled
            ignored.extend(
                (position - part.base + part.first, lease.disposition_of(position) if position in gone else "not_yours")
                for position in (positions if theirs else gone)
            )
            if not theirs and len(gone) < len(positions):
                found.setdefault(lease.number, (lease, BitMap()))[1].update(positions - gone)
        yield from found.values()

    def _why_ignored(self, offset: int) -> IgnoredReason:
        """Why an offset is in no live lease. Costs hardly more for a large backlog, since repeated calls are normal traffic."""
        if not 0 <= offset < self.log.header.next:
            return "unknown"
        log = self.log
        # Where items go by key, those beyond the head may have been leased.
        waits = offset >= log.header.head and (log.flows is None or log.ready_extent(offset) is not None)
        return self.closed.why_offset(offset) or ("not_leased" if waits else "settled")

    def _stage(self, lease: LeaseState, positions: BitMap, disposition: Disposition) -> None:
        for other in [staged for staged in lease.staged if staged != disposition]:
            lease.staged[other] -= positions
            if not lease.staged[other]:
                del lease.staged[other]
        if disposition.verdict != "done":
            lease.staged[disposition] = lease.staged.get(disposition, BitMap()) | positions
        self.log.touch(RecordKind.LEASE, lease.number)

    def _settle(self, lease: LeaseState, positions: BitMap, disposition: Disposition, now: Millis, result: Settled) -> None:
        """Close those open positions of a lease. The caller closes the lease itself."""
        if disposition.verdict == "dead" and self._key_rules.blocks and (held := self._keyed(lease, positions)):
            self._settle(lease, held, disposition._replace(verdict="retry", retry_at=HELD), now, result)
            positions = positions - held
        if not positions:
            return
        self.log.record_time(now)
        if self.circuit is not None:
            _report(self.circuit, disposition, len(positions), lease.probe)
        stays = positions
        is_back = disposition.verdict in ("retry", "release")
        behind = behind_in_flows(lease, positions) - positions if is_back and self._key_rules.order else BitMap()
        if disposition.verdict in ("retry", "dead"):
            _, _, _, reason, trace, host, handler_time = disposition
            self.log.failures.note(lease, positions, Failure(0, now, lease.client_id, reason, trace, host, handler_time))
        if disposition.verdict == "done":
            self.log.header.completed += len(positions)
            self.log.bundles.end_of("completed", by_part(lease, positions))
            if self.repeated:
                self.repeated.settled(lease, positions)
        elif disposition.verdict == "dead":
            self._dead_letter(lease, positions, disposition.reason or "rejected")
            lease.tell("dead", positions)
        else:
            dying = self._put_back(lease, positions, disposition, now)
            for reason, those in dying.items():
                self._dead_letter(lease, those, reason + (f": {disposition.reason}" if disposition.reason else ""))
                lease.tell("dead", those)
                result.count("dead", len(those))
                stays = stays - those
            if disposition.verdict == "release":
                self.log.header.released += len(stays)
                lease.tell("released", stays)
            else:
                self.log.header.retried += len(stays)
                lease.tell("retried", stays)
        result.count(disposition.verdict, len(stays))
        self._close(lease, positions)
        if behind:
            # They must not be handled before what is in front of them again.
            self._settle(lease, behind, RELEASE, now, Settled())

    def _close(self, lease: LeaseState, positions: BitMap) -> None:
        """Close the positions in this lease; wherever their rows went, they are already counted there."""
        lease.settled |= positions
        self.leased_count -= len(positions)
        self.log.leave_lease(lease, positions)
        self.log.close_leased(lease, positions)
        self.log.touch(RecordKind.LEASE, lease.number)

    def _close_if_empty(self, lease: LeaseState) -> None:
        if lease.open == 0:
            self._leave(lease)
            self.log.touch(RecordKind.LEASE, lease.number)

    def _put_back(self, lease: LeaseState, positions: BitMap, disposition: Disposition, now: Millis) -> dict[str, BitMap]:
        """Append the rows again, now or when due. Returns those that die instead, by reason."""
        back: ReturningRows = {}
        dying = self._collect_returns(lease, positions, disposition, now, back)
        self._append_returns(back, now)
        return dying

    def _collect_returns(
        self, lease: LeaseState, positions: BitMap, disposition: Disposition | None, now: Millis, back: ReturningRows
    ) -> dict[str, BitMap]:
        """Add rows to `back` (`disposition` None: the lease ran out). Returns the positions that die instead, by reason."""
        dying: dict[str, BitMap] = {}
        released = disposition is not None and disposition.verdict == "release"
        # An expiry counts even then: an item that kills its consumers must die.
        counts = disposition is None or not (released or (self.circuit is not None and self.circuit.spares))
        # After expiry, halve the next lease's size, down to one: one of these items may have killed the consumer.
        max_lease_size = 0 if disposition is not None else max(1, len(positions) // 2)
        for part, chosen in by_part(lease, positions):
            extent, attempts = part.extent, part.extent.attempts + counts
            is_dying = bool(self.max_attempts) and attempts >= self.max_attempts and counts
            if is_dying:
                held = keyed_among(part, chosen) if self._key_rules.blocks else BitMap()
                dying.setdefault(f"max_attempts {self.max_attempts} reached", BitMap()).update(chosen - held)
                chosen = held
            elif extent.expires_at and extent.expires_at <= now:
                dying.setdefault("expired while it was leased", BitMap()).update(chosen)
                chosen = BitMap()
            if chosen:
                blob, expires_at = extent.blob, extent.expires_at
                due_at = HELD if is_dying else self._due_at(disposition, extent.attempts + 1, now)
                name = (blob.number, attempts, expires_at, extent.max_lease_size if released else max_lease_size, due_at)
                rows = rows_of_part(part, chosen)
                if not released:
                    self.repeated.failed(blob.number, rows, attempts, now)
                if name in back:
                    back[name][1].update(rows)
                else:
                    back[name] = blob, rows
                # Keep the blob while other rows of it are freed before these are back.
                blob.open += len(rows)
        return {reason: those for reason, those in dying.items() if those}

    def _keyed(self, lease: LeaseState, positions: BitMap) -> BitMap:
        """Those of the positions whose items have a key."""
        return BitMap().union(*(keyed_among(part, chosen) for part, chosen in by_part(lease, positions)))

    def _append_returns(self, back: ReturningRows, now: Millis) -> None:
        """Append the gathered rows: adjacent rows of a blob with equal attributes form one extent, across leases."""
        for (_, attempts, expires_at, max_lease_size, due_at), (blob, rows) in back.items():
            if due_at > now:
                self.log.schedule(blob, rows, attempts, min(due_at, expires_at or due_at), expires_at, max_lease_size, is_back=True)
            else:
                self.log.append_rows(blob, rows, attempts, expires_at, max_lease_size)
            blob.open -= len(rows)
        back.clear()

    def _due_at(self, disposition: Disposition | None, attempts: int, now: Millis) -> Millis:
        if disposition is not None:
            if disposition.verdict == "release":
                return now
            if disposition.retry_at is not None:
                return disposition.retry_at
            if disposition.retry_after is not None:
                return now + disposition.retry_after
        return now + self.backoff.after(attempts, now) if self.backoff is not None else now

    # ---- dead items and clearing ------------------------------------------------------------------------------

    def _dead_letter(self, lease: LeaseState, positions: BitMap, reason: str) -> None:
        """Send those positions of a lease to the dead queue (they keep their offsets), or drop them."""
        self.log.bundles.end_of("dead", by_part(lease, positions))
        if self.repeated:
            self.repeated.settled(lease, positions)
        if self.keeps_dead:
            transfer = self.transfers.begin(by_part(lease, positions), reason, self.dead_queue, self.dead_incarnation)
            transfer.failures = self.log.failures.told(transfer)
        else:
            self.log.header.dead += len(positions)

    def clear(self, ready: bool, scheduled: bool, now: Millis) -> tuple[int, int]:
        """Drop waiting items. Returns the numbers of ready and of scheduled ones."""
        log = self.log
        log.record_time(now)
        self.repeated.dropped()
        dropped, undue = 0, 0
        for extent in list(log.ready) if ready else []:
            taken = log.take_out(extent, extent.waiting(log.at(extent)))
            if taken:
                dropped += len(taken)
                log.end_waiting("dropped", extent, taken)
        for due in list(log.dues.values()) if scheduled else []:
            log.unschedule(due)
            undue += len(due.rows)
            log.bundles.end("dropped", due.blob, due.rows)
            log.free(due.blob, len(due.rows))
        log.header.cleared += dropped + undue
        return dropped, undue

    # ---- bundles ----------------------------------------------------------------------------------------------

    def count_bundles(self, request: CountBundles) -> BundleCounts:
        """Count the items of bundles, after the request's step. Idempotent."""
        ledger = self.log.bundles
        for bundle in request.bundles:
            if request.step == "close":
                ledger.close(bundle, takes_items=not self.log.header.shut)
            elif request.step == "forget":
                ledger.forget(bundle)
        return BundleCounts({bundle: ledger.count(bundle) for bundle in request.bundles})

    # ---- time -------------------------------------------------------------------------------------------------

    def next_timer(self) -> Millis | None:
        """Time of the next work for `tick`; None: none."""
        log = self.log
        while log.due_times and log.due_times[0][1] not in log.dues:
            heapq.heappop(log.due_times)
        while log.expiries and not self._may_expire(log.expiries[0][1]):
            heapq.heappop(log.expiries)
        at = self._runs_out_at()
        for heap in (log.due_times, log.expiries):
            if heap and heap[0][0] < HELD and (at is None or heap[0][0] < at):
                at = heap[0][0]
        for snapshot in log.snapshots.values():
            if at is None or snapshot.until < at:
                at = snapshot.until
        if log.flows is not None and (wakes_at := log.flows.wakes_at()) is not None and (at is None or wakes_at < at):
            at = wakes_at
        return at

    def _runs_out_at(self) -> Millis | None:
        """When the next lease runs out; None: there is none."""
        deadline = self.leases.next_deadline()
        return None if deadline is None else max(deadline[0], self.grace_until)

    def _may_expire(self, first: int) -> bool:
        extent = self.log.extents.get(first)
        return extent is not None and extent.run(self.log.at(extent))[1] > 0

    def tick(self, now: Millis, most: int | None = None) -> int:
        """Put back items of expired leases, enter due items, let expired ones die: up to `most` leases and entries. Returns the items
        moved."""
        log = self.log
        moved = self.ticked = 0
        back: ReturningRows = {}
        log.release_snapshots(now)
        if log.flows is not None:
            log.flows.wake(now)
        for _ in range(TIMER_BATCH if most is None else most):
            if (at := self.next_timer()) is None or at > now:
                break
            self.ticked += 1
            log.record_time(now)
            is_due = bool(log.due_times) and log.due_times[0][0] == at
            if not is_due and (deadline := self.leases.next_deadline()) is not None and max(deadline[0], self.grace_until) == at:
                moved += self._run_out(self.leases[deadline[1]], now, back)
                continue
            self._append_returns(back, now)
            if is_due:
                moved += self._fall_due(log.dues[heapq.heappop(log.due_times)[1]], now)
            else:
                moved += self._expire(log.extents[heapq.heappop(log.expiries)[1]])
        self._append_returns(back, now)
        return moved

    def _run_out(self, lease: LeaseState, now: Millis, back: ReturningRows) -> int:
        self.log.record_time(now)
        positions = lease.open_positions()
        if self.circuit is not None:
            self.circuit.failed(len(positions), lease.probe)
        expired = len(positions)
        if self.ticked <= NOTED_EXPIRIES:
            self.log.failures.note(lease, positions, Failure(0, now, lease.client_id, RAN_OUT))
        for reason, those in self._collect_returns(lease, positions, None, now, back).items():
            self._dead_letter(lease, those, f"{reason}: the lease expired")
            expired -= len(those)
        self.log.header.expired += expired
        lease.tell("expired", positions)
        self._close(lease, positions)
        self._leave(lease)
        return len(positions)

    def _fall_due(self, due: Due, now: Millis) -> int:
        extent = self.log.enter_line(due)
        # In one step: an item that has already expired must not be leased in between.
        return len(due.rows) + (self._expire(extent) if 0 < due.expires_at <= now else 0)

    def _expire(self, extent: Extent) -> int:
        """Let the extent's remaining items die: they have waited too long."""
        taken = self.log.take_out(extent, extent.waiting(self.log.at(extent)))
        if taken:
            if self.keeps_dead:
                pieces = [(Part(extent, 0, extent.count, 0), taken)]
                transfer = self.transfers.begin(pieces, EXPIRED_READY, self.dead_queue, self.dead_incarnation)
                transfer.failures = self.log.failures.told(transfer)
            else:
                self.log.header.dead += len(taken)
            self.log.end_waiting("dead", extent, taken)
        return len(taken)

    # ---- changes ----------------------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to write."""
        log = self.log
        return log.changed or bool(log.touched or self.keys.touched or log.failures.touched or log.bundles.touched)

    def take_changes(self) -> tuple[Changes, dict[int, Rows]] | None:
        """Return everything since the last call as one change set, and the new blobs' rows; None if nothing changed."""
        log = self.log
        if not self.is_changed:
            return None
        self.keys.forget_old(log.header.now)
        self.txn += 1
        fresh, blobs, dropped, compacted = log.take_blobs()
        records = {(kind, str(number)): self._record((kind, number)) for kind, number in log.touched}
        records |= {(RecordKind.KEY, key): self.keys.record(key) for key in self.keys.touched}
        records |= {(RecordKind.FAILURE, str(number)): log.failures.record(number) for number in log.failures.touched}
        records |= {(RecordKind.BUNDLE, str(bundle)): log.bundles.record(bundle) for bundle in log.bundles.touched}
        puts = {name: data for name, data in records.items() if data is not None}
        changes = Changes(self.txn, pack(log.header), puts, records.keys() - puts.keys(), blobs, dropped, compacted)
        log.touched, log.changed, self.keys.touched, log.failures.touched, log.bundles.touched = {}, False, {}, {}, {}
        if log.flows is None:
            # Leases by key are in no order of offsets, by which those of many small columns are found.
            self.leases.pack()
        return changes, fresh

    def _record(self, name: RecordName) -> bytes | None:
        """The current bytes of a record; None if it is gone."""
        kind, number = name
        if kind is RecordKind.LEASE:
            if (closed := self.closed.record(number)) is not None:
                return closed
            lease = self.leases.find(number) or self.transfers.by_number.get(number)
            return lease_bytes(lease) if lease else None
        if kind is RecordKind.EXTENT:
            extent = self.log.extents.get(number)
            return extent_bytes(extent) if extent else None
        if kind is RecordKind.BLOB:
            blob = self.log.blobs.get(number)
            return blob_bytes(blob) if blob else None
        due = self.log.dues.get(number)
        return due_bytes(due) if due else None


def _answer_of(places: Sequence[SlotPlace], repeated: bool) -> Placed:
    """The answer of a part whose rows are there, slot by slot."""
    runs: list[tuple[int | None, int, int]] = []
    duplicates: list[tuple[int, int]] = []
    count, end = 0, None
    for each in places:
        if runs and runs[-1][0] == each.partition and end == each.first_offset:
            runs[-1] = each.partition, runs[-1][1], runs[-1][2] + each.rows
        else:
            runs.append((each.partition, each.first_offset, each.rows))
        duplicates += [(count + row, offset) for row, offset in each.duplicates]
        count, end = count + each.rows, each.end
    partition, first, _ = runs[0]
    return Placed(first, count, repeated, partition, tuple(runs) if len(runs) > 1 else (), tuple(duplicates))


def _report(circuit: Circuit, disposition: Disposition, items: int, probe: int) -> None:
    """Tell the circuit breaker what has become of leased items."""
    if disposition.verdict == "done":
        circuit.completed(items, probe)
    elif disposition.verdict == "release":
        circuit.returned(items, probe)
    else:
        circuit.failed(items, probe)
