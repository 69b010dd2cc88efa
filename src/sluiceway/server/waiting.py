"""Requests that may take long on purpose, and end early when nobody waits for their answer any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.http import DisconnectedError, Request

T = TypeVar("T")


class Waiting:
    """The work of such requests. It is cancelled when the client goes away, and with `stop`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def stop(self) -> None:
        """End all that waits with `unavailable`, now and from now on."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    async def run(self, request: Request, work: Coroutine[Any, Any, T], *, long: bool = True) -> T:
        """What the work returns or raises. Not `long`: it goes on also after `stop`.

        Raises `unavailable` if that ended it, and DisconnectedError if the client has gone.
        """
        if long and self._stopping:
            work.close()
            raise _stopping()
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.disconnected())
        if long:
            self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        finally:
            self._tasks.discard(task)
            task.cancel()
            gone.cancel()
        if task.cancelled():
            raise _stopping() if long and self._stopping else DisconnectedError
        return task.result()


def _stopping() -> SluicewayError:
    return SluicewayError("unavailable", "the server is stopping")
