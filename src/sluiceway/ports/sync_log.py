"""SyncLog and Election: the shared log of a group of tasks, and the choice of its leader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import Group

__all__ = ["Election", "Group", "LogPage", "LogUnavailableError", "SyncLog"]


class LogUnavailableError(Exception):
    """The log could not be reached. Records to be appended may or may not be there, now or later."""


class LogPage(NamedTuple):
    """Consecutive entries in order, without gaps. Numbers begin at 1 and rise.

    `first` is the lowest number that may still exist: a reader that has read less than `first - 1` has a gap, and must begin with the
    newest snapshot among the remaining entries. `end` is the number of the last entry of the log, 0 if it never had one.
    """

    first: int
    entries: tuple[tuple[int, bytes], ...]
    end: int


class SyncLog(Protocol):
    """An ordered log of small records, identical for all readers. Several processes append concurrently."""

    async def append(self, records: Sequence[bytes]) -> None:
        """Append durably, in this order; other processes' records may come between. Raises LogUnavailableError: all, some or none are
        there, or will be.

        Raises ValueError, and appends none of them, if one is too large for the log; every log takes 1,000,000 bytes.
        """
        ...

    async def read(self, after: int, limit: int = 1_000) -> LogPage:
        """Return at most `limit` entries after that number, including every append that returned before the call.

        If those were trimmed, the page begins with the first remaining entry. Raises LogUnavailableError.
        """
        ...

    async def wait(self, after: int, timeout: Millis) -> None:
        """Return when there may be entries after that number, or after `timeout`. Never raises LogUnavailableError."""
        ...

    async def trim(self, upto: int) -> None:
        """Allow removal of entries up to that number, now, later or never. Raises LogUnavailableError."""
        ...

    async def close(self) -> None: ...


class Election(Protocol):
    """Names the leader among the participants. Each process makes its own, for one member.

    `told` is called on the event loop with each change, in order; it must not raise. At least the leader learns all members. A member that
    lost its place is told that there is no leader (`Group(generation, "", ())`). Two leaders may be named at once for a while: the log
    decides.
    """

    async def join(self, name: str, told: Callable[[Group], None]) -> None:
        """Take part under that name, which is never reused. Returns at once; keeps trying in the background until `leave`."""
        ...

    async def leave(self) -> None:
        """Stop taking part; other members learn it soon."""
        ...
