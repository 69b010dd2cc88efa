"""Which partition of a queue descends from which, by what the servers tell of its partitions and rebalances. No I/O.

A partition is a child of those in whose stead it was made, once that cannot be undone: a rebalance that is cancelled opens its drained
partitions again and drains those that it made, which then come after nothing. It cannot be cancelled any more once a partition was removed,
so what a parent names at its end stays true. Until then nobody is told of the new partitions.

That a partition has ended is taken from the record of its removal and from nothing else: that a server does not know it may mean that this
server is behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluiceway.client.answers import QueueInfo
from sluiceway.contract.rebalances import Rebalance
from sluiceway.model.task_records import Born
from sluiceway.ports.change_stream import BrokenOffError, SeedsUpto

START = "0"
"""The position before everything in a partition."""
_UNDONE = ("cancelling", "cancelled")


def token_of(incarnation: str, number: int) -> str:
    """A queue that was deleted and made anew has other partitions."""
    return f"{incarnation}.{number}"


def removal_of(rebalances: Iterable[Rebalance], number: int) -> Rebalance | None:
    """The rebalance that has removed that partition; None: none of these."""
    return next((each for each in rebalances if any(step.partition == number for step in each.steps)), None)


def children_of(rebalance: Rebalance, incarnation: str, number: int) -> tuple[Born, ...]:
    """The partitions that were made in that one's stead, as they are told always and by everyone."""
    return tuple(
        Born(token_of(incarnation, new.partition), tuple(token_of(incarnation, parent) for parent in new.parents), START)
        for new in rebalance.plan.creates
        if number in new.parents
    )


def may_be_cancelled(rebalance: Rebalance) -> bool:
    """Whether it may still be undone."""
    if not rebalance.is_open or rebalance.state in _UNDONE or any(step.partition is not None for step in rebalance.steps):
        return False
    return not (rebalance.plan.in_order and rebalance.step not in ("create", "flip"))


def heirs(rebalances: Iterable[Rebalance], incarnation: str, number: int) -> tuple[Born, ...]:
    """The children of a partition that is being drained, if they are certain already."""
    for each in rebalances:
        if each.is_open and each.state not in _UNDONE and number in each.plan.drains and not may_be_cancelled(each):
            return children_of(each, incarnation, number)
    return ()


def _undone(rebalance: Rebalance) -> Iterable[int]:
    """What it had made, if it is cancelled. From the flip on its plan is the way back, which drains them."""
    if rebalance.state not in _UNDONE:
        return ()
    if any(step.step == "flip" for step in rebalance.steps):
        return rebalance.plan.drains
    return (new.partition for new in rebalance.plan.creates)


def point(after: str) -> tuple[str, int]:
    """The incarnation, and up to which number its partitions are known; nothing is known at the beginning."""
    incarnation, _, number = after.rpartition(":")
    return (incarnation, int(number)) if incarnation and number.isascii() and number.isdigit() else ("", 0)


def is_news(after: str, info: QueueInfo) -> bool:
    """Whether there may be seeds beyond that point."""
    incarnation, first = point(after)
    return incarnation != info.incarnation or any(each.partition >= first for each in info.partitions)


def seeds(after: str, info: QueueInfo, rebalances: Sequence[Rebalance]) -> SeedsUpto:
    """The partitions beyond that point that come after nothing. The rebalances were read after the queue, and are all that are remembered.

    The point goes up to the first partition of which it is not certain what it comes after. Raises BrokenOffError if what is remembered
    does not tell.
    """
    incarnation, first = point(after)
    if incarnation != info.incarnation:
        numbers, end = _at_first(info, rebalances)
    else:
        numbers, end = _further(first, info, rebalances)
        if end == first:
            return SeedsUpto(after, ())
    found = tuple(Born(token_of(info.incarnation, number), (), START) for number in numbers)
    return SeedsUpto(f"{info.incarnation}:{end}", found)


def _makers(rebalances: Iterable[Rebalance]) -> dict[int, Rebalance]:
    """Which partition was made by which rebalance, of those that were not undone."""
    return {new.partition: each for each in rebalances if each.state not in _UNDONE for new in each.plan.creates}


def _at_first(info: QueueInfo, rebalances: Sequence[Rebalance]) -> tuple[list[int], int]:
    """Of the partitions that there are now: those whose parents are gone, and gone parents that have a child with others."""
    there = {each.partition: each for each in info.partitions}
    makers, undone = _makers(rebalances), {number for each in rebalances for number in _undone(each)}
    found: set[int] = set()
    for number in sorted(there):
        parents = there[number].parents
        if number in undone or not any(parent in there for parent in parents):
            found.add(number)
            continue
        maker = makers.get(number)
        if maker is None:
            raise BrokenOffError(f"partition {number} is there beside its parents, and no rebalance is known that has made it")
        if may_be_cancelled(maker):
            return sorted(found), number
        found.update(parent for parent in parents if parent not in there)
    return sorted(found), max(there, default=-1) + 1


def _further(first: int, info: QueueInfo, rebalances: Sequence[Rebalance]) -> tuple[list[int], int]:
    """The same of those with higher numbers. They may have come and gone since, and have children."""
    there = {each.partition: each for each in info.partitions}
    makers, undone = _makers(rebalances), {number for each in rebalances for number in _undone(each)}
    end = max(first, max(there, default=-1) + 1)
    found: list[int] = []
    for number in range(first, end):
        is_told = number in there or removal_of(rebalances, number) is not None
        if number in undone:
            found += [number] if is_told else []
            continue
        maker = makers.get(number)
        if maker is None:
            if number in there:
                raise BrokenOffError(f"no rebalance is remembered that has made partition {number}: what it comes after is not known")
            continue
        parents = next(new.parents for new in maker.plan.creates if new.partition == number)
        if not parents:
            found += [number] if is_told else []
        elif may_be_cancelled(maker):
            return found, number
        elif any(parent >= first and parent not in makers for parent in parents):
            raise BrokenOffError(f"no rebalance is remembered that has made the parents of partition {number}")
    return found, end
