"""Codec of Arrow streams. A received stream is checked against the call's columns and limits, and fully validated, before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_PRIORITY, MAX_SCHEDULE
from sluiceway.kernel.names import check_text
from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD, PRODUCED, TIME, fit
from sluiceway.model.leased_items import common_schema
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Disposition, Offsets, Produce, Settle, Verdict
from sluiceway.model.small_batch import as_few
from sluiceway.wire.decoding import request_timeout
from sluiceway.wire.ipc_header import batch_header, check_metadata, metadata_at
from sluiceway.wire.item_limits import check_batch, too_many
from sluiceway.wire.json_items import ProduceFields
from sluiceway.wire.json_outcomes import SettleQuery
from sluiceway.wire.outcome_selection import group_rows

METADATA_KEY = b"sluiceway"
_OUTCOMES: tuple[Verdict, ...] = ("done", "retry", "dead")


class Column(NamedTuple):
    """A column of a call: its type after decoding. `also`: other types that a client may send, which are cast to it. `within`: the
    least and the greatest value."""

    type: pa.DataType
    required: bool = False
    nullable: bool = False
    also: tuple[pa.DataType, ...] = ()
    within: tuple[int, int] | None = None


_INTEGERS = (pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_TEXT = Column(pa.utf8(), nullable=True, also=(pa.large_utf8(),))
_PRODUCE = {
    "payload": Column(PAYLOAD.type, required=True, also=(pa.large_binary(), pa.utf8(), pa.large_utf8())),
    **{field.name: _TEXT if field.type == pa.utf8() else Column(field.type, nullable=True) for field in OPTIONAL if field.name in PRODUCED},
    "priority": Column(pa.int8(), nullable=True, also=_INTEGERS, within=(0, MAX_PRIORITY)),
    "enqueue_at": Column(TIME, nullable=True),
}
_SETTLE = {
    "partition": Column(pa.int32(), required=True),
    "offset": Column(pa.int64(), required=True),
    "outcome": Column(pa.utf8(), required=True, also=(pa.large_utf8(),)),
    "retry_after_ms": Column(pa.int64(), nullable=True),
    "reason": _TEXT,
}


def produce_request(query: ProduceFields, body: bytes, record: QueueRecord, now: Millis) -> Produce:
    """Decode an Arrow stream into one produce. A single large batch stays a view of `body`, without a copy.

    `query` has the call's other fields, `now` the time in milliseconds. Raises as `read_stream` and `check_batch` do.
    """
    rows = read_stream(body, _PRODUCE, MAX_ITEMS_ARROW)
    check_batch(rows, now)
    return Produce(as_few(rows) or _in_order(rows), request_timeout(query.request_timeout), query.key(record), bundle=query.bundle)


def _in_order(rows: pa.RecordBatch) -> pa.RecordBatch:
    names = set(rows.schema.names)
    fields = [PAYLOAD, *(field for field in (*OPTIONAL, ENQUEUE_AT) if field.name in names)]
    return pa.RecordBatch.from_arrays([rows.column(field.name) for field in fields], schema=pa.schema(fields))


def settle_request(query: SettleQuery, body: bytes, record: QueueRecord) -> Settle:
    """Decode an Arrow stream into one staging settle. Rows are grouped by partition and disposition without a Python loop over them.

    Raises as `read_stream` does, and `invalid_request` for an unknown outcome or an item with two outcomes.
    """
    rows = read_stream(body, _SETTLE, MAX_ITEMS_ARROW)
    partitions, offsets = (_natural(rows, name) for name in ("partition", "offset"))
    dispositions, disposition_of = _dispositions(rows)
    grouped = group_rows(partitions, offsets, dispositions, disposition_of, check_text(query.incarnation, "incarnation"), record)
    return Settle(grouped.selections, request_timeout(query.request_timeout), stage=True, foreign=grouped.foreign)


def _natural(rows: pa.RecordBatch, name: str) -> Offsets:
    values: Offsets = rows.column(name).to_numpy()
    if (values < 0).any():
        raise invalid(f"items[{int(np.argmax(values < 0))}].{name}", "must not be negative")
    return values


def _dispositions(rows: pa.RecordBatch) -> tuple[list[Disposition], Offsets]:
    """The distinct dispositions of the rows, and an array with each row's index into them."""
    outcomes, outcome_of = _distinct(rows, "outcome")
    delays, delay_of = _distinct(rows, "retry_after_ms")
    reasons, reason_of = _distinct(rows, "reason")
    codes = (outcome_of * len(delays) + delay_of) * len(reasons) + reason_of
    keys, first, disposition_of = np.unique(codes, return_index=True, return_inverse=True)
    dispositions = []
    for key, row in zip(keys.tolist(), first.tolist(), strict=True):
        rest, reason = divmod(key, len(reasons))
        outcome, delay = divmod(rest, len(delays))
        dispositions.append(_disposition(outcomes[outcome], delays[delay], reasons[reason], row))
    return dispositions, disposition_of.astype(np.int64)


def _distinct(rows: pa.RecordBatch, name: str) -> tuple[list[Any], Offsets]:
    if name not in rows.schema.names:
        return [None], np.zeros(rows.num_rows, np.int64)
    encoded = rows.column(name).dictionary_encode(null_encoding="encode")
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _disposition(outcome: str, delay: int | None, reason: str | None, row: int) -> Disposition:
    if outcome not in _OUTCOMES:
        raise invalid(f"items[{row}].outcome", f"{outcome[:40]!r} is not one of {', '.join(_OUTCOMES)}")
    if delay is not None:
        if outcome != "retry":
            raise invalid(f"items[{row}].retry_after_ms", "requires the outcome retry")
        if not 0 <= delay <= MAX_SCHEDULE:
            raise invalid(f"items[{row}].retry_after_ms", f"{delay} is not between 0 and {MAX_SCHEDULE}")
    text = "" if reason is None else check_text(reason, f"items[{row}].reason")
    return Disposition(outcome, retry_after=delay, reason=text)


def read_stream(body: bytes, columns: dict[str, Column], most: int) -> pa.RecordBatch:
    """The stream's rows as one record batch, its columns cast to the types in `columns`.

    Raises `invalid_request` for an unknown, missing or mistyped column and for a null in a required one, `too_many_items` for more than
    `most` rows, and `invalid_body` for a stream that is cut off, compressed, dictionary-encoded or damaged.
    """
    try:
        batches = _batches(body, columns, most)
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        raise _unreadable(str(error).partition("\n")[0][:200]) from None
    rows = batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    return _cast(rows, columns)


def _unreadable(what: str) -> SluicewayError:
    return SluicewayError("invalid_body", f"the body is not a valid Arrow stream: {what}")


def _batches(body: bytes, columns: dict[str, Column], most: int) -> list[pa.RecordBatch]:
    data, source = memoryview(body), pa.BufferReader(pa.py_buffer(body))
    schema: pa.Schema = None
    rows = 0
    batches: list[pa.RecordBatch] = []
    # Only the missing end mark would show that a stream was cut off between two batches.
    while (metadata := metadata_at(data, source.tell())) is not None:
        check_metadata(metadata)
        message = pa.ipc.read_message(source)
        # pyarrow crashes the process when it reads a message as the wrong type, so the type is checked first.
        expected = "schema" if schema is None else "record batch"
        if message.type != expected:
            raise _unreadable(f"a {message.type} message where a {expected} was expected")
        if schema is None:
            schema = pa.ipc.read_schema(message)
            _check_schema(schema, columns)
            continue
        header = batch_header(message.metadata)
        if header.compressed:
            raise _unreadable("its buffers are compressed; send them uncompressed")
        rows += max(0, header.rows)
        if rows > most or len(batches) > most:
            raise too_many("items", rows, most)
        batches.append(pa.ipc.read_record_batch(message, schema))
    if schema is None:
        raise _unreadable("it has no schema")
    if not rows:
        raise invalid("items", "must not be empty")
    return [batch for batch in batches if batch.num_rows]


def _check_schema(schema: pa.Schema, columns: dict[str, Column]) -> None:
    for name in schema.names:
        column = columns.get(name)
        if column is None:
            raise invalid(name[:80], f"unknown column; this call takes {', '.join(columns)}")
        if schema.names.count(name) > 1:
            raise invalid(name, "the column occurs twice")
        actual = schema.field(name).type
        if not _accepted(actual, column):
            raise invalid(name, f"expected a column of type {column.type}, got {str(actual)[:80]}")
    for name, column in columns.items():
        if column.required and name not in schema.names:
            raise invalid(name, f"the column is missing; expected type {column.type}")


def _accepted(actual: pa.DataType, column: Column) -> bool:
    if column.type == HEADERS:
        # Writers choose the names of a map's key and value fields, so only the types are compared.
        return bool(pa.types.is_map(actual)) and actual.key_type == pa.utf8() and actual.item_type == pa.utf8()
    return actual == column.type or actual in column.also


def _cast(rows: pa.RecordBatch, columns: dict[str, Column]) -> pa.RecordBatch:
    arrays = []
    for name in rows.schema.names:
        array, column = rows.column(name), columns[name]
        if array.null_count and not column.nullable:
            first = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            raise invalid(f"items[{first}].{name}", "must not be null")
        check_buffers(array, name)
        if column.type == HEADERS and array.items.null_count:
            raise invalid(name, "a header's value must not be null")
        if column.within is not None:
            _check_within(array, *column.within, name)
        arrays.append(array if array.type == column.type else array.cast(column.type))
    return pa.RecordBatch.from_arrays(arrays, names=rows.schema.names)


def _check_within(array: pa.Array, least: int, most: int, name: str) -> None:
    wrong = pc.or_(pc.less(array, pa.scalar(least, array.type)), pc.greater(array, pa.scalar(most, array.type)))
    row = pc.index(wrong, True).as_py()
    if row >= 0:
        raise invalid(f"items[{row}].{name}", f"{array[row].as_py()} is not between {least} and {most}")


def check_buffers(array: pa.Array, name: str) -> None:
    """Raises `invalid_body` for a binary or text column whose offsets buffer is not a whole number of 32-bit offsets."""
    # pyarrow's validation accepts such a buffer, but code that reads it as an array of integers fails on it.
    if (pa.types.is_binary(array.type) or pa.types.is_string(array.type)) and array.buffers()[1].size % 4:
        raise _unreadable(f"the offsets of column {name!r} are cut off")


def encode_leased(batches: Sequence[pa.RecordBatch], about: dict[str, Any]) -> memoryview:
    """The batches as one Arrow IPC stream. The schema's metadata has `about` as JSON under `sluiceway`. Payloads are copied once."""
    schema = common_schema(batches).with_metadata({METADATA_KEY: msgspec.json.encode(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            stream.write_batch(fit(batch, schema))
    return memoryview(sink.getvalue()).cast("B")
