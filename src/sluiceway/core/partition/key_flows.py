"""Flows: which items of a partition may be leased next where the queue orders them by key, shares service between keys, or limits a key.

A flow is a key with items that wait or are in flight. Its items wait in *segments*, runs of an extent's positions, in the order in which
they were stored, which no return changes. Keys that can be served are in two lines: *fresh* ones were at rest before, the others are in the
*turn*. A lease serves the fresh ones first, and otherwise in turn, by deficit round robin: Shreedhar and Varghese, Efficient fair queuing
using deficit round robin (SIGCOMM 1995), with the two lists of FQ-CoDel (RFC 8290). docs/adr/0053-order-and-fairness-by-key.md has the
reasons.

Derived from the partition's records, and not stored. All work goes by run of equal keys, none by item. Flows are rows of arrays: there may
be a million. From MANY keys on, the same is done for all of them at once, in columns.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise, repeat
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from sluiceway.contract.queue_settings import QueueSettings
from sluiceway.contract.queue_stats import KeyObstacle
from sluiceway.core.partition.blob_values import BlobValues, ValueCounts
from sluiceway.core.partition.records import Blob, Extent, LeaseState, Part, by_part, from_array, to_array
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_PRIORITY
from sluiceway.model.item_keys import DEFAULT_PRIORITY, NO_KEY, hash_of
from sluiceway.model.requests import Offsets

NOWHERE, FRESH, TURN = range(3)
TURN_ITEMS, TURNS = 16, 8
"""A key of the largest weight gets at least TURN_ITEMS items in a turn, unless a lease would then have fewer than TURNS turns."""
MANY = 16
"""Keys from which on working in columns costs less than one key after the other."""
_NONE = -1
_PLACE_BITS = 48
"""Of a rank: the place where an item was stored. Above is its level, which falls from 9 to 0 as the priority rises."""
_PLACES = (1 << _PLACE_BITS) - 1
_DEFAULT_LEVEL = MAX_PRIORITY - DEFAULT_PRIORITY
NO_WEIGHTS: Mapping[int, int] = MappingProxyType({})
_BLOCK = 1024
"""Values of which only the largest is compared when a few are looked for among many."""


class KeyRules(NamedTuple):
    """What holds of the keys. `concurrency`: most items of a key that are leased at once; 0: any number. `interval`: milliseconds for each
    item that is leased, in the long run; 0: none. `burst`: items that may be leased at once after a pause. `weights`: shares other than 1,
    by the key's hash. `blocks`: in order, an item that would die holds up its key instead. `priority`: within a flow, items of higher
    priority come first; where keys do not matter, all items are one flow.
    """

    order: bool = False
    fair: bool = False
    concurrency: int = 0
    interval: float = 0.0
    burst: int = 1
    weights: Mapping[int, int] = NO_WEIGHTS
    blocks: bool = False
    priority: bool = False

    def __bool__(self) -> bool:
        return self.by_key or self.priority

    @property
    def by_key(self) -> bool:
        """Whether keys matter."""
        return self.fair or self.keep_together

    @property
    def keep_together(self) -> bool:
        """Whether all items of a key are in one partition."""
        return self.order or self.concurrency > 0 or self.interval > 0


def key_rules(record: QueueSettings) -> KeyRules:
    """The rules by the queue's settings."""
    rate, weights = record.key_rate, {hash_of(key): weight for key, weight in (record.key_weights or {}).items()}
    interval, burst = (0.0, 1) if rate is None else (1_000 / rate.per_second, rate.burst)
    blocks = record.order is not None and record.key_on_dead is not None
    return KeyRules(
        record.order is not None,
        record.fair is not None,
        record.key_concurrency,
        interval,
        burst,
        weights,
        blocks,
        record.priority is not None,
    )


class Taken(NamedTuple):
    """A run of an extent's positions to lease."""

    extent: Extent
    at: int
    items: int


class KeyTotals(NamedTuple):
    """Keys with waiting items, those of them of which none may be leased now, and keys with as many leased items as they may have."""

    waiting: int = 0
    blocked: int = 0
    limited: int = 0


class WaitingKey(NamedTuple):
    """A key with waiting items, by its hash. `extent`, `at`: its next item. `returned`: items that hold it up until their delay is over."""

    key: int
    waiting: int
    leased: int
    returned: int
    extent: Extent
    at: int
    blocked_by: KeyObstacle | None


class KeyFlows:
    """The flows of a partition."""

    def __init__(self, rules: KeyRules) -> None:
        self.rules = rules
        self._heaviest = max(rules.weights.values(), default=1)
        self.servable = 0
        """Items that may be leased now."""
        self._numbers: dict[int, int] = {}
        """The number of each key's flow, by the key's hash."""
        self._keys = array("Q")
        self._first, self._last = array("q"), array("q")
        """The first segment of each flow, and the last."""
        self._waiting = array("q")
        self._flight = array("q")
        """Items that are leased, or hold up their key."""
        self._returned = array("q")
        """Those of `_flight` that hold it up until their delay is over."""
        self._can = array("q")
        """The flow's part of `servable`."""
        self._deficit, self._line = array("q"), array("b")
        self._full_at = array("d")
        """Where there is a rate: when the key may have a whole burst again, if nothing of it is leased until then."""
        self._now: Millis = 0
        self._begun_at: Millis | None = None
        """When this owner began. Nobody knows what was leased before: each key begins without its burst."""
        self._past: dict[int, float] = {}
        """`_full_at` of keys that have no flow now."""
        self._most_past = 0
        """How many there may be before those that may have a whole burst again are dropped."""
        self._wakes: list[tuple[float, int]] = []
        """When a flow that has used up its rate may be served again: (time, key). May name keys that have no flow any more."""
        self._waking: set[int] = set()
        """The keys in `_wakes`, each of which is there once."""
        self._held: frozenset[int] = frozenset()
        """Slots of which nothing is served, of `_slots`: see `Header.held_slots`."""
        self._slots = 1
        self._served_from: dict[int, Millis] = {}
        """When slots were held back no longer: a key's former home may have leased its whole burst until then."""
        self._free: list[int] = []
        self._fresh, self._turn = deque[int](), deque[int]()
        self._owed = 0
        """Turns of fresh keys for which the others have had none."""
        self._extents: list[Extent | None] = []
        self._at, self._count, self._next = array("q"), array("q"), array("q")
        """Of each segment: the first position, the number of positions, and the next segment of its flow."""
        self._since = array("q")
        """When the blob of each segment was written."""
        self._rank = array("q")
        """Where the first item of each segment stands in its flow: the offset that it had when it was stored, behind its priority."""
        self._levels = _Levels()
        self._free_segments: list[int] = []
        self._torn: set[int] = set()
        """Flows whose segments may have positions that have left."""

    @property
    def flows(self) -> int:
        """Keys with items that wait or are in flight."""
        return len(self._numbers)

    @property
    def has_precedence(self) -> bool:
        """Whether what is served next should not wait for other partitions: keys that were at rest, or items above the default priority."""
        return self._levels.urgent > 0 or self._has_fresh

    @property
    def _has_fresh(self) -> bool:
        """Whether keys that were at rest are to be served next."""
        return bool(self._fresh) and (not self._turn or self._owed <= len(self._fresh) + len(self._turn))

    # ---- events -----------------------------------------------------------------------------------------------

    def enter(self, extent: Extent, at: int, count: int) -> None:
        """Those positions of the extent have entered the line."""
        keys, counts = _keys_at(extent, at, count, self.rules.by_key)
        if self.rules.priority:
            self._enter_by_priority(keys, extent, at, counts)
            return
        # What comes back may belong in the midst of a torn flow's segment; what is new follows everything.
        follows = extent.rows is None and (not self._torn or extent.first == extent.blob.number + extent.row)
        if follows and len(keys) >= MANY and len(set(keys)) == len(keys):
            self._enter_many(keys, extent, at, np.array(counts))
            return
        for key, items in zip(keys, counts, strict=True):
            if self.rules.order and key != NO_KEY and extent.rows is not None:
                # Rows that come back at another time may belong between them.
                for begin, end in _consecutive(extent.rows_at(at, items)):
                    self._enter(key, extent, at + begin, end - begin)
            else:
                self._enter(key, extent, at, items)
            at += items

    def _enter_by_priority(self, keys: Sequence[int], extent: Extent, at: int, counts: Sequence[int]) -> None:
        for key, count in zip(keys, counts, strict=True):
            for priority, items in zip(*_values_at(extent.blob.priorities, extent, at, count, DEFAULT_PRIORITY), strict=True):
                for begin, end in [(0, items)] if extent.rows is None else _consecutive(extent.rows_at(at, items)):
                    self._enter(key, extent, at + begin, end - begin, (MAX_PRIORITY - priority) << _PLACE_BITS)
                at += items

    def enter_waiting(self, extent: Extent, positions: BitMap) -> None:
        """The same of any positions."""
        places = to_array(positions)
        for begin, end in _consecutive(places):
            self.enter(extent, int(places[begin]), end - begin)

    def leave(self, extent: Extent, positions: BitMap) -> None:
        """Those positions have left the line without being leased."""
        for key, rows in zip(*_keys_among(extent, positions, self.rules.by_key), strict=True):
            number = self._numbers[key]
            self._waiting[number] -= rows
            self._torn.add(number)
            self._drop_absent(number)
            self._update(number)

    def settled(self, lease: LeaseState, positions: BitMap) -> None:
        """Those positions of the lease are no longer leased, whatever has become of them."""
        keys, counts = _keys_in(lease, positions, self.rules.by_key)
        numbers = [self._numbers[key] for key in keys]
        for number, rows in zip(numbers, counts, strict=True):
            self._flight[number] -= rows
        self._update_all(list(dict.fromkeys(numbers)))

    def leased(self, lease: LeaseState) -> None:
        """The lease's open positions are leased: as `take` has done it for those that it returned."""
        for key, rows in zip(*_keys_in(lease, lease.open_positions(), self.rules.by_key), strict=True):
            self._in_flight(key, rows)

    def hold(self, blob: Blob, rows: BitMap) -> None:
        """Those rows were returned, and in order hold up their keys until their delay is over."""
        for key, count in zip(*keys_of(blob, rows), strict=True) if self.rules.order else ():
            self._returned[self._number(key)] += count
            self._in_flight(key, count)

    def let_go(self, blob: Blob, rows: BitMap) -> None:
        """Those rows do so no longer."""
        for key, count in zip(*keys_of(blob, rows), strict=True) if self.rules.order else ():
            self._returned[self._number(key)] -= count
            self._in_flight(key, -count)

    def _in_flight(self, key: int, count: int) -> None:
        number = self._number(key)
        self._flight[number] += count
        self._update(number)

    # ---- slots that come from another partition ---------------------------------------------------------------

    def hold_back(self, slots: frozenset[int], of: int, now: Millis) -> None:
        """Serve no key of these slots, of `of`, and from `now` on those of all others."""
        changed, served = self._held ^ slots, self._held - slots
        self._held, self._slots, self._now = slots, of, max(now, self._now)
        if self.rules.interval:
            self._served_from |= dict.fromkeys(served, self._now)
        for number in self._of_slots(changed):
            if self.rules.interval and self._keys[number] % of in served:
                self._full_at[number] = max(self._full_at[number], self._now + self.rules.burst * self.rules.interval)
            self._update(number)

    def slots_left(self, of: int) -> set[int]:
        """The slots, of `of`, of which items wait or are in flight."""
        return set(np.flatnonzero(np.bincount((_view(self._keys)[self._of_keys()] % np.uint64(of)).astype(np.int64))).tolist())

    def _of_slots(self, slots: frozenset[int]) -> list[int]:
        """The flows of keys of these slots."""
        chosen = np.zeros(self._slots, np.bool_)
        chosen[sorted(slots)] = True
        return np.flatnonzero(chosen[_view(self._keys) % np.uint64(self._slots)] & self._of_keys()).tolist()

    def _of_keys(self) -> npt.NDArray[np.bool_]:
        """Which flows there are now, apart from that of the items without a key."""
        there: npt.NDArray[np.bool_] = (_view(self._keys) != NO_KEY) & ((_view(self._waiting) > 0) | (_view(self._flight) > 0))
        return there

    # ---- rates ------------------------------------------------------------------------------------------------

    def wakes_at(self) -> Millis | None:
        """When a key may be served again that has used its rate up; None: there is none."""
        if self._begun_at is None and self.rules.interval and self._numbers:
            return 0
        return ceil(self._wakes[0][0]) if self._wakes else None

    def wake(self, now: Millis) -> None:
        """It is `now`: keys may be served again."""
        if not self.rules.interval:
            return
        self._begin(now)
        while self._wakes and self._wakes[0][0] <= now:
            key = heapq.heappop(self._wakes)[1]
            self._waking.discard(key)
            if key in self._numbers:
                self._update(self._numbers[key])

    def _begin(self, now: Millis) -> None:
        self._now = max(now, self._now)
        if self._begun_at is None:
            self._begun_at = self._now
            for number in list(self._numbers.values()):
                self._full_at[number] = self._begun_at + self.rules.burst * self.rules.interval
                self._update(number)
        if len(self._past) > max(self._most_past, 2 * len(self._numbers) + 1_000):
            self._past = {key: full_at for key, full_at in self._past.items() if full_at > now}
            # At low rates all of them may stay for long: they are looked through only once they have doubled.
            self._most_past = 2 * len(self._past)

    def _allowed(self, number: int) -> int:
        """Items that the key's rate allows now. Otherwise it wakes when it allows one: the generic cell rate algorithm (ITU-T I.371)."""
        if self._begun_at is None:
            return 0
        interval, burst = self.rules.interval, self.rules.burst
        allowed = int(burst - max(0.0, self._full_at[number] - self._now) / interval + 1e-9)
        if not allowed and self._keys[number] not in self._waking:
            self._waking.add(self._keys[number])
            # Later than now, however both are rounded: a key that wakes too early would be woken again and again.
            wakes_at = max(self._full_at[number] - (burst - 1) * interval, self._now + 1)
            heapq.heappush(self._wakes, (wakes_at, self._keys[number]))
        return allowed

    # ---- flows ------------------------------------------------------------------------------------------------

    def _number(self, key: int) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._free.pop() if self._free else self._grow()
            self._keys[number] = key
            self._remember_rate(number)
        return number

    def _remember_rate(self, number: int) -> None:
        if self.rules.interval and self._begun_at is not None:
            key = self._keys[number]
            begun_at = max(self._begun_at, self._served_from.get(key % self._slots, 0))
            self._full_at[number] = max(self._past.pop(key, 0.0), begun_at + self.rules.burst * self.rules.interval)

    def _numbers_of(self, keys: Sequence[int]) -> Offsets:
        """The same of distinct keys."""
        found = [*map(self._numbers.get, keys)]
        new = [key for key, number in zip(keys, found, strict=True) if number is None]
        if new:
            if len(self._free) < len(new):
                self._free.append(self._grow(len(new)))
            numbers = self._free[-len(new) :]
            del self._free[-len(new) :]
            _view(self._keys)[numbers] = np.array(new, np.uint64)
            self._numbers.update(zip(new, numbers, strict=True))
            for number in numbers if self.rules.interval else ():
                self._remember_rate(number)
            found = [*map(self._numbers.get, keys)]
        return np.array(found, np.int64)

    def _grow(self, least: int = 16) -> int:
        """Make room for as many more flows as there are, and at least so many. Returns the number of one."""
        number = len(self._keys)
        more = max(least, number)
        counts = self._waiting, self._flight, self._returned, self._can, self._deficit
        for column in (self._keys, self._line, self._full_at, *counts):
            column.extend(repeat(0, more))
        for column in (self._first, self._last):
            column.extend(repeat(_NONE, more))
        self._free.extend(range(number + more - 1, number, -1))
        return number

    def _update(self, number: int, is_fresh: bool = False) -> None:
        """Note what can be served after a change of the flow, and have it stand in line. `is_fresh`: it was at rest."""
        self._recount(number)
        if self._line[number] != NOWHERE:
            return
        if self._can[number]:
            self._line[number] = FRESH if is_fresh and self.rules.fair else TURN
            self._line_of(number).append(number)
        elif not self._waiting[number] and not self._flight[number]:
            self._forget(number)

    def _recount(self, number: int) -> None:
        can, flight = self._waiting[number], self._flight[number]
        if self._keys[number] != NO_KEY:
            if (self.rules.order and flight) or (self._held and self._keys[number] % self._slots in self._held):
                can = 0
            elif self.rules.concurrency:
                can = max(0, min(can, self.rules.concurrency - flight))
            if can and self.rules.interval:
                can = min(can, self._allowed(number))
        self.servable += can - self._can[number]
        self._can[number] = can

    def _update_all(self, numbers: Sequence[int], are_fresh: npt.NDArray[np.bool_] | None = None) -> None:
        """The same for all of these. `are_fresh`: which of them were at rest."""
        if len(numbers) < MANY or self.rules.interval or self._held:
            for index, number in enumerate(numbers):
                self._update(number, are_fresh is not None and bool(are_fresh[index]))
            return
        chosen = np.array(numbers, np.int64)
        can, line = self._recount_many(chosen), _view(self._line)
        rests = line[chosen] == NOWHERE
        stands = rests & (can > 0)
        if are_fresh is not None and self.rules.fair:
            fresh = chosen[stands & are_fresh]
            line[fresh] = FRESH
            self._fresh.extend(fresh.tolist())
            stands &= ~are_fresh
        line[chosen[stands]] = TURN
        self._turn.extend(chosen[stands].tolist())
        empty = chosen[rests & (_view(self._waiting)[chosen] == 0) & (_view(self._flight)[chosen] == 0)]
        self._forget_many(empty)

    def _recount_many(self, chosen: Offsets) -> Offsets:
        """Returns what can be served of each."""
        can, flight, column = _view(self._waiting)[chosen], _view(self._flight)[chosen], _view(self._can)
        keyed = _view(self._keys)[chosen] != NO_KEY
        if self.rules.order:
            can[keyed & (flight > 0)] = 0
        if self.rules.concurrency:
            can[keyed] = np.clip(self.rules.concurrency - flight, 0, can)[keyed]
        self.servable += int(can.sum()) - int(column[chosen].sum())
        column[chosen] = can
        return can

    def _line_of(self, number: int) -> deque[int]:
        return self._fresh if self._line[number] == FRESH else self._turn

    def _forget(self, number: int) -> None:
        """The flow is empty, and in no line."""
        while self._first[number] != _NONE:
            # Segments whose positions have left.
            self._drop_first(number)
        self._deficit[number] = 0
        self._torn.discard(number)
        if self.rules.interval and self._full_at[number] > self._now:
            self._past[self._keys[number]] = self._full_at[number]
        del self._numbers[self._keys[number]]
        self._free.append(number)

    def _forget_many(self, chosen: Offsets) -> None:
        """The same for all of these."""
        has_segments = _view(self._first)[chosen] != _NONE
        if has_segments.any() or self.rules.interval:
            for number in chosen.tolist():
                self._forget(number)
            return
        _view(self._deficit)[chosen] = 0
        self._torn.difference_update(chosen.tolist())
        for key in _view(self._keys)[chosen].tolist():
            del self._numbers[key]
        self._free.extend(chosen.tolist())

    # ---- segments ---------------------------------------------------------------------------------------------

    def _enter(self, key: int, extent: Extent, at: int, count: int, behind: int = 0) -> None:
        """`behind`: the part of the rank that its priority makes."""
        number = self._number(key)
        last = self._levels.last(number, behind) if self.rules.priority else self._last[number]
        if last != _NONE and extent.rows is None and self._extents[last] is extent and self._at[last] + self._count[last] == at:
            self._count[last] += count
        else:
            self._insert(number, self._segment(extent, at, count, behind))
        is_fresh = not self._waiting[number] and not self._flight[number]
        self._waiting[number] += count
        self._update(number, is_fresh)

    def _enter_many(self, keys: Sequence[int], extent: Extent, at: int, counts: Offsets) -> None:
        """The same for a run of each of these keys, which follow each other."""
        numbers = self._numbers_of(keys)
        segments = self._segments_of(extent, at, counts)
        first, last, rank = _view(self._first), _view(self._last), _view(self._rank)
        before = last[numbers]
        is_only = before == _NONE
        is_last = is_only | (rank[before] < rank[segments])
        first[numbers[is_only]] = segments[is_only]
        follows = is_last & ~is_only
        _view(self._next)[before[follows]] = segments[follows]
        last[numbers[is_last]] = segments[is_last]
        for index in np.flatnonzero(~is_last).tolist():
            self._insert(int(numbers[index]), int(segments[index]))
        waiting = _view(self._waiting)
        are_fresh = (waiting[numbers] == 0) & (_view(self._flight)[numbers] == 0)
        waiting[numbers] += counts
        self._update_all(numbers.tolist(), are_fresh)

    def _segment(self, extent: Extent, at: int, count: int, behind: int) -> int:
        segment = self._free_segments.pop() if self._free_segments else self._grow_segments(1)
        self._extents[segment], self._at[segment], self._count[segment] = extent, at, count
        self._since[segment], self._rank[segment] = extent.blob.written_at, behind + extent.blob.number + extent.row_at(at)
        return segment

    def _segments_of(self, extent: Extent, at: int, counts: Offsets) -> Offsets:
        """Segments of so many positions each, which follow each other; the extent's rows do so, too."""
        more = len(counts) - len(self._free_segments)
        if more > 0:
            self._free_segments.append(self._grow_segments(more))
        segments = self._free_segments[-len(counts) :]
        del self._free_segments[-len(counts) :]
        for segment in segments:
            self._extents[segment] = extent
        chosen = np.array(segments, np.int64)
        ats = np.cumsum(counts) - counts + at
        _view(self._at)[chosen], _view(self._count)[chosen], _view(self._next)[chosen] = ats, counts, _NONE
        _view(self._since)[chosen], _view(self._rank)[chosen] = extent.blob.written_at, ats + extent.blob.number + extent.row
        return chosen

    def _grow_segments(self, more: int) -> int:
        """Make room for so many more segments. Returns one of them."""
        segment = len(self._extents)
        self._extents.extend(repeat(None, more))
        for column in (self._at, self._count, self._next, self._since, self._rank):
            column.extend(repeat(_NONE, more))
        self._free_segments.extend(range(segment + more - 1, segment, -1))
        return segment

    def _insert(self, number: int, segment: int) -> None:
        """Insert it by its rank: nearly always last, or, if it was returned, first."""
        rank = self._rank[segment]
        before = self._before(number, rank)
        after = self._first[number] if before == _NONE else self._next[before]
        while after != _NONE and self._rank[after] < rank:
            before, after = after, self._next[after]
        if before != _NONE and number in self._torn:
            after = self._split(number, before, rank)
        self._next[segment] = after
        if before == _NONE:
            self._first[number] = segment
        else:
            self._next[before] = segment
        if after == _NONE:
            self._last[number] = segment
        if self.rules.priority and (after == _NONE or self._rank[after] >> _PLACE_BITS != rank >> _PLACE_BITS):
            self._levels.add(number, rank, segment)

    def _split(self, number: int, segment: int, rank: int) -> int:
        """Cut off what the segment, of another extent, has behind that rank: one that has left it comes back there. Returns the segment
        that follows it now."""
        extent, at, count = self._segment_at(segment)
        behind = self._rank[segment] & ~_PLACES
        places = extent.rows_at(at, count) + (behind + extent.blob.number)
        stay = int(places.searchsorted(rank))
        if stay == count:
            return self._next[segment]
        rest = self._segment(extent, at + stay, count - stay, behind)
        self._next[rest], self._next[segment], self._count[segment] = self._next[segment], rest, stay
        if self._last[number] == segment:
            self._last[number] = rest
        if self.rules.priority and self._levels.last(number, behind) == segment:
            self._levels.add(number, behind, rest)
        return rest

    def _before(self, number: int, rank: int) -> int:
        """A segment before that rank, perhaps the last of them; _NONE: there may be none."""
        if not self.rules.priority:
            last = self._last[number]
            return last if last != _NONE and self._rank[last] < rank else _NONE
        for behind in range(rank >> _PLACE_BITS, -1, -1):
            last = self._levels.last(number, behind << _PLACE_BITS)
            if last != _NONE and self._rank[last] < rank:
                return last
        return _NONE

    def _drop_first(self, number: int) -> None:
        segment = self._first[number]
        self._first[number] = self._next[segment]
        if self._first[number] == _NONE:
            self._last[number] = _NONE
        if self.rules.priority:
            self._levels.drop(number, self._rank[segment], segment)
        self._extents[segment] = None
        self._free_segments.append(segment)

    def _drop_absent(self, number: int) -> None:
        """Drop the first segments whose positions have all left: the first of a flow says how long it has waited."""
        while self._first[number] != _NONE and not _present(*self._segment_at(self._first[number]))[1]:
            self._drop_first(number)

    def _segment_at(self, segment: int) -> tuple[Extent, int, int]:
        extent = self._extents[segment]
        assert extent is not None, "it is in use"
        return extent, self._at[segment], self._count[segment]

    def _extents_of(self, segments: Offsets) -> list[Extent]:
        return cast(list[Extent], [self._extents[segment] for segment in segments.tolist()])

    def _segments(self, number: int) -> Iterator[tuple[Extent, int, int]]:
        segment = self._first[number]
        while segment != _NONE:
            yield self._segment_at(segment)
            segment = self._next[segment]

    # ---- reads ------------------------------------------------------------------------------------------------

    def totals(self) -> KeyTotals:
        """Count the keys. Some 5 ms for a million."""
        if not self._numbers:
            return KeyTotals()
        keyed = _view(self._keys) != NO_KEY
        waits = keyed & (_view(self._waiting) > 0)
        blocked = waits & (_view(self._can) == 0)
        leased = _view(self._flight) - _view(self._returned)
        limited = keyed & (leased >= self.rules.concurrency) if self.rules.concurrency else keyed[:0]
        return KeyTotals(*(int(np.count_nonzero(each)) for each in (waits, blocked, limited)))

    def most_waiting(self, limit: int) -> list[WaitingKey]:
        """The `limit` keys with most items, waiting and in flight, and as many whose next item is oldest, in no order: of keys with waiting
        items. The items without a key are one."""
        if not self._extents:
            return []
        waiting, first = _view(self._waiting), _view(self._first)
        items = np.where(waiting > 0, waiting + _view(self._flight), 0)
        # A flow in which nothing waits may have no segment.
        age = np.where(waiting > 0, -_view(self._since)[first], np.iinfo(np.int64).min)
        numbers = np.union1d(_largest(items, limit), _largest(age, limit))
        return [self._waiting_key(number) for number in numbers.tolist() if self._waiting[number]]

    def waiting_of(self, key: int) -> int:
        """How many items of the key wait."""
        number = self._numbers.get(key)
        return 0 if number is None else self._waiting[number]

    def of_key(self, key: int) -> WaitingKey | None:
        """The key of that hash; None: none of its items waits."""
        return self._waiting_key(self._numbers[key]) if self.waiting_of(key) else None

    def of_item(self, extent: Extent, at: int) -> tuple[WaitingKey, int]:
        """The key of that waiting position, and how many items of it are served before."""
        keys = extent.blob.keys if self.rules.by_key else None
        number = self._numbers[NO_KEY if keys is None else keys.at(extent.row_at(at))]
        ahead = 0
        for other, first, count in self._segments(number):
            is_there = other is extent and first <= at < first + count
            end = at if is_there else first + count
            ahead += end - first - (other.gone.range_cardinality(first, end) if end > first else 0)
            if is_there:
                break
        return self._waiting_key(number), ahead

    def _waiting_key(self, number: int) -> WaitingKey:
        present = ((extent, *_present(extent, at, count)) for extent, at, count in self._segments(number))
        extent, at = next((extent, at) for extent, at, count in present if count)
        returned, flight = self._returned[number], self._flight[number]
        blocked_by: KeyObstacle | None = None
        if not self._can[number]:
            if self._held and self._keys[number] and self._keys[number] % self._slots in self._held:
                blocked_by = "rebalance"
            elif self.rules.order and flight:
                blocked_by = "lease" if flight > returned else "retry"
            else:
                blocked_by = "limit" if self.rules.concurrency and flight >= self.rules.concurrency else "rate"
        return WaitingKey(self._keys[number], self._waiting[number], flight - returned, returned, extent, at, blocked_by)

    # ---- take -------------------------------------------------------------------------------------------------

    def take(self, taking: Taking) -> list[Taken]:
        """Take positions to lease, until `taking` has enough or nothing more can be served. In the order in which they were stored, which
        is that within each key, too."""
        taken = _Pieces()
        aside: list[int] = []
        served: dict[int, None] = {}
        weights = self.rules.weights
        self.wake(taking.now)
        quantum = self._quantum(taking.want)
        is_many = not (self.rules.interval or self.rules.priority or taking.before is not None)
        while taking.goes_on and (self._fresh or self._turn):
            line = self._next_line()
            if is_many and len(line) >= MANY:
                many = self._serve_many(line, taking, quantum, taken)
                served.update(dict.fromkeys(many))
                is_many = bool(many)
                continue
            number = line.popleft()
            where, self._line[number] = self._line[number], NOWHERE
            self._deficit[number] = self._deficit[number] or quantum * (weights.get(self._keys[number], 1) if weights else 1)
            is_for_later = self._serve(number, taking, taken)
            served[number] = None
            if self.rules.order and not taking.runs:
                self._recount(number)
            if is_for_later:
                aside.append(number)
            elif self._can[number] and self._deficit[number]:
                # The lease ends in the midst of its turn.
                self._line[number] = where
                line.appendleft(number)
            else:
                self._deficit[number] = 0
                self._owed = self._owed + 1 if where == FRESH else max(0, self._owed - 1)
                if self._can[number]:
                    self._line[number] = TURN
                    self._turn.append(number)
        for number in reversed(aside):
            self._line[number] = TURN
            self._turn.appendleft(number)
        self._update_all([number for number in served if self._waiting[number]])
        return taken.runs()

    def _quantum(self, want: int) -> int:
        """Items of a turn of a key of weight 1. A lease that took little of every key would cost most, and keep keys in order from all
        other consumers."""
        if not self.rules.fair:
            return want
        flows = max(1, len(self._fresh) + len(self._turn))
        return max(1, want // (flows * self._heaviest), min(TURN_ITEMS, want // TURNS) // self._heaviest)

    def _next_line(self) -> deque[int]:
        """Fresh keys come first, but for no longer than a round of all takes: there may be new ones all the time."""
        if not self._turn:
            self._owed = 0
        return self._fresh if self._has_fresh else self._turn

    def _serve(self, number: int, taking: Taking, taken: _Pieces) -> bool:
        """Take from the flow what its turn allows. What this lease took from it before is no obstacle: its consumer has both. True: what
        comes next in the flow is not for this lease."""
        is_single = self.rules.order and not taking.runs and self._keys[number] != NO_KEY
        while self._can[number] > 0 and self._deficit[number] > 0 and taking.goes_on:
            segment = self._first[number]
            extent, at, count = self._segment_at(segment)
            start, present = _present(extent, at, count)
            behind = self._rank[segment] >> _PLACE_BITS << _PLACE_BITS
            rank = behind + extent.blob.number + extent.row_at(start) if present else 0
            most = 1 if is_single else min(present, self._can[number], self._deficit[number])
            take = taking.take(extent, start, most) if present else 0
            if present and not take:
                return taking.goes_on
            end = start + take
            if end == at + count or not present:
                self._drop_first(number)
            else:
                self._at[segment], self._count[segment] = end, at + count - end
                self._rank[segment] = behind + extent.blob.number + extent.row_at(end)
            if take:
                self._waiting[number] -= take
                self._flight[number] += take
                self._deficit[number] -= take
                if self.rules.interval:
                    self._full_at[number] = max(self._full_at[number], self._now) + take * self.rules.interval
                self._can[number] -= take
                self.servable -= take
                taken.add([extent], [start], [take], [rank])
                if is_single:
                    break
        return False

    def _serve_many(self, line: deque[int], taking: Taking, quantum: int, taken: _Pieces) -> list[int]:
        """Serve as many flows of the line as get their whole turn, as `take` does it with each. Returns them; empty: not in columns."""
        numbers = np.array([*islice(line, min(len(line), taking.want - taking.count))], np.int64)
        turns, rest = self._turns_to_take(numbers, taking, quantum)
        whole = int(np.searchsorted(np.cumsum(turns), taking.want - taking.count, "right"))
        whole = min(whole, self._turns_of(line, rest))
        numbers, turns, rest = numbers[:whole], turns[:whole], rest[:whole]
        if whole < MANY or (self._torn and not self._torn.isdisjoint(numbers.tolist())):
            return []
        pieces = self._pieces(numbers, turns)
        extents = [extent for _, segments, _ in pieces for extent in self._extents_of(segments)]
        if not taking.take_all(extents, np.concatenate([counts for *_, counts in pieces]) if pieces else turns[:0]):
            return []
        for flows, segments, counts in pieces:
            self._take_pieces(flows, segments, counts, taken)
        if line is self._turn:
            self._owed = max(0, self._owed - whole)
        elif self._turn:
            self._owed += whole
        else:
            # Owed since there was one to whom.
            self._owed = max(1, whole - _first_true(rest > 0))
        for _ in range(whole):
            line.popleft()
        can = _view(self._can)
        self.servable -= int(can[numbers].sum() - rest.sum())
        can[numbers] = rest
        _view(self._deficit)[numbers] = 0
        stays = rest > 0
        _view(self._line)[numbers] = np.where(stays, TURN, NOWHERE)
        self._turn.extend(numbers[stays].tolist())
        return [*numbers.tolist()]

    def _turns_of(self, line: deque[int], rest: Offsets) -> int:
        """Turns of these flows until the other line may be the next."""
        fresh, turn = len(self._fresh), len(self._turn)
        if line is self._turn:
            return self._owed - fresh - turn if fresh else turn
        if turn:
            return (fresh + turn - self._owed) // 2 + 1
        alone = _first_true(rest > 0)
        return alone + (fresh - alone) // 2 + 1

    def _turns_to_take(self, numbers: Offsets, taking: Taking, quantum: int) -> tuple[Offsets, Offsets]:
        """Items of the turn of each of these flows, and how many more can be served then."""
        keys, deficit, can = _view(self._keys)[numbers], _view(self._deficit)[numbers], _view(self._can)[numbers]
        weights = self.rules.weights
        weight = np.array([weights.get(key, 1) for key in keys.tolist()]) if weights else 1
        turns: Offsets = np.minimum(can, np.where(deficit > 0, deficit, quantum * weight))
        if not self.rules.order or taking.runs:
            return turns, can - turns
        keyed = keys != NO_KEY
        turns = np.where(keyed, np.minimum(turns, 1), turns)
        return turns, np.where(keyed, 0, can - turns)

    def _pieces(self, numbers: Offsets, turns: Offsets) -> list[tuple[Offsets, Offsets, Offsets]]:
        """The next so many items of each of these flows, as columns: flow, segment, items. The second are behind the first, and so on."""
        pieces = []
        segments, count, following = _view(self._first)[numbers], _view(self._count), _view(self._next)
        while (has := turns > 0).any():
            numbers, segments, turns = numbers[has], segments[has], turns[has]
            items = np.minimum(turns, count[segments])
            pieces.append((numbers, segments, items))
            segments, turns = following[segments], turns - items
        return pieces

    def _take_pieces(self, numbers: Offsets, segments: Offsets, items: Offsets, taken: _Pieces) -> None:
        """Take so many items of the first segment of each of these flows."""
        at, count, rank = _view(self._at), _view(self._count), _view(self._rank)
        taken.add(self._extents_of(segments), at[segments].tolist(), items.tolist(), rank[segments].tolist())
        _view(self._waiting)[numbers] -= items
        _view(self._flight)[numbers] += items
        is_all = items == count[segments]
        following, dropped = _view(self._next)[segments[is_all]], segments[is_all].tolist()
        _view(self._first)[numbers[is_all]] = following
        _view(self._last)[numbers[is_all][following == _NONE]] = _NONE
        for segment in dropped:
            self._extents[segment] = None
        self._free_segments.extend(dropped)
        rest, gone = segments[~is_all], items[~is_all]
        at[rest], count[rest], rank[rest] = at[rest] + gone, count[rest] - gone, rank[rest] + gone
        for segment, extent in zip(rest.tolist(), self._extents_of(rest), strict=True):
            if extent.rows is not None:
                rank[segment] = extent.blob.number + extent.row_at(self._at[segment])


class _Levels:
    """Where there are priorities: the last segment of each flow and priority, which is that of a rank."""

    def __init__(self) -> None:
        self.urgent = 0
        """Those with a priority above the default."""
        self._last: dict[tuple[int, int], int] = {}

    def last(self, number: int, rank: int) -> int:
        return self._last.get((number, rank >> _PLACE_BITS), _NONE)

    def add(self, number: int, rank: int, segment: int) -> None:
        """It is the last now."""
        level = rank >> _PLACE_BITS
        self.urgent += (number, level) not in self._last and level < _DEFAULT_LEVEL
        self._last[number, level] = segment

    def drop(self, number: int, rank: int, segment: int) -> None:
        """The flow's first segment has gone, which may have been the last, too."""
        level = rank >> _PLACE_BITS
        if self._last.get((number, level)) == segment:
            del self._last[number, level]
            self.urgent -= level < _DEFAULT_LEVEL


class _Pieces:
    """Runs of positions that were taken, as columns."""

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._at: list[int] = []
        self._items: list[int] = []
        self._rank: list[int] = []

    def add(self, extents: Sequence[Extent], at: Sequence[int], items: Sequence[int], rank: Sequence[int]) -> None:
        self._extents.extend(extents)
        self._at.extend(at)
        self._items.extend(items)
        self._rank.extend(rank)

    def runs(self) -> list[Taken]:
        """All of them, by rank. Those that follow each other in an extent are one: most do."""
        if len(self._at) < 2:
            return [*map(Taken, self._extents, self._at, self._items)]
        order = np.argsort(self._rank)
        at, items = np.array(self._at)[order], np.array(self._items)[order]
        extents = np.array([*map(id, self._extents)])[order]
        is_first = (extents[1:] != extents[:-1]) | (at[1:] != at[:-1] + items[:-1])
        first = np.flatnonzero(np.concatenate(([True], is_first)))
        return [
            Taken(self._extents[number], start, count)
            for number, start, count in zip(order[first].tolist(), at[first].tolist(), np.add.reduceat(items, first).tolist(), strict=True)
        ]


class Taking:
    """What a lease asks for and has room for, and what it has got. With `before`, it takes only items at lower offsets; with `runs`,
    several items of a key that are in order."""

    def __init__(self, want: int, room: float, at_least_one: bool, now: Millis, before: int | None = None, runs: bool = False) -> None:
        self.want = want
        self.runs = runs
        self.count = 0
        self.nbytes = 0.0
        self.now = now
        self.before = before
        self._room = room
        self._at_least_one = at_least_one
        self._is_full = False

    @property
    def goes_on(self) -> bool:
        """Whether it has room for more."""
        return self.count < self.want and not self._is_full

    def take(self, extent: Extent, at: int, run: int) -> int:
        """Take up to `run` positions of the extent from `at` on. Returns how many; with 0 it may be full, or these are not for it."""
        if 0 < extent.expires_at <= self.now:
            self._is_full = True  # its timer comes in the next cycle
            return 0
        if self.before is not None:
            run = min(run, self.before - extent.first - at)
            if run < 1:
                return 0
        if extent.max_lease_size:
            self._is_full = self.count >= extent.max_lease_size
            self.want = min(self.want, extent.max_lease_size)
        each = extent.blob.nbytes / extent.blob.stored_rows
        fits = int((self._room - self.nbytes) / each) if each else self.want
        if fits < 1 and (self.count or not self._at_least_one):
            self._is_full = True
        if self._is_full:
            return 0
        take = min(self.want - self.count, run, max(1, fits))
        self.count += take
        self.nbytes += take * each
        return take

    def take_all(self, extents: Sequence[Extent], counts: Offsets) -> bool:
        """Take so many positions of each extent, if `take` would take all of them. `before` is not looked at."""
        names = [*map(id, extents)]
        distinct = dict(zip(names, extents, strict=True))
        if any(0 < extent.expires_at <= self.now or extent.max_lease_size for extent in distinct.values()):
            return False
        each = {name: extent.blob.nbytes / extent.blob.stored_rows for name, extent in distinct.items()}
        nbytes = float(np.dot(counts, [*map(each.__getitem__, names)]))
        if self.nbytes + nbytes > self._room:
            return False
        self.count += int(counts.sum())
        self.nbytes += nbytes
        return True


def behind_in_flows(lease: LeaseState, positions: BitMap) -> BitMap:
    """The open positions of a lease that come after the first of these in the flow of its key."""
    found = BitMap()
    keys: set[int] = set()
    for part in lease.parts:
        base = part.base
        for key, items in zip(*_keys_at(part.extent, part.at, part.count, True), strict=True):
            span = BitMap(range(base, base + items))
            if key in keys:
                found |= span
            elif key != NO_KEY and (chosen := span & positions):
                found.add_range(chosen.min() + 1, base + items)
                keys.add(key)
            base += items
    return found - lease.settled


# ---- keys of positions ------------------------------------------------------------------------------------------------


def keyed_among(part: Part, positions: BitMap) -> BitMap:
    """Those of these positions of the lease's part whose items have a key."""
    keys, counts = _keys_among(part.extent, positions.shift(part.at - part.base), True)
    return from_array(to_array(positions)[np.repeat(np.array(keys, np.uint64) != NO_KEY, counts)])


def _keys_in(lease: LeaseState, positions: BitMap, by_key: bool) -> ValueCounts:
    """The keys of those positions of a lease. Not `by_key`: none has one."""
    keys: list[int] = []
    counts: list[int] = []
    if len(positions) == lease.count:
        found = (_keys_at(part.extent, part.at, part.count, by_key) for part in lease.parts)
    else:
        found = (_keys_among(part.extent, chosen.shift(part.at - part.base), by_key) for part, chosen in by_part(lease, positions))
    for theirs, rows in found:
        keys.extend(theirs)
        counts.extend(rows)
    return keys, counts


def _keys_at(extent: Extent, at: int, count: int, by_key: bool) -> ValueCounts:
    """The keys of a run of positions."""
    return _values_at(extent.blob.keys if by_key else None, extent, at, count, NO_KEY)


def _values_at(values: BlobValues | None, extent: Extent, at: int, count: int, default: int) -> ValueCounts:
    if values is None:
        return [default], [count]
    if extent.rows is None:
        return values.split(extent.row + at, count)
    return values.split_sorted(extent.rows_at(at, count))


def _keys_among(extent: Extent, positions: BitMap, by_key: bool) -> ValueCounts:
    """The keys of any positions."""
    first = positions.min()
    if positions.max() - first + 1 == len(positions):
        return _keys_at(extent, first, len(positions), by_key)
    if extent.blob.keys is None or not by_key:
        return [NO_KEY], [len(positions)]
    places = to_array(positions)
    rows = places + extent.row if extent.rows is None else to_array(extent.rows)[places]
    return extent.blob.keys.split_sorted(rows)


def keys_of(blob: Blob, rows: BitMap) -> ValueCounts:
    """The keys of those rows."""
    return ([NO_KEY], [len(rows)]) if blob.keys is None else blob.keys.split_sorted(to_array(rows))


def _view(column: array[int]) -> npt.NDArray[Any]:
    """The column as a numpy array, to be dropped at once: meanwhile the column cannot grow."""
    return np.frombuffer(column, column.typecode) if column else np.zeros(0, column.typecode)


def _first_true(mask: npt.NDArray[np.bool_]) -> int:
    """The first True, or the length."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _largest(values: Offsets, count: int) -> Offsets:
    """The places of the `count` largest values, in no order. They lie in as many blocks: those with the largest maxima."""
    blocks = len(values) // _BLOCK
    if blocks > count:
        end = blocks * _BLOCK
        chosen = np.argpartition(values[:end].reshape(blocks, _BLOCK).max(axis=1), blocks - count)[blocks - count :]
        places = np.concatenate([(chosen[:, None] * _BLOCK + np.arange(_BLOCK)).ravel(), np.arange(end, len(values))])
        return places[_largest_of_few(values[places], count)]
    return _largest_of_few(values, count)


def _largest_of_few(values: Offsets, count: int) -> Offsets:
    return np.argpartition(values, -count)[-count:] if len(values) > count else np.arange(len(values))


def _present(extent: Extent, at: int, count: int) -> tuple[int, int]:
    """The first run of those positions that are still in the line, as (start, length); length 0: none."""
    if not extent.gone or not extent.gone.range_cardinality(at, at + count):
        return at, count
    present = BitMap(range(at, at + count)) - extent.gone
    if not present:
        return at + count, 0
    start = present.min()
    later = extent.gone & BitMap(range(start, at + count))
    return start, (later.min() if later else at + count) - start


def _consecutive(places: Offsets) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers, as (begin, end) of their indexes."""
    edges = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    return ((begin, end) for begin, end in pairwise(edges) if end > begin)
