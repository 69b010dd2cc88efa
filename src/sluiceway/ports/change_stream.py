"""ChangeStream: partitions of records that split and merge. ChangeSink: the destination of the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import CHANGES, AnnouncedPartition, DeadLetters

__all__ = [
    "CHANGES",
    "AnnouncedPartition",
    "Barrier",
    "Batch",
    "Born",
    "BrokenOffError",
    "ChangeSink",
    "ChangeStream",
    "End",
    "PlanLostError",
    "SeedsUpto",
    "StaleBatchError",
    "UnknownPositionError",
]

Born = AnnouncedPartition
"""The former name, which streams of users may still import. It goes with the next release."""


class BrokenOffError(Exception):
    """The stream could not be reached, or disconnected. Not an end: read again."""


class UnknownPositionError(Exception):
    """The stream does not have that position (any more). Reading cannot continue from there, and must not begin elsewhere."""


class PlanLostError(Exception):
    """The stream cannot repeat the batch, since it was read from something that has gone with its reader, such as a database snapshot.

    Its records are states, not events: they can be read anew from the batch's position, as they are now. Parts of the batch may have been
    handed on already, so those arrive a second time.
    """


class StaleBatchError(Exception):
    """A later batch of the partition exists already, so another reader has taken it over. Nothing was added."""


class SeedsUpto(NamedTuple):
    """All partitions without parents between the requested point and `upto`; the same point: there are none yet."""

    upto: str
    partitions: tuple[AnnouncedPartition, ...]


class End(NamedTuple):
    """The end of the partition, after this batch. `children` are all of the partition's; no record of them is older than `ended_at`."""

    children: tuple[AnnouncedPartition, ...]
    ended_at: Millis


class Barrier(NamedTuple):
    """A point of the partition, after this batch, at which key ranges come from partitions that go on, or leave for them.

    `mark`: positive, and rises from barrier to barrier of a partition. `gives`, `takes`: the *handoffs* out of and into the partition, each
    under a name of its own, which the stream gives at both ends, and which no other handoff ever has. Reading continues from `after`, once
    every partition that gives what this one takes is committed up to its own barrier.

    Barriers have an order that all partitions share, such as that of timestamps: a partition that gives is never the descendant of one
    that takes, and everything before a barrier comes before every barrier that follows it in that order. So no waits form a circle.
    """

    mark: int
    gives: tuple[str, ...]
    takes: tuple[str, ...]
    after: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Records from a position, exclusive, up to `upto`, inclusive; reading continues from `upto`. None: no new position.

    `records` has the columns of CHANGES and may be empty although `upto` has moved. `at`: no record after `upto` is older, as far as the
    stream knows (its heartbeat). `behind`: how long `upto` is behind the end of the stream; None: unknown. It is by wall clock, as of the
    read: everything durable `behind` before the read began lies at or before `upto`; 0: everything durable when it began. It is not the age
    of the newest record, and too low is worse than too high: a reader that reads up to now ends by it. `children`: the partition's children
    known before it ends; `end` if it ends here. A batch that ends with no `upto` ends where it began. `barrier` if one follows; then there
    is no `end` yet. It is found again from `upto`, until reading continues from the barrier's `after`.
    """

    records: pa.RecordBatch
    upto: str | None
    at: Millis | None = None
    behind: Millis | None = None
    children: tuple[AnnouncedPartition, ...] = ()
    end: End | None = None
    barrier: Barrier | None = None


class ChangeStream(Protocol):
    """A stream of changes whose partitions may have children, with one or several parents, that begin where their parents end.

    Key ranges may also pass between partitions that go on: see `Barrier`.

    It names the same parents of a partition each time. Tokens, positions and points are texts of its own, at most 1,000 bytes. It keeps
    everything after the committed positions. Calls for several partitions may run concurrently.

    BrokenOffError is for transient faults. Lasting ones (no such stream, no permission, unreadable data) are a SluicewayError that names
    the fault. Both may be repeated.
    """

    async def seeds(self, after: str) -> SeedsUpto:
        """Return the partitions without parents (or whose parents' records are all gone) beyond that point; "" precedes all.

        Between two points the result is always the same; a seed list is complete up to its point. Raises BrokenOffError, SluicewayError.
        """
        ...

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        """Return records after the position: a `AnnouncedPartition.start`, the `upto` of an earlier batch, or the `after` of its barrier,
        whichever reader read it.

        Without `upto`: at most `limit` records (more where they cannot be split), and possibly none after a wait of up to a second. With
        `upto`, from an earlier batch with the same position: exactly the records of that batch, in the same order, repeatably, until a
        later position is reported as kept; or a PlanLostError. Raises BrokenOffError, UnknownPositionError, SluicewayError; never treats
        unknown data as an end.
        """
        ...

    async def kept(self, partition: str, position: str) -> None:
        """Report that everything up to this position is safe elsewhere, for streams that retain data until then.

        A hint, which may be lost; also sent at the end of a partition. Raises only BrokenOffError.
        """
        ...

    def left(self, partition: str) -> None:
        """Release this process's resources for the partition: its reading has ended here, and will not continue here."""
        ...

    async def close(self) -> None: ...


class ChangeSink(Protocol):
    """Destination of records, in batches."""

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> DeadLetters | None:
        """Write a batch durably, once: repeating a partition's last batch, or an earlier one, adds nothing, whichever process repeats it.

        `batch` rises by one. Raises BrokenOffError: outcome unknown; write the same again. StaleBatchError: a later batch exists.
        SluicewayError: refused, and will be until an operator changes something.

        Records that can never be accepted, such as one that is too large, must not hold back the others: they go to a dead queue, with the
        same guarantee, and are returned, also on repetition. None: there were none.
        """
        ...
