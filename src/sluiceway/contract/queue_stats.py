"""The counts of a queue and its partitions: the core fills them in, the server sends them, clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Answer, QueueName, Time, about, one_of

KeyObstacle = Literal["lease", "retry", "limit", "rate", "rebalance"]
"""What blocks a key: an earlier item that is leased, one that was returned and waits for its delay, `key_concurrency`,
`key_rate`, or a rebalance, until the key's former partition has nothing left."""


def _counter(text: str) -> Meta:
    """A count since the queue was created: it only grows, and is a metric of its own."""
    return Meta(description=text, extra={"counter": True})


class PartitionStats(Answer, frozen=True, kw_only=True):
    """A partition now, and what it has counted since the queue was created."""

    partition: int
    backend: Annotated[str, about("The storage backend that holds it.")] = "default"
    state: Annotated[
        str,
        about(
            "`available`, `preparing`, `draining`, `paused`, `unavailable` (its store or owner does not answer, or it is being opened) or "
            "`error` (it is damaged, and stopped)."
        ),
    ] = "available"
    commit_time_ms: Annotated[float, about("Moving average of the commit duration.")] = 0.0
    degraded: Annotated[bool, about("Far slower than its peers, so produces avoid it.")] = False
    total: Annotated[int, about("Ready, leased and scheduled items.")] = 0
    ready: Annotated[int, about("Items that wait to be leased.")] = 0
    servable: Annotated[
        int,
        about(
            "Those of them that could be leased now; fewer than `ready` where keys are blocked by `order`, `key_concurrency` or `key_rate`."
        ),
    ] = 0
    total_leased: Annotated[int, about("Items in leases.")] = 0
    scheduled: Annotated[int, about("Items that are not due yet.")] = 0
    transferring: Annotated[int, about("Items in transfer to another queue.")] = 0
    leases: Annotated[int, about("Live leases.")] = 0
    failures: Annotated[int, about("Failed openings, and commits refused or with an unknown outcome, in this process.")] = 0
    produced: Annotated[int, _counter("Items produced.")] = 0
    deduplicated: Annotated[int, _counter("Items of repeated calls, which were not stored again.")] = 0
    leased: Annotated[int, _counter("Items leased, counted each time.")] = 0
    completed: Annotated[int, _counter("Items completed.")] = 0
    retried: Annotated[int, _counter("Items put back by a retry.")] = 0
    expired: Annotated[int, _counter("Items put back because their lease ran out.")] = 0
    dead: Annotated[int, _counter("Items sent to the dead queue, or dropped without one.")] = 0
    released: Annotated[int, _counter("Items given back unprocessed.")] = 0
    cleared: Annotated[int, _counter("Items dropped by `queue.clear`.")] = 0
    redriven: Annotated[int, _counter("Items sent back out of a dead queue.")] = 0
    moved: Annotated[int, _counter("Items that a rebalance moved to other partitions of the queue.")] = 0
    moved_in: Annotated[int, _counter("Items that a rebalance moved here from other partitions of the queue.")] = 0
    duplicates: Annotated[int, _counter("Items that were not stored, since their unique key was taken.")] = 0
    keys_waiting: Annotated[
        int, about("Keys with ready items; 0 in a queue without `order`, `fair`, `key_concurrency` and `key_rate`.")
    ] = 0
    keys_blocked: Annotated[int, about("Those of them of which no item can be leased now.")] = 0
    keys_limited: Annotated[int, about("Keys with as many leased items as `key_concurrency` allows.")] = 0
    next_offset: Annotated[int | None, about("Offset that the next new item will get; null while the partition is not open.")] = None


def _counters() -> Mapping[str, str]:
    metas = {each.name: getattr(each.type, "__metadata__", (Meta(),))[-1] for each in msgspec.structs.fields(PartitionStats)}
    return {name: str(meta.description) for name, meta in metas.items() if meta.extra}


COUNTERS: Final = _counters()
"""What a partition counts, and what each means. The header of a partition has a field for each."""
LEVELS: Final = (
    *("total", "ready", "servable", "total_leased", "scheduled", "transferring", "leases", "failures"),
    *("keys_waiting", "keys_blocked", "keys_limited"),
)
"""The other numbers of a partition that can be added up."""


Limit = Literal["concurrency", "rate"]
"""Settings that limit what is leased of a whole queue."""


class CircuitStats(Answer, frozen=True, kw_only=True):
    """The circuit breaker of a queue on one instance."""

    state: Annotated[
        str,
        about(
            "`closed` (items are leased), `open` (none are, until `until`) or `half_open` (a few are leased as probes, and their outcomes "
            "decide). "
            "After a restart: `closed`."
        ),
    ]
    since: Annotated[Time | None, about("When it opened; null: it is closed.")] = None
    until: Annotated[Time | None, about("When the next probes may be leased; null: it is not `open`.")] = None


class LogicalQueueStats(Answer, frozen=True, kw_only=True):
    """What one instance has of a queue: the requests that wait there, and its partitions."""

    instance: Annotated[str | None, about("Instance that owns the partitions; null: partitions without an owner.")] = None
    produce_waiting: Annotated[int, about("Waiting produces.")] = 0
    lease_waiting: Annotated[int, about("Waiting lease calls.")] = 0
    complete_waiting: Annotated[int, about("Other waiting calls.")] = 0
    in_flight: Annotated[int, about("Commits in flight.")] = 0
    handled: Annotated[int, about("Items of the last five minutes for which consumers reported a handler time to this instance.")] = 0
    handler_p50_ms: Annotated[int | None, about("Median of these handler times; null: none were reported.")] = None
    handler_p99_ms: Annotated[int | None, about("99th percentile of these handler times; null: none were reported.")] = None
    partitions: Annotated[list[PartitionStats], about("The partitions of this instance.")] = []
    circuit: Annotated[CircuitStats | None, about("The queue's circuit breaker on this instance; null: the queue has none.")] = None
    limited_by: Annotated[
        Annotated[str, one_of(Limit)] | None,
        about("The setting because of which lease calls wait on this instance although items are ready; null: none."),
    ] = None


def handler_ms(shares: Iterable[LogicalQueueStats]) -> tuple[int, int] | None:
    """How long half of a queue's items and 99 of 100 were handled at most, in milliseconds; None: nobody said so in the last minutes.

    Where several instances were told, it is the half of the one that was told most, and the longest 99 of 100.
    """
    told = [each for each in shares if each.handled]
    if not told:
        return None
    return max(told, key=lambda each: each.handled).handler_p50_ms or 0, max(each.handler_p99_ms or 0 for each in told)


WAITING: Final = ("produce_waiting", "lease_waiting", "complete_waiting", "in_flight")


class QueueStats(Answer, frozen=True, kw_only=True):
    """The counts of a queue's partitions, by owning instance."""

    queue_name: QueueName
    logical_queues: Annotated[list[LogicalQueueStats], about("The queue's counts per instance.")] = []

    @property
    def partitions(self) -> list[PartitionStats]:
        """All partitions of the queue, by number."""
        return sorted((part for logical in self.logical_queues for part in logical.partitions), key=lambda part: part.partition)


class WaitingKey(Answer, frozen=True, kw_only=True):
    """A key with items that wait to be leased."""

    key: Annotated[str | None, about("The key; null: the items without one, which are not blocked.")]
    waiting: Annotated[int, about("Its ready items.")]
    leased: Annotated[int, about("Its items in leases.")]
    returned: Annotated[int, about("Its items that wait for the delay of a retry, and with `order` hold up later ones.")]
    oldest_at: Annotated[Time, about("When its next ready item was stored.")]
    blocked_by: Annotated[
        Annotated[str, one_of(KeyObstacle)] | None,
        about(
            "Why none of its items can be leased now: an earlier one is in a `lease`, or waits for its `retry`; or as many as "
            "`key_concurrency` allows are leased (`limit`); or `key_rate` is used up (`rate`); or items of it, or of keys that moved "
            "with it, are left in their former partition (`rebalance`). Null: the next one can be leased."
        ),
    ] = None


class QueueKeys(Answer, frozen=True, kw_only=True):
    """The keys of a queue with `order`, `fair`, `key_concurrency` or `key_rate`. A queue without these does not look at keys: none here."""

    queue_name: QueueName
    waiting: Annotated[int, about("Number of keys with ready items.")] = 0
    blocked: Annotated[int, about("Those of them of which no item can be leased now.")] = 0
    limited: Annotated[int, about("Number of keys with as many leased items as `key_concurrency` allows.")] = 0
    busiest: Annotated[list[WaitingKey], about("Keys with most items, ready, leased and returned; the first has most.")] = []
    oldest: Annotated[list[WaitingKey], about("Keys that have waited longest; the first has waited longest.")] = []
    skipped: Annotated[list[int], about("Partitions that are not counted, because they are not available.")] = []


class QueueDepth(Answer, frozen=True, kw_only=True):
    """A queue's items over all instances, for autoscalers. Items that are on their way to another queue do not count."""

    queue_name: QueueName
    ready: Annotated[int, about("Items that wait to be leased.")] = 0
    servable: Annotated[
        int,
        about(
            "Those of them that can be leased now; fewer than `ready` where keys are blocked by `order`, `key_concurrency` or `key_rate`."
        ),
    ] = 0
    leased: Annotated[int, about("Items that consumers have leased.")] = 0
    scheduled: Annotated[int, about("Items that are not due yet.")] = 0
    active: Annotated[int, about("The sum of `ready` and `leased`: the work to be done now.")] = 0
    skipped: Annotated[list[int], about("Partitions that are not counted, because they are not available.")] = []
