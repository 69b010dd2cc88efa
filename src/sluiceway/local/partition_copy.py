"""Copy of a partition into another storage, while nobody uses it. For partitions in use there is `rebalance start --drain copy`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import count

from sluiceway.core.partition.records import unpack_blob
from sluiceway.local.backend import Backend
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, PartitionStore, RecordKind, Snapshot, StoreUnavailableError

SLICE_BYTES = 8 << 20
"""Payload bytes of one write: large enough that its delay matters little, small enough for its time limit."""
SLICE_RECORDS = 2_000
"""Small records of one write. Most have some 50 bytes."""
UNFINISHED = b""
"""Header of a partition whose copy has not ended. It cannot be decoded, so no owner would serve the half."""


async def copy_partition(ref: PartitionRef, source: Backend, target: PartitionStore, fence: Fence, note: Callable[[int], None]) -> Least:
    """Make the partition in `target` equal to that in `source`, whatever an earlier copy has left there. Returns the target's state.

    Both are opened with `fence`: a later owner of either is an error, and no earlier copy can interfere. `note` is called with the bytes
    of each write. Raises FencedError, DamagedError, LostError, StoreUnavailableError; the copy can then be repeated, with a higher fence.
    """
    snapshot = (await source.open(ref, fence)).whole()
    found = (await target.open(ref, fence)).whole()
    if (found.header, found.records) == (snapshot.header, snapshot.records):
        return Least(fence, found.txn)
    if found.txn:
        await target.drop(ref)
        fence = fence._replace(opening=fence.opening + 1)
        await target.open(ref, fence)
    txn = 0
    async for changes in _slices(ref, snapshot, source):
        if (outcome := await target.apply(ref, changes, fence)) is not Outcome.DONE:
            raise StoreUnavailableError(f"partition {ref.incarnation}-{ref.partition}: a write of its copy was {outcome.value}")
        txn = changes.txn
        note(sum(map(len, changes.blobs.values())))
    await target.release(ref)
    return Least(fence, txn)


async def _slices(ref: PartitionRef, snapshot: Snapshot, source: Backend) -> AsyncIterator[Changes]:
    """The cycles that make an empty partition equal to the snapshot. Only the last has the header."""
    assert snapshot.header is not None, "an unwritten partition equals an empty one"
    txn = count(1)
    blobs = ((int(key), unpack_blob(record).nbytes) for (kind, key), record in snapshot.records.items() if kind is RecordKind.BLOB)
    for numbers in _runs(blobs):
        yield Changes(next(txn), UNFINISHED, blobs=await source.read(ref, numbers))
    records = list(snapshot.records.items())
    while len(records) > SLICE_RECORDS:
        yield Changes(next(txn), UNFINISHED, puts=dict(records[-SLICE_RECORDS:]))
        del records[-SLICE_RECORDS:]
    yield Changes(next(txn), snapshot.header, puts=dict(records))


def _runs(blobs: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """Group the blobs, given by number and size, into runs of up to SLICE_BYTES, or of one blob."""
    run: list[int] = []
    size = 0
    for number, nbytes in blobs:
        if run and size + nbytes > SLICE_BYTES:
            yield run
            run, size = [], 0
        run.append(number)
        size += nbytes
    if run:
        yield run
