"""Failed attempts of a partition's unsettled items: what is known of the last few of each item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from pyroaring import BitMap

from sluiceway.core.partition.records import LeaseState, Part, by_part, from_array, pack, pack_bits, rows_of_part, to_array, unpack_bits
from sluiceway.model.requests import Failure

KEPT = 5
"""Failed attempts of an item that are kept, the latest."""
MAX_NOTES = 1_000
MAX_BYTES = 1 << 20
"""Per partition. The oldest notes are forgotten first."""


class NoteRecord(msgspec.Struct, array_like=True):
    failure: Failure
    blob: int
    rows: bytes


_unpack = msgspec.msgpack.Decoder(NoteRecord).decode


class Note:
    """A failure, and the rows of a blob that it was the failure of."""

    __slots__ = ("blob", "failure", "nbytes", "rows")

    def __init__(self, failure: Failure, blob: int, rows: BitMap) -> None:
        self.failure, self.blob, self.rows = failure, blob, rows
        self.nbytes = len(failure.reason) + len(failure.trace) + 100


class FailureNotes:
    """Notes by number. Items that failed in the same way at the same attempt share one: a failing dependency fails many at once.

    `touched` are the numbers of notes to write. Notes go with their blob; until then they may list rows that have been settled.
    """

    def __init__(self) -> None:
        self.touched: dict[int, None] = {}
        """A dict for its order: the same history must give the same bytes in every process."""
        self._notes: dict[int, Note] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        """By what makes two notes the same."""
        self._by_blob: dict[int, dict[int, dict[int, None]]] = {}
        """By blob and attempt."""
        self._next = 0
        self._nbytes = 0
        self.latest: Failure | None = None
        """The latest failure, since this owner has had the partition."""

    def numbers(self) -> list[int]:
        """The numbers of all notes, the oldest first."""
        return list(self._notes)

    # ---- notes --------------------------------------------------------------------------------------------------

    def note(self, lease: LeaseState, positions: BitMap, failure: Failure) -> None:
        """Note that an attempt failed at those positions of a lease. The attempt's number is that of each item."""
        for part, chosen in by_part(lease, positions):
            blob, rows = part.extent.blob.number, rows_of_part(part, chosen)
            self._add(blob, rows, failure._replace(attempt=part.extent.attempts + 1))
            self._forget_rows(blob, rows, part.extent.attempts + 1 - KEPT)
        self.latest = failure
        while len(self._notes) > MAX_NOTES or self._nbytes > MAX_BYTES:
            self._remove(next(iter(self._notes)))

    def _add(self, blob: int, rows: BitMap, failure: Failure) -> None:
        number = self._numbers.get(_sameness(blob, failure))
        if number is None:
            self._next += 1
            self._insert(self._next, Note(failure, blob, rows))
            self.touched[self._next] = None
            return
        note = self._notes[number]
        note.failure, note.rows = failure, note.rows | rows
        self.touched[number] = None

    def _insert(self, number: int, note: Note) -> None:
        self._notes[number] = note
        self._numbers[_sameness(note.blob, note.failure)] = number
        self._by_blob.setdefault(note.blob, {}).setdefault(note.failure.attempt, {})[number] = None
        self._nbytes += note.nbytes

    def _forget_rows(self, blob: int, rows: BitMap, attempt: int) -> None:
        for number in list(self._by_blob[blob].get(attempt, ())):
            note = self._notes[number]
            if note.rows & rows:
                note.rows = note.rows - rows
                self.touched[number] = None
                if not note.rows:
                    self._remove(number)

    def _remove(self, number: int) -> None:
        note = self._notes.pop(number)
        self._nbytes -= note.nbytes
        del self._numbers[_sameness(note.blob, note.failure)]
        attempts = self._by_blob[note.blob]
        del attempts[note.failure.attempt][number]
        if not attempts[note.failure.attempt]:
            del attempts[note.failure.attempt]
        if not attempts:
            del self._by_blob[note.blob]
        self.touched[number] = None

    def forget_blob(self, blob: int) -> None:
        """Forget all of a blob, which is gone."""
        for numbers in list(self._by_blob.get(blob, {}).values()):
            for number in list(numbers):
                self._remove(number)

    # ---- queries ------------------------------------------------------------------------------------------------

    def of(self, blob: int, row: int) -> list[Failure]:
        """The failures of an item that are known, the latest last."""
        return [self._notes[number].failure for number in self._of_rows(blob, BitMap([row]))]

    def _of_rows(self, blob: int, rows: BitMap) -> list[int]:
        """The notes on some of those rows, by attempt."""
        levels = sorted(self._by_blob.get(blob, {}).items())
        return [number for _, numbers in levels for number in numbers if self._notes[number].rows & rows]

    def told(self, lease: LeaseState) -> list[tuple[BitMap, str]]:
        """The failures of a lease's open items as texts (`failures_text`), each with the positions of the items that share it."""
        found: dict[tuple[int, ...], BitMap] = {}
        for part, positions in by_part(lease, lease.open_positions()):
            for numbers, those in self._shared(part, positions):
                found.setdefault(numbers, BitMap()).update(those)
        texts = ((those, self._failures(numbers)) for numbers, those in found.items() if numbers)
        return [(those, failures_text(failures, len(those))) for those, failures in texts]

    def _failures(self, numbers: Iterable[int]) -> list[Failure]:
        return sorted((self._notes[number].failure for number in numbers), key=lambda each: each.attempt)

    def _shared(self, part: Part, positions: BitMap) -> Iterator[tuple[tuple[int, ...], BitMap]]:
        """The positions of a part, by the notes that they have in common."""
        rows = rows_of_part(part, positions)
        numbers = self._of_rows(part.extent.blob.number, rows)
        of_all = tuple(number for number in numbers if rows.issubset(self._notes[number].rows))
        if len(of_all) == len(numbers):
            # As where a large batch fails at once: nothing to look at row by row.
            yield of_all, positions
            return
        of_row: dict[int, tuple[int, ...]] = {}
        for number in numbers:
            for row in self._notes[number].rows & rows:
                of_row[row] = (*of_row.get(row, ()), number)
        found: dict[tuple[int, ...], list[int]] = {}
        for row, position in zip(to_array(rows).tolist(), to_array(positions).tolist(), strict=True):
            found.setdefault(of_row.get(row, ()), []).append(position)
        for key, those in found.items():
            yield key, from_array(np.array(those))

    # ---- records ------------------------------------------------------------------------------------------------

    def record(self, number: int) -> bytes | None:
        """The bytes of a note; None if it is gone."""
        note = self._notes.get(number)
        return None if note is None else pack(NoteRecord(note.failure, note.blob, pack_bits(note.rows)))

    def load(self, number: int, data: bytes) -> None:
        """Take over a stored note. They come in order of their numbers."""
        record = _unpack(data)
        self._next = max(self._next, number)
        self._insert(number, Note(record.failure, record.blob, unpack_bits(record.rows)))


def _sameness(blob: int, failure: Failure) -> tuple[object, ...]:
    attempt, _, client_id, reason, trace, host, _ = failure
    return blob, attempt, client_id, reason, trace, host


MAX_TOLD = 4 << 20
"""Bytes that the traces of a transfer's items may take. Without them, ten thousand items of one failure still have its reason."""


def failures_text(failures: list[Failure], items: int) -> str:
    """The failures as JSON for the header of that many items: a list of objects, the latest last, which alone has its trace.

    Texts are cut, since the headers of an item that a client produces have 8 KiB at most, and dead items are produced again.
    """
    *earlier, latest = failures[-KEPT:]
    trace = latest.trace if len(latest.trace) * items <= MAX_TOLD else ""
    cut = [each._replace(reason=_first(each.reason, 300), trace="") for each in earlier]
    cut.append(latest._replace(reason=_first(latest.reason, 1_000), trace=_last(trace, 2_000)))
    return msgspec.json.encode([each.shown() for each in cut]).decode()


def _first(text: str, nbytes: int) -> str:
    return text.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore")


def _last(text: str, nbytes: int) -> str:
    return text.encode("utf-8", "replace")[-nbytes:].decode("utf-8", "ignore")
