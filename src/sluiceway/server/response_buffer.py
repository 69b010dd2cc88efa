"""Large answers on their way to clients, which may be slow to take them: sent piece by piece, and not too many at one time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from sluiceway.kernel.limits import MAX_ANSWERS_BYTES
from sluiceway.server.http import Body, DisconnectedError, Send

PIECE: Final = 256 << 10
"""Bytes that the connection is given at a time: what it holds of an answer twice."""

BUILT_ALONE: Final = 2 << 20
"""Bytes from which on an answer is built while no other such is: a burst would make them all before one of them was counted."""
_PASSES: Final = 3
"""Passes of the event loop in which a sending that was cut off comes to its end, and lets go of its answer."""
_AT_ONCE: Final = contextlib.nullcontext()


class AnswerMemory:
    """What all large answers may take together. Beyond it, those that have been on their way for longest are cut off to make room.

    To refuse new ones instead would let a few clients that do not read keep all others from being served.
    """

    def __init__(self, most: int = MAX_ANSWERS_BYTES) -> None:
        self._most = most
        self.held = 0
        self._sizes: dict[asyncio.Timeout, int] = {}
        """By what ends the sending; the oldest first."""
        self._alone = asyncio.Lock()

    def building(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """For the time in which an answer of about so many bytes is made. It is to be sent at once."""
        return _AT_ONCE if size < BUILT_ALONE else self._building_alone()

    @contextlib.asynccontextmanager
    async def _building_alone(self) -> AsyncIterator[None]:
        async with self._alone:
            for _ in range(_PASSES):
                await asyncio.sleep(0)
            yield

    async def send(self, send: Send, body: Body) -> None:
        """Send a body as the end of an answer that was begun. Raises DisconnectedError if it is cut off."""
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
        # Each piece waits until the connection has room for more. A copy, as a part of the body would keep all of it in memory.
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
