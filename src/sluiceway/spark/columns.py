"""Columns of a reader: some of an item's, or, with `payloadFormat=json`, those of a user's schema.

PySpark does not tell a source which columns a query uses; only the schema that the user gives does.

Payloads are parsed in bulk. Payloads that do not fit are located by bisection down to some hundreds of rows, and there by decoding each one
by itself, in one pass, so that no other row is affected: all of their columns are null, and the text goes into the column
`_corrupt_record`, if the schema has that.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sluiceway.kernel.errors import invalid

log = logging.getLogger("sluiceway.spark")

ITEM = "_item"
"""Struct of item columns in a user's schema. Separate, since payload members may have any name, such as `id`."""

CORRUPT = "_corrupt_record"
"""Spark's name for it."""

_PIECE = 1_000
"""Rows decoded one by one in Python where the parser refuses them together. With more, one bad row costs more; with fewer, many do."""

_TIME = re.compile(
    r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?:[ T]\d\d(?::?\d\d(?::?\d\d(?:\.\d*)?)?)?(?:Z|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
"""Matches every text that the parser accepts as a point in time, and some others."""

_PLAIN = (BooleanType, NumericType, DateType, TimestampType, TimestampNTZType)


def check_columns(schema: StructType, known: StructType) -> StructType:
    """The requested columns. Raises `invalid_request` for one that is not in `known`, or has another type there."""
    types = {field.name: field.dataType.simpleString() for field in known}
    for field in schema:
        if field.name not in types:
            raise invalid("schema", f"there is no column {field.name!r}; an item has {', '.join(types)}")
        if field.dataType.simpleString() != types[field.name]:
            raise invalid("schema", f"the column {field.name!r} is of the type {types[field.name]}, not {field.dataType.simpleString()}")
    return schema


class ItemColumns:
    """Some of the `known` columns of an item. Raises `invalid_request` for others."""

    def __init__(self, schema: StructType, known: StructType) -> None:
        self.read = check_columns(schema, known)

    def make(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows


class JsonColumns:
    """Produces the columns of `schema`: members of payloads, `_item` with some of the `known` columns of an item, and `_corrupt_record`.

    Raises `invalid_request` for a column that cannot be made.
    """

    def __init__(self, schema: StructType, known: StructType) -> None:
        members = [field for field in schema if field.name not in (ITEM, CORRUPT)]
        if not members:
            raise invalid("schema", f"expected columns for members of the payload, such as 'shop int', beside {ITEM} and {CORRUPT}")
        for field in members:
            _check_type(field, field.name)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._struct = pa.struct([self._schema.field(field.name) for field in members])
        item = schema[ITEM].dataType if ITEM in schema.names else StructType([])
        if not isinstance(item, StructType):
            raise invalid("schema", f"{ITEM} is a struct of columns of the item, such as {ITEM} struct<id: string, attempts: int>")
        if CORRUPT in schema.names and not isinstance(schema[CORRUPT].dataType, StringType):
            raise invalid("schema", f"{CORRUPT} is of the type string")
        wanted = {field.name for field in check_columns(item, known)} | {"id", "payload"}
        self.read = StructType([field for field in known if field.name in wanted])
        """The item columns that `make` requires."""

    def make(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert items to rows: the same number, in the same order."""
        payloads = rows.column("payload")
        members = pa.concat_arrays(list(_parse(payloads, self._struct)))
        columns = dict(zip(self._struct.names, members.flatten(), strict=True))
        bad = members.is_null()
        if members.null_count:
            first = rows.column("id").filter(bad)[0]
            log.warning("%d of %d payloads do not match the schema as JSON; the first is that of %s", members.null_count, len(bad), first)
        if ITEM in self._schema.names:
            item = self._schema.field(ITEM).type
            columns[ITEM] = pa.StructArray.from_arrays([rows.column(field.name).cast(field.type) for field in item], fields=list(item))
        if CORRUPT in self._schema.names:
            texts = [payload.decode(errors="replace") for payload in payloads.filter(bad).to_pylist()]
            columns[CORRUPT] = pc.replace_with_mask(pa.nulls(len(rows), pa.utf8()), bad, pa.array(texts, pa.utf8()))
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)


Columns = ItemColumns | JsonColumns


def _parse(payloads: pa.Array, kind: pa.StructType, *, sieved: bool = False) -> Iterator[pa.StructArray]:
    """One struct per payload, in order; null for one that does not fit. `sieved`: they were decoded one by one already."""
    if not len(payloads):
        yield pa.nulls(0, kind)
    elif (found := _parsed(payloads, kind)) is not None:
        yield found
    elif len(payloads) == 1:
        yield pa.nulls(1, kind)
    elif len(payloads) <= _PIECE and not sieved:
        yield _sieved(payloads, kind)
    else:
        middle = len(payloads) // 2
        yield from _parse(payloads[:middle], kind, sieved=sieved)
        yield from _parse(payloads[middle:], kind, sieved=sieved)


def _sieved(payloads: pa.Array, kind: pa.StructType) -> pa.StructArray:
    """Parse payloads of which some do not fit: certain misfits are left out, and the parser decides on the others."""
    may_fit = _may_fit(kind)
    good = np.fromiter((_may_be(payload, may_fit) for payload in payloads.to_pylist()), bool, len(payloads))
    # If no misfit was found, bisection is all that is left.
    parsed = pa.concat_arrays(list(_parse(payloads.filter(pa.array(good)), kind, sieved=True)))
    places = np.where(good, np.cumsum(good) - 1, 0)
    return parsed.take(pa.array(places, pa.int64(), mask=~good))


class _Repeating(dict[str, Any]):
    """A JSON object with `repeated` members."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = {name for name, times in Counter(name for name, _ in pairs).items() if times > 1}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else _Repeating(pairs)


_read = json.JSONDecoder(object_pairs_hook=_object).decode


def _may_be(payload: bytes, may_fit: Callable[[Any], bool]) -> bool:
    """False: the parser certainly refuses the payload."""
    try:
        value = _read(payload.decode())
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    except (ValueError, RecursionError):
        # A number with thousands of digits, or deeply nested values: the parser may skip them.
        return True
    return value is not None and may_fit(value)


def _may_fit(kind: pa.DataType) -> Callable[[Any], bool]:
    """A predicate on decoded values: whether the parser may accept one as this type. False is certain."""
    if pa.types.is_struct(kind):
        members = [(field.name, _may_fit(field.type)) for field in kind]
        names = {name for name, _ in members}

        def may_be_struct(value: Any) -> bool:
            if not isinstance(value, dict):
                return value is None
            # The parser refuses a repeated member, unless it ignores that member.
            once = not isinstance(value, _Repeating) or names.isdisjoint(value.repeated)
            return once and all(may(value.get(name)) for name, may in members)

        return may_be_struct
    if pa.types.is_list(kind):
        each = _may_fit(kind.value_type)
        return lambda value: value is None or (isinstance(value, list) and all(map(each, value)))
    if pa.types.is_integer(kind):
        most = 1 << (kind.bit_width - 1)
        return lambda value: value is None or (type(value) is int and -most <= value < most)
    if pa.types.is_floating(kind):
        return lambda value: value is None or type(value) in (int, float)
    if pa.types.is_boolean(kind):
        return lambda value: value is None or value is True or value is False
    if pa.types.is_string(kind):
        return lambda value: value is None or type(value) is str
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return lambda value: value is None or type(value) in (int, float) or (type(value) is str and _TIME.fullmatch(value) is not None)
    return lambda value: True


def _parsed(payloads: pa.Array, kind: pa.StructType) -> pa.StructArray | None:
    """Parse all of them at once; None: at least one does not fit."""
    try:
        # The parser does not check for UTF-8; the cast does. A payload cannot extend into the next: unclosed brackets end too early. It can
        # only be several values, which shows in the number of values in its list or in total.
        texts = payloads.cast(pa.utf8())
        lines = pc.binary_join_element_wise('{"v":[', texts, "]}\n", "")
        size = pc.sum(pc.binary_length(lines)).as_py()
        found = pa.json.read_json(
            pa.BufferReader(lines.buffers()[2].slice(0, size)),
            # A single block, since payloads may contain line ends, at which other blocks could be cut.
            pa.json.ReadOptions(use_threads=False, block_size=size + 1),
            pa.json.ParseOptions(explicit_schema=pa.schema([("v", pa.list_(_as_parsed(kind)))]), unexpected_field_behavior="ignore"),
        )
        values = found.column("v").combine_chunks()
        each_one = len(values) == len(payloads) and pc.all(pc.equal(pc.list_value_length(values), 1).fill_null(False)).as_py()
        return values.flatten().cast(kind) if each_one else None
    except pa.ArrowInvalid:
        return None


def _as_parsed(kind: pa.DataType) -> pa.DataType:
    """The type given to the parser, which knows points in time as texts, and dates only as numbers."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_parsed(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_parsed(kind.value_type)))
    return pa.timestamp("s") if pa.types.is_date(kind) else kind


def _check_type(field: StructField, name: str) -> None:
    if not field.nullable:
        raise invalid("schema", f"{name} may be missing from a payload, so it cannot be NOT NULL")
    _check_kind(field.dataType, name)


def _check_kind(kind: DataType, name: str) -> None:
    if isinstance(kind, StructType):
        for field in kind:
            _check_type(field, f"{name}.{field.name}")
    elif isinstance(kind, ArrayType):
        _check_type(StructField("element", kind.elementType, kind.containsNull), f"{name}.element")
    elif not isinstance(kind, _PLAIN) and kind.simpleString() != "string":
        advice = "read the column payload as it is, and use from_json"
        raise invalid("schema", f"{name} is of the type {kind.simpleString()}, which cannot be decoded from JSON; {advice}")
