"""Planted bugs of pins: where pinned items are, and how pins come and go."""

from __future__ import annotations

from typing import Any

import msgspec

from simulation.bugs_group import unchecked
from simulation.planting import Bug, shelf
from sluiceway.core.group import item_placement, load_balance, rounds
from sluiceway.core.group.group_records import GroupView, Keys, Resource, Writes, decode_record
from sluiceway.core.group.plan import NO_PINS
from sluiceway.core.group.rounds import Rounds

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(rounds, "sticky")
def plans_without_pins(original: Any) -> Any:
    """A round takes no notice of pins."""
    return lambda items, members, current, limits, unsettled, zones, _pins: original(
        items, members, current, limits, unsettled, zones, NO_PINS
    )


@bug(Rounds, "_seal")
def knows_only_pins_of_before_it_came(original: Any) -> Any:
    """A member plans by the pins that it found when it joined: they are lost, or come back, with the member that seals."""

    def seal(self: Any, look: GroupView, resource: Resource, current: Any) -> Writes:
        if not hasattr(self, "first_pins"):
            self.first_pins = resource.pins
        writes: Writes = original(self, look, msgspec.structs.replace(resource, pins=self.first_pins), current)
        return writes

    return seal


@bug(item_placement, "pin")
def pins_under_the_old_version(original: Any) -> Any:
    """A pin is recorded under the old resource version, so no round follows."""

    def pin(look: GroupView, keys: Keys, *args: Any) -> Writes:
        writes: Writes = original(look, keys, *args)
        if writes.puts and look.resource is not None:
            resource = decode_record(writes.puts[keys.resource], Resource)
            writes.put(keys.resource, msgspec.structs.replace(resource, version=look.resource.version))
        return writes

    return pin


@bug(item_placement, "pin")
def pins_in_a_resource_that_has_changed(original: Any) -> Any:
    """A pin overwrites a concurrent change of the resource."""
    return unchecked(original, "resource")


@bug(item_placement, "_pins_of")
def leaves_pins_behind(original: Any) -> Any:
    """A pin stays when its item has gone."""
    return lambda items, pins: dict(pins)


@bug(load_balance._Exchanges, "__init__")
def exchanges_pinned_items(original: Any) -> Any:
    """Pinned items are exchanged, too, and come back with the same round: nothing is levelled, and it never ends."""

    def init(self: Any, look: Any, resource: Any, plan: Any, reports: Any) -> None:
        original(self, look, msgspec.structs.replace(resource, pins={}), plan, reports)

    return init
