"""When to leave a backend alone because its partitions fail together."""

from __future__ import annotations

from sluiceway.kernel.clock import Millis
from sluiceway.model.changes import PartitionRef

TOGETHER = 2
"""Partitions that fail, with no success in between, before it is the backend that is taken to have failed. Of a single one, that one."""

PROBE_INTERVAL: Millis = 1_000
"""From the start of one probe to that of the next, at least: bounds the load on a backend that is down, and the wait once it is back."""


class Breaker:
    """One backend's breaker: a pure machine that is told what succeeded and what failed.

    While it is open one probe at a time may go to the backend; any success closes it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._failing: set[PartitionRef] = set()
        self._probe: PartitionRef | None = None
        self._probe_at: Millis = 0

    def failed(self, ref: PartitionRef, partitions: int) -> bool:
        """The backend did not answer for that partition, one of `partitions` that it holds. Whether this opened the breaker."""
        if ref == self._probe:
            self._probe = None
        self._failing.add(ref)
        opens = not self.is_open and len(self._failing) >= min(TOGETHER, partitions)
        if opens:
            self.is_open, self._probe_at = True, 0
        return opens

    def succeeded(self) -> bool:
        """The backend did what it was asked to. Whether this closed the breaker."""
        closes = self.is_open
        self.is_open, self._probe = False, None
        self._failing.clear()
        return closes

    def forget(self, ref: PartitionRef) -> None:
        """The backend is not asked for that partition any more: what became of it says nothing."""
        self._failing.discard(ref)
        if ref == self._probe:
            self._probe = None

    def wants_probe(self, now: Millis) -> bool:
        """Whether the next `admits` would let a probe through."""
        return self.is_open and self._probe is None and now >= self._probe_at

    def admits(self, ref: PartitionRef, now: Millis) -> bool:
        """Whether that partition may be opened now. If the breaker is open that is a probe, which ends with `failed` or `succeeded`."""
        if not self.is_open:
            return True
        if not self.wants_probe(now):
            return False
        self._probe, self._probe_at = ref, now + PROBE_INTERVAL
        return True
