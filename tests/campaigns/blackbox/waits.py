"""How long processes waited for a processor while they could have run: on a busy machine a late answer is no mistake of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.servers import pids

STEP = 1.0
"""Seconds between two looks."""
LEAST = 0.2
"""Seconds of a wait that is noted: of any shorter one no call is late."""


class Wait(NamedTuple):
    """The seconds in which a process waited, put together, right before they were counted."""

    began: float
    ended: float


class Waits:
    """Of the main threads of processes, in which servers make their answers and the campaign makes its calls. `note` gets them.

    Linux counts them; elsewhere there are none.
    """

    def __init__(self, running: Callable[[], Iterable[int]], note: Callable[[Wait], object]) -> None:
        self._running = running
        self._note = note
        self._known: dict[int, float] = {}
        self.total = 0.0
        """Seconds."""

    async def watch(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            self.look(time.time())
            await asyncio.sleep(STEP)

    def look(self, now: float) -> None:
        """Note what was waited since the last look, by the process that waited longest."""
        known = {pid: pids.cpu_time(pid).waiting for pid in self._running()}
        longest = max((waited - self._known.get(pid, waited) for pid, waited in known.items()), default=0.0)
        self._known = known
        if longest >= LEAST:
            self.total += longest
            self._note(Wait(now - longest, now))


def overlap(waits: Iterable[Wait], began: float, ended: float) -> float:
    """The seconds between these that were spent waiting."""
    seconds, until = 0.0, began
    for each in sorted(waits):
        seconds += max(0.0, min(each.ended, ended) - max(each.began, until))
        until = max(until, each.ended)
    return seconds
