"""Spreading of queues over zones: a zone gets its share of each queue, rounded down or up.

A zone is a failure domain, such as a data centre: its instances may all die at once. `zones` maps members to zones; members without one
form a zone of their own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

NO_ZONES: Final[Mapping[str, str]] = MappingProxyType({})
MAX_ZONES = 16
"""Zones of a group. With more, all are ignored: planning would take too long, and a name per instance is no failure domain."""


def span(members: Iterable[str], zones: Mapping[str, str]) -> Mapping[str, str]:
    """The zone of each of these members; empty if there is nothing to spread over: fewer than two zones, or more than MAX_ZONES."""
    found = {member: zones.get(member, "") for member in members}
    return found if 2 <= len({*found.values()}) <= MAX_ZONES else NO_ZONES


class Quota:
    """The number of members that a limited queue, or a remainder, takes in each zone: `wanted` of all members, in proportion to the zone's
    members, rounded down or up. `take` them in the order of preference."""

    def __init__(self, wanted: int, zones: Mapping[str, str]) -> None:
        sizes = Counter(zones.values())
        total = sizes.total()
        self._zones = zones
        self.least = {zone: wanted * size // total for zone, size in sizes.items()}
        self.most = {zone: -(-wanted * size // total) for zone, size in sizes.items()}
        self._taken: Counter[str] = Counter()
        self._extra = wanted - sum(self.least.values())

    def take(self, member: str) -> bool:
        """Take the member, if its zone has room. Once all members were offered, exactly `wanted` are taken."""
        zone = self._zones[member]
        taken = self._taken[zone]
        if taken >= self.least[zone]:
            if not self._extra or taken >= self.most[zone]:
                return False
            self._extra -= 1
        self._taken[zone] += 1
        return True


def interleaved(loads: Mapping[str, int], zones: Mapping[str, str]) -> list[str]:
    """The members, least loaded first, and among equal loads from all zones in turn, in proportion to their members."""
    groups: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for member in sorted(loads):
        groups[loads[member], zones.get(member, "")].append(member)
    turn = {member: (2 * nth + 1) / len(group) for group in groups.values() for nth, member in enumerate(group)}
    return sorted(loads, key=lambda member: (loads[member], turn[member], member))


# ---- unlimited queues -------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """What stays, and where the rest goes: `held` per member; `free` per zone, for its members that have less than their share."""

    held: dict[str, list[str]]
    free: dict[str, list[str]]


def spread(
    queues: Mapping[str, Sequence[str]],
    held: Mapping[str, Sequence[str]],
    share: Mapping[str, int],
    zones: Mapping[str, str],
    unsettled: Collection[str],
) -> Spread:
    """Divide the items of unlimited queues among zones, of which each takes as many as its members' shares together.

    `queues` has the items of each; `held` those of each member, `share` how many it is to have. A zone gets its part of all items from each
    queue, rounded down or up. Nothing moves if that is so already and no member has more than its share.
    """
    rooms: Counter[str] = Counter()
    for member, count in share.items():
        rooms[zones[member]] += count
    owner = {item: member for member, items in held.items() for item in items}
    has = {queue: Counter(zones[owner[item]] for item in items if item in owner) for queue, items in queues.items()}
    wanted = targets({queue: len(items) for queue, items in queues.items()}, has, rooms)
    excess = {member: len(items) - share[member] for member, items in held.items()}
    leaving: set[str] = set()
    for queue in sorted(queues):
        for zone, count in sorted(has[queue].items()):
            if count > wanted[queue][zone]:
                there = [item for item in queues[queue] if item in owner and zones[owner[item]] == zone]
                leaving.update(_fullest(there, count - wanted[queue][zone], owner, excess, unsettled))
    stays = {member: [item for item in items if item not in leaving] for member, items in held.items()}
    return Spread(stays, _destinations(queues, owner, leaving, wanted, zones))


def _fullest(
    items: Sequence[str], going: int, owner: Mapping[str, str], excess: dict[str, int], unsettled: Collection[str]
) -> Iterable[str]:
    """Choose so many items to go: those of the members furthest above their shares, and of these not what was moved a moment ago."""
    of: defaultdict[str, list[str]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item not in unsettled):
        of[owner[item]].append(item)
    for _ in range(going):
        member = max(of, key=lambda member: (excess[member], member))
        yield of[member].pop()
        excess[member] -= 1
        if not of[member]:
            del of[member]


def _destinations(
    queues: Mapping[str, Sequence[str]],
    owner: Mapping[str, str],
    leaving: Collection[str],
    wanted: Mapping[str, Mapping[str, int]],
    zones: Mapping[str, str],
) -> dict[str, list[str]]:
    """The zone for each item that has to go, or has no owner: those that lack most of its queue, in turn."""
    free: dict[str, list[str]] = {zone: [] for zone in zones.values()}
    for queue, items in queues.items():
        lacks = Counter(wanted[queue])
        lacks.subtract(zones[owner[item]] for item in items if item in owner and item not in leaving)
        for item in items:
            if item not in owner or item in leaving:
                zone = max(lacks, key=lambda zone: (lacks[zone], zone))
                lacks[zone] -= 1
                free[zone].append(item)
    return free


def targets(sizes: Mapping[str, int], has: Mapping[str, Mapping[str, int]], rooms: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The number of items of each queue in each zone, given the queues' sizes and what each zone `has` of them now.

    `rooms`: items that each zone takes, together all. Each number is the queue's size times the zone's part of all items, rounded down or
    up; such numbers always exist (it is a flow with integral capacities). As few as can be seen easily differ from what is there.
    """
    total = sum(rooms.values())
    plan: dict[str, dict[str, int]] = {}
    ups: dict[str, set[str]] = {}
    able: dict[str, list[str]] = {}
    for queue, size in sizes.items():
        plan[queue] = {zone: size * rooms[zone] // total for zone in rooms}
        able[queue] = [zone for zone in sorted(rooms) if size * rooms[zone] % total]
    left = {zone: rooms[zone] - sum(each[zone] for each in plan.values()) for zone in rooms}
    for queue in sorted(sizes):
        floors, there = plan[queue], has[queue]
        in_turn = sorted(able[queue], key=lambda zone: (there.get(zone, 0) <= floors[zone], -left[zone], zone))
        ups[queue] = {*in_turn[: sizes[queue] - sum(floors.values())]}
        for zone in ups[queue]:
            left[zone] -= 1
    if any(left.values()):
        _Repair(plan, has, able, ups, left).run()
    return {queue: {zone: count + (zone in ups[queue]) for zone, count in floors.items()} for queue, floors in plan.items()}


class _Repair:
    """Moves round-ups from zones that got too many to those that got too few, along chains of queues, cheap ones first."""

    def __init__(
        self,
        floors: Mapping[str, Mapping[str, int]],
        has: Mapping[str, Mapping[str, int]],
        able: Mapping[str, Sequence[str]],
        ups: dict[str, set[str]],
        left: dict[str, int],
    ) -> None:
        self._floors, self._has, self._able, self._ups, self._left = floors, has, able, ups, left
        self._ways: defaultdict[tuple[str, str], list[tuple[bool, str]]] = defaultdict(list)
        """For each pair of zones: queues that round up in the first and could in the second instead; a heap, possibly outdated."""
        for queue, zones in able.items():
            self._offer(queue, ups[queue], [zone for zone in zones if zone not in ups[queue]])

    def _offer(self, queue: str, sources: Iterable[str], targets: Iterable[str]) -> None:
        for source in sources:
            # Costly: the zone has the item that it would lose.
            costly = self._has[queue].get(source, 0) > self._floors[queue][source]
            for target in targets:
                heapq.heappush(self._ways[source, target], (costly, queue))

    def run(self) -> None:
        for zone in sorted(self._left):
            while self._left[zone] < 0:
                chain = self._chain(zone)
                for source, target in pairwise(chain):
                    self._shift(source, target)
                self._left[chain[0]] += 1
                self._left[chain[-1]] -= 1

    def _chain(self, start: str) -> list[str]:
        """The shortest chain of zones from this one to one with too few. There is one, since numbers that fit exist."""
        came: dict[str, str | None] = {start: None}
        waiting = deque([start])
        while waiting:
            zone = waiting.popleft()
            if self._left[zone] > 0:
                return _back(came, zone)
            for other in sorted(self._left):
                if other not in came and self._top(zone, other) is not None:
                    came[other] = zone
                    waiting.append(other)
        raise AssertionError("the zones' rooms are those of all items")

    def _top(self, source: str, target: str) -> str | None:
        """The best queue whose round-up can go from one zone to the other."""
        ways = self._ways[source, target]
        while ways and not (source in self._ups[ways[0][1]] and target not in self._ups[ways[0][1]]):
            heapq.heappop(ways)
        return ways[0][1] if ways else None

    def _shift(self, source: str, target: str) -> None:
        queue = self._top(source, target)
        assert queue is not None, "each step of the chain is another pair of zones, found a moment ago"
        ups = self._ups[queue]
        ups.remove(source)
        ups.add(target)
        self._offer(queue, [target], [zone for zone in self._able[queue] if zone not in ups])
        self._offer(queue, ups, [source])


def _back(came: Mapping[str, str | None], zone: str | None) -> list[str]:
    chain: list[str] = []
    while zone is not None:
        chain.append(zone)
        zone = came[zone]
    return chain[::-1]
