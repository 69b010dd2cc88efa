"""Long polls: requests that wait by design, and end early when their client goes away or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.http import DisconnectedError, Request

T = TypeVar("T")


class Waiting:
    """Runs long polls, and cancels one when its client goes away, and all on `stop`."""

    def __init__(self) -> None:
        self._running: set[_Cut] = set()
        self._stopping = False

    def stop(self) -> None:
        """End all waiting requests with `unavailable`, now and from now on."""
        self._stopping = True
        for cut in self._running:
            cut()

    async def run(self, request: Request, work: Coroutine[Any, Any, T], *, long: bool = True) -> T:
        """Run the work, and return or raise its result. With `long` False, `stop` does not end it.

        Raises `unavailable` if `stop` ended it, and DisconnectedError if the client has gone.
        """
        if long and self._stopping:
            work.close()
            raise _stopping()
        task = asyncio.current_task()
        assert task is not None
        cut = _Cut(task)
        if long:
            self._running.add(cut)
        unwatch = None
        try:
            unwatch = request.watch(cut)
            return await work
        except asyncio.CancelledError:
            if not cut.made or task.cancelling() > 1:
                # The task was cancelled for another reason.
                raise
            raise (_stopping() if long and self._stopping else DisconnectedError()) from None
        finally:
            work.close()
            if unwatch is not None:
                unwatch()
            self._running.discard(cut)
            cut.end()


class _Cut:
    """Cancels the task at most once, and not after `end`."""

    __slots__ = ("_task", "made")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task: asyncio.Task[Any] | None = task
        self.made = False

    def __call__(self) -> None:
        if self._task is not None and not self.made:
            self.made = True
            self._task.cancel()

    def end(self) -> None:
        if self.made and self._task is not None:
            self._task.uncancel()
        self._task = None


def _stopping() -> SluicewayError:
    return SluicewayError("unavailable", "the server is stopping")
