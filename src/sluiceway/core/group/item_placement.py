"""Placement: the meta-store writes that add items to a group and remove them, to be combined with others in one commit.

`begin` replaces the items, and the group follows with a round, as it does after `limit`. `place` and `remove` need no round: new items are
owned, and removed ones free, as soon as the commit lands. Where that is impossible they change only the resource, and the group follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sluiceway.core.group.group_records import (
    MAX_PINS,
    Claim,
    GroupView,
    Keys,
    Parameters,
    Pin,
    Plan,
    Resource,
    Strategy,
    Writes,
    decode_record,
    encode_record,
    largest_commit,
    members_of,
)
from sluiceway.core.group.plan import UNLIMITED, dealt, queue_of
from sluiceway.kernel.errors import invalid
from sluiceway.model.meta import MAX_COMMIT_BYTES, Entry

ROOM = 128 << 10
"""Bytes of a commit reserved for its other contents: a queue's record, an audit entry."""
MAX_CLAIM_WRITES = 500
"""Claims that one commit places or removes, for the same reason."""
RESTORED_ERAS = 100
"""Eras that a restore skips: the strategy may have changed this often since the backup, with tokens given out each time."""


def check_item(item: object) -> str:
    """Validate an item of a resource: 1 to 200 printable ASCII characters. Raises `invalid_request`."""
    if not isinstance(item, str) or not 1 <= len(item) <= 200 or not (item.isascii() and item.isprintable()):
        raise invalid("items", f"{str(item)[:80]!r} is not an item's name: 1 to 200 printable ASCII characters")
    return item


def era_of(entry: Entry | None) -> int:
    """The era in that resource record; 1 if there is none."""
    return 1 if entry is None else decode_record(entry.value, Resource).era


def begin(
    keys: Keys,
    entry: Entry | None,
    items: Iterable[str],
    strategy: Strategy,
    parameters: Parameters | None = None,
    limits: Mapping[str, int] | None = None,
    *,
    load_moves: int | None = None,
    first_era: int = 1,
    era_above: int = 0,
    restored: bool = False,
) -> tuple[Resource, Writes]:
    """Set the group's items and strategy; `entry` is its current resource record. The writes have no `puts` if nothing changes.

    `parameters`, `limits`, `load_moves` None: unchanged. `first_era` applies to a group without a record: 2 if its items may have had a
    static owner. A change of strategy begins a new era, whose tokens are all greater; so does `restored`, each time: the store comes from a
    backup. `era_above`: an era that items come from, which the group's is to exceed. Raises `invalid_request`, also for more items than a
    plan can hold.
    """
    wanted = tuple(sorted({check_item(item) for item in items}))
    if entry is None:
        before = None
        bounds = _limits_of(wanted, limits or UNLIMITED)
        after = Resource(
            items=wanted, strategy=strategy, parameters=parameters or Parameters(), era=max(first_era, era_above + 1), limits=bounds
        )
        after = after if load_moves is None else msgspec.structs.replace(after, load_moves=load_moves)
    else:
        before = decode_record(entry.value, Resource)
        pins = _pins_of(wanted, before.pins)
        bounds = _limits_of(wanted, before.limits if limits is None else limits)
        moves = before.load_moves if load_moves is None else load_moves
        after = msgspec.structs.replace(
            before, items=wanted, strategy=strategy, parameters=parameters or before.parameters, limits=bounds, load_moves=moves, pins=pins
        )
        if restored or after != before:
            era = before.era + (RESTORED_ERAS if restored else strategy != before.strategy)
            after = msgspec.structs.replace(after, version=before.version + 1, era=max(era, era_above + 1))
    _check_size(keys, after.items, before.items if before else ())
    writes = Writes(checks={keys.resource: entry.stamp if entry else None})
    if after != before:
        writes.put(keys.resource, after)
    return after, writes


def place(look: GroupView, keys: Keys, items: Sequence[str], late: Collection[str] = (), limits: Mapping[str, int] = UNLIMITED) -> Writes:
    """Add items that were never in the group, and give them to members evenly, neighbours to different members.

    No `puts` if the group has them all. Members of `late` get none while there are others. `limits` apply to new queues. Items that cannot
    be given away now are only added to the resource, and the group gives them away later: when there is no plan of the current resource,
    when no member can take them, when the commit would be too large, or when a limited queue grows. Raises `invalid_request`, also for more
    items than a plan can hold.
    """
    resource = _resource_of(look)
    known = set(resource.items)
    new = [item for item in dict.fromkeys(map(check_item, items)) if item not in known]
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if not new:
        return writes
    plan = _current_plan(look, resource)
    bounds = resource.limits | _limits_of(new, limits)
    after = msgspec.structs.replace(resource, items=tuple(sorted([*resource.items, *new])), version=resource.version + 1, limits=bounds)
    _check_size(keys, after.items, [item for grants in plan.owners.values() for item in grants] if plan else ())
    writes.put(keys.resource, after)
    # A limited queue that already has members is left to the round, which sees the holders of its parts.
    if plan is not None and not _limits_of(resource.items, _limits_of(new, bounds)):
        _plan_new(look, keys, plan, new, late, bounds, writes)
    if resource.strategy == "claims":
        _claim_new(look, keys, new, late, writes)
    return writes


def remove(look: GroupView, keys: Keys, items: Iterable[str]) -> Writes:
    """Remove items from the group for good: a member that serves one stops at its next look. No `puts` if the group has none of them.

    Removed items must never come back, by `place` or `begin`: no record remains of who may still serve them, and of claims not even the
    last grant. The remaining items stay where they are; the next round rebalances them.
    """
    resource = _resource_of(look)
    gone = {*items} & {*resource.items}
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if not gone:
        return writes
    # The caller may have asked the owners whether the items can go: no other member must have been given them since.
    writes.checks[keys.plan] = look.stamp(keys.plan)
    left = tuple(item for item in resource.items if item not in gone)
    limits = _limits_of(left, resource.limits)
    pins = _pins_of(left, resource.pins)
    writes.put(keys.resource, msgspec.structs.replace(resource, items=left, version=resource.version + 1, limits=limits, pins=pins))
    plan = _current_plan(look, resource)
    if plan is not None:
        owners = {name: {item: grant for item, grant in grants.items() if item not in gone} for name, grants in plan.owners.items()}
        _put_plan(look, keys, plan, {name: grants for name, grants in owners.items() if grants}, writes)
    # Claims check the resource, so no member can claim an item that has just gone.
    recorded = gone if resource.strategy == "claims" else gone & look.claims.keys()
    writes.deletes = [keys.claims + item for item in sorted(recorded)[:MAX_CLAIM_WRITES]]
    writes.checks |= {key: look.stamp(key) for key in writes.deletes}
    return writes


def limit(look: GroupView, keys: Keys, queue: str, most: int | None) -> Writes:
    """Limit the queue's items to `most` members from the next round on; None: unlimited. No `puts` if unchanged, or if the queue has no
    items."""
    resource = _resource_of(look)
    others = {name: each for name, each in resource.limits.items() if name != queue}
    limits = _limits_of(resource.items, others if most is None else others | {queue: most})
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if limits != resource.limits:
        writes.put(keys.resource, msgspec.structs.replace(resource, version=resource.version + 1, limits=limits))
    return writes


def pin(look: GroupView, keys: Keys, item: str, where: Pin | None) -> Writes:
    """Pin the item, which the group has, from the next round on; None: unpin it. No `puts` if unchanged.

    Raises `invalid_request` for a pin to what no member is, and for more pins than MAX_PINS.
    """
    resource = _resource_of(look)
    if where is not None and not members_of(where, look.zones):
        raise invalid("instance" if where.instance else "zone", f"there is no instance of {where} in the cluster")
    pins = {name: each for name, each in resource.pins.items() if name != item} | ({} if where is None else {item: where})
    if len(pins) > max(MAX_PINS, len(resource.pins)):
        raise invalid("partition", f"there are {MAX_PINS} pins, which is the maximum; unpin others first")
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if pins != resource.pins:
        sorted_pins = {name: pins[name] for name in sorted(pins)}
        writes.put(keys.resource, msgspec.structs.replace(resource, version=resource.version + 1, pins=sorted_pins))
    return writes


def _pins_of(items: Iterable[str], pins: Mapping[str, Pin]) -> dict[str, Pin]:
    """The pins of these items."""
    if not pins:
        return {}
    there = {*items}
    return {item: where for item, where in pins.items() if item in there}


def _limits_of(items: Iterable[str], limits: Mapping[str, int]) -> dict[str, int]:
    """The limits of those queues that have items."""
    if not limits:
        return {}
    there = {queue_of(item) for item in items}
    return {queue: limits[queue] for queue in sorted(limits) if queue in there}


def _resource_of(look: GroupView) -> Resource:
    assert look.resource is not None, "a group has a resource before anything is placed"
    return look.resource


def _current_plan(look: GroupView, resource: Resource) -> Plan | None:
    """The plan, if it is in force and no round is needed to replace it."""
    plan = look.plan
    followed = plan is not None and resource.strategy == "rounds" and plan.era == resource.era
    return plan if plan is not None and followed and plan.resource_version == resource.version else None


def _plan_new(
    look: GroupView, keys: Keys, plan: Plan, new: list[str], late: Collection[str], limits: Mapping[str, int], writes: Writes
) -> None:
    """Put the items into the plan, which keeps the number of its round."""
    takers = _takers(look, look.round.participants if look.round else (), late)
    if not takers:
        return
    owners = {name: dict(grants) for name, grants in plan.owners.items()}
    for item, name in dealt(new, {name: len(owners.get(name, ())) for name in takers}, limits, look.zones).items():
        # The item had no owner since that round: no token of it is as great, and members that may still serve it are in the plan's waits.
        owners.setdefault(name, {})[item] = plan.round
    _put_plan(look, keys, plan, owners, writes)


def _put_plan(look: GroupView, keys: Keys, plan: Plan, owners: dict[str, dict[str, int]], writes: Writes) -> None:
    """Make it the plan of the resource put beside it, if both fit into the commit."""
    encoded = encode_record(msgspec.structs.replace(plan, resource_version=plan.resource_version + 1, owners=owners))
    if len(encoded) + len(writes.puts[keys.resource]) <= MAX_COMMIT_BYTES - ROOM:
        # No check of the round: one being opened works on whatever plan exists when it is sealed, and sealing checks the resource.
        writes.checks[keys.plan] = look.stamp(keys.plan)
        writes.puts[keys.plan] = encoded


def _claim_new(look: GroupView, keys: Keys, new: list[str], late: Collection[str], writes: Writes) -> None:
    """Claim the items for their future owners; a member that cannot take them is detected as with any claim."""
    takers = _takers(look, look.members, late)
    free = [item for item in new if item not in look.claims][:MAX_CLAIM_WRITES]
    if takers:
        has = Counter(claim.owner for claim in look.claims.values())
        for item, name in dealt(free, {name: has[name] for name in takers}).items():
            writes.put(keys.claims + item, Claim(owner=name, grant=1))


def _takers(look: GroupView, names: Iterable[str], late: Collection[str]) -> list[str]:
    """The members among `names` that can be given new items."""
    able = [name for name in names if name in look.members and not look.members[name].leaving]
    return [name for name in able if name not in late] or able


def _check_size(keys: Keys, items: Sequence[str], before: Iterable[str]) -> None:
    before = tuple(before)
    largest = largest_commit(keys, items, before)
    if largest > MAX_COMMIT_BYTES:
        raise invalid(
            "items",
            f"the plan of {len(items)} items, {len(before)} before, may take {largest} bytes, and a commit holds {MAX_COMMIT_BYTES}; "
            "shorten the names, change fewer at a time, or divide the items among several groups",
        )
