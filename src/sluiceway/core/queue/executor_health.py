"""Which lanes are slow, and which takes the next produce."""

from __future__ import annotations

from collections.abc import Collection

from sluiceway.core.queue.partition_executor import Lane, LaneState
from sluiceway.kernel.clock import Millis

DEGRADED = (100, 4)
"""A partition is degraded if its commits take longer than this many milliseconds, and than so many times those of the median partition."""

PROBE_EVERY = 1_000
"""Milliseconds between the produces that a degraded partition is given all the same, to see whether it has recovered."""


def least_patience(working: int) -> float:
    """Milliseconds that any commit may take where so many lanes work; 0 where there is nothing to compare."""
    return float(DEGRADED[0]) if working > 1 else 0.0


def judge(lanes: Collection[Lane], now: Millis) -> float:
    """See which lanes are far slower than the others. Returns the milliseconds a commit may take; 0 where there is nothing to compare."""
    working = [lane for lane in lanes if lane.takes_work]
    for lane in lanes:
        # Nobody judges it until it works again, and then anew.
        lane.degraded = lane.degraded and lane.state in (LaneState.READY, LaneState.COMMITTING)
    slowness = [lane.slowness(now) for lane in working]
    patience = least_patience(len(working))
    if patience:
        patience = max(patience, DEGRADED[1] * sorted(slowness)[(len(slowness) - 1) // 2])
    for lane, each in zip(working, slowness, strict=True):
        lane.degraded = bool(patience) and each > patience
    return patience


def choose(lanes: Collection[Lane], now: Millis) -> Lane | None:
    """The lane for a produce: one that has to be tried again, otherwise the emptiest of those that are not degraded, if there are any."""
    working = [lane for lane in lanes if lane.takes_items]
    for lane in working:
        if lane.degraded and lane.state is LaneState.READY and lane.probe_at <= now:
            return lane
    return min([lane for lane in working if not lane.degraded] or working, key=Lane.candidate, default=None)
