"""State of a partition, in memory and as the small records that a store keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition.blob_uniques import BlobUniques
from sluiceway.core.partition.blob_values import BlobValues
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Disposition, Offsets

REDRIVEN = ""
"""Reason of a redrive's transfer: its items do not die."""

EXPIRED_READY = "expired"
"""Reason of a transfer of items that expired while ready, without being leased."""

RAN_OUT = "the lease ran out"
"""Reason of an attempt of which its client said nothing."""

HELD: Millis = 253_402_300_799_000
"""Due time of an item that holds up its key until an operator decides: the last second of the year 9999."""

MOVED = "moved"
"""Reason of a transfer to another partition of the queue. Only its target identifies it, since a client may give any reason."""


def partition_target(partition: int) -> str:
    """Transfer target for that partition of the same queue: a name that no queue can have."""
    return f"#{partition}"


def target_partition(target: str | None) -> int | None:
    """The partition that a transfer target names; None: the target is a queue."""
    return int(target[1:]) if target is not None and target.startswith("#") else None


Gone = Literal["expired", "retried", "released", "dead"]
"""Outcomes of a leased item other than completed."""


class ReasonGroup(NamedTuple):
    """Rows of a blob that died of the same `reason` in the same queue, `source`. `rows`: which, as packed bits; empty: all of the blob."""

    reason: str
    source: str
    items: int
    rows: bytes = b""


@dataclass(slots=True)
class Blob:
    """A batch of rows, numbered by the first offset given to its first row. `open` counts the rows not settled yet.

    A blob with `pins` stays even when all rows are settled. A compacted blob is stored with only `kept` rows (0: all), and `nbytes` is
    their size. `reasons`: why its rows died, where they did. `keys`, `bundles`, `priorities`, `uniques`: which rows have which, or belong
    to which; None: none was noted.
    """

    number: int
    rows: int
    columns: int
    written_at: Millis
    nbytes: int
    open: int = 0
    pins: int = 0
    kept: int = 0
    reasons: tuple[ReasonGroup, ...] = ()
    keys: BlobValues | None = None
    bundles: BlobValues | None = None
    priorities: BlobValues | None = None
    uniques: BlobUniques | None = None

    @property
    def stored_rows(self) -> int:
        return self.kept or self.rows


@dataclass(slots=True)
class Extent:
    """`count` dense offsets from `first` on, and their blob rows: consecutive from `row` on, or those in `rows`.

    `attempts`: attempts made before these offsets were given. `max_lease_size`: maximum number that one lease may take (0: any). `gone`:
    positions that left the line out of turn: without being leased, or leased before earlier ones of other keys.
    """

    first: int
    count: int
    blob: Blob
    row: int
    rows: BitMap | None
    attempts: int
    open: int
    expires_at: Millis = 0
    max_lease_size: int = 0
    gone: BitMap = field(default_factory=BitMap)

    def continued_by(self, other: Extent) -> bool:
        """Whether `other` holds the next offsets and the next rows of the same blob, with equal attributes."""
        return (
            self.blob is other.blob
            and self.rows is None
            and other.rows is None
            and self.attempts == other.attempts
            and self.expires_at == other.expires_at
            and self.max_lease_size == other.max_lease_size
            and not (self.gone or other.gone)
            and self.first + self.count == other.first
            and self.row + self.count == other.row
        )

    def waiting(self, at: int) -> BitMap:
        """The positions from `at` on that are in the line."""
        return BitMap(range(at, self.count)) - self.gone if at < self.count else BitMap()

    def run(self, at: int) -> tuple[int, int]:
        """The first run of positions from `at` on that are in the line, as (start, length); length 0: none."""
        if not self.gone:
            return at, self.count - at
        waiting = self.waiting(at)
        if not waiting:
            return self.count, 0
        start = waiting.min()
        later = self.gone & BitMap(range(start, self.count))
        return start, (later.min() if later else self.count) - start

    def row_at(self, at: int) -> int:
        """The blob row of position `at`."""
        return self.row + at if self.rows is None else int(self.rows[at])

    def rows_at(self, at: int, count: int) -> Offsets:
        """The blob rows of `count` offsets from position `at` on."""
        if self.rows is None:
            return np.arange(self.row + at, self.row + at + count, dtype=np.int64)
        return to_array(self.rows)[at : at + count]


@dataclass(slots=True)
class Part:
    """A run of one extent's offsets in a lease: `count` from the extent's position `at` on. `base` is its first position in the lease."""

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
    """A lease on `parts`. Positions count through the parts from 0; `settled` are the closed ones.

    `dispositions`: the outcomes of items not completed. `staged` ones take effect when the lease is closed. A lease with a `transfer`
    reason belongs to the system: it has no deadline, and its items are on their way to the queue `target` (None, in records written before
    it was noted: the dead queue), or to another partition of this queue. For scheduled items, `dues` lists (due time, number of consecutive
    positions).
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
    """For a transfer to another queue: the incarnation of that queue to which it is bound. None: to none, as in records written before it
    was noted."""
    nbytes: float = 0.0
    """Approximate payload bytes; known only to the call that made the lease."""
    failures: list[tuple[BitMap, str]] = field(default_factory=list)
    """For a transfer of dead items: what is known of their failures, as texts, by positions. Kept with the transfer, since a repetition has
    to send the same."""
    probe: int = 0
    """The number by which its outcomes are reported to the circuit breaker; not stored."""
    leased_at: Millis = 0
    """Not stored: of a lease from before this owner, the last time that the partition had recorded."""
    is_completed: bool = False
    """Of an ended lease: it was completed, although in order what was behind an item that came back was released with that."""

    @property
    def open(self) -> int:
        return self.count - len(self.settled)

    @property
    def moves_to(self) -> int | None:
        """For a transfer inside the queue: the target partition."""
        return target_partition(self.target)

    def due_at(self) -> dict[int, Millis]:
        """Due time of the scheduled items of a transfer, by part base. All items of a part share one due time."""
        times = iter(self.dues)
        due_at, end = 0, 0
        found = {}
        for part in self.parts if self.dues else ():
            while part.base >= end:
                due_at, count = next(times)
                end += count
            if due_at:
                found[part.base] = due_at
        return found

    def open_positions(self) -> BitMap:
        return BitMap(range(self.count)) - self.settled

    def tell(self, disposition: Gone, positions: BitMap) -> None:
        """Record the outcome of those positions."""
        if positions:
            self.dispositions[disposition] = self.dispositions.get(disposition, BitMap()) | positions

    def disposition_of(self, position: int) -> Gone | Literal["completed"]:
        """The outcome of a settled position."""
        return next((disposition for disposition, those in self.dispositions.items() if position in those), "completed")


@dataclass(slots=True)
class Due:
    """Rows of a blob scheduled beside the line until `due_at`. `max_lease_size` as in an Extent: their lease ran out. `is_back`: they were
    returned, so in a queue that is ordered by key later ones of their keys wait for them."""

    number: int
    due_at: Millis
    blob: Blob
    rows: BitMap
    attempts: int
    expires_at: Millis = 0
    max_lease_size: int = 0
    is_back: bool = False


class Header(msgspec.Struct, array_like=True):
    """Counters and positions of a partition. Nothing before `head` is ready; `next` is the next offset to give; `now` is the time of the
    last scheduling cycle (see `SegmentLog.record_time`).

    The fields from `shut` to `held_slots` belong to rebalances (`core.partition.admission`): what the partition durably takes, whatever
    its owner knows of the queue. Headers written before these fields existed have their defaults.
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
    """Items moved to other partitions of the queue."""
    moved_in: int = 0
    """Items moved in from other partitions of the queue; they do not count as produced."""
    shut: int = 0
    """0: takes items; 1: takes none; 2: takes none and is empty for good."""
    shut_cursor: int = 0
    given_cursor: int = 0
    taken_cursor: int = 0
    slots_of: int = 0
    closed_slots: bytes = b""
    """Bit map (lowest slot first, of `slots_of` slots) of the slots whose keys another partition takes."""
    held_slots: bytes = b""
    """Bit map of the slots of which no items are served yet: their former home has items of them."""
    duplicates: int = 0
    """Items that were not stored, since their unique key was taken."""


def slots_in(bits: bytes) -> list[int]:
    """The slots of one of the header's bit maps."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist()


class BlobRecord(msgspec.Struct, array_like=True):
    rows: int
    columns: int
    written_at: Millis
    nbytes: int
    kept: int = 0
    reasons: tuple[ReasonGroup, ...] = ()
    keys: bytes = b""
    bundles: bytes = b""
    priorities: bytes = b""
    uniques: bytes = b""


class ExtentRecord(msgspec.Struct, array_like=True):
    count: int
    blob: int
    row: int
    rows: bytes | None
    attempts: int
    expires_at: Millis = 0
    max_lease_size: int = 0
    gone: bytes = b""


class LeaseRecord(msgspec.Struct, array_like=True):
    """A live lease, a transfer, or (`closed`) the memory of an ended lease, whose settled positions, all of them, are not stored."""

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
    failures: list[tuple[bytes, str]] = []
    is_completed: bool = False


class DueRecord(msgspec.Struct, array_like=True):
    due_at: Millis
    blob: int
    rows: bytes
    attempts: int
    expires_at: Millis = 0
    max_lease_size: int = 0
    is_back: bool = False


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
    noted = (b"" if each is None else each.packed() for each in (blob.keys, blob.bundles, blob.priorities, blob.uniques))
    return pack(BlobRecord(blob.rows, blob.columns, blob.written_at, blob.nbytes, blob.kept, blob.reasons, *noted))


_PLAIN = b"\x01"
"""First byte of a bit map stored as plain bits from its first member on. Roaring's own form never begins with it."""


_FEW = 64


def pack_bits(bits: BitMap) -> bytes:
    """Encode a bit map in the shorter of two forms: Roaring's (8 KiB from 4,096 scattered members on) or plain bits. Empty: no bytes."""
    if not bits:
        return b""
    count, first = len(bits), bits.min()
    if count <= _FEW and bits.max() - first + 1 == count:
        # Fast path for small leases. Produces the same bytes as below.
        return _PLAIN + first.to_bytes(4, "little") + (((1 << count) - 1) << -count % 8).to_bytes(-(-count // 8), "big")
    bits.run_optimize()
    roaring: bytes = bits.serialize()
    if (bits.max() - first) // 8 + 6 >= len(roaring):
        return roaring
    plain = np.zeros(bits.max() - first + 1, np.bool_)
    plain[to_array(bits) - first] = True
    return _PLAIN + first.to_bytes(4, "little") + np.packbits(plain).tobytes()


def unpack_bits(data: bytes) -> BitMap:
    """Decode the output of `pack_bits`, or a bit map in Roaring's own form, which earlier versions wrote."""
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
            extent.max_lease_size,
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
            [(pack_bits(bits), text) for bits, text in lease.failures],
            lease.is_completed,
        )
    )


def due_bytes(due: Due) -> bytes:
    rows = pack_bits(due.rows)
    return pack(DueRecord(due.due_at, due.blob.number, rows, due.attempts, due.expires_at, due.max_lease_size, due.is_back))


def by_part(lease: LeaseState, positions: BitMap) -> Iterator[tuple[Part, BitMap]]:
    """The positions grouped by the part they lie in."""
    whole = len(positions) == lease.count
    for part in lease.parts:
        span = BitMap(range(part.base, part.base + part.count))
        chosen = span if whole else span & positions
        if chosen:
            yield part, chosen


def rows_of_extent(extent: Extent, positions: BitMap) -> BitMap:
    """The blob rows of those positions of an extent."""
    return rows_of_part(Part(extent, 0, extent.count, 0), positions)


def rows_of_part(part: Part, positions: BitMap) -> BitMap:
    """The blob rows of those positions of a part."""
    extent = part.extent
    if extent.rows is None:
        return positions.shift(extent.row + part.at - part.base)
    return from_array(extent.rows_at(part.at, part.count)[to_array(positions) - part.base])
