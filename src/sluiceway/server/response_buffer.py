"""Buffer of large answers to clients that may read slowly: sent in pieces, within a memory budget."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sluiceway.kernel.limits import MAX_ANSWERS_BYTES
from sluiceway.server.http import Body, DisconnectedError, Send

PIECE: Final = 256 << 10
"""Bytes passed to the connection at a time; it holds up to twice as much of an answer."""

BUILT_ALONE: Final = 2 << 20
"""Bytes from which answers are built one at a time: a burst could otherwise build all before one of them is counted."""
_PASSES: Final = 3
"""Passes of the event loop until a send that was cut off has ended and released its answer."""
_AT_ONCE: Final = contextlib.nullcontext()


class AnswerMemory:
    """Memory budget of all large answers. Beyond it, the oldest sends are cut off to make room.

    Refusing new answers instead would let a few clients that do not read block all others.
    """

    def __init__(self, most: int = MAX_ANSWERS_BYTES) -> None:
        self._most = most
        self.held = 0
        self._sizes: dict[asyncio.Timeout, int] = {}
        """Sizes by the timeout that can end the send, oldest first."""
        self._alone = asyncio.Lock()

    def building(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Context in which an answer of about `size` bytes is built. Send it at once."""
        return _AT_ONCE if size < BUILT_ALONE else self._building_alone()

    @contextlib.asynccontextmanager
    async def _building_alone(self) -> AsyncIterator[None]:
        async with self._alone:
            for _ in range(_PASSES):
                await asyncio.sleep(0)
            yield

    async def send(self, send: Send, body: Body) -> None:
        """Send a body as the end of an answer that has begun. Raises DisconnectedError if it is cut off."""
        if len(body) <= PIECE:
            await send({"type": "http.response.body", "body": body})
            return
        try:
            async with asyncio.timeout(None) as limit:
                self._make_room(len(body))
                self._hold(limit, len(body))
                try:
                    await self._send_pieces(send, memoryview(body))
                finally:
                    self._let_go(limit)
        except TimeoutError:
            raise DisconnectedError from None

    async def _send_pieces(self, send: Send, body: memoryview) -> None:
        # Each piece waits until the connection has room. It is a copy, since a slice of the body would keep all of it in memory.
        for start in range(0, len(body), PIECE):
            more = start + PIECE < len(body)
            await send({"type": "http.response.body", "body": bytes(body[start : start + PIECE]), "more_body": more})

    def _make_room(self, size: int) -> None:
        for limit in list(self._sizes):
            if self.held + size <= self._most:
                return
            limit.reschedule(0)
            self._let_go(limit)

    def _hold(self, limit: asyncio.Timeout, size: int) -> None:
        self._sizes[limit] = size
        self.held += size

    def _let_go(self, limit: asyncio.Timeout) -> None:
        self.held -= self._sizes.pop(limit, 0)
