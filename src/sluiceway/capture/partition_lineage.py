"""The lineage of a queue's partitions, derived from the queue's partitions and rebalances. No I/O.

A partition is a child of the partitions that it replaces, once the rebalance can no longer be cancelled. A cancelled rebalance reopens the
partitions that it drained and drains the ones that it made, which then have no parents. A rebalance that has removed a partition cannot be
cancelled, so the children that a parent reports at its end are final. New partitions are not reported before that.

Only the record of a partition's removal proves that the partition has ended. A server that does not know it may just be outdated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sluiceway.client.answers import QueueInfo
from sluiceway.contract.rebalances import Rebalance
from sluiceway.model.task_records import AnnouncedPartition
from sluiceway.ports.change_stream import BrokenOffError, SeedsUpto

START = "0"
"""The position before a partition's first item."""
_UNDONE = ("cancelling", "cancelled")


def token_of(incarnation: str, number: int) -> str:
    """The name of a partition. It has the incarnation, because a queue that was deleted and created again has other partitions."""
    return f"{incarnation}.{number}"


def removal_of(rebalances: Iterable[Rebalance], number: int) -> Rebalance | None:
    """The rebalance that removed the partition; None if none of these did."""
    return next((each for each in rebalances if any(step.partition == number for step in each.steps)), None)


def children_of(rebalance: Rebalance, incarnation: str, number: int) -> tuple[AnnouncedPartition, ...]:
    """The partitions that `rebalance` made to replace partition `number`. The result is the same at every call and in every process."""
    return tuple(
        AnnouncedPartition(token_of(incarnation, new.partition), tuple(token_of(incarnation, parent) for parent in new.parents), START)
        for new in rebalance.plan.creates
        if number in new.parents
    )


def may_be_cancelled(rebalance: Rebalance) -> bool:
    """Whether the rebalance can still be cancelled."""
    if not rebalance.is_open or rebalance.state in _UNDONE or any(step.partition is not None for step in rebalance.steps):
        return False
    return not ((rebalance.plan.in_order or rebalance.plan.by_key) and rebalance.step not in ("create", "flip"))


def heirs(rebalances: Iterable[Rebalance], incarnation: str, number: int) -> tuple[AnnouncedPartition, ...]:
    """The children of a draining partition, if its rebalance can no longer be cancelled; otherwise none."""
    for each in rebalances:
        if each.is_open and each.state not in _UNDONE and number in each.plan.drains and not may_be_cancelled(each):
            return children_of(each, incarnation, number)
    return ()


def _undone(rebalance: Rebalance) -> Iterable[int]:
    """The partitions that a cancelled rebalance had made. After the flip its plan is the way back, which drains them."""
    if rebalance.state not in _UNDONE:
        return ()
    if any(step.step == "flip" for step in rebalance.steps):
        return rebalance.plan.drains
    return (new.partition for new in rebalance.plan.creates)


def point(after: str) -> tuple[str, int]:
    """The incarnation of a point, and the number up to which its partitions are known: ("", 0) at the beginning."""
    incarnation, _, number = after.rpartition(":")
    return (incarnation, int(number)) if incarnation and number.isascii() and number.isdigit() else ("", 0)


def is_news(after: str, info: QueueInfo) -> bool:
    """Whether the queue may have seeds after the point `after`."""
    incarnation, first = point(after)
    return incarnation != info.incarnation or any(each.partition >= first for each in info.partitions)


def seeds(after: str, info: QueueInfo, rebalances: Sequence[Rebalance]) -> SeedsUpto:
    """The partitions without parents after the point `after`, and the next point.

    `rebalances` are all that the server remembers, read after `info`. The next point ends before the first partition whose rebalance may
    still be cancelled. Raises BrokenOffError if the rebalances do not tell a partition's parents.
    """
    incarnation, first = point(after)
    if incarnation != info.incarnation:
        numbers, end = _at_first(info, rebalances)
    else:
        numbers, end = _further(first, info, rebalances)
        if end == first:
            return SeedsUpto(after, ())
    found = tuple(AnnouncedPartition(token_of(info.incarnation, number), (), START) for number in numbers)
    return SeedsUpto(f"{info.incarnation}:{end}", found)


def _makers(rebalances: Iterable[Rebalance]) -> dict[int, Rebalance]:
    """The rebalances by the partitions that they made, without cancelled ones."""
    return {new.partition: each for each in rebalances if each.state not in _UNDONE for new in each.plan.creates}


def _at_first(info: QueueInfo, rebalances: Sequence[Rebalance]) -> tuple[list[int], int]:
    """The seeds of a queue that is read for the first time, and the end of the known partitions.

    Seeds are the present partitions without a present parent, and removed parents of a child that also has a present parent.
    """
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
            raise BrokenOffError(f"partition {number} exists beside its parents, but the rebalance that created it has no record any more")
        if may_be_cancelled(maker):
            return sorted(found), number
        found.update(parent for parent in parents if parent not in there)
    return sorted(found), max(there, default=-1) + 1


def _further(first: int, info: QueueInfo, rebalances: Sequence[Rebalance]) -> tuple[list[int], int]:
    """The seeds among the partitions from number `first` on, which may be removed already, and the end of the known partitions."""
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
                raise BrokenOffError(
                    f"the record of the rebalance that created partition {number} no longer exists, so its parents are unknown"
                )
            continue
        parents = next(new.parents for new in maker.plan.creates if new.partition == number)
        if not parents:
            found += [number] if is_told else []
        elif may_be_cancelled(maker):
            return found, number
        elif any(parent >= first and parent not in makers for parent in parents):
            raise BrokenOffError(f"the record of the rebalance that created the parents of partition {number} no longer exists")
    return found, end
