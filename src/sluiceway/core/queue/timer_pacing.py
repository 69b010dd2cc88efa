"""Pacing of a mass expiry: limits the expired leases and due entries per scheduling cycle, so that other requests wait only milliseconds.

A pure machine: the driver passes the time and the cost of each slice. It holds no items and decides nothing that is stored.
"""

from __future__ import annotations

from sluiceway.kernel.limits import TIMER_BATCH, TIMER_SLICE

MIN_SLICE = 16
"""Minimum entries per slice: on the slowest machine a smaller transaction costs more than its entries."""

FIRST_SLICE = 64
"""Entries of the first slice, before any is measured."""


class TimerPace:
    """Sizes the slices of expired leases and due entries for all queues of an instance, which share one event loop.

    A slice takes about `TIMER_SLICE` milliseconds of processor time. After a full slice the timers rest for as long as it took, so a mass
    expiry takes at most half of the event loop. Waiting queues take turns. Times are seconds; `now` is monotonic.
    """

    def __init__(self) -> None:
        self._entries = FIRST_SLICE
        self._rest = 0.0
        self._waiting: dict[str, None] = {}
        """Queues with timers left over, next first."""
        self.rests_until = 0.0
        self.is_behind = False
        """Whether the last slice was full, so that `note` needs the processor time of the next."""

    def allowance(self, queue: str, now: float) -> int:
        """The number of entries that a cycle of this queue may handle: 0 while the timers rest, or while another queue comes first."""
        if now < self.rests_until:
            return 0
        # A queue that misses its turn, since it was deleted or has nothing left, delays the others by one rest only.
        is_next = next(iter(self._waiting), queue) == queue
        return self._entries if is_next or now >= self.rests_until + self._rest else 0

    def wait(self, queue: str, now: float) -> float:
        """Enqueue a queue with timers left over. Returns the seconds until the rest is over."""
        self._waiting.setdefault(queue)
        return max(0.0, self.rests_until - now)

    def note(self, queue: str, entries: int, spent: float | None, elapsed: float, now: float) -> None:
        """Record the entries handled by a cycle of this queue: `spent` seconds of processor time (None: not measured, the size stays),
        `elapsed` seconds of wall time.

        The size follows processor time: by wall time slices would be tiny on a busy machine, and many small transactions cost more than a
        few large ones. The rest follows wall time: a mass expiry then takes half of what the machine leaves to this process.
        """
        if queue in self._waiting:
            while (first := next(iter(self._waiting))) != queue:
                del self._waiting[first]
            del self._waiting[queue]
        self.is_behind = entries >= self._entries
        if not self.is_behind:
            return  # Everything due was handled: no backlog to pace, and too small a sample.
        if spent is not None:
            fits = int(entries * TIMER_SLICE / 1000 / max(spent, 1e-6))
            # Double or halve at most: one cycle may have been interrupted, or have had many produces as well.
            self._entries = max(MIN_SLICE, min(TIMER_BATCH, 2 * entries, max(entries // 2, fits)))
        self._rest = elapsed
        self.rests_until = now + elapsed
