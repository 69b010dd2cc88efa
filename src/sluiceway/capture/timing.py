"""Timing of a capture member."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.clock import Millis

FAILURES = 8
"""Consecutive failures of a partition, or of the stream to name its partitions, before an alarm: about a minute."""


class Timing(NamedTuple):
    """In milliseconds, except `snapshot`.

    `tick`: interval at which the member checks for records to repeat. `wait`: interval of log reads without a notification. `again`: retry
    delay for unreachable systems. `seeds`: interval of requests for new seeds. `leave`: time limit for leaving in order. `longest_pause`:
    maximum pause of a partition that fails repeatedly. For the leader: `snapshot`, records between two snapshots (or as many as there are
    partitions, if more); `chores`, delay before lost snapshots and trims are repeated; `forget`, interval of searches for obsolete
    positions, and `keep`, their age before deletion: a reader frozen for so long could open a forgotten partition as if it were new.
    """

    tick: Millis = 250
    wait: Millis = 1_000
    again: Millis = 500
    seeds: Millis = 5_000
    leave: Millis = 30_000
    longest_pause: Millis = 30_000
    snapshot: int = 500
    chores: Millis = 10_000
    forget: Millis = 600_000
    keep: Millis = 7 * 86_400_000
