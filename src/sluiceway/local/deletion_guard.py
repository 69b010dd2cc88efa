"""Deletion guard: a queue that may be about to be deleted takes nothing. Without news of the deletion's outcome, it finds out itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError

log = logging.getLogger(__name__)


class DeletionGuard:
    """Whether a share is `closed`. `may_reopen` tells whether its queue still exists, and stays."""

    def __init__(self, may_reopen: Callable[[], Awaitable[bool]]) -> None:
        self.closed = False
        self._may_reopen = may_reopen
        self._reopening: asyncio.Task[None] | None = None

    def close_for(self, timeout: Millis) -> None:
        """Close for `timeout` ms, and after that until it is certain that the queue stays; 0: open at once."""
        self.stop()
        self.closed = timeout > 0
        if self.closed:
            self._reopening = asyncio.create_task(self._reopen(timeout))

    async def _reopen(self, timeout: Millis) -> None:
        while self.closed:
            await asyncio.sleep(timeout / 1000)
            try:
                if not await self._may_reopen():
                    return
            except SluicewayError as error:
                log.warning("a queue could not be reopened: %s", error)
            except Exception:
                # Whatever it is: without another look, the queue would take nothing until a restart.
                log.exception("a queue could not be reopened, will retry")
            else:
                self.closed = False

    def stop(self) -> None:
        """Stop checking."""
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
