"""The plan: which member gets which item. Even, sticky, and the same in every process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def sticky(items: Sequence[str], members: Iterable[str], current: Mapping[str, str]) -> dict[str, str]:
    """The owner of each item. No member has more than one item more than another, and no such plan moves fewer items.

    `current` has today's owners; items that are gone and owners that are no member (any more) are passed over. Without members the
    plan is empty. The order of `items` decides which move, and neighbours among those go to different members; that of `members`
    and of `current` does not matter.

    Why it is minimal: with n items and m members, r = n mod m of them have one more than n // m. An item stays only within its
    owner's share, so what stays is the sum of min(has, share), and giving the larger share to a member adds one to it exactly if the
    member has more than n // m. The larger shares go to those first.
    """
    held: dict[str, list[str]] = {member: [] for member in sorted(members)}
    if not held:
        return {}
    free: list[str] = []
    for item in items:
        held.get(current.get(item, ""), free).append(item)
    least, more = divmod(len(items), len(held))
    # Sorting is stable: of members with equally many, the first by name.
    by_most = sorted(held, key=lambda member: -len(held[member]))
    share = dict.fromkeys(held, least) | dict.fromkeys(by_most[:more], least + 1)
    for member, has in held.items():
        if len(has) > share[member]:
            held[member], given_up = _spread(has, share[member])
            free.extend(given_up)
    plan = {item: member for member, has in held.items() for item in has}
    plan.update(zip(free, _takers({member: share[member] - len(has) for member, has in held.items()}), strict=True))
    return plan


def dealt(items: Sequence[str], counts: Mapping[str, int]) -> dict[str, str]:
    """The owner of each new item, where the members have so many already: in turns, beginning with those that have fewest.

    So neighbours go to different members, and what was even stays even. The same in every process.
    """
    in_turn = sorted(counts, key=lambda member: (counts[member], member))
    return {item: in_turn[nth % len(in_turn)] for nth, item in enumerate(items)}


def moves(plan: Mapping[str, str], current: Mapping[str, str]) -> int:
    """How many items have another owner than before, or one for the first time."""
    return sum(current.get(item) != owner for item, owner in plan.items())


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
