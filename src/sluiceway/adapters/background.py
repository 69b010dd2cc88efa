"""Work that goes on when its callers give up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: asyncio.Future[T]) -> T:
    """Wait for work that goes on when the caller is cancelled. Nobody learns of an error of it then, and it is not logged."""
    # `asyncio.shield` alone forgets such work, and the event loop logs that its exception was never retrieved, with a traceback.
    work.add_done_callback(_look_at)
    return await asyncio.shield(work)


def _look_at(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()


class Calls:
    """Calls that are carried to their end even if their callers are cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Make the call in a task of its own, and return its result."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await shielded(task)

    async def ended(self) -> None:
        """Wait until all of them have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
