"""What must hold in a simulated group, told from its records and from who serves what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sluiceway.core.assignment.group import Keys, Look, Plan, Resource, Token, Writes, read_group
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import View
from sluiceway.sim.checks import check


class Tokens:
    """Of each item the greatest token that anyone has served it with."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[Token, str]] = {}

    def serve(self, name: str, owned: Mapping[str, Token]) -> None:
        for item, token in owned.items():
            highest, owner = self._highest.get(item, (Token(0, 0), name))
            rises = token > highest or (token == highest and owner == name)
            check(rises, f"{name} serves {item} under {token}, after {owner} under {highest}")
            self._highest[item] = (token, name)


def check_overlap(serving: Iterable[tuple[str, Mapping[str, Token]]], now: Millis) -> None:
    """No item is served by two."""
    by: dict[str, str] = {}
    for name, owned in serving:
        for item in owned:
            other = by.setdefault(item, name)
            check(other == name, f"{item} is served by {other} and {name} at {now}")


def check_commit(before: View, after: View, keys: Keys, unseen: Collection[str] = ()) -> None:
    """A commit that seals a round makes the plan of just those who had marked themselves, of just what there is, with the fewest moves.

    `unseen`: members whose records came after it was decided, as of one that had marked itself and was not there any more.
    One that changes the plan without a round leaves all as it is that stays, and gives what is new to those who take part.
    """
    was, now = read_group(before, keys, 0), read_group(after, keys, 0)
    if was.round == now.round and was.plan != now.plan:
        _check_placed(was, now)
        return
    if now.round is None or not now.round.sealed:
        return
    left = list(after.prefix(keys.marks))
    check(not left, f"marks without a round: {left}")
    if was.plan == now.plan:
        return
    assert now.plan is not None
    assert now.resource is not None
    check(now.plan.round == now.round.number, f"plan {now.plan.round} in round {now.round.number}")
    check(was.round is not None and not was.round.sealed, "sealed twice")
    takes_part = set(now.round.participants)
    due = {name for name in was.marks & was.members.keys() if not was.members[name].leaving and name not in unseen}
    check(due <= takes_part <= was.marks, f"{takes_part} take part, {was.marks} had marked themselves, not leaving: {due}")
    check(now.plan.resource_version == now.resource.version, "the plan is of another version of the resource")
    _check_plan(was, now, now.resource)


def _check_plan(was: Look, now: Look, resource: Resource) -> None:
    assert now.plan is not None
    assert now.round is not None
    owners = {item: owner for owner, grants in now.plan.owners.items() for item in grants}
    had = {item: owner for owner, grants in was.plan.owners.items() for item in grants} if was.plan is not None else {}
    members, items = now.round.participants, resource.items
    if not members:
        check(not owners, "items of nobody have owners")
        return
    check(sorted(owners) == sorted(items), f"the plan has {sorted(owners)} of {items}")
    least, more = divmod(len(items), len(members))
    has = Counter(had[item] for item in items if had.get(item) in members)
    kept = sum(min(has[name], least) for name in members) + min(more, sum(has[name] > least for name in members))
    moved = sum(had.get(item) != owner for item, owner in owners.items())
    check(moved == len(items) - kept == now.round.moved, f"{moved} moves, said to be {now.round.moved}, of {len(items) - kept} needed")


def check_placing(look: Look, writes: Writes, keys: Keys) -> None:
    """What is placed goes to members that are there and not leaving, to each as much as to the others, to within one item."""
    if keys.plan not in writes.puts:
        return
    assert look.plan is not None
    had, has = _grants(look.plan), _grants(msgspec.json.decode(writes.puts[keys.plan], type=Plan))
    given = Counter(owner for item, (owner, _) in has.items() if item not in had)
    check(given.keys() <= look.members.keys(), f"new items for {sorted(given)}, of whom some have gone")
    check(not any(look.members[name].leaving for name in given), f"new items for {sorted(given)}, of whom some leave")
    check(max(given.values(), default=0) - min(given.values(), default=0) <= 1, f"new items are given away unevenly: {given}")


def _check_placed(was: Look, now: Look) -> None:
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
    # Its record may have gone since that was decided; that will be a reason for a round.
    check(takers <= {*now.round.participants}, f"new items for {sorted(takers)}, of whom some take no part")


def _grants(plan: Plan) -> dict[str, tuple[str, int]]:
    return {item: (owner, grant) for owner, grants in plan.owners.items() for item, grant in grants.items()}


def check_rest(view: View, keys: Keys, alive: Mapping[str, Mapping[str, Token]]) -> None:
    """After a calm time: everything is served, evenly, by those who live; nobody else is a member."""
    resource = msgspec.json.decode(view.entries[keys.resource].value, type=Resource)
    members = {key.removeprefix(keys.members) for key in view.prefix(keys.members)}
    check(members == alive.keys(), f"members at rest: {sorted(members)}, alive: {sorted(alive)}")
    served = sorted(item for owned in alive.values() for item in owned)
    check(served == sorted(resource.items), f"served at rest: {served} of {resource.items}")
    left = [key for key in view.prefix(keys.claims) if key.startswith(keys.claims + "p")]
    check({key.removeprefix(keys.claims) for key in left} <= {*resource.items}, f"claims of what was removed: {left}")
    counts = [len(owned) for owned in alive.values()]
    check(max(counts) - min(counts) <= 1, f"uneven at rest: {counts}")
