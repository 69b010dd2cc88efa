"""Item search: finds a partition's items by what they have, page by page, within bounds of rows, bytes and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.adapters import system
from sluiceway.core.partition.item_listing import Found, after, from_place
from sluiceway.core.partition.partition import Partition
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.local.answer_budget import first_rows
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.local.snapshot_reader import without_payloads
from sluiceway.model.inspection import Place, Search, SearchedPage
from sluiceway.model.item_filter import column_bit
from sluiceway.model.leased_items import Slice, present, served, take_rows, with_columns
from sluiceway.model.sparse import SparseBatch

_STEP_ROWS = 10_000
"""Items compared between two looks at the clock."""
_STEP_PIECES = 500
"""The same limit in runs of items: each costs some Python work, and may have a blob of its own."""
_STEP_BYTES = 8 << 20
"""The same limit in bytes of blobs, of which a step reads at least one."""
_THREAD_BYTES = 1 << 20
"""Bytes of payloads that are compared in a thread."""


class _Step(NamedTuple):
    """Items to compare, whose blobs have `nbytes`. `next`: the place after them; None: they are the last."""

    found: list[Found]
    nbytes: int
    next: Place | None


async def search(driver: QueueDriver, request: Search) -> SearchedPage:
    """Search on from `request.start`, step by step, until one of the request's bounds is reached. Always makes one step.

    Raises `not_here`, `unavailable`, `partition_damaged`.
    """
    deadline = system.now() + request.request_timeout
    page, place = SearchedPage(), request.start
    finder = _Finder(request, driver.record.incarnation)
    entries = sorted(driver.executor(request.partition).partition.log.dues) if "scheduled" in request.states else []
    while True:
        executor = driver.executor(request.partition)
        step = _step(executor.partition, finder, place, request.rows - page.looked_at, entries)
        wanted = [each.listed.piece for each in step.found if finder.may_match(each.listed.piece)]
        blobs = await driver.blobs(executor.number, wanted, keep=False) if wanted else {}
        if request.wanted.contains is not None and step.nbytes > _THREAD_BYTES:
            # Arrow compares some 300 MB/s, and lets other calls be served meanwhile.
            page.next = await asyncio.to_thread(finder.collect, page, step, blobs)
        else:
            page.next = finder.collect(page, step, blobs)
        if page.next is None or finder.is_full or page.looked_at >= request.rows or system.now() >= deadline:
            return page
        place = page.next
        await asyncio.sleep(0)


class _Finder:
    """Compares the items of a partition with a search. `incarnation`: the queue's."""

    def __init__(self, request: Search, incarnation: str) -> None:
        self.states = request.states
        self._request = request
        self._wanted = request.wanted
        self._names = request.wanted.columns()
        self._item = request.wanted.item
        self._is_own = self._item is not None and self._item[:2] == (incarnation, request.partition)
        self._left, self._room = request.limit, float(MAX_LEASE_BYTES)

    @property
    def is_full(self) -> bool:
        """Whether an answer holds no more items."""
        return self._left == 0 or self._room <= 0

    def may_match(self, piece: Slice) -> bool:
        """Whether any of these items can match, as far as can be told without reading them."""
        if not self._wanted.may_match(piece.columns):
            return False
        return self._item is None or bool(piece.columns & column_bit("origin")) or bool(self._named(piece).any())

    def collect(self, page: SearchedPage, step: _Step, blobs: Mapping[int, pa.RecordBatch | SparseBatch]) -> Place | None:
        """Add the step's matching items to the page, up to the limits. Returns the place at which to search on; None: the end."""
        matching = self._matching_of([each.listed.piece for each in step.found], blobs)
        for at, each in enumerate(step.found):
            listed, found = each.listed, matching.get(at)
            if found is None:
                page.looked_at += len(listed.piece.rows)
                continue
            batch = served(self._request.partition, listed.lease, first_rows([found], self._left)[0], blobs[found.blob])
            if not self._request.payload:
                batch = without_payloads(batch)
            page.rows.append((batch, listed.standing))
            self._left -= batch.num_rows
            self._room -= batch.nbytes
            if self.is_full:
                seen = int(listed.piece.offsets.searchsorted(found.offsets[batch.num_rows - 1])) + 1
                page.looked_at += seen
                return _rest(step, at, seen)
            page.looked_at += len(listed.piece.rows)
        return step.next

    def _matching_of(self, pieces: list[Slice], blobs: Mapping[int, pa.RecordBatch | SparseBatch]) -> dict[int, Slice]:
        """The items that match, by the index of their piece. Compares each blob once, although its rows may be scheduled one by one."""
        by_blob: dict[int, list[int]] = {}
        for at, piece in enumerate(pieces):
            if piece.blob in blobs:
                by_blob.setdefault(piece.blob, []).append(at)
        found: dict[int, Slice] = {}
        for number, those in by_blob.items():
            rows, offsets = (np.concatenate([getattr(pieces[at], name) for at in those]) for name in ("rows", "offsets"))
            order = np.argsort(rows, kind="stable")
            matching = self._matching(pieces[those[0]]._replace(rows=rows[order], offsets=offsets[order]), blobs[number])
            if matching is None:
                continue
            is_match = np.isin(rows, matching.rows)
            ends = np.cumsum([len(pieces[at].rows) for at in those])
            for nth in np.unique(np.searchsorted(ends, np.flatnonzero(is_match), "right")).tolist():
                piece = pieces[those[nth]]
                mask = is_match[ends[nth] - len(piece.rows) : ends[nth]]
                found[those[nth]] = piece._replace(rows=piece.rows[mask], offsets=piece.offsets[mask])
        return found

    def _matching(self, piece: Slice, blob: pa.RecordBatch | SparseBatch) -> Slice | None:
        """The items that match; None: none does."""
        there = present(piece, blob)
        if there is None:
            return None
        chosen = np.ones(len(there.rows), np.bool_)
        if self._names:
            mask = self._wanted.matches(take_rows(with_columns(blob, self._names), there.rows))
            chosen = mask.to_numpy(zero_copy_only=False)
        if self._item is not None:
            chosen = chosen & self._is_item(there, blob)
        return there._replace(rows=there.rows[chosen], offsets=there.offsets[chosen]) if chosen.any() else None

    def _is_item(self, piece: Slice, blob: pa.RecordBatch | SparseBatch) -> npt.NDArray[np.bool_]:
        """For each item, whether the wanted id is its id or its origin."""
        named = self._named(piece)
        if not piece.columns & column_bit("origin"):
            return named
        origin = take_rows(with_columns(blob, ["origin"]), piece.rows).column(0)
        # An item with an origin was produced elsewhere: the offset of its row is not it.
        moved = origin.is_valid().to_numpy(zero_copy_only=False)
        same = pc.fill_null(pc.equal(origin, str(self._item)), False).to_numpy(zero_copy_only=False)
        return np.where(moved, same | (named & (piece.offsets == self._offset)), named)

    def _named(self, piece: Slice) -> npt.NDArray[np.bool_]:
        """For each item, whether the wanted id is its id, or that under which it was produced here."""
        at_offset: npt.NDArray[np.bool_] = (piece.offsets == self._offset) | (piece.rows + piece.blob == self._offset)
        return at_offset & self._is_own

    @property
    def _offset(self) -> int:
        return -1 if self._item is None else self._item.offset


def _step(partition: Partition, finder: _Finder, start: Place, most: int, entries: Sequence[int]) -> _Step:
    """The next items to compare, up to `most`: as many as a step may read."""
    found: list[Found] = []
    blobs: set[int] = set()
    left, nbytes = min(_STEP_ROWS, most), 0
    for each in from_place(partition, finder.states, start, entries):
        piece = each.listed.piece
        if found and (not left or len(found) == _STEP_PIECES or nbytes >= _STEP_BYTES):
            return _Step(found, nbytes, each.place)
        if piece.blob not in blobs and finder.may_match(piece):
            blobs.add(piece.blob)
            nbytes += partition.log.blobs[piece.blob].nbytes
        if len(piece.rows) > left:
            found.append(each._replace(listed=each.listed._replace(piece=first_rows([piece], left)[0])))
            return _Step(found, nbytes, after(each, left))
        found.append(each)
        left -= len(piece.rows)
    return _Step(found, nbytes, None)


def _rest(step: _Step, at: int, seen: int) -> Place | None:
    """The place after the first `seen` items of the step's run `at`."""
    if seen < len(step.found[at].listed.piece.rows):
        return after(step.found[at], seen)
    return step.found[at + 1].place if at + 1 < len(step.found) else step.next
