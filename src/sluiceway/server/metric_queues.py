"""Selection of the queues with metrics of their own, and the totals of all others. Pure: gets the counts as arguments, does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

from sluiceway.contract import queue_stats
from sluiceway.contract.consumer_answers import QueryState
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.core.partition.key_flows import KeyTotals
from sluiceway.core.partition.partition_states import ShownState
from sluiceway.core.queue.handler_times import HandlerTimes
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_METRIC_QUEUES
from sluiceway.model.consumers import Query
from sluiceway.model.queue import QueueRecord

OTHER: Final = "(other)"
"""Label of all queues without metrics of their own, together. No queue can have this name."""

COUNTERS: Final = {
    **queue_stats.COUNTERS,
    "failures": "Failed openings of partitions, and commits refused or with an unknown outcome.",
}
"""Counters of `PartitionStats`: of items since the queue was created, of failures since the process started."""

PARTITION_STATES: Final[tuple[str, ...]] = get_args(ShownState)
_UNKNOWN: Final = ("unavailable", "error")
"""States of a partition that may never have been open."""

QUERY_STATES: Final[tuple[str, ...]] = get_args(QueryState)

Counts = tuple[int, ...]
_ZERO: Final[Counts] = (0,) * len(COUNTERS)
_FAILURES: Final = len(COUNTERS) - 1
"""Place of the failures."""


class QueueCounts(NamedTuple):
    """Counts of one or more queues. `counters`: in the order of COUNTERS; None: a partition's are not known yet."""

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
    """Items in draining partitions."""
    parts: Mapping[int, Counts] = MappingProxyType({})
    """Counters by partition; `counters` is their sum."""
    consumers: int = 0
    """Clients that asked for items within the last minute."""
    queries: dict[str, int] = dict.fromkeys(QUERY_STATES, 0)
    """Reporting streaming queries, by state."""
    query_rate: float = 0.0
    query_duration: float = 0.0
    """Of the running queries: total items per second, and the longest batch (ms)."""
    circuits_open: int = 0
    """Circuit breakers of this instance that are not closed: 1 at most for a queue."""
    handled: HandlerTimes | None = None
    """How long items were handled, as far as consumers told this instance."""
    servable: int = 0
    keys: KeyTotals = KeyTotals()
    everywhere: frozenset[int] = frozenset()
    """The queue's partitions on all instances, by number."""

    @property
    def size(self) -> int:
        return sum(self.items.values())


def count_queue(
    record: QueueRecord, stats: LogicalQueueStats, consumers: int = 0, queries: Sequence[Query] = (), handled: HandlerTimes | None = None
) -> QueueCounts:
    """Add up the queue's partitions and queries."""
    running = [query for query in queries if query.state == "running"]
    parts = stats.partitions
    # A failed partition that was open keeps its counts. One that was never open has none yet, and would later seem to count all at once.
    known = all(part.state not in _UNKNOWN or part.produced for part in parts)
    counted = {part.partition: tuple(int(getattr(part, name)) for name in COUNTERS) for part in parts}
    states: dict[str, int] = dict.fromkeys(PARTITION_STATES, 0)
    for part in parts:
        states[part.state] += 1
    return QueueCounts(
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
        int(stats.circuit is not None and stats.circuit.state != "closed"),
        handled,
        sum(part.servable for part in parts),
        KeyTotals(
            sum(part.keys_waiting for part in parts), sum(part.keys_blocked for part in parts), sum(part.keys_limited for part in parts)
        ),
        frozenset(each.partition for each in record.partitions),
    )


def _sum(counts: Iterable[Counts]) -> Counts:
    return tuple(map(sum, zip(_ZERO, *counts, strict=True)))


class QueueLabels:
    """Bounds the number of label values, and keeps counters from decreasing, which would be read as a restart.

    The first `most` queues, biggest first, have metrics of their own until they are deleted. Any other queue adds its increments to OTHER,
    not its totals, so a queue that gets its own metrics takes nothing away from OTHER.

    A queue counts from its creation. With `shared`, partitions come from other instances, with all that these have counted: a queue counts
    only what its partitions count here, from the first look at each of them on.
    """

    def __init__(self, started_at: Millis, most: int = MAX_METRIC_QUEUES, *, shared: bool = False) -> None:
        self._started_at = started_at
        self._most = most
        self._shared = shared
        self._named: set[str] = set()
        self._last: dict[str, Counts] = {}
        self._parts: dict[str, dict[int, Counts]] = {}
        """Last counters of each partition; without `shared` including removed ones, whose counts remain."""
        self._everywhere: dict[str, frozenset[int]] = {}
        """The partitions that each queue had at the last look, on all instances."""
        self._others: Counts = _ZERO

    def divide(self, queues: Sequence[QueueCounts]) -> list[QueueCounts]:
        """Return the queues with metrics of their own, by name, then all others, if any, as OTHER."""
        present = {queue.incarnation for queue in queues}
        self._named &= present
        free = [queue for queue in queues if queue.incarnation not in self._named]
        free.sort(key=lambda queue: (-queue.size, queue.queue_name))
        self._named |= {queue.incarnation for queue in free[: self._most - len(self._named)]}
        named: list[QueueCounts] = []
        others: list[QueueCounts] = []
        for queue in queues:
            counted = queue._replace(counters=self._count(queue))
            (named if queue.incarnation in self._named else others).append(counted)
        self._last = {incarnation: counts for incarnation, counts in self._last.items() if incarnation in present}
        self._parts = {incarnation: parts for incarnation, parts in self._parts.items() if incarnation in present}
        self._everywhere = {incarnation: those for incarnation, those in self._everywhere.items() if incarnation in present}
        named.sort(key=lambda queue: queue.queue_name)
        return [*named, self._together(others)] if others or any(self._others) else named

    def _count(self, queue: QueueCounts) -> Counts | None:
        """Return the queue's counters, never lower than before: a commit of unknown outcome may turn out not to have happened."""
        last = self._last.get(queue.incarnation)
        if queue.counters is None:
            return last
        is_new = queue.created_at >= self._started_at
        counts = self._grown(queue, last or _ZERO, is_new) if queue.parts or self._shared else queue.counters
        counts = counts if last is None else tuple(map(max, last, counts))
        if queue.incarnation not in self._named:
            # A queue that is new here counts in full if created after the process started; otherwise only later increments count.
            before = last or (_ZERO if is_new or self._shared else counts)
            self._others = tuple(sum_ + now - then for sum_, now, then in zip(self._others, counts, before, strict=True))
        self._last[queue.incarnation] = counts
        return counts

    def _grown(self, queue: QueueCounts, last: Counts, is_new: bool) -> Counts:
        """The queue's counters, which were `last` at the last look, with what its partitions have counted since."""
        known = self._parts.get(queue.incarnation, {})
        there = self._everywhere.get(queue.incarnation, frozenset() if is_new else queue.everywhere)
        now: dict[int, Counts] = {} if self._shared else dict(known)
        for partition, counts in queue.parts.items():
            before = known.get(partition)
            if before is None:
                # What another instance may have counted. Failures are counted by each process for itself.
                before = (*counts[:_FAILURES], 0) if self._shared and partition in there else _ZERO
            now[partition] = before
            # Most partitions are idle.
            if counts != before:
                now[partition] = tuple(map(max, before, counts))
                last = tuple(sum_ + each - then for sum_, each, then in zip(last, now[partition], before, strict=True))
        self._parts[queue.incarnation], self._everywhere[queue.incarnation] = now, queue.everywhere
        return last

    def _together(self, others: Iterable[QueueCounts]) -> QueueCounts:
        total = QueueCounts(OTHER, "", 0, {}, {}, {}, 0, 0, 0.0, self._others)
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
                circuits_open=total.circuits_open + queue.circuits_open,
                servable=total.servable + queue.servable,
                keys=KeyTotals(*map(add, total.keys, queue.keys)),
            )
        return total


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + count for name, count in other.items()}
