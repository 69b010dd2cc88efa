"""Ranks the keys of a queue that wait in several partitions or instances."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nlargest, nsmallest

from sluiceway.model.peers import KeyCount


def together(keys: Iterable[KeyCount]) -> Collection[KeyCount]:
    """Each key once. Items without a key are in many partitions, those of a key in one, or where they were before the queue's setting."""
    found: dict[int, KeyCount] = {}
    for each in keys:
        found[each.hash] = _sum(found[each.hash], each) if each.hash in found else each
    return found.values()


def _sum(one: KeyCount, other: KeyCount) -> KeyCount:
    return KeyCount(
        one.hash,
        one.waiting + other.waiting,
        one.leased + other.leased,
        one.returned + other.returned,
        min(one.oldest_at, other.oldest_at),
        other.blocked_by and one.blocked_by,
        one.text,
    )


def busiest(keys: Iterable[KeyCount], limit: int) -> list[KeyCount]:
    """Those with most items, waiting and in flight, most first."""
    return nlargest(limit, keys, lambda each: each.waiting + each.leased + each.returned)


def oldest(keys: Iterable[KeyCount], limit: int) -> list[KeyCount]:
    """Those whose next item is oldest, oldest first."""
    return nsmallest(limit, keys, lambda each: each.oldest_at)
