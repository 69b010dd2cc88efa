"""Live counts of every queue, updated each second and shared by all pages that one reader has open."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Final

from sluiceway.adapters import system
from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.clock import Millis
from sluiceway.server.ui.api import Api, ProblemError

COUNTED: Final = ("produced", "completed", "retried", "expired", "dead")
"""Counters that are shown as rates."""
SPAN: Final = 10.0
"""Seconds over which a rate is averaged."""
_FIRST: Final[Millis] = 2_000
"""Milliseconds for which a page waits for the first counts."""
_LINGERS: Final = 5.0
"""Seconds for which the stream stays open after its last page has closed."""
_AGAIN: Final = 1.0
"""Seconds before a stream that ended or was refused is reopened."""
_LOOKS: Final = 16
"""Samples that are kept of a queue: one per second, slightly more than SPAN."""


class Counts:
    """Follows the `stats` events while pages need them. `of` maps a queue to its counts; a queue without counts is absent."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, int]] = {}
        self.problem: ProblemError | None = None
        self._past: dict[str, deque[tuple[float, tuple[int, ...]]]] = {}
        self._ready = asyncio.Event()
        self._users = 0
        self._used_at = stopwatch()
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def following(self, api: Api) -> AsyncIterator[None]:
        """Keep the counts up to date until the block ends, plus _LINGERS: a loaded page opens its stream a moment later."""
        self._users += 1
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if self._task is None or self._task.done():
            self._ready.clear()
            self._task = asyncio.create_task(self._follow(api))
        try:
            yield
        finally:
            self._users -= 1
            self._used_at = stopwatch()
            if not self._users:
                self._end = asyncio.get_running_loop().call_later(_LINGERS, self.stop)

    @property
    def is_over(self) -> bool:
        """Whether no page follows the counts, nor is about to."""
        return not self._users and self._task is None and stopwatch() - self._used_at >= _LINGERS

    async def known(self) -> None:
        """Wait for the first counts, for _FIRST at most. Raises ProblemError if the reader may not see them."""
        await system.wait(self._ready, _FIRST)
        if self.problem is not None:
            raise self.problem

    def stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
        if self._task is not None:
            self._task.cancel()
        self._task = self._end = None

    def rates(self, queue_name: str) -> Mapping[str, float]:
        """Items per second over the last SPAN for each name in COUNTED; empty until the queue was watched for a second."""
        past = self._past.get(queue_name)
        if past is None:
            return {}
        now = stopwatch()
        while len(past) > 1 and past[1][0] <= now - SPAN:
            past.popleft()
        since, first = past[0]
        elapsed = min(SPAN, now - since)
        if elapsed < 1:
            return {}
        last = past[-1][1]
        return {name: max(0, last[place] - first[place]) / elapsed for place, name in enumerate(COUNTED)}

    async def _follow(self, api: Api) -> None:
        while True:
            # Older samples would show as a jump in the rates.
            self.of, self._past, self.problem = {}, {}, None
            try:
                await self._read(api)
            except ProblemError as error:
                if error.code in ("unauthenticated", "forbidden"):
                    self.problem = error
                    self._ready.set()
                    return
            await asyncio.sleep(_AGAIN)

    async def _read(self, api: Api) -> None:
        async for kind, data in api.events("stats,queue.deleted"):
            name = data.pop("queue_name", "")
            if kind == "queue.deleted":
                self.of.pop(name, None)
                self._past.pop(name, None)
            elif kind == "stats":
                self.of.setdefault(name, {}).update(data)
                self._note(name)
                self._ready.set()

    def _note(self, name: str) -> None:
        counts = self.of[name]
        past = self._past.setdefault(name, deque(maxlen=_LOOKS))
        past.append((stopwatch(), tuple(counts.get(each, 0) for each in COUNTED)))
