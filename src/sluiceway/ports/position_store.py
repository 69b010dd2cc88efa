"""PositionStore: how far each partition of a change stream has been handed on, fenced by grant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import Kept

__all__ = ["FencedError", "Kept", "Opening", "PositionStore", "PositionUnknownError", "Stored"]


class FencedError(Exception):
    """Nothing was written, and nothing will be: somebody opened the partition later."""

    def __init__(self, token: str, grant: int) -> None:
        super().__init__(f"partition {token} was opened under grant {grant}")
        self.token = token
        self.grant = grant
        """The grant that it is open under. It may be the caller's own: then the partition was opened once more under it."""


class PositionUnknownError(Exception):
    """The store could not be reached, or did not answer: what was to be written is there, or not, or will be."""


class Opening(NamedTuple):
    """One opening of a partition. `number` tells it from others, also from those of the same grant."""

    token: str
    grant: int
    number: int


class Stored(NamedTuple):
    """What is kept of a partition. `written_at` is by the clock of whoever wrote it."""

    grant: int
    kept: Kept
    written_at: Millis


class PositionStore(Protocol):
    """What a commit has returned for is not lost. Of two who opened the same partition, only the later can commit."""

    async def open(self, token: str, grant: int) -> tuple[Opening, Kept]:
        """Raise the fence to that grant, end every earlier opening, **also those of the same grant**, and say what is committed: one step.

        Raises FencedError if a higher grant has opened it, PositionUnknownError.
        """
        ...

    async def commit(self, opening: Opening, kept: Kept) -> None:
        """Keep that instead of what was kept. Raises FencedError if there was a later opening; PositionUnknownError: open again."""
        ...

    async def read(self) -> Mapping[str, Stored]:
        """All that is kept, by token, for people to look at and for the watermark. Raises PositionUnknownError."""
        ...

    async def forget(self, tokens: Collection[str]) -> None:
        """Drop what is kept of these, with their fences. Raises PositionUnknownError."""
        ...
