"""How items come to a group and go from it: what a commit, which may contain more, has to contain for that.

`begin` says anew what there is, and the group follows with a round; so it does after `limit`. `place` and `remove` need none: new items
are owned, and removed ones are nobody's, as soon as the commit has landed. Where that cannot be, they change the resource only, and the
group follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sluiceway.core.group.group_records import Claim, Keys, Look, Parameters, Plan, Resource, Strategy, Writes, largest_commit
from sluiceway.core.group.plan import UNLIMITED, dealt, queue_of
from sluiceway.kernel.errors import invalid
from sluiceway.model.meta import MAX_COMMIT_BYTES, Entry

ROOM = 128 << 10
"""Bytes of a commit that are left to what else it contains: a queue's record, an audit entry."""
MAX_CLAIM_WRITES = 500
"""Claims that one commit places or removes, for the same reason."""
RESTORED_ERAS = 100
"""How many eras a restore skips: as many changes of the strategy may have been made since the backup, and their tokens given out."""


def check_item(item: object) -> str:
    """An item of a resource: 1 to 200 printable ASCII characters. Raises `invalid_request`."""
    if not isinstance(item, str) or not 1 <= len(item) <= 200 or not (item.isascii() and item.isprintable()):
        raise invalid("items", f"{str(item)[:80]!r} is not an item's name: 1 to 200 printable ASCII characters")
    return item


def era_of(entry: Entry | None) -> int:
    """The era of the group with that resource record; 1 if there is none."""
    return 1 if entry is None else msgspec.json.decode(entry.value, type=Resource).era


def begin(
    keys: Keys,
    entry: Entry | None,
    items: Iterable[str],
    strategy: Strategy,
    parameters: Parameters | None = None,
    limits: Mapping[str, int] | None = None,
    *,
    first_era: int = 1,
    restored: bool = False,
) -> tuple[Resource, Writes]:
    """What the group divides from now on, and how, where `entry` is its resource record so far; without `puts` if it is so already.

    `parameters`, `limits` None: as they are. `first_era` is that of a group without a record: 2 if its items may have had a static owner.
    A change of the strategy begins a new era, whose tokens are all greater; so does `restored`, each time: the store comes from a backup.
    Raises `invalid_request`, also for more items than a plan can hold.
    """
    wanted = tuple(sorted({check_item(item) for item in items}))
    if entry is None:
        before = None
        bounds = _limits_of(wanted, limits or UNLIMITED)
        after = Resource(items=wanted, strategy=strategy, parameters=parameters or Parameters(), era=first_era, limits=bounds)
    else:
        before = msgspec.json.decode(entry.value, type=Resource)
        bounds = _limits_of(wanted, before.limits if limits is None else limits)
        times = parameters or before.parameters
        after = msgspec.structs.replace(before, items=wanted, strategy=strategy, parameters=times, limits=bounds)
        if restored or after != before:
            era = before.era + (RESTORED_ERAS if restored else strategy != before.strategy)
            after = msgspec.structs.replace(after, version=before.version + 1, era=era)
    _check_size(keys, after.items, before.items if before else ())
    writes = Writes(checks={keys.resource: entry.stamp if entry else None})
    if after != before:
        writes.put(keys.resource, after)
    return after, writes


def place(look: Look, keys: Keys, items: Sequence[str], late: Collection[str] = (), limits: Mapping[str, int] = UNLIMITED) -> Writes:
    """Add items that the group has not and that were never removed from it, and give them to members, evenly, neighbours to different ones.

    Without `puts` if it has them all. Members of `late` get none while there are others. `limits` are those of new queues. What cannot be
    given away now is added to the resource, and the group gives it away: if there is no plan of the resource as it is, if nobody could
    take the items, if the commit would be too large, if items are added to a limited queue.
    Raises `invalid_request`, also for more items than a plan can hold.
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
    # Who has a part of such a queue already is for the round to look at.
    if plan is not None and not _limits_of(resource.items, _limits_of(new, bounds)):
        _plan_new(look, keys, plan, new, late, bounds, writes)
    if resource.strategy == "claims":
        _claim_new(look, keys, new, late, writes)
    return writes


def remove(look: Look, keys: Keys, items: Iterable[str]) -> Writes:
    """Take items from the group for ever: who serves one stops when it looks. Without `puts` if it has none of them.

    They must not come again, under either call: nothing is kept of who may still serve them, and of claims not even the last grant.
    What stays is not divided anew; the next round makes it even.
    """
    resource = _resource_of(look)
    gone = {*items} & {*resource.items}
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if not gone:
        return writes
    # Whoever asks may have asked those who have the items whether they can go: nobody else must have been given them since.
    writes.checks[keys.plan] = look.stamp(keys.plan)
    left = tuple(item for item in resource.items if item not in gone)
    limits = _limits_of(left, resource.limits)
    writes.put(keys.resource, msgspec.structs.replace(resource, items=left, version=resource.version + 1, limits=limits))
    plan = _current_plan(look, resource)
    if plan is not None:
        owners = {name: {item: grant for item, grant in grants.items() if item not in gone} for name, grants in plan.owners.items()}
        _put_plan(look, keys, plan, {name: grants for name, grants in owners.items() if grants}, writes)
    # Claims check the resource, so that none comes of what has just gone.
    recorded = gone if resource.strategy == "claims" else gone & look.claims.keys()
    writes.deletes = [keys.claims + item for item in sorted(recorded)[:MAX_CLAIM_WRITES]]
    writes.checks |= {key: look.stamp(key) for key in writes.deletes}
    return writes


def limit(look: Look, keys: Keys, queue: str, most: int | None) -> Writes:
    """Let the queue's items lie on so many members, by the round that follows; None: on all. Without `puts` if it is so, or has none."""
    resource = _resource_of(look)
    others = {name: each for name, each in resource.limits.items() if name != queue}
    limits = _limits_of(resource.items, others if most is None else others | {queue: most})
    writes = Writes(checks={keys.resource: look.stamp(keys.resource)})
    if limits != resource.limits:
        writes.put(keys.resource, msgspec.structs.replace(resource, version=resource.version + 1, limits=limits))
    return writes


def _limits_of(items: Iterable[str], limits: Mapping[str, int]) -> dict[str, int]:
    """The limits of queues that have items."""
    if not limits:
        return {}
    there = {queue_of(item) for item in items}
    return {queue: limits[queue] for queue in sorted(limits) if queue in there}


def _resource_of(look: Look) -> Resource:
    assert look.resource is not None, "a group has a resource before anything is placed"
    return look.resource


def _current_plan(look: Look, resource: Resource) -> Plan | None:
    """The plan, if it is followed and a round need not replace it."""
    plan = look.plan
    followed = plan is not None and resource.strategy == "rounds" and plan.era == resource.era
    return plan if plan is not None and followed and plan.resource_version == resource.version else None


def _plan_new(look: Look, keys: Keys, plan: Plan, new: list[str], late: Collection[str], limits: Mapping[str, int], writes: Writes) -> None:
    """Put the items into the plan, which stays that of its round."""
    takers = _takers(look, look.round.participants if look.round else (), late)
    if not takers:
        return
    owners = {name: dict(grants) for name, grants in plan.owners.items()}
    for item, name in dealt(new, {name: len(owners.get(name, ())) for name in takers}, limits).items():
        # Nobody has had it since that round: no token of it is as great, and who may still serve it is in the plan's waits.
        owners.setdefault(name, {})[item] = plan.round
    _put_plan(look, keys, plan, owners, writes)


def _put_plan(look: Look, keys: Keys, plan: Plan, owners: dict[str, dict[str, int]], writes: Writes) -> None:
    """Make it the plan of the resource that is put beside it, if both fit into the commit."""
    encoded = msgspec.json.encode(msgspec.structs.replace(plan, resource_version=plan.resource_version + 1, owners=owners))
    if len(encoded) + len(writes.puts[keys.resource]) <= MAX_COMMIT_BYTES - ROOM:
        # Not the round: if one is being opened, it is about whatever the plan is when it is sealed, and sealing checks the resource.
        writes.checks[keys.plan] = look.stamp(keys.plan)
        writes.puts[keys.plan] = encoded


def _claim_new(look: Look, keys: Keys, new: list[str], late: Collection[str], writes: Writes) -> None:
    """Claim the items for their owners to be; who cannot take them is found out as with any claim."""
    takers = _takers(look, look.members, late)
    free = [item for item in new if item not in look.claims][:MAX_CLAIM_WRITES]
    if takers:
        has = Counter(claim.owner for claim in look.claims.values())
        for item, name in dealt(free, {name: has[name] for name in takers}).items():
            writes.put(keys.claims + item, Claim(owner=name, grant=1))


def _takers(look: Look, names: Iterable[str], late: Collection[str]) -> list[str]:
    """Those of the names that new items may be given to."""
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
