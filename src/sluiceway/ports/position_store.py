"""PositionStore: how far each partition of a change stream has been handed on, fenced by grant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import PositionRecord

__all__ = ["FencedError", "Kept", "Opening", "PositionRecord", "PositionStore", "PositionUnknownError", "Stored"]

Kept = PositionRecord
"""The former name, which stores of users may still import. It goes with the next release."""


class FencedError(Exception):
    """Nothing was written, and nothing will be: the partition was opened later by another reader."""

    def __init__(self, token: str, grant: int) -> None:
        super().__init__(f"partition {token} was opened under grant {grant}")
        self.token = token
        self.grant = grant
        """The grant it is now open under. May be the caller's own: then the partition was opened again under it."""


class PositionUnknownError(Exception):
    """The store could not be reached, or did not answer: the write may have landed, or may land later."""


class Opening(NamedTuple):
    """One opening of a partition. `number` distinguishes it from others, including those of the same grant."""

    token: str
    grant: int
    number: int


class Stored(NamedTuple):
    """The stored state of a partition. `written_at` is by its writer's clock."""

    grant: int
    kept: PositionRecord
    written_at: Millis


class PositionStore(Protocol):
    """Durable positions: a position is not lost once its commit has returned. Of two openers of a partition, only the later can commit."""

    async def open(self, token: str, grant: int) -> tuple[Opening, PositionRecord]:
        """Raise the fence to that grant, end every earlier opening, **also those of the same grant**, and return the committed position:
        one step.

        Raises FencedError if a higher grant has opened it, PositionUnknownError.
        """
        ...

    async def commit(self, opening: Opening, kept: PositionRecord) -> None:
        """Replace the stored position. Raises FencedError after a later opening; PositionUnknownError: open again."""
        ...

    async def read(self) -> Mapping[str, Stored]:
        """Return all stored positions, by token, for display and for the watermark. Raises PositionUnknownError."""
        ...

    async def forget(self, tokens: Collection[str]) -> None:
        """Drop the positions of these tokens, with their fences. Raises PositionUnknownError."""
        ...
