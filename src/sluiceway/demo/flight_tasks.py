"""What a task of the streaming query does with its flights, in Arrow: payloads to rows, two joins, a Parquet file for each month.

A replayed batch has the same items in the same tasks, so the files get the same names and contents.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq
from pyspark import TaskContext

CANCELLED, LOST = "cancelled: it never departed", "departed, and never arrived"
FAULTS = "id string, attempts int, fault string"
_OF_ITEM = ("id", "attempts", "reference")


@dataclass(frozen=True, slots=True)
class FlightTasks:
    """`flight`: the members of a payload. `airlines`: by `carrier`; `planes`: by `tailnum`."""

    flight: pa.Schema
    airlines: pa.Table
    planes: pa.Table

    def store(self, batches: Iterator[pa.RecordBatch], batch: int, table: Path) -> Iterator[pa.RecordBatch]:
        """Write the flights that arrived into `table`; the others are returned as `FAULTS`."""
        if not (found := list(batches)):
            return
        rows = self._rows(pa.Table.from_batches(found))
        arrived = rows["arr_time"].is_valid()
        self._write(rows.filter(arrived).drop_columns(["id", "attempts"]), batch, table)
        never = rows.filter(pc.invert(arrived))
        fault = pc.if_else(never["dep_time"].is_valid(), LOST, CANCELLED)
        yield from never.select(["id", "attempts"]).append_column("fault", fault).to_batches()

    def _rows(self, items: pa.Table) -> pa.Table:
        lines = b"\n".join(items["payload"].to_pylist())
        rows = pa.json.read_json(
            io.BytesIO(lines),
            pa.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            pa.json.ParseOptions(explicit_schema=self.flight, unexpected_field_behavior="error"),
        )
        for name in _OF_ITEM:
            rows = rows.append_column(name, items[name])
        return rows.join(self.airlines, "carrier", use_threads=False).join(self.planes, "tailnum", use_threads=False)

    def _write(self, rows: pa.Table, batch: int, table: Path) -> None:
        task = TaskContext.get()
        assert task is not None
        name = f"part-{task.partitionId()}.parquet"
        for month in pc.unique(rows["month"]).to_pylist():
            folder = table / f"month={month}" / f"batch={batch}"
            folder.mkdir(parents=True, exist_ok=True)
            # Spark reads no file whose name begins with a dot, which is all that a killed task leaves.
            unfinished = folder / f".{name}"
            pq.write_table(rows.filter(pc.equal(rows["month"], month)).drop_columns(["month"]), unfinished)
            unfinished.replace(folder / name)
