"""Whether an instance is short of processor time, by how much of the time its event loop runs.

A pure machine: the driver passes the readings. It decides nothing that is stored.
"""

from __future__ import annotations

HIGH, LOW = 0.6, 0.3
"""Shares of the time at which pressure begins and ends. Large leases may halve the work, which must not end the pressure at once."""
EVERY = 0.2
"""Seconds between two readings, at least: a burst, such as the opening of partitions, is no pressure yet."""


class LoopPressure:
    """For all queues of an instance, which share one event loop. Times are seconds; `now` is monotonic.

    While the pressure is high, items go to few consumers in large leases. A lease costs about as much as some hundred items: with eight
    consumers that wait, a batch of 1,000 items divided among all of them costs twice the processor time.
    """

    def __init__(self) -> None:
        self.is_high = False
        self._busy = 0.0
        self._read_at = float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is time for a reading."""
        return now - self._read_at >= EVERY

    def note(self, busy: float, now: float) -> None:
        """Take a reading: for how long the event loop's thread has run so far.

        Without what it has waited for a processor: beside other work, an idle instance would be under pressure by its few calls.
        """
        share = (busy - self._busy) / (now - self._read_at)
        self._busy, self._read_at = busy, now
        self.is_high = share >= (LOW if self.is_high else HIGH)
