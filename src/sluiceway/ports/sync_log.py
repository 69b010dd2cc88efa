"""SyncLog and Election: the one log that a group of tasks shares, and who of them leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import Group

__all__ = ["Election", "Group", "LogPage", "LogUnavailableError", "SyncLog"]


class LogUnavailableError(Exception):
    """The log could not be reached. What was to be appended may or may not be there, now or later."""


class LogPage(NamedTuple):
    """Entries in their order, with none left out between them. Numbers begin at 1 and rise.

    `first` is the least number that may still be there: whoever has read less than `first - 1` has missed something and must begin with
    the newest snapshot among what is left. `end` is the number of the last entry of the log, 0 if it never had one.
    """

    first: int
    entries: tuple[tuple[int, bytes], ...]
    end: int


class SyncLog(Protocol):
    """An ordered log of small records, the same for all who read it. Several processes append to it at once."""

    async def append(self, records: Sequence[bytes]) -> None:
        """Durably, in this order; others' records may come between. Raises LogUnavailableError: all, some or none are there, or will be.

        Raises ValueError, and appends none of them, if one is too large for the log; each log takes 1,000,000 bytes.
        """
        ...

    async def read(self, after: int, limit: int = 1_000) -> LogPage:
        """What comes after that number, at most so many; sees every append that returned before the call.

        If that was trimmed, it begins with the first that is left. Raises LogUnavailableError.
        """
        ...

    async def wait(self, after: int, timeout: Millis) -> None:
        """Return when there may be something after that number, and once `timeout` is over. Never raises LogUnavailableError."""
        ...

    async def trim(self, upto: int) -> None:
        """Nobody needs what came up to that number. It goes now, later, or stays. Raises LogUnavailableError."""
        ...

    async def close(self) -> None: ...


class Election(Protocol):
    """Names the leader of those who take part. Each process makes one of its own, for one member.

    `told` is called on the event loop with each change, in order; it raises nothing. At least the leader is told all members. A member
    that lost its place is told that nobody leads (`Group(generation, "", ())`). Two may be named at once for a while: the log decides.
    """

    async def join(self, name: str, told: Callable[[Group], None]) -> None:
        """Take part under that name, which is never used again. Returns at once; it goes on trying by itself until `leave`."""
        ...

    async def leave(self) -> None:
        """Take no part any more; others learn it soon."""
        ...
