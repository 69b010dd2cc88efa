"""Planted bugs of member limits: on how many members a queue may lie."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgspec

from simulation.bugs_group import unchecked
from simulation.planting import Bug, shelf
from sluiceway.core.group import item_placement, rounds
from sluiceway.core.group.group_records import GroupView, Keys, Resource, Writes, decode_record
from sluiceway.core.group.plan import UNLIMITED, queue_of

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(item_placement, "limit")
def limits_under_the_old_version(original: Any) -> Any:
    """A limit is recorded under the old resource version, so no round follows."""

    def limit(look: GroupView, keys: Keys, *args: Any) -> Writes:
        writes: Writes = original(look, keys, *args)
        if writes.puts and look.resource is not None:
            resource = decode_record(writes.puts[keys.resource], Resource)
            writes.put(keys.resource, msgspec.structs.replace(resource, version=look.resource.version))
        return writes

    return limit


@bug(item_placement, "limit")
def limits_a_resource_that_has_changed(original: Any) -> Any:
    """Setting a limit overwrites a concurrent change of the resource."""
    return unchecked(original, "resource")


@bug(item_placement, "limit")
def limits_what_has_gone(original: Any) -> Any:
    """A queue without items gets a limit, which stays forever."""

    def limit(look: GroupView, keys: Keys, queue: str, most: int | None) -> Writes:
        writes: Writes = original(look, keys, queue, most)
        resource = look.resource
        if resource is not None and most is not None and queue not in map(queue_of, resource.items):
            limits = resource.limits | {queue: most}
            writes.put(keys.resource, msgspec.structs.replace(resource, version=resource.version + 1, limits=limits))
        return writes

    return limit


@bug(item_placement, "remove")
def leaves_limits_behind(original: Any) -> Any:
    """A queue's limit stays when its last item has gone."""

    def remove(look: GroupView, keys: Keys, *args: Any) -> Writes:
        writes: Writes = original(look, keys, *args)
        if writes.puts and look.resource is not None:
            resource = decode_record(writes.puts[keys.resource], Resource)
            writes.put(keys.resource, msgspec.structs.replace(resource, limits=look.resource.limits))
        return writes

    return remove


@bug(item_placement, "dealt")
def places_a_queue_on_everybody(original: Any) -> Any:
    """A new queue with a limit is placed on all members, and stays there until the next round."""
    return lambda items, counts, *_: original(items, counts)


@bug(item_placement, "place")
def places_beside_what_there_is_of_a_queue(original: Any) -> Any:
    """New items of a limited queue go to the least loaded members, regardless of where the queue already lies."""

    def place(look: GroupView, keys: Keys, items: list[str], late: Any, limits: Any) -> Writes:
        resource = look.resource
        if resource is None or not resource.limits.keys() & set(map(queue_of, items)):
            return cast(Writes, original(look, keys, items, late, limits))
        unlimited = dataclasses.replace(look, resource=msgspec.structs.replace(resource, limits={}))
        writes: Writes = original(unlimited, keys, items, late)
        if writes.puts:
            put = decode_record(writes.puts[keys.resource], Resource)
            writes.put(keys.resource, msgspec.structs.replace(put, limits=resource.limits))
        return writes

    return place


@bug(rounds, "sticky")
def plans_without_limits(original: Any) -> Any:
    """A round spreads every queue over all members."""
    return lambda items, members, current, limits, *more: original(items, members, current, UNLIMITED, *more)


@bug(rounds, "sticky")
def moves_a_queue_for_no_reason(original: Any) -> Any:
    """Each round chooses the members of a limited queue anew."""
    return lambda items, members, current, limits, *more: original(
        items, members, {item: owner for item, owner in current.items() if queue_of(item) not in limits}, limits, *more
    )
