"""Planted bugs of a queue's limit of leased items: each removes one rule of ADR 58."""

from __future__ import annotations

from typing import Any

import msgspec

from simulation.planting import Bug, shelf
from sluiceway.core.queue import queue_slots
from sluiceway.local import slot_quotas

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(queue_slots, "_lower")
def gives_away_what_is_leased(original: Any) -> Any:
    """A quota is lowered below what is leased."""

    def lower(limit: int, shares: Any, mine: Any, *rest: Any) -> Any:
        ceilings = original(limit, shares, mine, *rest)
        for number, most in ceilings.items():
            shares[number] = msgspec.structs.replace(shares[number], quota=min(most, shares[number].quota))
        return ceilings

    return lower


@bug(queue_slots, "_raise")
def takes_more_than_is_free(original: Any) -> Any:
    """Each partition takes its part, whether others have given it or not."""

    def raises(limit: int, shares: Any, mine: Any, wanted: Any) -> None:
        original(limit + sum(each.quota for each in shares.values()), shares, mine, wanted)

    return raises


@bug(slot_quotas, "decide")
def takes_partitions_that_are_not_open_for_empty(original: Any) -> Any:
    """A new owner gives the quota away before it knows what is leased."""

    def decide(record: Any, held: Any, *rest: Any) -> Any:
        return original(record, {number: each._replace(is_open=True) for number, each in held.items()}, *rest)

    return decide
