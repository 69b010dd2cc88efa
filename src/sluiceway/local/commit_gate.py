"""Commit gate: holds back the commits of all queues of an instance for a moment, in which nothing stored changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError


class CommitGate:
    """Commits pass it. While it is closed, none is in flight and none begins: a commit that depends on another one begins after that one
    has ended, so what is stored then is what a power cut at that moment would have left."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._waiting: dict[Callable[[], None], None] | None = None
        """Cycles to run once the gate is open again; None: it is open."""
        self._changed = asyncio.Event()

    def enter(self) -> None:
        """A commit begins."""
        self._in_flight += 1

    def leave(self) -> None:
        """A commit has ended, and all that depends on its outcome is done."""
        self._in_flight -= 1
        self._changed.set()

    def holds(self, cycle: Callable[[], None]) -> bool:
        """Whether no commit may begin now. If so, `cycle` is called, once, when one may."""
        if self._waiting is None:
            return False
        self._waiting[cycle] = None
        return True

    async def opened(self) -> None:
        """Wait until commits may begin."""
        while self._waiting is not None:
            await self._wait()

    async def close(self, patience: Millis) -> None:
        """Let no commit begin, and wait for those in flight; then call `open`. Raises `unavailable` if one does not end within `patience`
        ms; the gate is open then."""
        await self.opened()
        self._waiting = {}
        try:
            async with asyncio.timeout(patience / 1000):
                while self._in_flight:
                    await self._wait()
        except TimeoutError:
            self.open()
            what = f"a commit has not ended within {format_duration(patience)}"
            raise SluicewayError("unavailable", f"{what}; try again when the storage is faster") from None
        except BaseException:
            self.open()
            raise

    def open(self) -> None:
        """Let commits begin. An open gate stays open."""
        cycles, self._waiting = self._waiting or {}, None
        self._changed.set()
        for cycle in cycles:
            cycle()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
