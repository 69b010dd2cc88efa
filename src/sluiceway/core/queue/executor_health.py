"""Which executors are slow, and which takes the next produce."""

from __future__ import annotations

from collections.abc import Collection

from sluiceway.core.queue.partition_executor import LaneState, PartitionExecutor
from sluiceway.kernel.clock import Millis

DEGRADED = (100, 4)
"""A partition is degraded if its commits take longer than this many milliseconds, and than so many times those of the median partition."""

PROBE_EVERY = 1_000
"""Milliseconds between the produces that a degraded partition is given all the same, to see whether it has recovered."""


def least_patience(working: int) -> float:
    """Milliseconds that any commit may take where so many executors work; 0 where there is nothing to compare."""
    return float(DEGRADED[0]) if working > 1 else 0.0


def judge(executors: Collection[PartitionExecutor], now: Millis) -> float:
    """Mark executors that are far slower than the others. Returns the milliseconds a commit may take; 0: nothing to compare."""
    working = [executor for executor in executors if executor.takes_work]
    for executor in executors:
        # Nobody judges it until it works again, and then anew.
        executor.degraded = executor.degraded and executor.state in (LaneState.READY, LaneState.COMMITTING)
    slowness = [executor.slowness(now) for executor in working]
    patience = least_patience(len(working))
    if patience:
        patience = max(patience, DEGRADED[1] * sorted(slowness)[(len(slowness) - 1) // 2])
    for executor, each in zip(working, slowness, strict=True):
        executor.degraded = bool(patience) and each > patience
    return patience


def choose(executors: Collection[PartitionExecutor], now: Millis) -> PartitionExecutor | None:
    """The executor for a produce: one that has to be tried again, otherwise the emptiest that is not degraded, if any."""
    working = [executor for executor in executors if executor.takes_items]
    for executor in working:
        if executor.degraded and executor.state is LaneState.READY and executor.probe_at <= now:
            return executor
    return min([executor for executor in working if not executor.degraded] or working, key=PartitionExecutor.candidate, default=None)
