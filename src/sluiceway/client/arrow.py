"""Items as Arrow tables: many at a time, without a Python object for each. Needs pyarrow only when used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.client.answers import Lease


class _Head(msgspec.Struct):
    """The answer without its items: it travels in the schema's metadata."""

    queue_name: str
    incarnation: str
    partition: int | None = None
    leases: list[Lease] = []
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class BrowsedTable:
    """A page of what a partition had at one moment, in the columns of `docs/api.md`. `cursor` is that of the next one; None: the last."""

    queue_name: str
    incarnation: str
    partition: int
    cursor: str | None
    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)


@dataclass(frozen=True, slots=True)
class LeasedTable:
    """What a lease call got. `table` has the columns that `docs/api.md` lists for Arrow; it is empty if there was nothing."""

    queue_name: str
    incarnation: str
    partition: int | None
    leases: list[Lease]
    table: pa.Table

    @property
    def lease_ids(self) -> list[str]:
        return [lease.lease_id for lease in self.leases]

    @property
    def lease_deadline(self) -> datetime | None:
        """The earliest deadline of the leases."""
        return min((lease.lease_deadline for lease in self.leases), default=None)

    def ids(self) -> pa.ChunkedArray:
        """The items' ids, in the table's order, as a column of text."""
        text = pa.utf8()
        return pc.binary_join_element_wise(self.incarnation, self.table["partition"].cast(text), self.table["offset"].cast(text), ".")

    def __len__(self) -> int:
        return int(self.table.num_rows)


def write_stream(rows: pa.RecordBatch | pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write(rows)
    return bytes(sink.getvalue())


def read_leased(body: bytes) -> LeasedTable:
    """Raises ValueError (pyarrow's or msgspec's) if the body is not an Arrow answer of the server."""
    head, table = _read(body)
    return LeasedTable(head.queue_name, head.incarnation, head.partition, head.leases, table)


def read_browsed(body: bytes) -> BrowsedTable:
    """Raises as `read_leased`."""
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
