"""Shape of ingested items: maps the rows of files to the columns of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, DataFrameReader
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import BinaryType

from sluiceway.kernel.errors import invalid
from sluiceway.spark.jobs.files import CSV, JSON, TEXT

JSON_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Spark's own formats would cut off the microseconds."""

_CSV = {"header": "true", "multiLine": "true", "escape": '"', "enforceSchema": "false"}
_ITEM = (
    "payload string, kind string, encoding string, reference string, key string, priority string, headers map<string,string>, "
    "enqueue_at string"
)
_PARSED = {"priority": "int", "enqueue_at": "timestamp"}
"""Columns that are read from lines as texts, and their types."""
_COLUMNS = ("payload", "kind", "encoding", "reference", "key", "priority", "headers", "enqueue_at")


@dataclass(frozen=True, slots=True)
class Shape:
    """Mapping of a row's parts to an item's; by default the payload is the row as JSON, or the unchanged line.

    `payload`, `kind`, `reference` and `key` name columns; `every_kind` is the kind of all items. `items`: the rows have an item's own
    columns.
    """

    payload: str | None = None
    kind: str | None = None
    reference: str | None = None
    every_kind: str | None = None
    items: bool = False
    key: str | None = None

    def check(self, format: str, with_options: bool) -> None:
        """Raises `invalid_request` for contradictory settings."""
        named = self.payload or self.kind or self.reference or self.key
        if self.kind and self.every_kind:
            raise invalid("kind", "give one kind for all items, or the column with the kind, not both")
        if self.items and (named or self.every_kind):
            raise invalid("items", "rows that are items have their payload and kind already; leave out the other columns")
        if format == TEXT and (named or self.items):
            raise invalid("format", "a line of text has no columns")

    def as_list(self) -> list[object]:
        """The fields that decide the items, for a write id."""
        fields = list(astuple(self))
        # Without a key as before there were keys: an ingest that is run again then adds nothing.
        return fields if self.key else fields[:-1]


def reader_options(format: str, options: Mapping[str, str]) -> dict[str, str]:
    """The reader's options with non-Spark defaults. Spark's option names are case-insensitive, so a given one must replace its default."""
    given = {name.lower() for name in options}
    defaults = _CSV if format == CSV else {}
    return {name: value for name, value in defaults.items() if name.lower() not in given} | dict(options)


def shaped(
    reader: DataFrameReader | DataStreamReader, format: str, paths: str | list[str], options: Mapping[str, str], shape: Shape
) -> DataFrame:
    """The files' rows in the sink's columns. Raises `invalid_request` for a missing column."""
    source: Any = reader
    if format == TEXT or (format == JSON and not options):
        lines = source.format("text").options(**options).load(paths)
        return _lines(lines, shape) if format == TEXT else _json_lines(lines.where(F.trim("value") != ""), shape)
    rows = source.format(format).options(**reader_options(format, options)).load(paths)
    return _items(rows) if shape.items else _rows(rows, shape)


def to_json(row: Column) -> Column:
    return F.to_json(row, JSON_TIMES)


def column(frame: DataFrame, name: str) -> Column:
    """The column of that exact name, whatever its characters. Raises `invalid_request`."""
    if name not in frame.columns:
        raise invalid("column", f"there is no column {name!r}; there are {', '.join(frame.columns)}")
    return frame["`{}`".format(name.replace("`", "``"))]


def _item(payload: Column, kind: Column | None, reference: Column | None, key: Column | None) -> list[Column]:
    optional = {"kind": kind, "reference": reference, "key": key}
    return [payload.alias("payload"), *(each.alias(name) for name, each in optional.items() if each is not None)]


def _lines(lines: DataFrame, shape: Shape) -> DataFrame:
    # As bytes: a line need not be valid text.
    kind = None if shape.every_kind is None else F.lit(shape.every_kind)
    return lines.select(*_item(F.col("value").cast("binary"), kind, None, None))


def _json_lines(lines: DataFrame, shape: Shape) -> DataFrame:
    """Bypasses Spark's own reader, so that lines stay unchanged and numbers are not rounded."""
    if shape.items:
        rows = lines.select(F.from_json("value", _ITEM).alias("item")).select("item.*")
        return rows.select(*(_parsed(name, _PARSED[name]) if name in _PARSED else F.col(name) for name in rows.columns))

    kind = _member(shape.kind) if shape.every_kind is None else F.lit(shape.every_kind)
    payload = F.col("value").cast("binary") if shape.payload is None else _member(shape.payload)
    assert payload is not None
    return lines.select(*_item(payload, kind, _member(shape.reference), _member(shape.key)))


def _parsed(name: str, kind: str) -> Column:
    """The text column as that type. Fails the load for any other text: with a null in its place, the item would be served at once."""
    text = F.col(name)
    value = text.try_cast(kind)
    wrong = F.raise_error(F.concat(F.lit(f"{name} is no {kind}: "), text))
    return F.when(text.isNotNull() & value.isNull(), wrong).otherwise(value).alias(name)


def _member(name: str | None) -> Column | None:
    """That member of the line's object: a text as it is, the rest as Spark writes JSON. Raises `invalid_request` for a name that Spark's
    JSON paths cannot express."""
    if name is None:
        return None
    if not set(name) & set("'?"):
        return F.get_json_object("value", f"$['{name}']")
    if set(name) & set(".[?"):
        raise invalid(
            "column", f"{name!r} cannot be told from a path; read the file with an option of Spark's reader, such as mode=PERMISSIVE"
        )
    return F.get_json_object("value", f"$.{name}")


def _rows(rows: DataFrame, shape: Shape) -> DataFrame:
    def text(name: str | None) -> Column | None:
        return None if name is None else column(rows, name).cast("string")

    if shape.payload is None:
        payload = to_json(F.struct(*(column(rows, name) for name in rows.columns)))
    else:
        payload = column(rows, shape.payload)
        if not isinstance(rows.schema[shape.payload].dataType, BinaryType):
            payload = payload.cast("string")
    kind = text(shape.kind) if shape.every_kind is None else F.lit(shape.every_kind)
    return rows.select(*_item(payload, kind, text(shape.reference), text(shape.key)))


def _items(rows: DataFrame) -> DataFrame:
    column(rows, "payload")
    return rows.select(*(name for name in _COLUMNS if name in rows.columns))
