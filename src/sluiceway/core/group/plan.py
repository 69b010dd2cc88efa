"""The plan: which member gets which item. Even, sticky, and the same in every process.

The items of a *queue*, those whose names are the same up to their last dot, may be limited to so many members. Then they lie on just
so many, and a part of a queue goes as a whole: what is even is so to within one part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

Parts = dict[str, dict[str, int]]
"""Of each limited queue: how many of its items each of its members has."""
UNLIMITED: Final[Mapping[str, int]] = MappingProxyType({})


def queue_of(item: str) -> str:
    """By what limits go: the item's name up to its last dot."""
    return item.rpartition(".")[0]


def sticky(
    items: Sequence[str], members: Iterable[str], current: Mapping[str, str], limits: Mapping[str, int] = UNLIMITED
) -> dict[str, str]:
    """The owner of each item. Without limits no member has more than one item more than another, and no such plan moves fewer items.

    `current` has today's owners; items that are gone and owners that are no member (any more) are passed over. Without members the
    plan is empty. The order of `items` decides which move, and neighbours among those go to different members; that of `members`
    and of `current` does not matter.

    Why it is minimal: with n items and m members, r = n mod m of them have one more than n // m. An item stays only within its
    owner's share, so what stays is the sum of min(has, share), and giving the larger share to a member adds one to it exactly if the
    member has more than n // m. The larger shares go to those first.

    `limits` says for some queues on how many members, 1 or more, they lie: on exactly as many, unless there are fewer members or items.
    These have as many of its items as one another, to within one. Who has most of a queue keeps a part of it, while that is even
    enough: where a member has more than another by two items or more, it has nothing but parts of limited queues, each of those of
    which the other has none is as large as the difference at least, and of those of which both have some it has no more. So no two
    differ by more than the largest part. What has no limit is then divided as above, with as few moves, to make up for the rest.
    """
    names = sorted(members)
    if not names:
        return {}
    limited, rest = _apart(items, limits)
    loads = dict.fromkeys(names, 0)
    parts = _parts(limited, loads, current, limits, len(rest))
    held, free = _held(rest, names, current)
    plan = _filled(held, free, _shares(loads, held, len(rest)))
    for queue, part in parts.items():
        plan |= _filled(*_held(limited[queue], sorted(part), current), part)
    return plan


def dealt(items: Sequence[str], counts: Mapping[str, int], limits: Mapping[str, int] = UNLIMITED) -> dict[str, str]:
    """The owner of each new item, where the members have so many already: in turns, beginning with those that have fewest.

    So neighbours go to different members, and what was even stays even. The same in every process. Of a limited queue, which has no
    items yet, to so many members only.
    """
    limited, rest = _apart(items, limits)
    has, plan = dict(counts), dict[str, str]()
    for new, most in [*((limited[queue], limits[queue]) for queue in limited), (rest, len(has))]:
        in_turn = _by_load(has)[:most]
        plan |= {item: in_turn[nth % len(in_turn)] for nth, item in enumerate(new)}
        _add(has, Counter(plan[item] for item in new))
    return plan


def moves(plan: Mapping[str, str], current: Mapping[str, str]) -> int:
    """How many items have another owner than before, or one for the first time."""
    return sum(current.get(item) != owner for item, owner in plan.items())


# ---- limited queues ---------------------------------------------------------------------------------------------------


def _apart(items: Sequence[str], limits: Mapping[str, int]) -> tuple[Mapping[str, Sequence[str]], Sequence[str]]:
    """The items of each limited queue, and those of all others."""
    if not limits:
        return {}, items
    limited: defaultdict[str, list[str]] = defaultdict(list)
    rest: list[str] = []
    for item in items:
        queue = queue_of(item)
        (limited[queue] if queue in limits else rest).append(item)
    return limited, rest


def _parts(
    limited: Mapping[str, Sequence[str]], loads: dict[str, int], current: Mapping[str, str], limits: Mapping[str, int], rest: int
) -> Parts:
    """Who gets how many of each queue's items; `loads` is raised by that. So many items without a limit come on top."""
    has = {queue: Counter(current[item] for item in items if current.get(item) in loads) for queue, items in limited.items()}
    wanted = {queue: min(limits[queue], len(loads), len(items)) for queue, items in limited.items()}
    # The large parts first: the small ones then fill what is left.
    in_order = sorted(limited, key=lambda queue: (-(len(limited[queue]) // wanted[queue]), queue))
    parts: Parts = {}
    for queue in in_order:
        least = len(limited[queue]) // wanted[queue]
        stay = sorted(has[queue], key=lambda member: (-has[queue][member], loads[member], member))[: wanted[queue]]
        parts[queue] = dict.fromkeys(stay, least)
        _add(loads, parts[queue])
    for queue in in_order:
        part, least = parts[queue], len(limited[queue]) // wanted[queue]
        if len(part) < wanted[queue]:
            others = [member for member in _by_load(loads) if member not in part][: wanted[queue] - len(part)]
            _add(loads, dict.fromkeys(others, least))
            part |= dict.fromkeys(others, least)
        in_turn = sorted(part, key=lambda member: (has[queue][member] <= least, loads[member], member))
        larger = dict.fromkeys(in_turn[: len(limited[queue]) % wanted[queue]], 1)
        _add(loads, larger)
        _add(part, larger)
    _Balance(parts, loads, rest).even_out()
    return parts


def _add(loads: dict[str, int], more: Mapping[str, int]) -> None:
    for member, count in more.items():
        loads[member] = loads.get(member, 0) + count


class _Balance:
    """Moves parts, and the one item by which two of a queue may differ, from fuller members to emptier ones, until no such move helps.

    It comes to an end: each move makes the sum of the squares of what the members have in the end smaller.
    """

    def __init__(self, parts: Parts, loads: dict[str, int], rest: int) -> None:
        self._parts, self._loads, self._rest = parts, loads, rest
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
            # All of them in each pass, the fullest first.
            relieved = sum(self._relieve(member) for member in reversed(self._emptiest))

    def _relieve(self, member: str) -> bool:
        """Take from that member what is better elsewhere. Whether there was something."""
        relieved = False
        for queue in sorted(self._queues[member], key=lambda queue: (-self._parts[queue][member], queue)):
            if self._loads[member] <= self._level + 1:
                break
            relieved = self._shift(queue, member) or relieved
        return relieved

    def _shift(self, queue: str, member: str) -> bool:
        """The part to one who has nothing of the queue, or an item of it to one who has fewer."""
        part, loads = self._parts[queue], self._loads
        outside = next((other for other in self._emptiest if other not in part), None)
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


def _by_load(loads: Mapping[str, int]) -> list[str]:
    """Those who have least first."""
    return sorted(loads, key=lambda member: (loads[member], member))


# ---- all others -------------------------------------------------------------------------------------------------------


def _level(loads: Mapping[str, int], rest: int) -> tuple[int, int]:
    """Up to how much so many items fill those who have less, and how many are left over then, fewer than have no more."""
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
    """What each of these members has of the items, and what none of them has."""
    held: dict[str, list[str]] = {member: [] for member in members}
    free: list[str] = []
    for item in items:
        held.get(current.get(item, ""), free).append(item)
    return held, free


def _shares(loads: Mapping[str, int], held: Mapping[str, Sequence[str]], rest: int) -> dict[str, int]:
    """How many of so many items each member gets on top of its load, where it has some of them already."""
    level, more = _level(loads, rest)
    share = {member: max(0, level - load) for member, load in loads.items()}
    # Sorting is stable: of members with equally many, the first by name.
    by_most = sorted((member for member in loads if loads[member] <= level), key=lambda member: share[member] - len(held[member]))
    for member in by_most[:more]:
        share[member] += 1
    return share


def _filled(held: dict[str, list[str]], free: list[str], share: Mapping[str, int]) -> dict[str, str]:
    """The owners when each member has its share: of what it has, as much as that, and what is free or others have to give up."""
    for member, has in held.items():
        if len(has) > share[member]:
            held[member], given_up = _spread(has, share[member])
            free.extend(given_up)
    plan = {item: member for member, has in held.items() for item in has}
    plan.update(zip(free, _takers({member: share[member] - len(has) for member, has in held.items()}), strict=True))
    return plan


def _spread(has: list[str], share: int) -> tuple[list[str], list[str]]:
    """What stays and what goes: the latter evenly along the list, so that it is not one queue's partitions that all leave."""
    going = len(has) - share
    leaving = {(2 * nth + 1) * len(has) // (2 * going) for nth in range(going)}
    return [item for at, item in enumerate(has) if at not in leaving], [has[at] for at in sorted(leaving)]


def _takers(wanting: Mapping[str, int]) -> Iterable[str]:
    """Each member as often as it wants items, in turns."""
    left = {member: wants for member, wants in wanting.items() if wants > 0}
    while left:
        yield from left
        left = {member: wants - 1 for member, wants in left.items() if wants > 1}
