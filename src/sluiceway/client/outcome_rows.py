"""Rows of outcomes in columns, without a Python object for each: their checks, and the bodies of the calls that stage them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.client.arrow import ROWS, write_stream
from sluiceway.client.item_calls import Outcomes
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_SCHEDULE, MAX_TEXT_BYTES

OUTCOMES = ("done", "retry", "dead")

_TYPES = {"partition": pa.int32(), "offset": pa.int64(), "outcome": pa.utf8(), "retry_after_ms": pa.int64(), "reason": pa.utf8()}
_POSITION = ("partition", "offset")
_USED = ("id", *_TYPES)
_MAY_STAY = {*_USED, *ROWS.names, "lease", "origin_offset"}
"""Columns that rows of outcomes may have: those of an outcome, and what is left of the items'."""
_ID = r"^(?P<incarnation>[^.]+)\.(?P<partition>[0-9]{1,9})\.(?P<offset>[0-9]{1,18})$"


def outcome_table(rows: object) -> pa.Table:
    """The columns of an outcome: `id`, or `partition` and `offset`, and `outcome`, `retry_after_ms` and `reason` as far as there are such.

    Raises `invalid_request` that names a column which is missing, unknown, or of another type, or has a null where that means nothing.
    """
    expected = "expected outcomes as a pyarrow Table or RecordBatch, a data frame that exports Arrow, or a dict of columns"
    if not (isinstance(rows, Mapping) or hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")):
        raise invalid("rows", f"{expected}, not {type(rows).__name__}")
    try:
        table = pa.table(rows).replace_schema_metadata(None)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise invalid("rows", f"{expected}; this {type(rows).__name__} cannot be read as one: {error}") from None
    names = table.schema.names
    for name in names:
        if name not in _MAY_STAY or names.count(name) > 1:
            raise invalid(name, f"not a column of an outcome, or more than one; expected {', '.join(_USED)}")
    if "outcome" not in names:
        raise invalid("outcome", f"this column is required; the columns are {', '.join(names) or 'none'}")
    if "id" not in names and not all(name in names for name in _POSITION):
        raise invalid("id", "the column id is required, or partition and offset")
    positions = ("id",) if "id" in names else _POSITION
    wanted = [name for name in (*positions, "outcome", "retry_after_ms", "reason") if name in names]
    made = pa.table({name: _column(table[name], name) for name in wanted}).combine_chunks()
    for name in positions:
        if made[name].null_count:
            raise invalid(name, f"{made[name].null_count:,} rows have none")
    for batch in made.to_batches():
        check_values(batch)
    return made


def _column(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """The column with the type that it has on the wire. pandas has whole numbers as floating-point ones where some are missing."""
    kind, given = _TYPES.get(name, pa.utf8()), column.type
    if pa.types.is_dictionary(given):
        given = given.value_type
    is_text = pa.types.is_string(kind)
    fits = _TEXTS if is_text else _NUMBERS if name == "retry_after_ms" else _NUMBERS[:1]
    if not any(is_one(given) for is_one in (*fits, pa.types.is_null)):
        raise invalid(name, f"the column must be {'text' if is_text else 'whole numbers'}, not {column.type}")
    try:
        if pa.types.is_dictionary(column.type):
            # Arrow decodes no dictionary of Polars's texts.
            return pa.chunked_array([chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks], kind)
        return column.cast(kind)
    except pa.ArrowException as error:
        raise invalid(name, str(error).partition("\n")[0]) from None


_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating)


def outcome_bodies(table: pa.Table) -> Iterator[Outcomes]:
    """The bodies of `queue.settle` for an `outcome_table`, of up to 10,000 rows each. Raises `invalid_request` for a malformed id."""
    for incarnation, located in _located(table):
        for start in range(0, len(located), MAX_ITEMS_ARROW):
            part = located.slice(start, MAX_ITEMS_ARROW)
            yield Outcomes(incarnation, pc.unique(part["partition"]).to_pylist(), write_stream(part))


def outcome_counts(table: pa.Table) -> dict[str, int]:
    """The numbers of rows of an `outcome_table`, by outcome."""
    return {name: pc.sum(pc.equal(table["outcome"], name)).as_py() or 0 for name in OUTCOMES}


def _located(table: pa.Table) -> Iterator[tuple[str | None, pa.Table]]:
    """The outcomes by position, grouped by the incarnation that the ids name: a single one, unless they are of a deleted queue, too."""
    if "id" not in table.schema.names:
        yield None, table
        return
    ids = table["id"].combine_chunks()
    parts = pc.extract_regex(ids, pattern=_ID)
    if parts.null_count:
        bad = ids.filter(parts.is_null())[0].as_py()
        raise invalid("id", f"{bad[:64]!r} is not an item id such as k7f3q2ma.0.1042")
    incarnations = pc.struct_field(parts, "incarnation")
    columns = {name: pc.struct_field(parts, name).cast(_TYPES[name]) for name in _POSITION}
    located = pa.table(columns | {name: table[name] for name in table.schema.names if name != "id"})
    for name in pc.unique(incarnations).to_pylist():
        yield name, located.filter(pc.equal(incarnations, name))


def outcome_ids(table: pa.Table, incarnation: str) -> pa.ChunkedArray:
    """The ids of the items in a table of outcomes. Positions are of that incarnation."""
    if "id" in table.schema.names:
        return table["id"]
    partition, offset = (table[name].cast(pa.utf8()) for name in _POSITION)
    return pc.binary_join_element_wise(incarnation, partition, offset, ".")


def check_values(batch: pa.RecordBatch) -> None:
    """Raise `invalid_request` that names the column and an item, for a value that the server would refuse."""

    def check(name: str, wrong: pa.Array, what: str) -> None:
        rows = pc.indices_nonzero(wrong)
        if len(rows):
            row = rows[0].as_py()
            value = _value(batch.column(name), row)
            shown = "null" if value is None else repr(value[:40]) if isinstance(value, str) else f"{value:,}"
            more = f" ({len(rows):,} such rows at once)" if len(rows) > 1 else ""
            raise invalid(name, f"{shown} of item {_named(batch, row)} {what}{more}")

    outcome = batch.column("outcome")
    check("outcome", pc.invert(pc.is_in(outcome, pa.array(OUTCOMES))), "is not an outcome; expected done, retry or dead")
    if "retry_after_ms" in batch.schema.names:
        after = batch.column("retry_after_ms").cast(pa.int64())
        out_of_range = pc.or_(pc.less(after, 0), pc.greater(after, MAX_SCHEDULE)).fill_null(False)
        check("retry_after_ms", out_of_range, f"is not from 0 to {MAX_SCHEDULE:,} milliseconds")
        alone = pc.and_(after.is_valid(), pc.not_equal(outcome, "retry"))
        check("retry_after_ms", alone, "requires the outcome retry; it is null with others")
    if "reason" in batch.schema.names:
        long = pc.greater(pc.binary_length(batch.column("reason")), MAX_TEXT_BYTES).fill_null(False)
        check("reason", long, f"is longer than {MAX_TEXT_BYTES:,} bytes")
        check("reason", no_text(batch.column("reason")), "is not UTF-8")


def _named(batch: pa.RecordBatch, row: int) -> str:
    names = ("id",) if "id" in batch.schema.names else _POSITION
    return ".".join(str(_value(batch.column(name), row))[:64] for name in names)


def _value(column: pa.Array, row: int) -> Any:
    """A value for a message, with other characters in place of bytes that are no text."""
    if not any(is_one(column.type) for is_one in _TEXTS):
        return column[row].as_py()
    data = column.slice(row, 1).cast(pa.binary())[0].as_py()
    return None if data is None else data.decode(errors="replace")


# -- texts, which some engines do not check ---------------------------------------------------------------------------


def is_text(column: pa.Array) -> bool:
    """Whether all values are UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def no_text(column: pa.Array) -> pa.Array:
    """Which values are not UTF-8. Spark, for one, makes texts of binary columns without a check."""
    if is_text(column):
        return pa.repeat(False, len(column))
    return pa.array([is_no_text(value) for value in column.cast(pa.binary()).to_pylist()])


def is_no_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return True
    return False
