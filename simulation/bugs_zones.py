"""Planted bugs of zones: how queues are spread over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from simulation.planting import Bug, shelf
from sluiceway.core.group import plan, rounds, zones
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.zones import NO_ZONES, Quota

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(rounds, "sticky")
def plans_without_zones(original: Any) -> Any:
    """A round takes no notice of zones."""
    return lambda items, members, current, limits, unsettled, _zones, *more: original(
        items, members, current, limits, unsettled, NO_ZONES, *more
    )


@bug(Beating, "_record")
def says_no_zone(original: Any) -> Any:
    """A member leaves its zone out of what it says of itself, so that it counts among those without one."""
    return lambda *arguments: msgspec.structs.replace(original(*arguments), zone="")


@bug(zones, "targets")
def fills_one_zone_with_each_queue(original: Any) -> Any:
    """Zones have as many items as they should, but of each queue whatever comes first."""

    def targets(sizes: Mapping[str, int], has: Any, rooms: Mapping[str, int]) -> dict[str, dict[str, int]]:
        left, made = dict(rooms), {}
        for queue, size in sizes.items():
            made[queue] = dict.fromkeys(rooms, 0)
            for zone in rooms:
                made[queue][zone] = min(size - sum(made[queue].values()), left[zone])
                left[zone] -= made[queue][zone]
        return made

    return targets


@bug(zones, "targets")
def spreads_anew_in_each_round(original: Any) -> Any:
    """Which zones get the larger parts of a queue does not depend on where it is."""
    return lambda sizes, has, rooms: original(sizes, {queue: {} for queue in has}, rooms)


@bug(plan, "_shares")
def gives_the_larger_shares_by_name(original: Any) -> Any:
    """The members that have an item more may all be in one zone."""
    return lambda loads, held, rest, across: original(loads, held, rest, NO_ZONES)


@bug(Quota, "take")
def takes_no_notice_of_zones_for_a_limited_queue(original: Any) -> Any:
    """The members of a limited queue may all be in one zone."""

    def take(self: Any, member: str) -> bool:
        self._extra -= 1
        return bool(sum(self.least.values()) + self._extra >= 0)

    return take
