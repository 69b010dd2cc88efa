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
    with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
        table = stream.read_all()
    metadata = (table.schema.metadata or {}).get(b"sluiceway")
    if metadata is None:
        raise ValueError("the Arrow schema lacks the metadata `sluiceway`")
    head = msgspec.json.decode(metadata, type=_Head)
    return LeasedTable(head.queue_name, head.incarnation, head.partition, head.leases, table)
