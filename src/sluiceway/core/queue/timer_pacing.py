"""Pacing of a mass expiry: how many expired leases and due entries one turn takes on, so that other requests wait for milliseconds.

A pure machine: the driver tells it the time and what a slice took. It holds no item and decides nothing that is stored.
"""

from __future__ import annotations

from sluiceway.kernel.limits import TIMER_BATCH, TIMER_SLICE

MIN_SLICE = 16
"""Entries of a slice on the slowest machine: a transaction for fewer costs more than the entries do."""

FIRST_SLICE = 64
"""Entries of the first slice, before any is measured."""


class TimerPace:
    """Sizes the slices of expired leases and due entries for all queues of an instance, which share one event loop.

    A slice takes about `TIMER_SLICE` milliseconds of processor time. After a full slice the timers rest for as long as it took, so a mass
    expiry takes half of the event loop at most. Queues that wait take turns. Times are seconds; `now` is of a clock that does not go back.
    """

    def __init__(self) -> None:
        self._entries = FIRST_SLICE
        self._rest = 0.0
        self._waiting: dict[str, None] = {}
        """Queues with timers left over, the one that comes next first."""
        self.rests_until = 0.0

    def allowance(self, queue: str, now: float) -> int:
        """Returns how many entries a turn of this queue may take on: none while the timers rest, or while another queue comes first."""
        if now < self.rests_until:
            return 0
        # A queue that misses its turn, because it was deleted or has nothing left, delays the others by one rest only.
        is_next = next(iter(self._waiting), queue) == queue
        return self._entries if is_next or now >= self.rests_until + self._rest else 0

    def wait(self, queue: str, now: float) -> float:
        """Put a queue with timers left over in line. Returns the seconds until the rest is over."""
        self._waiting.setdefault(queue)
        return max(0.0, self.rests_until - now)

    def note(self, queue: str, entries: int, spent: float, elapsed: float, now: float) -> None:
        """Record that a turn of this queue took on so many entries: `spent` seconds of processor time, `elapsed` by the clock.

        The size follows processor time: by the clock slices would be tiny on a busy machine, and many small transactions cost more than a
        few large ones. The rest follows the clock: there a mass expiry takes half of what the machine leaves to this process.
        """
        if queue in self._waiting:
            while (first := next(iter(self._waiting))) != queue:
                del self._waiting[first]
            del self._waiting[queue]
        if entries < self._entries:
            return  # All that was due: no backlog to pace, and too little to measure by.
        fits = int(entries * TIMER_SLICE / 1000 / max(spent, 1e-6))
        # At most doubled or halved: one turn may have been interrupted, or had many produces as well.
        self._entries = max(MIN_SLICE, min(TIMER_BATCH, 2 * entries, max(entries // 2, fits)))
        self._rest = elapsed
        self.rests_until = now + elapsed
