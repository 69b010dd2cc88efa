"""The times of a member of a capture."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.clock import Millis

FAILURES = 8
"""So often in a row, which takes a minute, a partition breaks off, or the stream does not say which there are, before that is an alarm."""


class Timing(NamedTuple):
    """All in milliseconds, but for `snapshot`.

    `tick`: how often the member looks whether it must say something again. `wait`: how often the log is read though nobody says that there
    is news. `again`: when that is tried anew which could not be reached. `seeds`: how often the stream is asked for new seeds. `leave`: how
    long a member takes to leave in order, before it goes anyway. `longest_pause`: how long a partition that fails again and again is left
    alone. The leader's: `snapshot`, how many records come before the next one (or as many as there are partitions, if that is more);
    `chores`, how soon what was lost of these is done again; `forget`, how often it looks for positions that nobody needs, and `keep`,
    how long these are kept: a reader that stood still so long could open a partition that is forgotten as if it were new.
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
