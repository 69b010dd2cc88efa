"""What a partition consists of, in memory and as the small records that a store keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from pyroaring import BitMap

from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Disposition, Offsets

REDRIVEN = ""
"""In place of the reason of a transfer: its items do not die."""

EXPIRED_READY = "expired"
"""The reason of a transfer whose items expired in the line, without being leased."""

MOVED = "moved"
"""The reason of a transfer to another partition of the queue. What tells it apart is its target, as a client may give any reason."""


def partition_target(partition: int) -> str:
    """That partition of the same queue as the target of a transfer: a name that no queue can have."""
    return f"#{partition}"


def target_partition(target: str | None) -> int | None:
    """The partition of the same queue that the target of a transfer is; None: it is a queue."""
    return int(target[1:]) if target is not None and target.startswith("#") else None


Gone = Literal["expired", "retried", "released", "dead"]
"""How an item left its lease, other than completed."""


@dataclass(slots=True)
class Blob:
    """A batch of rows, numbered by the offset that its first row was first given. `open` rows are not settled yet.

    While it has `pins` it stays as it is, although all of them are. A compacted blob is stored with `kept` rows only (0: with all),
    and `nbytes` is their size.
    """

    number: int
    rows: int
    columns: int
    written_at: Millis
    nbytes: int
    open: int = 0
    pins: int = 0
    kept: int = 0

    @property
    def stored_rows(self) -> int:
        return self.kept or self.rows


@dataclass(slots=True)
class Extent:
    """`count` dense offsets from `first` on, and the blob rows they stand for: from `row` on, or those of `rows`.

    `attempts` is the number of attempts that these items had before they got these offsets. `together` is how many of them a lease may
    take at most (0: any number). `gone` are the positions that left the line without being leased.
    """

    first: int
    count: int
    blob: Blob
    row: int
    rows: BitMap | None
    attempts: int
    open: int
    expires_at: Millis = 0
    together: int = 0
    gone: BitMap = field(default_factory=BitMap)

    def continued_by(self, other: Extent) -> bool:
        """The other has the next offsets and the next rows of the same blob, and nothing tells its items from these."""
        return (
            self.blob is other.blob
            and self.rows is None
            and other.rows is None
            and self.attempts == other.attempts
            and self.expires_at == other.expires_at
            and self.together == other.together
            and not (self.gone or other.gone)
            and self.first + self.count == other.first
            and self.row + self.count == other.row
        )

    def waiting(self, at: int) -> BitMap:
        """The positions from `at` on that are in the line."""
        return BitMap(range(at, self.count)) - self.gone if at < self.count else BitMap()

    def run(self, at: int) -> tuple[int, int]:
        """The first run of positions from `at` on that are in the line, as (start, length); length 0 if there is none."""
        if not self.gone:
            return at, self.count - at
        waiting = self.waiting(at)
        if not waiting:
            return self.count, 0
        start = waiting.min()
        later = self.gone & BitMap(range(start, self.count))
        return start, (later.min() if later else self.count) - start

    def rows_at(self, at: int, count: int) -> Offsets:
        """The blob rows of `count` offsets from the `at`-th on."""
        if self.rows is None:
            return np.arange(self.row + at, self.row + at + count, dtype=np.int64)
        return to_array(self.rows)[at : at + count]


@dataclass(slots=True)
class Part:
    """A run of offsets of one extent in a lease: `count` from the extent's `at`-th on. `base` is its first position in the lease."""

    extent: Extent
    at: int
    count: int
    base: int

    @property
    def first(self) -> int:
        return self.extent.first + self.at

    @property
    def end(self) -> int:
        return self.extent.first + self.at + self.count


@dataclass(slots=True)
class LeaseState:
    """A claim on `parts`. Positions count through the parts from 0; `settled` are those that are closed.

    `dispositions` has the outcome of those that were not completed. `staged` ones take effect when the lease is closed. A lease with a
    `transfer` reason belongs to the system: it has no deadline, and its items are on their way to the queue `target`
    (None, of a record from before it was noted: the dead queue), or to another partition of this one. If these were scheduled, `dues`
    are when, and how many positions in a row.
    """

    number: int
    parts: list[Part]
    count: int
    client_id: str
    deadline: Millis | None
    lease_key: str | None = None
    transfer: str | None = None
    settled: BitMap = field(default_factory=BitMap)
    staged: dict[Disposition, BitMap] = field(default_factory=dict)
    dispositions: dict[Gone, BitMap] = field(default_factory=dict)
    target: str | None = None
    dues: list[tuple[Millis, int]] = field(default_factory=list)
    target_incarnation: str | None = None
    """Of a redrive: the one queue of that name to which it goes. None: not bound yet, as in a record from before it was noted."""
    nbytes: float = 0.0
    """Of the payloads, roughly; known only to the call that made the lease."""

    @property
    def open(self) -> int:
        return self.count - len(self.settled)

    @property
    def moves_to(self) -> int | None:
        """Of a transfer inside the queue: the partition that takes the items."""
        return target_partition(self.target)

    def due_at(self) -> dict[int, Millis]:
        """Of a transfer of scheduled items: when each part is due, by its base. Nothing of a part is due at another time."""
        times = iter(self.dues)
        due_at, end = 0, 0
        found = {}
        for part in self.parts if self.dues else ():
            while part.base >= end:
                due_at, count = next(times)
                end += count
            found[part.base] = due_at
        return found

    def open_positions(self) -> BitMap:
        return BitMap(range(self.count)) - self.settled

    def tell(self, disposition: Gone, positions: BitMap) -> None:
        """Note what becomes of those positions."""
        if positions:
            self.dispositions[disposition] = self.dispositions.get(disposition, BitMap()) | positions

    def disposition_of(self, position: int) -> Gone | Literal["completed"]:
        """What became of a settled position."""
        return next((disposition for disposition, those in self.dispositions.items() if position in those), "completed")


@dataclass(slots=True)
class Due:
    """Rows of a blob that wait beside the line until `due_at`. `together` as in an Extent: they had a lease that ran out."""

    number: int
    due_at: Millis
    blob: Blob
    rows: BitMap
    attempts: int
    expires_at: Millis = 0
    together: int = 0


class Header(msgspec.Struct, array_like=True):
    """The partition's own numbers. Nothing before `head` is ready; `next` is the next offset to give, `now` the time of the last turn
    (`Line._at`).

    Those from `shut` on belong to rebalances (`core.gate`): what the partition durably takes, whatever its owner knows of the queue. A
    header that was written before there were any has their defaults.
    """

    next: int = 0
    head: int = 0
    lease_number: int = 0
    due_number: int = 0
    now: Millis = 0
    produced: int = 0
    deduplicated: int = 0
    leased: int = 0
    completed: int = 0
    retried: int = 0
    expired: int = 0
    dead: int = 0
    released: int = 0
    cleared: int = 0
    redriven: int = 0
    moved: int = 0
    """Items that went to other partitions of the queue."""
    moved_in: int = 0
    """Items that came from there: they do not count as produced."""
    shut: int = 0
    """0: it takes items, 1: it takes none, 2: and it is empty for good."""
    shut_cursor: int = 0
    given_cursor: int = 0
    taken_cursor: int = 0
    slots_of: int = 0
    closed_slots: bytes = b""
    """The slots (of `slots_of`) whose idempotency keys are taken elsewhere: a bit each, the lowest first."""


class BlobRecord(msgspec.Struct, array_like=True):
    rows: int
    columns: int
    written_at: Millis
    nbytes: int
    kept: int = 0


class ExtentRecord(msgspec.Struct, array_like=True):
    count: int
    blob: int
    row: int
    rows: bytes | None
    attempts: int
    expires_at: Millis = 0
    together: int = 0
    gone: bytes = b""


class LeaseRecord(msgspec.Struct, array_like=True):
    """A live lease, a transfer, or (`closed`) what is remembered of a lease that is over: all of it is settled, and that is not said."""

    ranges: list[tuple[int, int]]
    client_id: str
    deadline: Millis | None
    lease_key: str | None
    transfer: str | None
    settled: bytes
    staged: list[tuple[Disposition, bytes]]
    dispositions: list[tuple[Gone, bytes]] = []
    target: str | None = None
    closed: bool = False
    dues: list[tuple[Millis, int]] = []
    target_incarnation: str | None = None


class DueRecord(msgspec.Struct, array_like=True):
    due_at: Millis
    blob: int
    rows: bytes
    attempts: int
    expires_at: Millis = 0
    together: int = 0


pack = msgspec.msgpack.Encoder().encode
unpack_header = msgspec.msgpack.Decoder(Header).decode
unpack_blob = msgspec.msgpack.Decoder(BlobRecord).decode
unpack_extent = msgspec.msgpack.Decoder(ExtentRecord).decode
unpack_lease = msgspec.msgpack.Decoder(LeaseRecord).decode
unpack_due = msgspec.msgpack.Decoder(DueRecord).decode


def to_array(bits: BitMap) -> Offsets:
    """The members of a bit map, sorted."""
    return np.frombuffer(bits.to_array(), np.uint32).astype(np.int64)


def from_array(values: Offsets) -> BitMap:
    return BitMap(values.astype(np.uint32))


def blob_bytes(blob: Blob) -> bytes:
    return pack(BlobRecord(blob.rows, blob.columns, blob.written_at, blob.nbytes, blob.kept))


_PLAIN = b"\x01"
"""Begins a bit map that is written as plain bits from its first member on. The other form, Roaring's, never begins so."""


_FEW = 64


def pack_bits(bits: BitMap) -> bytes:
    """A bit map in the shorter of two forms: Roaring's (8 KiB from 4,096 members on that make no runs), or plain bits. None: nothing."""
    if not bits:
        return b""
    count, first = len(bits), bits.min()
    if count <= _FEW and bits.max() - first + 1 == count:
        # The common case of a small lease, without a detour. The same bytes as below.
        return _PLAIN + first.to_bytes(4, "little") + (((1 << count) - 1) << -count % 8).to_bytes(-(-count // 8), "big")
    bits.run_optimize()
    roaring: bytes = bits.serialize()
    if (bits.max() - first) // 8 + 6 >= len(roaring):
        return roaring
    plain = np.zeros(bits.max() - first + 1, np.bool_)
    plain[to_array(bits) - first] = True
    return _PLAIN + first.to_bytes(4, "little") + np.packbits(plain).tobytes()


def unpack_bits(data: bytes) -> BitMap:
    """What `pack_bits` wrote; also Roaring's own form, in which all were written once."""
    if not data:
        return BitMap()
    if not data.startswith(_PLAIN):
        return BitMap.deserialize(data)
    plain = np.unpackbits(np.frombuffer(data, np.uint8, offset=5))
    return from_array(np.flatnonzero(plain) + int.from_bytes(data[1:5], "little"))


def extent_bytes(extent: Extent) -> bytes:
    rows = None if extent.rows is None else pack_bits(extent.rows)
    return pack(
        ExtentRecord(
            extent.count,
            extent.blob.number,
            extent.row,
            rows,
            extent.attempts,
            extent.expires_at,
            extent.together,
            pack_bits(extent.gone),
        )
    )


def lease_bytes(lease: LeaseState, closed: bool = False) -> bytes:
    return pack(
        LeaseRecord(
            [(part.first, part.count) for part in lease.parts],
            lease.client_id,
            lease.deadline,
            lease.lease_key,
            lease.transfer,
            b"" if closed else pack_bits(lease.settled),
            [(disposition, pack_bits(bits)) for disposition, bits in lease.staged.items()],
            [(disposition, pack_bits(bits)) for disposition, bits in lease.dispositions.items()],
            lease.target,
            closed,
            lease.dues,
            lease.target_incarnation,
        )
    )


def due_bytes(due: Due) -> bytes:
    return pack(DueRecord(due.due_at, due.blob.number, pack_bits(due.rows), due.attempts, due.expires_at, due.together))


def by_part(lease: LeaseState, positions: BitMap) -> Iterator[tuple[Part, BitMap]]:
    """The positions by the part they lie in."""
    whole = len(positions) == lease.count
    for part in lease.parts:
        span = BitMap(range(part.base, part.base + part.count))
        chosen = span if whole else span & positions
        if chosen:
            yield part, chosen


def rows_of_part(part: Part, positions: BitMap) -> BitMap:
    """The blob rows of those positions of a part."""
    extent = part.extent
    if extent.rows is None:
        return positions.shift(extent.row + part.at - part.base)
    return from_array(extent.rows_at(part.at, part.count)[to_array(positions) - part.base])
