"""Planted bugs of placing and removing items without a round."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from simulation.bugs_group import unchecked
from simulation.planting import Bug, shelf
from sluiceway.core.group import item_placement
from sluiceway.core.group.claims import Claims
from sluiceway.core.group.group_records import GroupView, Keys, Plan, Resource, Writes, decode_record
from sluiceway.core.group.plan import sticky

BUGS: list[Bug] = []
bug = shelf(BUGS)
RARE: list[Bug] = []
"""Bugs that random histories hardly ever show; tests/group/test_assignment_holes.py has a history for each."""
rare = shelf(RARE)


def replanned(writes: Writes, keys: Keys, **fields: Any) -> Writes:
    """Change fields of the commit's plan, if it has one."""
    if keys.plan in writes.puts:
        plan = decode_record(writes.puts[keys.plan], Plan)
        writes.put(keys.plan, msgspec.structs.replace(plan, **fields))
    return writes


@bug(item_placement, "place")
def places_into_a_plan_that_has_changed(original: Any) -> Any:
    """Placing overwrites the plan of a concurrent round."""
    return unchecked(original, "plan")


@bug(item_placement, "place")
def places_into_a_resource_that_has_changed(original: Any) -> Any:
    """Placing overwrites a concurrent change of the resource."""
    return unchecked(original, "resource")


@bug(item_placement, "remove")
def removes_from_a_plan_that_has_changed(original: Any) -> Any:
    """Removing overwrites the plan of a concurrent round."""
    return unchecked(original, "plan")


@bug(item_placement, "remove")
def removes_from_a_resource_that_has_changed(original: Any) -> Any:
    """Removing also removes items that were added concurrently."""
    return unchecked(original, "resource")


@bug(item_placement, "place")
def places_under_the_old_version(original: Any) -> Any:
    """The resource gets new items, but it and the plan keep the old version."""

    def place(look: GroupView, keys: Keys, *args: Any) -> Writes:
        writes: Writes = original(look, keys, *args)
        if look.resource is not None and writes.puts:
            resource = decode_record(writes.puts[keys.resource], Resource)
            writes.put(keys.resource, msgspec.structs.replace(resource, version=look.resource.version))
        return replanned(writes, keys, resource_version=look.resource.version if look.resource else 0)

    return place


@bug(item_placement, "place")
def gives_new_items_to_nobody(original: Any) -> Any:
    """The plan claims the new version but has none of the new items."""

    def place(look: GroupView, keys: Keys, *args: Any) -> Writes:
        return replanned(original(look, keys, *args), keys, owners=look.plan.owners if look.plan else {})

    return place


@bug(item_placement, "remove")
def leaves_in_the_plan_what_it_removes(original: Any) -> Any:
    """The plan claims the new version but still has removed items."""

    def remove(look: GroupView, keys: Keys, *args: Any) -> Writes:
        return replanned(original(look, keys, *args), keys, owners=look.plan.owners if look.plan else {})

    return remove


@bug(item_placement, "remove")
def leaves_what_it_removes_to_a_round(original: Any) -> Any:
    """The plan keeps removed items and another version than the resource, yet no round follows."""

    def remove(look: GroupView, keys: Keys, *args: Any) -> Writes:
        writes: Writes = original(look, keys, *args)
        resource = decode_record(writes.puts[keys.resource], Resource) if writes.puts else None
        if resource is not None and writes.puts.pop(keys.plan, b""):
            writes.put(keys.resource, msgspec.structs.replace(resource, version=resource.version - 1))
        return writes

    return remove


@bug(item_placement, "_takers")
def places_on_those_who_leave(original: Any) -> Any:
    """A leaving member gets new items."""
    return lambda look, names, late: [name for name in names if name in look.members]


@bug(item_placement, "_takers")
def places_on_those_who_have_gone(original: Any) -> Any:
    """Members of the last round get new items even if they have gone."""
    return lambda look, names, late: list(names)


@bug(item_placement, "_takers")
def places_on_those_who_take_no_part(original: Any) -> Any:
    """Members that took no part in the round get new items."""
    return lambda look, names, late: original(look, look.members, late)


@bug(item_placement, "_current_plan")
def places_in_any_plan(original: Any) -> Any:
    """Items are placed in a plan of another resource version or an earlier era."""
    return lambda look, resource: look.plan


@bug(item_placement, "_plan_new")
def divides_everything_anew(original: Any) -> Any:
    """Items that have an owner move too, without a round."""

    def plan_new(look: GroupView, keys: Keys, plan: Plan, new: Any, late: Any, limits: Any, writes: Writes) -> None:
        original(look, keys, plan, new, late, limits, writes)
        items = [item for grants in plan.owners.values() for item in grants]
        owners: dict[str, dict[str, int]] = {}
        for item, name in sticky(items + new, look.round.participants if look.round else (), {}).items():
            owners.setdefault(name, {})[item] = plan.round
        replanned(writes, keys, owners=owners)

    return plan_new


@bug(item_placement, "_plan_new")
def forgets_who_may_still_serve_an_item(original: Any) -> Any:
    """Placing anything discards all waits for former owners."""

    def plan_new(look: GroupView, keys: Keys, plan: Plan, new: Any, late: Any, limits: Any, writes: Writes) -> None:
        original(look, keys, plan, new, late, limits, writes)
        replanned(writes, keys, waits={})

    return plan_new


@rare(item_placement, "_plan_new")
def begins_with_the_first_grant(original: Any) -> Any:
    """Placed items get the first round's token."""

    def plan_new(look: GroupView, keys: Keys, plan: Plan, new: Any, late: Any, limits: Any, writes: Writes) -> None:
        original(look, keys, plan, new, late, limits, writes)
        if keys.plan in writes.puts:
            owners = decode_record(writes.puts[keys.plan], Plan).owners
            owners = {name: {item: 1 if item in new else grant for item, grant in grants.items()} for name, grants in owners.items()}
            replanned(writes, keys, owners=owners)

    return plan_new


@bug(item_placement, "_claim_new")
def claims_what_had_an_owner(original: Any) -> Any:
    """The first claim of a new item overwrites an existing claim."""

    def claim_new(look: GroupView, *args: Any) -> None:
        original(dataclasses.replace(look, claims={}), *args)

    return claim_new


@bug(item_placement, "remove")
def leaves_claims_behind(original: Any) -> Any:
    """An item is removed, and its claim is not."""

    def remove(*args: Any) -> Writes:
        writes: Writes = original(*args)
        writes.deletes = []
        return writes

    return remove


@bug(Claims, "_write")
def claims_what_has_just_gone(original: Any) -> Any:
    """A claim does not check that the item still exists, and stays forever."""
    return unchecked(original, "resource")
