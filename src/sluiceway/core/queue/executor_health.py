"""Executor health: detects slow executors, and picks one for the next produce when some are."""

from __future__ import annotations

from collections.abc import Collection

from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.kernel.clock import Millis

DEGRADED = (100, 4)
"""A partition is degraded if its commits take longer than this many milliseconds, and this many times the median partition's."""

PROBE_EVERY = 1_000
"""Milliseconds between produces given to a degraded partition to probe for recovery."""


def least_patience(working: int) -> float:
    """Minimum tolerated commit time in ms with `working` executors; 0 if there is nothing to compare with."""
    return float(DEGRADED[0]) if working > 1 else 0.0


def mark_degraded(executors: Collection[PartitionExecutor], now: Millis) -> float:
    """Mark executors far slower than the others. Returns the tolerated commit time in ms; 0: nothing to compare."""
    working = [executor for executor in executors if executor.takes_work]
    for executor in executors:
        # A closed executor is judged afresh once it works again.
        executor.degraded = executor.degraded and executor.state in (ExecutorState.READY, ExecutorState.COMMITTING)
    slowness = [executor.slowness(now) for executor in working]
    patience = least_patience(len(working))
    if patience:
        patience = max(patience, DEGRADED[1] * sorted(slowness)[(len(slowness) - 1) // 2])
    for executor, each in zip(working, slowness, strict=True):
        executor.degraded = bool(patience) and each > patience
    return patience


def choose(executors: Collection[PartitionExecutor], now: Millis) -> PartitionExecutor | None:
    """The executor for a produce: a degraded one due for a probe, otherwise the emptiest healthy one, or the emptiest if none is."""
    working = [executor for executor in executors if executor.takes_items]
    for executor in working:
        if executor.degraded and executor.state is ExecutorState.READY and executor.probe_at <= now:
            return executor
    return min([executor for executor in working if not executor.degraded] or working, key=PartitionExecutor.candidate, default=None)
