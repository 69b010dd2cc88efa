"""Items as Arrow tables, without a Python object per item. pyarrow is imported only with this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("Arrow tables need pyarrow: pip install 'sluiceway-client[arrow]'", name=error.name) from None

from sluiceway.client.answers import Completed, Lease
from sluiceway.kernel.errors import invalid

ROWS = pa.schema(
    [
        pa.field("id", pa.utf8(), nullable=False),
        pa.field("origin", pa.utf8(), nullable=False),
        pa.field("queue", pa.utf8(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("enqueued_at", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("kind", pa.utf8()),
        pa.field("encoding", pa.utf8()),
        pa.field("reference", pa.utf8()),
        pa.field("key", pa.utf8()),
        pa.field("priority", pa.int32()),
        pa.field("unique_key", pa.utf8()),
        pa.field("headers", pa.map_(pa.utf8(), pa.utf8())),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("lease_id", pa.utf8(), nullable=False),
    ]
)
"""The columns of `LeasedTable.rows`, which are those of the Spark source."""


class _Head(msgspec.Struct):
    """The answer without its items, from the schema's metadata."""

    queue_name: str
    incarnation: str
    partition: int | None = None
    leases: list[Lease] = []
    completed: Completed | None = None
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class BrowsedTable:
    """A page of a partition's items at one moment.

    `table` has the columns of `docs/reference/api.md`. `cursor`: the next page's; None: the last. What reads Arrow takes the page as it is:
    `polars.DataFrame(page)`, `pyarrow.table(page)`.
    """

    queue_name: str
    incarnation: str
    partition: int
    cursor: str | None
    table: pa.Table

    def ids(self) -> pa.ChunkedArray:
        """The items' ids, in the table's order, as a column of text."""
        return _ids(self.incarnation, self.table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the table by Arrow's C stream interface."""
        return self.table.__arrow_c_stream__(requested_schema)


@dataclass(frozen=True, slots=True)
class LeasedTable:
    """The answer of a lease call.

    `table` has the columns that `docs/reference/api.md` lists for Arrow. It is empty if no items were leased. What reads Arrow takes the
    answer as it is: `polars.DataFrame(leased)`, `pyarrow.table(leased)`.
    """

    queue_name: str
    incarnation: str
    partition: int | None
    leases: list[Lease]
    table: pa.Table
    completed: Completed | None = None

    @property
    def lease_ids(self) -> list[str]:
        return [lease.lease_id for lease in self.leases]

    @property
    def lease_deadline(self) -> datetime | None:
        """The earliest deadline of the leases."""
        return min((lease.lease_deadline for lease in self.leases), default=None)

    def ids(self) -> pa.ChunkedArray:
        """The items' ids, in the table's order, as a column of text."""
        return _ids(self.incarnation, self.table)

    def first_other(self, ids: pa.ChunkedArray) -> str | None:
        """The first of the ids that is of no item in the table; None: there is none."""
        others = ids.filter(pc.invert(pc.is_in(ids, self.ids().combine_chunks())))
        return str(others[0].as_py()) if len(others) else None

    def rows(self) -> pa.Table:
        """The items with the columns and types of `ROWS`, whatever these items have values for, so that such tables can be put together.

        They are in one piece. `id` names an item in its outcome; `origin` is the same in each of its attempts.
        """
        table = self.table.combine_chunks()
        own = _ids(self.incarnation, table, "origin_offset")
        number = pc.binary_join_element_wise("L", table["lease"].cast(pa.utf8()), "")
        made = {
            "id": self.ids(),
            "origin": pc.coalesce(table["origin"], own) if "origin" in table.schema.names else own,
            "queue": pa.repeat(self.queue_name, len(table)),
            "lease_id": pc.binary_join_element_wise(self.incarnation, table["partition"].cast(pa.utf8()), number, "."),
        }
        there = {name: table[name] for name in table.schema.names} | made
        columns = [there[field.name].cast(field.type) if field.name in there else pa.nulls(len(table), field.type) for field in ROWS]
        return pa.Table.from_arrays(columns, schema=ROWS).combine_chunks()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the table by Arrow's C stream interface."""
        return self.table.__arrow_c_stream__(requested_schema)


def _ids(incarnation: str, table: pa.Table, name: str = "offset") -> pa.ChunkedArray:
    """The ids of items of the table's partitions, with the offsets of that column."""
    return pc.binary_join_element_wise(incarnation, table["partition"].cast(pa.utf8()), table[name].cast(pa.utf8()), ".")


def write_stream(rows: object) -> bytes:
    """Encode a record batch, a table, or a data frame that exports Arrow (Polars, pandas) as an Arrow stream. Raises `invalid_request`."""
    table = rows if isinstance(rows, pa.RecordBatch | pa.Table) else _table_of(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write(table)
    return bytes(sink.getvalue())


_PLAIN: list[tuple[Callable[[pa.DataType], bool], pa.DataType]] = [
    (pa.types.is_large_string, pa.string()),
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_large_binary, pa.binary()),
    (pa.types.is_binary_view, pa.binary()),
]


def _table_of(rows: object) -> pa.Table:
    """A data frame as a table, its text and bytes cast from wider types to the API's."""
    expected = "expected a pyarrow Table or RecordBatch, or a data frame that exports Arrow"
    if isinstance(rows, Mapping) or not (hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")):
        raise invalid("rows", f"{expected}, not {type(rows).__name__}")
    try:
        table = pa.table(rows).replace_schema_metadata(None)
        for at, column in enumerate(table.schema):
            plain = next((plain for is_wide, plain in _PLAIN if is_wide(column.type)), column.type)
            if column.name == "payload" and plain == pa.string():
                plain = pa.binary()
            if plain != column.type:
                table = table.set_column(at, column.name, table.column(at).cast(plain))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise invalid("rows", f"{expected}; this {type(rows).__name__} cannot be read as one: {error}") from None
    return table


def read_leased(body: bytes) -> LeasedTable:
    """Decode the Arrow answer of a lease. Raises ValueError (pyarrow's or msgspec's) if the body is not such an answer."""
    head, table = _read(body)
    return LeasedTable(head.queue_name, head.incarnation, head.partition, head.leases, table, head.completed)


def read_browsed(body: bytes) -> BrowsedTable:
    """Decode the Arrow answer of a browse. Raises as `read_leased` does."""
    head, table = _read(body)
    if head.partition is None:
        raise ValueError("the Arrow answer says nothing of its partition")
    return BrowsedTable(head.queue_name, head.incarnation, head.partition, head.cursor, table)


def _read(body: bytes) -> tuple[_Head, pa.Table]:
    with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
        table = stream.read_all()
    metadata = (table.schema.metadata or {}).get(b"sluiceway")
    if metadata is None:
        raise ValueError("the Arrow schema lacks the metadata `sluiceway`")
    return msgspec.json.decode(metadata, type=_Head), table
