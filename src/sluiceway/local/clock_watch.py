"""Clock watch: detects a wrong clock, on this machine or on the server that last wrote a partition."""

from __future__ import annotations

import logging

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis, format_duration, format_time
from sluiceway.kernel.limits import MAX_CLOCK_STEP
from sluiceway.model.health import Check

log = logging.getLogger(__name__)

_AGREES = "the machine's clock and the server's time agree"


class ClockWatch:
    """Tracks partitions whose last commit lies in the future; reports them, and jumps of the machine's clock (ADR 37)."""

    def __init__(self) -> None:
        self._latest: Millis = 0
        self._where = ""

    def opened(self, queue_name: str, partition: int, written_at: Millis) -> None:
        """Record the opening of a partition whose last commit was at `written_at`, by its owner's clock."""
        ahead = written_at - system.now()
        if ahead <= MAX_CLOCK_STEP or written_at <= self._latest + MAX_CLOCK_STEP:
            return
        self._latest, self._where = written_at, f"queue {queue_name}, partition {partition}"
        log.warning("%s", self._of_partition(ahead))

    def _of_partition(self, ahead: Millis) -> str:
        return (
            f"{self._where} was last written at {format_time(self._latest)}, {format_duration(ahead)} from now: the clock was wrong then, "
            "or is wrong now; deadlines and due times that were set then stay as they are"
        )

    def check(self) -> Check:
        """Return the health check of the clock."""
        jump, ahead = system.clock_jump(), self._latest - system.now()
        if jump:
            where = "ahead of" if jump > 0 else "behind"
            detail = f"the machine's clock is {format_duration(abs(jump))} {where} the server's time; correct it, or restart the server"
            return Check("clock", False, detail, 0)
        if ahead > MAX_CLOCK_STEP:
            return Check("clock", False, self._of_partition(ahead), 0)
        return Check("clock", True, _AGREES, 0)
