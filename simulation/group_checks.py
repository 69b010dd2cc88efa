"""Invariants of a simulated group, checked on its records and on the items that each member serves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from simulation.promises import BrokenPromiseError, check
from sluiceway.core.group import group_records
from sluiceway.core.group.group_records import GroupView, Keys, Plan, Resource, Token, Writes, decode_record, pinned
from sluiceway.core.group.plan import queue_of
from sluiceway.core.group.zones import NO_ZONES, span
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import View


class Tokens:
    """Highest token under which each item has been served."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[Token, str]] = {}

    def serve(self, name: str, owned: Mapping[str, Token]) -> None:
        for item, token in owned.items():
            highest, owner = self._highest.get(item, (Token(0, 0), name))
            rises = token > highest or (token == highest and owner == name)
            check(rises, f"{name} serves {item} under {token}, after {owner} under {highest}")
            self._highest[item] = (token, name)


def check_overlap(serving: Iterable[tuple[str, Mapping[str, Token]]], now: Millis) -> None:
    """Check that no item is served by two members. Raises BrokenPromiseError."""
    by: dict[str, str] = {}
    for name, owned in serving:
        for item in owned:
            other = by.setdefault(item, name)
            check(other == name, f"{item} is served by {other} and {name} at {now}")


class Overlap:
    """Checks that no item is served by two members. The full check runs only when the served items change, as nothing else can break it."""

    def __init__(self) -> None:
        self._before: list[tuple[str, Mapping[str, Token]]] = []

    def check(self, serving: list[tuple[str, Mapping[str, Token]]], now: Millis) -> None:
        """Raises BrokenPromiseError. `serving`: each serving member with its items; the mapping must not be changed afterwards."""
        if serving != self._before:
            check_overlap(serving, now)
            self._before = serving


def check_commit(was: GroupView, now: GroupView, keys: Keys, unseen: Collection[str] = ()) -> None:
    """Check a commit's effect on the plan.

    A commit that seals a round assigns exactly the resource's items to exactly the marked members, within the queues' member limits, spread
    over the members' zones, and without limits and zones with the fewest moves. If it gives members up, of the marked ones only those of
    the last round take part, if there are any. A commit that changes the plan without a round leaves every remaining assignment as it is,
    and gives new items to participants only. `unseen`: members whose records were created after the commit was decided, such as a member
    that had marked itself and was gone.
    """
    if was.resource is not None and was.resource != now.resource:
        check(now.resource is not None and now.resource.version > was.resource.version, "the resource has changed under its old version")
    if was.round == now.round and was.plan != now.plan:
        _check_placed(was, now)
        return
    if now.round is None or not now.round.sealed:
        return
    left, had = now.view.prefix(keys.marks).keys(), len(was.view.prefix(keys.marks))
    # A seal may leave some of many marks. None comes later.
    check(
        len(left) <= (had if was.round == now.round else max(0, had - group_records.MAX_CLEARED)), f"marks without a round: {sorted(left)}"
    )
    if was.plan == now.plan:
        return
    assert now.plan is not None
    assert now.resource is not None
    check(now.plan.round == now.round.number, f"plan {now.plan.round} in round {now.round.number}")
    check(was.round is not None and not was.round.sealed, "sealed twice")
    takes_part = set(now.round.participants)
    due = {name for name in was.marks & was.members.keys() if not was.members[name].leaving and name not in unseen}
    if was.round is not None and was.members.keys() - now.members.keys():
        heirs = due.intersection(was.round.participants)
        # The only heir may have begun to leave since the round was decided.
        due = heirs if heirs or takes_part.intersection(was.round.participants) else due
    check(due <= takes_part <= was.marks, f"{takes_part} take part, {was.marks} had marked themselves, not leaving: {due}")
    check(now.plan.resource_version == now.resource.version, "the plan is of another version of the resource")
    _check_plan(was, now, now.resource)


def _check_plan(was: GroupView, now: GroupView, resource: Resource) -> None:
    assert now.plan is not None
    assert now.round is not None
    owners = {item: owner for owner, grants in now.plan.owners.items() for item in grants}
    had = {item: owner for owner, grants in was.plan.owners.items() for item in grants} if was.plan is not None else {}
    members, items = now.round.participants, resource.items
    if not members:
        check(not owners, "items of nobody have owners")
        return
    check(sorted(owners) == sorted(items), f"the plan has {sorted(owners)} of {items}")
    zones = span(members, was.zones)
    if not was.members.keys() >= {*members}:
        # The record of a participant went after the round was decided, and its zone with it.
        return
    pins = pinned(resource.pins, {name: was.zones[name] for name in members})
    check_rules(owners, members, resource, zones, pins)
    moved = sum(had.get(item) != owner for item, owner in owners.items())
    check(moved == now.round.moved, f"{moved} moves, said to be {now.round.moved}")
    # Moves for loads come first: the plan keeps to the rules from there.
    swaps = was.round.swaps if was.round is not None else ()
    had |= {move.item: move.owner for move in swaps if had.get(move.item) == move.before and move.owner in members}
    moved = sum(had.get(item) != owner for item, owner in owners.items())
    if resource.limits or zones or pins:
        check(not moved or not _is_plan(had, members, resource, zones, pins), f"{moved} moves, and none was needed")
    else:
        least, more = divmod(len(items), len(members))
        has = Counter(had[item] for item in items if had.get(item) in members)
        kept = sum(min(has[name], least) for name in members) + min(more, sum(has[name] > least for name in members))
        check(moved == len(items) - kept, f"{moved} moves of {len(items) - kept} needed")


def check_rules(
    owners: Mapping[str, str], members: Collection[str], resource: Resource, zones: Mapping[str, str], pins: Mapping[str, tuple[str, ...]]
) -> None:
    """Check all that a plan has to heed."""
    check_pins(owners, pins)
    free = {item: owner for item, owner in owners.items() if item not in pins}
    check_limits(free, members, resource.limits)
    check_zones(free, resource.limits, zones)
    check_even(owners, members, resource.limits, zones, pins)
    check_shares(owners, resource.limits, zones, pins)


def check_pins(owners: Mapping[str, str], pins: Mapping[str, tuple[str, ...]]) -> None:
    """Check that each pinned item is at one of the members that it is pinned to."""
    for item, members in pins.items():
        check(owners[item] in members, f"{item} is at {owners[item]}, and pinned to {members}")


def check_limits(owners: Mapping[str, str], members: Collection[str], limits: Mapping[str, int]) -> None:
    """Check that each limited queue lies on as many members as allowed, balanced to within one item."""
    for queue, limit in limits.items():
        has = Counter(owner for item, owner in owners.items() if queue_of(item) == queue)
        wanted = min(limit, len(members), has.total())
        check(len(has) == wanted, f"{queue} lies on {sorted(has)}, and should on {wanted} members")
        check(max(has.values(), default=0) - min(has.values(), default=0) <= 1, f"{queue} is uneven: {has}")


def check_zones(owners: Mapping[str, str], limits: Mapping[str, int], zones: Mapping[str, str]) -> None:
    """Check that each zone has its part of each queue's items, or of its members if it is limited, rounded down or up."""
    if not zones:
        return
    rest = Counter(zones[owner] for item, owner in owners.items() if queue_of(item) not in limits)
    members = Counter(zones.values())
    for queue in {queue_of(item) for item in owners}:
        there = [owner for item, owner in owners.items() if queue_of(item) == queue]
        there = sorted({*there}) if queue in limits else there
        has, whole = Counter(zones[owner] for owner in there), members if queue in limits else rest
        for zone in members:
            # Less than one away from its part, without fractions.
            away = abs(has[zone] * whole.total() - len(there) * whole[zone])
            check(away < whole.total(), f"{queue} lies in {has} of {whole}")


def check_shares(owners: Mapping[str, str], limits: Mapping[str, int], zones: Mapping[str, str], pins: Collection[str] = ()) -> None:
    """Check that each zone has its part of the members that have an unlimited item more than others, rounded down or up."""
    if not zones:
        return
    below = Counter(owner for item, owner in owners.items() if queue_of(item) in limits or item in pins)
    share = Counter(owner for item, owner in owners.items() if queue_of(item) not in limits and item not in pins)
    height = max((below[name] + count for name, count in share.items()), default=0)
    able = [name for name in zones if below[name] < height]
    larger = Counter(zones[name] for name in able if below[name] + share[name] == height)
    members = Counter(zones[name] for name in able)
    for zone in members:
        away = abs(larger[zone] * len(able) - larger.total() * members[zone])
        check(away < len(able), f"larger shares: {larger} of {members}")


def _may_leave(queue: str, one: str, other: str, owners: Mapping[str, str], zones: Mapping[str, str]) -> bool:
    """Return whether the queue's part may go from one member to the other, which has none, without leaving a zone short of its part."""
    there = {owner for item, owner in owners.items() if queue_of(item) == queue}
    after = {item: other if owner == one and queue_of(item) == queue else owner for item, owner in owners.items()}
    assert other not in there
    try:
        check_zones({item: owner for item, owner in after.items() if queue_of(item) == queue}, {queue: len(there)}, zones)
    except BrokenPromiseError:
        return False
    return True


def check_even(
    owners: Mapping[str, str],
    members: Collection[str],
    limits: Mapping[str, int],
    zones: Mapping[str, str] = NO_ZONES,
    pins: Collection[str] = (),
) -> None:
    """Check that no move would help. A member with two or more items above another has only pinned items and parts of limited queues, and
    the other has as much of each such queue, or the part is as large as the difference, or must not leave its zone."""
    totals = Counter(owners.values())
    free = {item: owner for item, owner in owners.items() if item not in pins}
    counts = {name: Counter(queue_of(item) for item, owner in free.items() if owner == name) for name in members}
    for one, other in itertools.permutations(members, 2):
        more = totals[one] - totals[other]
        if more < 2:
            continue
        check(counts[one].keys() <= limits.keys(), f"{one} has {counts[one]}, {other} {counts[other]}")
        given = {queue: (part, counts[other][queue]) for queue, part in counts[one].items()}
        useless = all(
            there >= part or (not there and (part >= more or not _may_leave(queue, one, other, free, zones)))
            for queue, (part, there) in given.items()
        )
        check(useless, f"{one} could give {other} a part: it has {counts[one]}, and the other {counts[other]}")


def check_placing(look: GroupView, writes: Writes, keys: Keys) -> None:
    """Check a placement: new items go only to present members that are not leaving, balanced to within one item."""
    if keys.plan not in writes.puts:
        return
    assert look.plan is not None
    had, has = _grants(look.plan), _grants(decode_record(writes.puts[keys.plan], Plan))
    given = Counter(owner for item, (owner, _) in has.items() if item not in had)
    check(given.keys() <= look.members.keys(), f"new items for {sorted(given)}, of whom some have gone")
    check(not any(look.members[name].leaving for name in given), f"new items for {sorted(given)}, of whom some leave")
    check(max(given.values(), default=0) - min(given.values(), default=0) <= 1, f"new items are given away unevenly: {given}")
    limits = decode_record(writes.puts[keys.resource], Resource).limits
    for queue in {queue_of(item) for item in has.keys() - had.keys()} & limits.keys():
        takers = {owner for item, (owner, _) in has.items() if queue_of(item) == queue}
        check(len(takers) <= limits[queue], f"{queue} is placed on {sorted(takers)}, and may lie on {limits[queue]}")


def _is_plan(
    owners: Mapping[str, str], members: Collection[str], resource: Resource, zones: Mapping[str, str], pins: Mapping[str, tuple[str, ...]]
) -> bool:
    """Return whether `owners` already was a valid plan for these members."""
    try:
        check(owners.keys() == {*resource.items} and {*owners.values()} <= {*members}, "items or members have changed")
        check_rules(owners, members, resource, zones, pins)
    except BrokenPromiseError:
        return False
    return True


def _check_placed(was: GroupView, now: GroupView) -> None:
    assert was.plan is not None
    assert was.resource is not None
    assert now.plan is not None
    assert now.resource is not None
    assert now.round is not None
    check(was.plan.resource_version == was.resource.version, "placed in a plan of another version of the resource")
    check(now.plan.resource_version == now.resource.version > was.resource.version, "the placing has no version of its own")
    check(now.plan.era == now.resource.era == was.plan.era, "placed in another era")
    check((now.plan.round, now.plan.waits) == (was.plan.round, was.plan.waits), "more than the owners has changed")
    had, has = _grants(was.plan), _grants(now.plan)
    there = now.resource.items if now.round.participants else ()
    check(sorted(has) == sorted(there), f"the plan has {sorted(has)} of {there}")
    stays = had.keys() & has.keys()
    check(all(has[item] == had[item] for item in stays), "something else has moved")
    takers = {owner for item, (owner, _) in has.items() if item not in had}
    # Its member record may have been removed since; that will cause a round.
    check(takers <= {*now.round.participants}, f"new items for {sorted(takers)}, of whom some take no part")


def _grants(plan: Plan) -> dict[str, tuple[str, int]]:
    return {item: (owner, grant) for owner, grants in plan.owners.items() for item, grant in grants.items()}


def check_rest(view: View, keys: Keys, alive: Mapping[str, Mapping[str, Token]], zones: Mapping[str, str] = NO_ZONES) -> None:
    """Check the group after the calm time: live members serve every item, evenly, spread over their `zones`, and no other member is
    left."""
    resource = decode_record(view.entries[keys.resource].value, Resource)
    members = {key.removeprefix(keys.members) for key in view.prefix(keys.members)}
    check(members == alive.keys(), f"members at rest: {sorted(members)}, alive: {sorted(alive)}")
    served = sorted(item for owned in alive.values() for item in owned)
    check(served == sorted(resource.items), f"served at rest: {served} of {resource.items}")
    queues = {queue_of(item) for item in resource.items}
    check(resource.limits.keys() <= queues, f"limits of {sorted(resource.limits)}, and there are {sorted(queues)}")
    reported = {key.removeprefix(keys.loads) for key in view.prefix(keys.loads)}
    check(reported <= members, f"reports of loads of {sorted(reported)}, alive: {sorted(alive)}")
    left = [key for key in view.prefix(keys.claims) if key.startswith(keys.claims + "p")]
    check({key.removeprefix(keys.claims) for key in left} <= {*resource.items}, f"claims of what was removed: {left}")
    owners = {item: name for name, owned in alive.items() for item in owned}
    check(resource.pins.keys() <= {*resource.items}, f"pins of {sorted(resource.pins)}, and there are {resource.items}")
    by_rounds = resource.strategy == "rounds"
    pins = pinned(resource.pins, {name: zones.get(name, "") for name in alive}) if by_rounds else {}
    rules = resource if by_rounds else msgspec.structs.replace(resource, limits={})
    check_rules(owners, alive.keys(), rules, span(alive, zones if by_rounds else NO_ZONES), pins)
