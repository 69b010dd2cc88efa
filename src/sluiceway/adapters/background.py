"""Work that goes on when its callers give up."""

from __future__ import annotations

import asyncio
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
