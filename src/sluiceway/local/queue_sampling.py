"""Samples of an instance's share of a queue, for the judge. A sample costs by partitions, and by a bounded number of leases and waiters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from sluiceway.core.partition import held_keys
from sluiceway.core.problems.observations import FailedQuery, HeldUp, Lease, QueueFacts, QueueSample, Repeat
from sluiceway.core.problems.thresholds import FEW_ITEMS, HELD_UP_AFTER, MEMORY, MIN_BEHIND, MIN_HOARD
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.queue_minutes import COUNTS
from sluiceway.model.requests import Lease as LeaseRequest

_RECENT: Final[Millis] = 10_000
"""A commit average is judged while commits are made: afterwards it says nothing of the present."""
_LEASES: Final = 500
"""Leases of a share that are looked at, the oldest of each partition first: what is held for long is among them."""
_WAITERS: Final = 64
"""Waiting lease calls that are looked at: enough to know whether others than one client wait."""
_REPEATS_KEPT: Final[Millis] = 3_600_000
"""An item that has not failed for so long may have gone elsewhere."""
_COUNTS: Final = {name: COUNTS.index(name) for name in ("produced", "leased", "completed", "retried", "expired", "dead", "released")}


def facts_of(driver: QueueDriver, dead_queues: frozenset[str]) -> QueueFacts:
    """What the queue's record says. `dead_queues`: the queues that take others' dead items."""
    record = driver.record
    return QueueFacts(
        record.queue_name,
        record.paused,
        record.dead_queue,
        record.queue_name in dead_queues,
        record.target_age,
        record.updated_at,
        record.incarnation,
        record.order is not None,
    )


def sample_of(driver: QueueDriver, now: Millis) -> tuple[QueueSample, dict[str, Millis]]:
    """A sample of the share, and the slowest commit of the last seconds by backend."""
    executors = driver.executors
    tally = driver.tally()
    ready, leased, scheduled = tally.levels
    circuit = driver.queue.circuit
    slowest: dict[str, Millis] = {}
    unserved: dict[int, str] = {}
    for executor in executors:
        backend = driver.backend(executor.number)
        took = _slowness(executor, now)
        if took > slowest.get(backend.name, 0):
            slowest[backend.name] = took
        if not executor.takes_work and backend.problem is None:
            unserved[executor.number] = executor.problem or "it is being opened"
    counts = {name: tally.counts[place] for name, place in _COUNTS.items()}
    waiters = islice(driver.queue.lease_scheduler.waiters.values(), _WAITERS)
    blocked = sum(executor.partition.log.ready_count - executor.partition.servable for executor in executors)
    repeats = _repeats(executors, now)
    in_order = driver.record.order is not None
    sample = QueueSample(
        now,
        ready,
        leased,
        scheduled,
        tally.oldest_at,
        taken=counts.pop("leased"),
        **counts,
        waiting=tuple(sorted({ticket.request.client_id for ticket in waiters if isinstance(ticket.request, LeaseRequest)})),
        seen_at=driver.consumers.last_seen,
        held=_held(executors) if leased else {},
        repeats=repeats,
        refused=dict(driver.refused),
        partitions=len(executors),
        unserved=unserved,
        slowest=max(slowest.values(), default=0),
        failure=_latest_failure(executors, now - MEMORY),
        circuit_since=None if circuit is None or circuit.state == "closed" else circuit.since,
        blocked=blocked,
        held_up=tuple(_held_up(executors, len(repeats), now)) if in_order and ready else (),
        held_keys=_held_keys(executors) if in_order and leased and ready == blocked and driver.queue.lease_scheduler.waiters else {},
        failed_queries=tuple(
            FailedQuery(client_id, query.name, query.error, query.told_at)
            for client_id, query in driver.consumers.queries(now)
            if query.state == "failed"
        ),
    )
    return sample, slowest


def _slowness(executor: PartitionExecutor, now: Millis) -> Millis:
    if executor.state is ExecutorState.COMMITTING:
        return round(executor.slowness(now))
    recent = executor.partition.log.header.now >= now - _RECENT
    return round(executor.commit_time) if recent and executor.takes_work else 0


def _latest_failure(executors: list[PartitionExecutor], since: Millis) -> str:
    """The reason of the latest failed attempt since then that has one."""
    latest = (executor.partition.log.failures.latest for executor in executors)
    return max(((each.at, each.reason) for each in latest if each is not None and each.at >= since and each.reason), default=(0, ""))[1]


def _held(executors: list[PartitionExecutor]) -> dict[str, dict[Lease, int]]:
    """The open items of the oldest leases, by client."""
    found: dict[str, dict[Lease, int]] = {}
    for executor in executors:
        for lease in islice(executor.partition.leases.values(), max(1, _LEASES // len(executors))):
            found.setdefault(lease.client_id, {})[executor.number, lease.number] = lease.open
    return found


def _held_keys(executors: list[PartitionExecutor]) -> dict[str, int]:
    """How many consumers could have what each client holds, of the oldest leases."""
    found: dict[str, int] = {}
    for executor in executors:
        for lease in islice(executor.partition.leases.values(), max(1, _LEASES // len(executors))):
            known = found.get(lease.client_id, 0)
            if known < MIN_HOARD:
                found[lease.client_id] = known + held_keys.keys_in(lease, MIN_HOARD - known)
    return found


def _held_up(executors: list[PartitionExecutor], repeats: int, now: Millis) -> Iterator[HeldUp]:
    """The keys that are held up for long. If many items fail, it is not they that are at fault."""
    longest: list[HeldUp] = []
    failing: set[int] = set()
    for executor in executors:
        if executor.partition.repeated and repeats <= FEW_ITEMS:
            for each in held_keys.failing(executor.partition):
                failing.add(each.key)
                yield HeldUp(executor.number, each)
        found = held_keys.longest_held(executor.partition, now - HELD_UP_AFTER, now + HELD_UP_AFTER)
        longest += [HeldUp(executor.number, each) for each in found if each.behind >= MIN_BEHIND and each.key not in failing]
    if longest:
        yield max(longest, key=lambda each: each.holder.behind)


def _repeats(executors: list[PartitionExecutor], now: Millis) -> tuple[Repeat, ...]:
    return tuple(
        Repeat(executor.number, each.offset, each.attempts, each.at)
        for executor in executors
        if executor.partition.repeated
        for each in executor.partition.repeated.items()
        if each.at >= now - _REPEATS_KEPT
    )
