"""Row fetcher: reads the rows of an instance's partitions from memory or their store, and delivers them to leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.core.group.group_records import Token
from sluiceway.core.queue.tickets import Commit, Grant
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.backend import Backend
from sluiceway.local.blob_cache import BlobCache
from sluiceway.model.items import decode_blob
from sluiceway.model.leased_items import Slice, present
from sluiceway.model.requests import Leased, LeaseInfo
from sluiceway.model.small_batch import Served, SmallBatch, StoredRows, in_columns
from sluiceway.model.sparse import SparseBatch, decode_stored
from sluiceway.ports.partition_store import DamagedError, PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

MAX_KEPT = 256
"""Maximum rows of a blob kept in memory as they came. Larger blobs take less memory in columns."""
MAX_KEPT_BYTES = 256 << 10
"""The same limit in bytes: an answer copies nothing out of columns."""


Held = tuple[PartitionRef, Token]


class PartitionHandle(NamedTuple):
    """A partition's location, and the token under which it is served here.

    Blobs are cached under both: another owner may reuse the number of a blob that did not land.
    """

    ref: PartitionRef
    token: Token
    backend: Backend


class RowFetcher:
    """Reads the rows that slices refer to. `handle_of` finds a partition's handle, `serves` tells whether it is still served under its
    token, `stop` is called for a partition with damaged data, `give_back` takes leases whose clients have gone."""

    def __init__(
        self,
        cache: BlobCache,
        handle_of: Callable[[int], PartitionHandle],
        serves: Callable[[Held], bool],
        stop: Callable[[int, Exception], None],
        give_back: Callable[[Sequence[LeaseInfo]], None],
    ) -> None:
        self._cache = cache
        self._handle_of = handle_of
        self._serves = serves
        self._stop = stop
        self._give_back = give_back
        self._fetching: dict[tuple[Held, int], asyncio.Task[None]] = {}
        """Reads that are under way before they are asked for, by the blob."""

    def keep(self, effect: Commit) -> None:
        """Cache the blobs being written: most are leased soon."""
        held = self._handle_of(effect.partition)[:2]
        for number, data in effect.changes.blobs.items():
            rows = effect.fresh[number]
            if not isinstance(rows, SmallBatch):
                # Over the blob's own bytes: the fresh rows may be a few views of a large request body, and would keep it alive.
                rows = pa.ipc.read_record_batch(pa.py_buffer(data), rows.schema)
            elif rows.num_rows > MAX_KEPT or rows.nbytes > MAX_KEPT_BYTES:
                rows = decode_blob(data, rows.columns)
            self._put(held, number, rows)

    def _put(self, held: Held, number: int, rows: StoredRows) -> None:
        # A commit or a read may end after the partition has gone, when nothing would drop the blob any more.
        if self._serves(held):
            self._cache.put((held, number), rows)

    def forget(self, held: Held) -> None:
        """Evict all blobs of a partition that is no longer served under that token."""
        self._cache.drop_all(held)

    def fetch(self, effect: Commit) -> None:
        """Begin to read the rows of the leases that are being written, so that they are there when the leases may be answered."""
        slices = [
            piece for ticket, answer in effect.answers if isinstance(answer, Grant) and ticket.waiter.payload for piece in answer.slices
        ]
        if not slices:
            return
        handle = self._handle_of(effect.partition)
        held = handle[:2]
        missing = [piece for piece in slices if (held, piece.blob) not in self._fetching and self._cache.get((held, piece.blob)) is None]
        if not missing:
            return
        reading = asyncio.get_running_loop().create_task(self._fetch(handle, missing))
        for piece in missing:
            self._fetching[held, piece.blob] = reading

        def end(_: asyncio.Task[None]) -> None:
            for piece in missing:
                self._fetching.pop((held, piece.blob), None)

        reading.add_done_callback(end)

    async def _fetch(self, handle: PartitionHandle, slices: Sequence[Slice]) -> None:
        # Whoever needs the rows reads them again, and is told.
        with contextlib.suppress(Exception):
            await self._read(handle, slices, keep=True)

    def drop(self, effect: Commit) -> None:
        """Evict the blobs that the commit has dropped or compacted."""
        held = self._handle_of(effect.partition)[:2]
        for number in (*effect.changes.dropped_blobs, *effect.changes.compacted_blobs):
            self._cache.drop((held, number))

    async def rows(self, partition: int, lease: int, slices: Sequence[Slice]) -> list[pa.RecordBatch]:
        """The rows of the slices, without those settled meanwhile and no longer stored."""
        return [each.batch() for each in await self._served(partition, lease, slices)]

    async def _served(self, partition: int, lease: int, slices: Sequence[Slice]) -> list[Served]:
        blobs = await self._blobs(partition, slices)
        return [
            Served(partition, lease, found, blobs[piece.blob])
            for piece in slices
            if piece.blob in blobs and (found := present(piece, blobs[piece.blob])) is not None
        ]

    async def blobs(self, partition: int, slices: Sequence[Slice], keep: bool = True) -> dict[int, pa.RecordBatch | SparseBatch]:
        """The blobs of the slices, by number, without those that are gone; some may lack rows (`leased_items.present`).

        Without `keep`, those that are read do not displace the cached ones. Raises `unavailable`, `partition_damaged`.
        """
        return {number: in_columns(blob) for number, blob in (await self._blobs(partition, slices, keep)).items()}

    def at_once(self, grants: Sequence[Grant]) -> Leased | None:
        """The answer to a lease whose rows are all in memory; None: `deliver` has to read."""
        rows: list[Served] = []
        for info, slices in grants:
            held = self._handle_of(info.partition)[:2]
            for piece in slices:
                blob = self._cache.get((held, piece.blob))
                if blob is None:
                    return None
                if (found := present(piece, blob)) is not None:
                    rows.append(Served(info.partition, info.number, found, blob))
        return Leased([grant.info for grant in grants], rows)

    async def _blobs(self, partition: int, slices: Sequence[Slice], keep: bool = True) -> dict[int, StoredRows]:
        """The blobs of the slices, by number, without those that are gone. Raises `unavailable`, `partition_damaged`."""
        handle = self._handle_of(partition)
        held = handle[:2]
        fetching = {reading for piece in slices if (reading := self._fetching.get((held, piece.blob))) is not None}
        if fetching:
            await asyncio.wait(fetching)
        found = {piece.blob: self._cache.get((held, piece.blob)) for piece in slices}
        blobs = {number: batch for number, batch in found.items() if batch is not None}
        missing = [piece for piece in slices if piece.blob not in blobs]
        if not missing:
            return blobs
        try:
            return blobs | await self._read(handle, missing, keep)
        except DamagedError as error:
            self._stop(partition, error)
            raise SluicewayError("partition_damaged", str(error)) from error
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"partition {partition} cannot be read: {error}") from error

    async def _read(self, handle: PartitionHandle, slices: Sequence[Slice], keep: bool) -> dict[int, StoredRows]:
        """Read the blobs from the store. Raises what Backend.read does."""
        columns = {piece.blob: piece.columns for piece in slices}
        read = await handle.backend.read(handle.ref, list(columns))
        blobs = {number: decode_stored(data, columns[number]) for number, data in read.items()}
        if keep:
            for number, blob in blobs.items():
                self._put(handle[:2], number, blob)
        return blobs

    async def deliver(self, future: asyncio.Future[Any], grants: Sequence[Grant], keyed: bool) -> None:
        """Answer a lease with its items. Grants that cannot be read are left out, so that the others need not wait: they are given back
        if their store does not answer, and run out otherwise. A client that repeats a `keyed` lease finds them.

        An error if none is left.
        """
        leases: list[LeaseInfo] = []
        away: list[LeaseInfo] = []
        batches: list[Served] = []
        problem: SluicewayError | None = None
        for grant in grants:
            try:
                # Even if the partition has gone by now: the lease is durable, and no other client gets it.
                batches += await self._served(grant.info.partition, grant.info.number, grant.slices)
                leases.append(grant.info)
            except SluicewayError as error:
                problem = error
                away.append(grant.info)
            except Exception:
                log.exception("reading leased items failed")
                problem = SluicewayError("internal", "internal error while reading the items; their lease will run out")
        if not keyed:
            # Nobody learns of these leases.
            self._give_back([*away, *leases] if future.done() else away)
        if future.done():
            return
        if problem is not None and not leases:
            future.set_exception(problem)
        else:
            future.set_result(Leased(leases, batches))
