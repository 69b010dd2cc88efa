"""Assignment of items to members: even, sticky, and identical in every process.

The items of a *queue*, those with equal names up to their last dot, may be limited to a number of members. They then lie on exactly that
many, and a queue's items on one member, a *part*, move as a whole: loads are even to within one part. Members may be in zones, over which
each queue is spread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sluiceway.core.group.zones import NO_ZONES, Quota, interleaved, span, spread

ItemCounts = dict[str, dict[str, int]]
"""For each limited queue: the number of its items on each of its members."""
UNLIMITED: Final[Mapping[str, int]] = MappingProxyType({})
NO_PINS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({})


def queue_of(item: str) -> str:
    """The queue that limits apply to: the item's name up to its last dot."""
    return item.rpartition(".")[0]


def sticky(
    items: Sequence[str],
    members: Iterable[str],
    current: Mapping[str, str],
    limits: Mapping[str, int] = UNLIMITED,
    unsettled: Collection[str] = (),
    zones: Mapping[str, str] = NO_ZONES,
    pins: Mapping[str, tuple[str, ...]] = NO_PINS,
) -> dict[str, str]:
    """Return the owner of each item. Without limits loads differ by one at most, and no such plan moves fewer items.

    `current` has today's owners; removed items and owners that are not members are ignored. Without members the plan is empty. The order of
    `items` decides which move, and neighbours among those go to different members; the order of `members` and of `current` is irrelevant.
    The `unsettled` ones, which were moved a moment ago, move only where a member has no others to give.

    Why it is minimal: with n items and m members, r = n mod m of them have one more than n // m. An item stays only within its owner's
    share, so what stays is the sum of min(has, share), and giving the larger share to a member adds one to it exactly if the member has
    more than n // m. The larger shares go to those first.

    `limits`: for some queues, the number of members, at least 1, that hold its items: exactly that many, unless there are fewer members or
    items. These members' parts differ by one item at most. The members with most of a queue's items keep their part while that is even
    enough: where a member has two or more items more than another, it holds only parts of limited queues; each part of a queue that the
    other lacks is at least as large as the difference, and of queues on both it has no more than the other. So loads differ by the largest
    part at most. Unlimited items are then divided as above, with as few moves, to level the loads.

    `zones`: the zone of each member. A zone has its part of each unlimited queue (the queue's items times the zone's part of all unlimited
    items), and its part of the members of each limited queue (their number times the zone's part of all members), both rounded down or up.
    The loads are as even as without zones, but for parts that must not leave their zone. More may move than the fewest, and nothing if all
    of this holds already.

    `pins`: the members that some items are pinned to, at least one of these members each, sorted. Such items go there, evenly, and the
    others are divided on top of them, so that loads are even where that is possible. Limits and zones are those of the others.
    """
    names = sorted(members)
    if not names:
        return {}
    across = span(names, zones)
    loads = dict.fromkeys(names, 0)
    pinned = _pinned([item for item in items if item in pins], loads, current, pins, unsettled) if pins else {}
    limited, rest = _apart([item for item in items if item not in pinned] if pinned else items, limits)
    parts = _parts(limited, loads, current, limits, len(rest), across)
    held, free = _held(rest, names, current)
    share = _shares(loads, held, len(rest), across)
    plan = _filled_by_zone(rest, held, share, across, unsettled) if across else _filled(held, free, share, unsettled)
    for queue, part in parts.items():
        plan |= _filled(*_held(limited[queue], sorted(part), current), part, unsettled)
    return plan | pinned


def dealt(
    items: Sequence[str], counts: Mapping[str, int], limits: Mapping[str, int] = UNLIMITED, zones: Mapping[str, str] = NO_ZONES
) -> dict[str, str]:
    """Return the owner of each new item, given the members' current counts: round-robin, least loaded first.

    Neighbours go to different members, and even loads stay even. Deterministic across processes. A limited queue, which has no items yet,
    goes to that many members only. Equally loaded members take turns by zone.
    """
    limited, rest = _apart(items, limits)
    has, plan = dict(counts), dict[str, str]()
    across = span(has, zones)
    for new, most in [*((limited[queue], min(limits[queue], len(has))) for queue in limited), (rest, len(has))]:
        in_turn = _first(interleaved(has, across), most, _quota(most, across))
        plan |= {item: in_turn[nth % len(in_turn)] for nth, item in enumerate(new)}
        _add(has, Counter(plan[item] for item in new))
    return plan


def moves(plan: Mapping[str, str], current: Mapping[str, str]) -> int:
    """The number of items that get another owner, or their first."""
    return sum(current.get(item) != owner for item, owner in plan.items())


# ---- zones ------------------------------------------------------------------------------------------------------------


def _quota(wanted: int, across: Mapping[str, str]) -> Quota | None:
    """The number of members that each zone gives of so many; None: there are no zones."""
    return Quota(wanted, across) if across else None


def _first(members: Iterable[str], wanted: int, quota: Quota | None) -> list[str]:
    """The first so many members, or those that the quota takes."""
    return list(members)[:wanted] if quota is None else [member for member in members if quota.take(member)]


def _filled_by_zone(
    items: Sequence[str],
    held: Mapping[str, Sequence[str]],
    share: Mapping[str, int],
    across: Mapping[str, str],
    unsettled: Collection[str],
) -> dict[str, str]:
    """The owners once each member has its share, and each zone its part of each queue."""
    queues: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        queues[queue_of(item)].append(item)
    stays, free = spread(queues, held, share, across, unsettled)
    plan: dict[str, str] = {}
    for zone, given in free.items():
        plan |= _filled({member: has for member, has in stays.items() if across[member] == zone}, given, share, unsettled)
    return plan


# ---- pins -------------------------------------------------------------------------------------------------------------


def _pinned(
    items: Sequence[str],
    loads: dict[str, int],
    current: Mapping[str, str],
    pins: Mapping[str, tuple[str, ...]],
    unsettled: Collection[str],
) -> dict[str, str]:
    """The owners of the pinned items; raises `loads` by them."""
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for item in items:
        groups[pins[item]].append(item)
    plan: dict[str, str] = {}
    # The narrowest first: those with a choice then make up for them.
    for members in sorted(groups, key=lambda members: (len(members), members)):
        held, free = _held(groups[members], members, current)
        share = _shares({member: loads[member] for member in members}, held, len(groups[members]), NO_ZONES)
        plan |= _filled(held, free, share, unsettled)
        _add(loads, share)
    return plan


# ---- limited queues ---------------------------------------------------------------------------------------------------


def _apart(items: Sequence[str], limits: Mapping[str, int]) -> tuple[Mapping[str, Sequence[str]], Sequence[str]]:
    """Split the items into those of each limited queue and the rest."""
    if not limits:
        return {}, items
    limited: defaultdict[str, list[str]] = defaultdict(list)
    rest: list[str] = []
    for item in items:
        queue = queue_of(item)
        (limited[queue] if queue in limits else rest).append(item)
    return limited, rest


def _parts(
    limited: Mapping[str, Sequence[str]],
    loads: dict[str, int],
    current: Mapping[str, str],
    limits: Mapping[str, int],
    rest: int,
    across: Mapping[str, str],
) -> ItemCounts:
    """The size of each member's part of each queue; raises `loads` by that. `rest` unlimited items come on top."""
    has = {queue: Counter(current[item] for item in items if current.get(item) in loads) for queue, items in limited.items()}
    wanted = {queue: min(limits[queue], len(loads), len(items)) for queue, items in limited.items()}
    # Place large parts first: small ones then fill the gaps.
    in_order = sorted(limited, key=lambda queue: (-(len(limited[queue]) // wanted[queue]), queue))
    parts: ItemCounts = {}
    quotas = {queue: _quota(wanted[queue], across) for queue in in_order}
    for queue in in_order:
        least = len(limited[queue]) // wanted[queue]
        by_most = sorted(has[queue], key=lambda member: (-has[queue][member], loads[member], member))
        parts[queue] = dict.fromkeys(_first(by_most, wanted[queue], quotas[queue]), least)
        _add(loads, parts[queue])
    for queue in in_order:
        part, least = parts[queue], len(limited[queue]) // wanted[queue]
        if len(part) < wanted[queue]:
            outside = [member for member in _by_load(loads) if member not in part]
            others = _first(outside, wanted[queue] - len(part), quotas[queue])
            _add(loads, dict.fromkeys(others, least))
            part |= dict.fromkeys(others, least)
        in_turn = sorted(part, key=lambda member: (has[queue][member] <= least, loads[member], member))
        larger = dict.fromkeys(in_turn[: len(limited[queue]) % wanted[queue]], 1)
        _add(loads, larger)
        _add(part, larger)
    _Balance(parts, loads, rest, quotas, across).even_out()
    return parts


def _add(loads: dict[str, int], more: Mapping[str, int]) -> None:
    for member, count in more.items():
        loads[member] = loads.get(member, 0) + count


class _Balance:
    """Moves parts, and the one item by which two parts of a queue may differ, from fuller to emptier members until no move helps.

    Terminates: each move reduces the sum of squares of the final loads.
    """

    def __init__(
        self, parts: ItemCounts, loads: dict[str, int], rest: int, quotas: Mapping[str, Quota | None], across: Mapping[str, str]
    ) -> None:
        self._parts, self._loads, self._rest = parts, loads, rest
        self._quotas, self._across = quotas, across
        self._queues: dict[str, set[str]] = {member: set() for member in loads}
        for queue, part in parts.items():
            for member in part:
                self._queues[member].add(queue)
        self._look()

    def _look(self) -> None:
        self._level, self._emptiest = _level(self._loads, self._rest)[0], _by_load(self._loads)

    def even_out(self) -> None:
        relieved = 1
        while relieved:
            # Visit every member in each pass, fullest first.
            relieved = sum(self._relieve(member) for member in reversed(self._emptiest))

    def _relieve(self, member: str) -> bool:
        """Move items off the member that are better placed elsewhere. Returns whether anything moved."""
        relieved = False
        for queue in sorted(self._queues[member], key=lambda queue: (-self._parts[queue][member], queue)):
            if self._loads[member] <= self._level + 1:
                break
            relieved = self._shift(queue, member) or relieved
        return relieved

    def _shift(self, queue: str, member: str) -> bool:
        """Move the part to a member without that queue, or one item to a member with a smaller part. Returns whether it moved."""
        part, loads = self._parts[queue], self._loads
        outside = next((other for other in self._emptiest if other not in part and self._may_go(queue, member, other)), None)
        inside = next((other for other in self._emptiest if part.get(other, part[member]) < part[member]), None)
        for other, going in ((outside, part[member]), (inside, 1)):
            if other is not None and loads[member] - max(loads[other], self._level) > going:
                for counts in (part, loads):
                    _add(counts, {member: -going, other: going})
                self._queues[other].add(queue)
                if not part[member]:
                    del part[member]
                    self._queues[member].remove(queue)
                self._look()
                return True
        return False

    def _may_go(self, queue: str, member: str, other: str) -> bool:
        """Whether each zone still has its part of the queue's members when one of them is replaced by the other."""
        quota, across = self._quotas[queue], self._across
        if quota is None or across[member] == across[other]:
            return True
        there = Counter(across[each] for each in self._parts[queue])
        leaves, enters = across[member], across[other]
        return there[leaves] > quota.least[leaves] and there[enters] < quota.most[enters]


def _by_load(loads: Mapping[str, int]) -> list[str]:
    """The members, least loaded first."""
    return sorted(loads, key=lambda member: (loads[member], member))


# ---- unlimited queues -------------------------------------------------------------------------------------------------


def _level(loads: Mapping[str, int], rest: int) -> tuple[int, int]:
    """The level to which `rest` items fill the members below it, and the remainder, smaller than the number of members at or below it."""
    level = under = 0
    for under, load in enumerate(sorted(loads.values())):
        if under * (load - level) > rest:
            break
        rest -= under * (load - level)
        level = load
    else:
        under = len(loads)
    return level + rest // under, rest % under


def _held(items: Sequence[str], members: Sequence[str], current: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """The items that each of these members holds, and those that none of them holds."""
    held: dict[str, list[str]] = {member: [] for member in members}
    free: list[str] = []
    for item in items:
        held.get(current.get(item, ""), free).append(item)
    return held, free


def _shares(loads: Mapping[str, int], held: Mapping[str, Sequence[str]], rest: int, across: Mapping[str, str]) -> dict[str, int]:
    """The number of the `rest` items each member gets on top of its load, favouring members that already hold some.

    The larger shares are divided among the zones in proportion to their members.
    """
    level, more = _level(loads, rest)
    share = {member: max(0, level - load) for member, load in loads.items()}
    # Sorting is stable: ties go to the first by name.
    by_most = sorted((member for member in loads if loads[member] <= level), key=lambda member: share[member] - len(held[member]))
    for member in _first(by_most, more, _quota(more, {member: across[member] for member in by_most} if across else NO_ZONES)):
        share[member] += 1
    return share


def _filled(held: dict[str, list[str]], free: list[str], share: Mapping[str, int], unsettled: Collection[str]) -> dict[str, str]:
    """The owners once each member has its share: it keeps its own items up to that, and takes free or given-up ones for the remainder."""
    for member, has in held.items():
        if len(has) > share[member]:
            held[member], given_up = _spread(has, share[member], unsettled)
            free.extend(given_up)
    plan = {item: member for member, has in held.items() for item in has}
    plan.update(zip(free, _takers({member: share[member] - len(has) for member, has in held.items()}), strict=True))
    return plan


def _spread(has: list[str], share: int, unsettled: Collection[str]) -> tuple[list[str], list[str]]:
    """Split into items that stay and items that go: the latter evenly along the list, so that no single queue's partitions all leave."""
    going = len(has) - share
    settled = [item for item in has if item not in unsettled]
    movable = settled if len(settled) >= going else has
    leaving = [movable[(2 * nth + 1) * len(movable) // (2 * going)] for nth in range(going)]
    gone = set(leaving)
    return [item for item in has if item not in gone], leaving


def _takers(wanting: Mapping[str, int]) -> Iterable[str]:
    """Each member once per item it wants, round-robin."""
    left = {member: wants for member, wants in wanting.items() if wants > 0}
    while left:
        yield from left
        left = {member: wants - 1 for member, wants in left.items() if wants > 1}
