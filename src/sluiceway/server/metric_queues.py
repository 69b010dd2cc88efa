"""Which queues have metrics of their own, and what all the others come to. A pure machine: it is told the counts and does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

from sluiceway.contract import queue_stats
from sluiceway.contract.consumer_answers import QueryState
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.core.partition.partition_states import ShownState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_METRIC_QUEUES
from sluiceway.model.consumers import Query
from sluiceway.model.queue import QueueRecord

OTHER: Final = "(other)"
"""In place of a queue's name: all queues without metrics of their own, together. No queue can be called so."""

COUNTERS: Final = {
    **queue_stats.COUNTERS,
    "failures": "Times that a partition could not be opened, or a commit ended refused or unknown.",
}
"""Counters of `PartitionStats`: of items since the queue was created, of failures since the process started."""

PARTITION_STATES: Final[tuple[str, ...]] = get_args(ShownState)
_UNKNOWN: Final = ("unavailable", "error")
"""The states of a partition that may never have been open."""

QUERY_STATES: Final[tuple[str, ...]] = get_args(QueryState)

Counts = tuple[int, ...]
_ZERO: Final[Counts] = (0,) * len(COUNTERS)


class Seen(NamedTuple):
    """A queue, or several, at one moment. `counters` are in the order of COUNTERS; None: what a partition has counted is not known yet."""

    queue_name: str
    incarnation: str
    created_at: Millis
    items: dict[str, int]
    waiting: dict[str, int]
    partitions: dict[str, int]
    leases: int
    degraded: int
    commit_time: float
    counters: Counts | None
    draining: int = 0
    """Items in partitions that are being drained."""
    parts: Mapping[int, Counts] = MappingProxyType({})
    """What each partition has counted, of those of which `counters` are the sum."""
    consumers: int = 0
    """Clients that asked for items within the last minute."""
    queries: dict[str, int] = dict.fromkeys(QUERY_STATES, 0)
    """Those that told of themselves, by state."""
    query_rate: float = 0.0
    query_duration: float = 0.0
    """Of the running ones: items a second together, and the longest batch (ms)."""

    @property
    def size(self) -> int:
        return sum(self.items.values())


def seen(record: QueueRecord, stats: LogicalQueueStats, consumers: int = 0, queries: Sequence[Query] = ()) -> Seen:
    """The queue's partitions, and its queries, added up."""
    running = [query for query in queries if query.state == "running"]
    parts = stats.partitions
    # One that was open and has failed keeps its counts; one that never was has none, and would seem to have counted all at once later.
    known = all(part.state not in _UNKNOWN or part.produced for part in parts)
    counted = {part.partition: tuple(int(getattr(part, name)) for name in COUNTERS) for part in parts}
    states: dict[str, int] = dict.fromkeys(PARTITION_STATES, 0)
    for part in parts:
        states[part.state] += 1
    return Seen(
        record.queue_name,
        record.incarnation,
        record.created_at,
        {
            "ready": sum(part.ready for part in parts),
            "leased": sum(part.total_leased for part in parts),
            "scheduled": sum(part.scheduled for part in parts),
            "transferring": sum(part.transferring for part in parts),
        },
        {"produce": stats.produce_waiting, "lease": stats.lease_waiting, "settle": stats.complete_waiting},
        states,
        sum(part.leases for part in parts),
        sum(part.degraded for part in parts),
        max((part.commit_time_ms for part in parts), default=0.0),
        _sum(counted.values()) if known else None,
        sum(part.total + part.transferring for part in parts if part.state == "draining"),
        counted if known else {},
        consumers,
        {state: sum(query.state == state for query in queries) for state in QUERY_STATES},
        sum(query.processed_per_s for query in running),
        max((query.batch_duration for query in running), default=0),
    )


def _sum(counts: Iterable[Counts]) -> Counts:
    return tuple(map(sum, zip(_ZERO, *counts, strict=True)))


class QueueLabels:
    """Keeps the number of label values bounded, and every counter from going backwards, which would be read as a restart.

    The first `most` queues, the biggest first, have metrics of their own until they are deleted. A queue beyond them adds to OTHER what
    happens in it, not what had happened: so a queue that gets a place takes nothing away from OTHER.
    """

    def __init__(self, started_at: Millis, most: int = MAX_METRIC_QUEUES) -> None:
        self._started_at = started_at
        self._most = most
        self._named: set[str] = set()
        self._last: dict[str, Counts] = {}
        self._parts: dict[str, dict[int, Counts]] = {}
        """What each partition was last seen to have counted, also those that have been removed since: they take nothing away."""
        self._others: Counts = _ZERO

    def divide(self, queues: Sequence[Seen]) -> list[Seen]:
        """Those with metrics of their own, by name, and last, if there are more, all others as OTHER."""
        present = {queue.incarnation for queue in queues}
        self._named &= present
        free = [queue for queue in queues if queue.incarnation not in self._named]
        free.sort(key=lambda queue: (-queue.size, queue.queue_name))
        self._named |= {queue.incarnation for queue in free[: self._most - len(self._named)]}
        named: list[Seen] = []
        others: list[Seen] = []
        for queue in queues:
            counted = queue._replace(counters=self._count(queue))
            (named if queue.incarnation in self._named else others).append(counted)
        self._last = {incarnation: counts for incarnation, counts in self._last.items() if incarnation in present}
        self._parts = {incarnation: parts for incarnation, parts in self._parts.items() if incarnation in present}
        named.sort(key=lambda queue: queue.queue_name)
        return [*named, self._together(others)] if others or any(self._others) else named

    def _count(self, queue: Seen) -> Counts | None:
        """The queue's counters, never lower than the last time: a commit that ended unknown may turn out not to have happened."""
        last = self._last.get(queue.incarnation)
        if queue.counters is None:
            return last
        counts = self._with_removed(queue) or queue.counters
        counts = counts if last is None else tuple(map(max, last, counts))
        if queue.incarnation not in self._named:
            # One that is new here has all of its life behind it, or only what came since the process started.
            before = last or (_ZERO if queue.created_at >= self._started_at else counts)
            self._others = tuple(sum_ + now - then for sum_, now, then in zip(self._others, counts, before, strict=True))
        self._last[queue.incarnation] = counts
        return counts

    def _with_removed(self, queue: Seen) -> Counts | None:
        """What the queue's partitions have counted, those included that it does not have any more."""
        if not queue.parts:
            return None
        parts = self._parts.setdefault(queue.incarnation, {})
        for partition, counts in queue.parts.items():
            parts[partition] = tuple(map(max, parts.get(partition, counts), counts))
        return _sum(parts.values())

    def _together(self, others: Iterable[Seen]) -> Seen:
        total = Seen(OTHER, "", 0, {}, {}, {}, 0, 0, 0.0, self._others)
        for queue in others:
            total = total._replace(
                items=_added(total.items, queue.items),
                waiting=_added(total.waiting, queue.waiting),
                partitions=_added(total.partitions, queue.partitions),
                leases=total.leases + queue.leases,
                degraded=total.degraded + queue.degraded,
                commit_time=max(total.commit_time, queue.commit_time),
                draining=total.draining + queue.draining,
                consumers=total.consumers + queue.consumers,
                queries=_added(total.queries, queue.queries),
                query_rate=total.query_rate + queue.query_rate,
                query_duration=max(total.query_duration, queue.query_duration),
            )
        return total


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + count for name, count in other.items()}
