"""Bad rows: detection of rows that no queue accepts, before they are sent; they are reported, or go to a queue of their own.

The checks depend on the row alone, so that a repeated write divides its rows as before. A time too far ahead depends on the time of the
check, and is left to the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.client.outcome_rows import is_no_text, is_text, no_text
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_HEADER_BYTES, MAX_ITEMS_ARROW, MAX_KEY_BYTES, MAX_PAYLOAD_BYTES, MAX_PRIORITY, MAX_TEXT_BYTES
from sluiceway.model.chunks import row_bytes
from sluiceway.model.items import HEADERS, batch_from_rows

REASON, ROW = "sluiceway-reason", "sluiceway-row"
"""Headers of a bad row's item: its fault, and its place as TASK/ROW."""

_SHOWN = 64 << 10
"""Bytes of an oversized payload that go into the queue for bad rows: enough to recognise it."""

_MOST_BYTES = 64 << 20
"""Maximum bytes of a task's bad items: they are kept in memory until its good rows are written."""

_KEYS = ("key", "unique_key")
_TEXTS = {"kind": MAX_TEXT_BYTES, "encoding": MAX_TEXT_BYTES, "reference": MAX_TEXT_BYTES} | dict.fromkeys(_KEYS, MAX_KEY_BYTES)
"""Short texts of an item, and the maximum bytes of each."""

_NO_TEXT = "not UTF-8"
_BYTES, _PAIRS = pa.binary(), pa.map_(pa.binary(), pa.binary())
"""Texts, and headers, that may be any bytes: Spark does not check what it casts to a string."""


class Sieve:
    """Divides a task's rows. `keep`: bad rows are kept, otherwise they fail the write."""

    def __init__(self, body: str, task: int, *, keep: bool) -> None:
        self._body = body
        self._task = task
        self._keep = keep
        self._rows = 0
        self._kept: list[dict[str, object]] = []
        self._kept_bytes = 0

    def good(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the acceptable rows. Raises `invalid_request` that names the column and the row at fault."""
        for batch in batches:
            reasons = self._reasons(batch)
            if reasons is None:
                yield batch
            else:
                self._take(batch, reasons)
                yield batch.filter(reasons.is_null())
            self._rows += batch.num_rows

    def bad(self) -> list[pa.RecordBatch]:
        """The items for the kept bad rows."""
        return [batch_from_rows(self._kept)] if self._kept else []

    def _reasons(self, batch: pa.RecordBatch) -> pa.Array | None:
        """The fault of each row, null for good rows; None: all are good."""
        payload = batch.column(self._body)
        found = [
            (f"{self._body}: there is no value, and every item needs a payload", payload.is_null()),
            (f"{self._body}: larger than {MAX_PAYLOAD_BYTES:,} bytes", _longer(payload, MAX_PAYLOAD_BYTES)),
        ]
        names = set(batch.schema.names)
        found += [
            (f"{name}: longer than {most:,} bytes", _longer(batch.column(name), most)) for name, most in _TEXTS.items() if name in names
        ]
        found += [
            (f"{name}: empty; a row without one has null", pc.equal(batch.column(name), "").fill_null(False))
            for name in _KEYS
            if name in names
        ]
        found += [(f"{name}: {_NO_TEXT}", no_text(batch.column(name))) for name in _TEXTS if name in names]
        if "priority" in names:
            given = batch.column("priority").cast(pa.int64())
            wrong = pc.or_(pc.less(given, 0), pc.greater(given, MAX_PRIORITY)).fill_null(False)
            found.append((f"priority: not between 0 and {MAX_PRIORITY}", wrong))
        if "headers" in names:
            found += _of_headers(batch.column("headers").cast(HEADERS))
        if "enqueue_at" in names:
            found.append(("enqueue_at: before 1970", pc.less(batch.column("enqueue_at").cast(pa.int64()), 0).fill_null(False)))
        if not any(pc.any(wrong).as_py() for _, wrong in found):
            return None
        reasons = pa.nulls(batch.num_rows, pa.utf8())
        for reason, wrong in reversed(found):
            reasons = pc.if_else(wrong, reason, reasons)
        return reasons

    def _take(self, batch: pa.RecordBatch, reasons: pa.Array) -> None:
        """Handle bad rows one by one: they are few, or the write fails."""
        wrong = pc.indices_nonzero(reasons.is_valid())
        if not self._keep:
            first = wrong[0].as_py()
            column, _, what = reasons[first].as_py().partition(": ")
            many = f"{len(wrong)} of {batch.num_rows} rows" if len(wrong) > 1 else "a row"
            where = f"row {self._rows + first} of task {self._task}{_named(batch, first)}"
            raise invalid(column, f"{what} ({many}; the first is {where}); the option badRows=QUEUE puts such rows into that queue")
        if len(self._kept) + len(wrong) > MAX_ITEMS_ARROW:
            raise invalid(
                "badRows", f"more than {MAX_ITEMS_ARROW:,} rows of task {self._task} are bad; the last: {reasons[wrong[-1].as_py()]}"
            )
        for number in wrong.to_pylist():
            reason = reasons[number].as_py()
            item = self._item(batch, number, reason)
            self._kept_bytes += len(item["payload"]) + _size(item["headers"])
            if self._kept_bytes > _MOST_BYTES:
                raise invalid("badRows", f"more than {_MOST_BYTES >> 20} MiB of the rows of task {self._task} are bad; the last: {reason}")
            self._kept.append(item)

    def _item(self, batch: pa.RecordBatch, number: int, reason: str) -> dict[str, Any]:
        """The item for a bad row. Long values are cut; values that cannot be cut are left out; bytes that are no text are replaced."""

        def value(name: str, kind: pa.DataType = _BYTES) -> Any:
            return batch.column(name).slice(number, 1).cast(kind)[0].as_py() if name in batch.schema.names else None

        payload = value(self._body) or b""
        texts = {name: _text(data)[: most // 4] for name, most in _TEXTS.items() if (data := value(name)) is not None}
        texts = {name: text for name, text in texts.items() if text or name not in _KEYS}
        # The queue for bad rows takes each row, and need not keep items unique.
        texts.pop("unique_key", None)
        told = [(REASON, reason), (ROW, f"{self._task}/{self._rows + number}")]
        pairs = value("headers", _PAIRS) or ()
        own = [(_text(name), _text(data)) for name, data in pairs if data is not None]
        headers = [pair for pair in own if pair[0] not in (REASON, ROW)] + told
        if len(own) < len(pairs) or _size(headers) > MAX_HEADER_BYTES:
            headers = told
        return {"payload": payload if len(payload) <= MAX_PAYLOAD_BYTES else payload[:_SHOWN], **texts, "headers": headers}


def _size(headers: list[tuple[str, str]]) -> int:
    return sum(len(name.encode()) + len(value.encode()) for name, value in headers)


def _of_headers(headers: pa.MapArray) -> list[tuple[str, pa.Array]]:
    large = row_bytes(pa.record_batch({"headers": headers})) > MAX_HEADER_BYTES
    nulls = np.concatenate(([0], np.cumsum(headers.items.is_null().to_numpy(zero_copy_only=False))))
    empty = np.diff(nulls[headers.offsets.to_numpy()]) > 0
    given = headers.is_valid()
    found = [
        (f"headers: larger than {MAX_HEADER_BYTES:,} bytes", pc.and_(pa.array(large), given)),
        ("headers: a header has no value", pc.and_(pa.array(empty), given)),
    ]
    if not (is_text(headers.keys) and is_text(headers.items)):
        rows = headers.cast(_PAIRS).to_pylist()
        wrong = [any(is_no_text(each) for pair in row or () for each in pair) for row in rows]
        found.append((f"headers: {_NO_TEXT}", pa.array(wrong)))
    return found


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _longer(column: pa.Array, most: int) -> pa.Array:
    return pc.greater(pc.binary_length(column), most).fill_null(False)


def _named(batch: pa.RecordBatch, row: int) -> str:
    """The row's reference, for a message."""
    reference = batch.column("reference").slice(row, 1).cast(_BYTES)[0].as_py() if "reference" in batch.schema.names else None
    return f", reference {_text(reference)[:64]!r}" if reference else ""
