"""Circuit breaker of a backend: opens when its partitions fail together."""

from __future__ import annotations

from sluiceway.kernel.clock import Millis
from sluiceway.model.changes import PartitionRef

FAILURE_THRESHOLD = 2
"""Failed partitions, without a success in between, that open the breaker. With a single partition, one."""

PROBE_INTERVAL: Millis = 1_000
"""Minimum interval between the starts of probes: bounds the load on a backend that is down, and the delay once it is back."""


class Breaker:
    """One backend's breaker: a pure machine fed with successes and failures.

    While open it admits one probe at a time; any success closes it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._failing: set[PartitionRef] = set()
        self._probe: PartitionRef | None = None
        self._probe_at: Millis = 0

    def failed(self, ref: PartitionRef, partitions: int) -> bool:
        """Record a failure for that partition, one of `partitions` on the backend. Returns whether this opened the breaker."""
        if ref == self._probe:
            self._probe = None
        self._failing.add(ref)
        opens = not self.is_open and len(self._failing) >= min(FAILURE_THRESHOLD, partitions)
        if opens:
            self.is_open, self._probe_at = True, 0
        return opens

    def succeeded(self) -> bool:
        """Record a success of the backend. Returns whether this closed the breaker."""
        closes = self.is_open
        self.is_open, self._probe = False, None
        self._failing.clear()
        return closes

    def forget(self, ref: PartitionRef) -> None:
        """Forget a partition that the backend is no longer asked for: its outcome is not evidence."""
        self._failing.discard(ref)
        if ref == self._probe:
            self._probe = None

    def wants_probe(self, now: Millis) -> bool:
        """Whether the next `admits` would let a probe through."""
        return self.is_open and self._probe is None and now >= self._probe_at

    def admits(self, ref: PartitionRef, now: Millis) -> bool:
        """Whether that partition may be opened now. With an open breaker this is a probe, which ends with `failed` or `succeeded`."""
        if not self.is_open:
            return True
        if not self.wants_probe(now):
            return False
        self._probe, self._probe_at = ref, now + PROBE_INTERVAL
        return True
