"""Balance of loads: which items to exchange between members, when the loads of members have differed for a while.

Members have equal numbers of items, and keep them: a busy item is exchanged for an idle one, so whatever a round does for other reasons,
the plan that results is one that rounds keep. One member decides, from what all have reported. It opens a round that names the moves.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from sluiceway.core.group.group_records import GroupView, Keys, LoadReport, Move, Plan, Resource, Round, Writes
from sluiceway.core.group.plan import queue_of
from sluiceway.core.group.zones import span
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import View

INSTANCE = 1_000_000
"""The load that a member can carry, as measured: loads are in millionths of it."""


class Pace(NamedTuple):
    """When loads are uneven, and what is done about it.

    `uneven`: a member above this many times the mean load is too busy. `even`: exchanges go on until none is above this. `gain`: what an
    exchange must take of a busy member's load, at least; less may be noise, and would soon be taken back. `floor`: differences below this
    do not matter, whatever their ratio. `looks`: the loads have to be uneven at so many looks in a row, `look` ms apart, without a round in
    between: averages forget what was before. `minute`: window of the bound on moves.
    """

    uneven: float = 1.25
    even: float = 1.1
    gain: float = 0.1
    floor: int = INSTANCE // 20
    looks: int = 4
    look: Millis = 15_000
    minute: Millis = 60_000


PACE = Pace()
NEIGHBOURS = 2
"""Items on either side of the best fitting one that are tried, too: the very best may be the one that is on both sides."""

TRIED = 10
"""The busiest members, and the idlest, that are looked at for an exchange: in large groups all pairs would take seconds."""


def reports_of(view: View, keys: Keys) -> dict[str, LoadReport]:
    """The members' reports, by member, from a view of the prefix `keys.loads`."""
    found = view.prefix(keys.loads).items()
    return {key.removeprefix(keys.loads): msgspec.json.decode(entry.value, type=LoadReport) for key, entry in found}


def noticeable(before: LoadReport | None, after: LoadReport) -> bool:
    """Whether the change is worth a report: another plan, or loads that differ by more than a tenth, and 2 % of what a member can carry."""
    if before is None or before.round != after.round:
        return True
    changed = sum(abs(after.loads.get(item, 0) - before.loads.get(item, 0)) for item in before.loads.keys() | after.loads.keys())
    return changed > max(sum(before.loads.values()) // 10, INSTANCE // 50)


def decides(look: GroupView, name: str) -> bool:
    """Whether that member decides on exchanges: the first of the last round that is not leaving. If two think so, one commit fails."""
    if look.round is None or not look.round.sealed:
        return False
    staying = [each for each in look.round.participants if each in look.members and not look.members[each].leaving]
    return staying[:1] == [name]


class Balancer:
    """Decides when loads have been uneven for long enough, and how many moves the minute has left. One for each member."""

    def __init__(self, pace: Pace = PACE) -> None:
        self._pace = pace
        self._uneven = 0
        self._round: int | None = None
        self._swapped: deque[tuple[Millis, int]] = deque()
        """The plan's count of moves for loads, and since when it is known; the first is from a minute ago or longer."""

    def note(self, now: Millis, look: GroupView) -> None:
        """Update from a look. All members do, so that any of them may decide at once."""
        swapped = 0 if look.plan is None else look.plan.swapped
        if not self._swapped or self._swapped[-1][1] != swapped:
            self._swapped.append((now, swapped))
        while len(self._swapped) > 1 and self._swapped[1][0] <= now - self._pace.minute:
            self._swapped.popleft()

    def budget(self, now: Millis, look: GroupView, most: int) -> int:
        """The moves left of `most` in a minute; 0 while this member has not known the group for a minute."""
        if look.plan is None or not self._swapped or self._swapped[0][0] > now - self._pace.minute:
            return 0
        # The count is lower than it was after a restore.
        return min(most, max(0, most - (look.plan.swapped - self._swapped[0][1])))

    def decide(self, now: Millis, look: GroupView, reports: Mapping[str, LoadReport]) -> tuple[Move, ...]:
        """The moves to make now. Call once every `look` ms of the pace, after `note`."""
        resource, plan, current = look.resource, look.plan, look.round
        if resource is None or plan is None or current is None or resource.strategy != "rounds" or plan.era != resource.era:
            return ()
        reported = all(name in reports and reports[name].round == current.number for name in current.participants)
        settled = reported and current.sealed and plan.resource_version == resource.version
        if not settled or self._round != current.number:
            self._round, self._uneven = current.number, 0
        totals = totals_of(plan, current.participants, reports)
        self._uneven = self._uneven + 1 if settled and is_uneven(totals) else 0
        if self._uneven < self._pace.looks:
            return ()
        return exchanges(look, resource, plan, reports, self.budget(now, look, resource.load_moves))


def open_round(look: GroupView, keys: Keys, swaps: Iterable[Move]) -> Writes:
    """The commit that opens a round for these moves. It fails if another round was opened."""
    assert look.round is not None, "decided after a round"
    writes = Writes(checks={keys.round: look.stamp(keys.round)}, deletes=look.marks_left(keys))
    opened = Round(
        number=look.round.number + 1, sealed=False, trigger="loads are uneven", participants=look.round.participants, swaps=tuple(swaps)
    )
    writes.put(keys.round, opened)
    return writes


# ---- which items ------------------------------------------------------------------------------------------------------


def totals_of(plan: Plan, members: Iterable[str], reports: Mapping[str, LoadReport]) -> dict[str, int]:
    """Each member's load: of the items that it owns, as it has reported them itself."""
    return {name: sum(loads_of(plan, name, reports).values()) for name in members}


def loads_of(plan: Plan, name: str, reports: Mapping[str, LoadReport]) -> dict[str, int]:
    """The member's items with their loads; 0: not reported."""
    reported = reports[name].loads if name in reports else {}
    return {item: reported.get(item, 0) for item in plan.owners.get(name, ())}


def is_uneven(totals: Mapping[str, int]) -> bool:
    """Whether a member is so much busier than the mean that items should be exchanged."""
    if len(totals) < 2:
        return False
    mean, most = sum(totals.values()) / len(totals), max(totals.values())
    return most > PACE.uneven * mean and most - mean > PACE.floor


def exchanges(look: GroupView, resource: Resource, plan: Plan, reports: Mapping[str, LoadReport], most: int) -> tuple[Move, ...]:
    """Up to `most` moves that level the loads: pairs of items that change places, or single items where that keeps the numbers even."""
    assert look.round is not None, "decided after a round"
    work = _Exchanges(look, resource, plan, reports)
    found: list[Move] = []
    while step := work.next(most - len(found)):
        found += step
    return tuple(found)


class _Exchanges:
    """The members' loads and items while exchanges are chosen one by one. Deterministic: ties go by name."""

    def __init__(self, look: GroupView, resource: Resource, plan: Plan, reports: Mapping[str, LoadReport]) -> None:
        assert look.round is not None, "decided after a round"
        members = [name for name in look.round.participants if name in look.members]
        self._loads = {name: loads_of(plan, name, reports) for name in members}
        self._totals = {name: sum(loads.values()) for name, loads in self._loads.items()}
        self._mean = sum(self._totals.values()) / max(1, len(members))
        self._limits, self._pins = resource.limits, resource.pins
        self._zones = span(members, look.zones)
        self._parts = _ZoneParts(self._loads, {*resource.limits}, {*resource.pins}, self._zones)
        self._done: set[str] = set()

    def next(self, room: int) -> list[Move]:
        """The next exchange of at most `room` moves; empty: none would help enough."""
        by_load = sorted(self._totals, key=lambda name: (-self._totals[name], name))
        for busy in by_load[:TRIED]:
            if self._totals[busy] <= PACE.even * self._mean or self._totals[busy] - self._mean <= PACE.floor // 2:
                break
            for idle in by_load[: -TRIED - 1 : -1]:
                if self._totals[busy] - self._totals[idle] < 2 * PACE.gain * self._totals[busy]:
                    break
                best = max(self._candidates(busy, idle, room), default=None)
                if best is not None:
                    return self._made(busy, idle, best)
        return []

    def _candidates(self, busy: str, idle: str, room: int) -> Iterator[_Candidate]:
        """The exchanges between the two that lower the busy one's load enough, and leave the idle one below that."""
        gap = self._totals[busy] - self._totals[idle]
        least = PACE.gain * self._totals[busy]
        gives, takes = self._by_class(busy, idle), self._by_class(idle, busy)
        for group in sorted(gives):
            back = [("", 0)] if self._is_one_more(busy, idle) and not group else []
            theirs = sorted((load, item) for item, load in takes.get(group, [])) if room >= 2 else []
            for item, load in gives[group]:
                at = bisect.bisect_left(theirs, (load - gap // 2, ""))
                near = [(other, less) for less, other in theirs[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]]
                for other, less in near + (back if room >= 1 else []):
                    gain = min(load - less, gap - (load - less))
                    if gain >= least:
                        yield _Candidate(gain, not other, item, other)

    def _by_class(self, name: str, other: str) -> dict[str, list[tuple[str, int]]]:
        """The member's items that may go to the other, by what they may be exchanged for: an item of the same class.

        A limited queue's items only for each other, where both have some. Others for any, unless their zone would lose its part; then,
        too, for one of the same queue.
        """
        found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        across = bool(self._zones) and self._zones[name] != self._zones[other]
        for item, load in self._loads[name].items():
            queue = queue_of(item)
            if item in self._done or item in self._pins:
                continue
            if queue in self._limits or across:
                found[queue or "."].append((item, load))
            if queue not in self._limits and (not across or self._parts.may_go(queue, self._zones[name], self._zones[other])):
                found[""].append((item, load))
        return found

    def _is_one_more(self, busy: str, idle: str) -> bool:
        """Whether the one may have the larger share instead of the other."""
        same_zone = not self._zones or self._zones[busy] == self._zones[idle]
        return same_zone and len(self._loads[busy]) == len(self._loads[idle]) + 1

    def _made(self, busy: str, idle: str, best: _Candidate) -> list[Move]:
        moves = [Move(best.item, busy, idle)]
        if best.other:
            moves.append(Move(best.other, idle, busy))
        for item, before, owner in moves:
            load = self._loads[before].pop(item)
            self._loads[owner][item] = load
            self._totals[before] -= load
            self._totals[owner] += load
            self._done.add(item)
            self._parts.moved(queue_of(item), before, owner)
        return moves


class _Candidate(NamedTuple):
    """An exchange of an item for another one, or, if empty, for none; the larger is the better. One move is better than two."""

    gain: float
    is_single: bool
    item: str
    other: str


class _ZoneParts:
    """How many items of each unlimited queue are in each zone, and may be."""

    def __init__(
        self, loads: Mapping[str, Mapping[str, int]], limits: Collection[str], pins: Collection[str], zones: Mapping[str, str]
    ) -> None:
        self._zones = zones
        self._has: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._rooms: Counter[str] = Counter()
        for name, items in loads.items() if zones else ():
            rest = [queue for item in items if (queue := queue_of(item)) not in limits and item not in pins]
            self._rooms[zones[name]] += len(rest)
            for queue in rest:
                self._has[queue][zones[name]] += 1
        self._sizes = {queue: has.total() for queue, has in self._has.items()}
        self._total = self._rooms.total()

    def may_go(self, queue: str, zone: str, other: str) -> bool:
        """Whether both zones still have their parts of the queue, rounded down or up, when an item of it goes from one to the other."""
        has, size = self._has[queue], self._sizes[queue]
        least, most = size * self._rooms[zone] // self._total, -(-size * self._rooms[other] // self._total)
        return has[zone] > least and has[other] < most

    def moved(self, queue: str, before: str, owner: str) -> None:
        if self._zones and queue in self._has:
            self._has[queue][self._zones[before]] -= 1
            self._has[queue][self._zones[owner]] += 1
