"""ChangeStream: partitions with records in them, which split and merge. And ChangeSink: where the records go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import CHANGES, Born, DeadLetters

__all__ = [
    "CHANGES",
    "Batch",
    "Born",
    "BrokenOffError",
    "ChangeSink",
    "ChangeStream",
    "End",
    "SeedsUpto",
    "StaleBatchError",
    "UnknownPositionError",
]


class BrokenOffError(Exception):
    """The stream could not be reached, or went away in the middle. That is no end: read again."""


class UnknownPositionError(Exception):
    """The stream does not have that position (any more). Reading cannot go on from there, and must not begin anywhere else."""


class StaleBatchError(Exception):
    """A later batch of the partition is there already, so somebody else has gone on with it. Nothing was added."""


class SeedsUpto(NamedTuple):
    """All partitions without parents between the point that was asked about and `upto`. The same point: there are none yet."""

    upto: str
    partitions: tuple[Born, ...]


class End(NamedTuple):
    """There are no more records after this batch. `children` are all of the partition's; no record of them is older than `ended_at`."""

    children: tuple[Born, ...]
    ended_at: Millis


@dataclass(frozen=True, slots=True)
class Batch:
    """Records from a position, exclusive, up to `upto`, inclusive; reading goes on from `upto`. None: nothing to go on from is new.

    `records` has the columns of CHANGES and may be empty although `upto` has moved. `at`: no record after `upto` is older, as far as the
    stream knows (its heartbeat). `behind`: by how long `upto` is behind the end of the stream; None: that is not known. It is by the clock,
    and of the moment of the read: all that was durable `behind` before the read began lies at or before `upto`; 0: all that was durable
    when it began. Time since the newest record is not by the clock, and too little is worse than too much: a reader that reads up to now
    ends by it. `children`: what is known of the partition's children before it ends; `end` if it ends here. A batch that ends with no
    `upto` ends where it began.
    """

    records: pa.RecordBatch
    upto: str | None
    at: Millis | None = None
    behind: Millis | None = None
    children: tuple[Born, ...] = ()
    end: End | None = None


class ChangeStream(Protocol):
    """A stream of changes whose partitions may have children, with one or several parents, that begin where their parents end.

    It names the same parents of a partition whenever it names it. Tokens, positions and points are texts of its own, at most 1,000 bytes.
    It keeps whatever lies after the positions that were committed. Calls for several partitions may go on at once.

    BrokenOffError is for what may pass by itself. What lasts until somebody changes something (no such stream, no permission, data that
    cannot be read) is a SluicewayError that says what. Both may be repeated.
    """

    async def seeds(self, after: str) -> SeedsUpto:
        """The partitions that are nobody's children (or whose parents' records are all gone), beyond that point; "" is before all.

        Between two points it always names the same ones; those of the first point are all there are. Raises BrokenOffError, SluicewayError.
        """
        ...

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        """Records after the position: a `Born.start`, or the `upto` of an earlier batch, whoever read that.

        Without `upto`: at most `limit` records (more where they cannot be torn apart), and perhaps none after a wait of a second or less.
        With `upto`, that of an earlier batch from the same position: exactly the records of that batch, in the same order, however often,
        until a later position is said to be kept. Raises BrokenOffError, UnknownPositionError, SluicewayError, and never takes what it
        does not understand for an end.
        """
        ...

    async def kept(self, partition: str, position: str) -> None:
        """Everything up to this position is safe elsewhere: for streams that keep what they have until they are told so.

        A hint, which may be lost; also said at the end of a partition. Raises BrokenOffError, and nothing else.
        """
        ...

    def left(self, partition: str) -> None:
        """Nobody reads the partition here any more, nor is to go on with it: what is held for it in this process can go."""
        ...

    async def close(self) -> None: ...


class ChangeSink(Protocol):
    """Where records go, in batches."""

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> DeadLetters | None:
        """Durably, once: the same batch of a partition, said again by anybody, adds nothing; nor does one before the last.

        `batch` rises by one. Raises BrokenOffError: it may or may not be there; write the same again. StaleBatchError: a later one
        is there. SluicewayError: it is refused, and will be until somebody changes something.

        What can never be taken, such as a record that is too large, must not keep the others back: it goes to a dead queue, in the same
        way, and is returned, also when the batch is said again. None: there was nothing of that kind.
        """
        ...
