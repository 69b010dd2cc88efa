"""Routing of requests among the instances that share a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.model.inspection import ByItems, DeleteItems, MoveItems, RunNow
from sluiceway.model.peers import Load
from sluiceway.model.requests import Clear, CountBundles, Extend, Offsets, Settle

OVERFLOW = 10_000
"""Items. A produce goes to another instance's emptiest partition only if that has fewer by this many, and by half: the hop costs, and
consumers elsewhere fetch what they want."""


class Peer(NamedTuple):
    """A member of the cluster, and the URL at which the others reach it."""

    name: str
    address: str


HERE = Peer("", "")
"""This instance."""

Owner = Callable[[int], Peer | None]
"""Returns the owner of that partition of the queue; None: none at the moment."""


def taker(own: Load, others: Mapping[Peer, Load], owners: Iterable[Peer], tried: Iterable[Peer]) -> Peer | None:
    """The next instance to ask to take a produce, among owners not tried yet; None: none is left.

    Prefers this instance, unless none of its partitions takes produces, or far more waits in each of them than elsewhere. `others` has the
    known loads of the others; an instance without one comes last.
    """
    left = set(owners) - set(tried)
    emptiest = {peer: load.emptiest for peer, load in others.items() if peer in left}
    fewest = min(((count, peer) for peer, count in emptiest.items() if count is not None), default=None)
    if HERE in left and own.emptiest is not None:
        return fewest[1] if fewest is not None and own.emptiest > 2 * fewest[0] + OVERFLOW else HERE
    if fewest is not None:
        return fewest[1]
    # A partition may just be opening.
    return HERE if HERE in left else min(left, default=None)


def stays(own: Load) -> bool:
    """Whether this instance takes a produce itself, however little waits at the others."""
    return own.emptiest is not None and own.emptiest <= OVERFLOW


Part = Settle | Extend | DeleteItems | RunNow | MoveItems | Clear | CountBundles


def by_owner(numbers: Iterable[int], owner: Owner) -> dict[Peer | None, list[int]]:
    """The partitions grouped by owner."""
    groups: dict[Peer | None, list[int]] = {}
    for number in numbers:
        groups.setdefault(owner(number), []).append(number)
    return groups


def numbers_of(request: Part) -> list[int]:
    """The partitions that the request names."""
    if isinstance(request, Settle):
        return sorted(request.selections)
    if isinstance(request, Extend):
        return sorted({*(partition for partition, _ in request.leases), *request.offsets})
    if isinstance(request, ByItems):
        return sorted(request.offsets)
    return list(request.partitions or ())


def names_of(request: Part, numbers: Iterable[int], incarnation: str) -> list[str]:
    """The ids of items and leases in those partitions that the request names."""
    wanted = set(numbers)
    items: list[tuple[int, Offsets]] = []
    leases: list[tuple[int, int]] = []
    if isinstance(request, Settle):
        chosen = [(number, each) for number, selections in request.selections.items() for each in selections]
        items = [(number, each.offsets) for number, each in chosen if each.offsets is not None]
        leases = [(number, each.lease) for number, each in chosen if each.lease is not None]
    elif isinstance(request, Extend):
        items, leases = list(request.offsets.items()), list(request.leases)
    elif isinstance(request, ByItems):
        items = list(request.offsets.items())
    names = [str(ItemId(incarnation, number, offset)) for number, offsets in items if number in wanted for offset in offsets.tolist()]
    return names + [str(LeaseId(incarnation, number, lease)) for number, lease in leases if number in wanted]


def part(request: Part, numbers: Iterable[int], request_timeout: Millis) -> Part:
    """The part of the request for those partitions. Ids that belong to none are in no part."""
    wanted = set(numbers)
    if isinstance(request, Settle):
        selections = {number: each for number, each in request.selections.items() if number in wanted}
        return replace(request, selections=selections, foreign=(), request_timeout=request_timeout)
    if isinstance(request, Extend):
        leases = [each for each in request.leases if each[0] in wanted]
        offsets = {number: each for number, each in request.offsets.items() if number in wanted}
        return replace(request, leases=leases, offsets=offsets, foreign=(), request_timeout=request_timeout)
    if isinstance(request, ByItems):
        offsets = {number: each for number, each in request.offsets.items() if number in wanted}
        return replace(request, offsets=offsets, foreign=(), request_timeout=request_timeout)
    return replace(request, partitions=tuple(sorted(wanted)), request_timeout=request_timeout)
