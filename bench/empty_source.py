"""The floor of PySpark's API for data sources: a stream source written in Python that calls no server. It gives rows of the same columns
and in batches of the same size as the Sluiceway source, made before they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from sluiceway.spark.rows import SCHEMA

NAME = "empty"


class Rows(InputPartition):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class EmptySource(DataSource):
    """Options: `items` of the whole stream, `most` of a batch, `size` of a payload in bytes, `tasks` of a batch, `chunk`: rows at once."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return SCHEMA

    def streamReader(self, schema: StructType) -> EmptyReader:
        return EmptyReader(schema, *(int(self.options[name]) for name in ("items", "most", "size", "tasks", "chunk")))


class EmptyReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, schema: StructType, items: int, most: int, size: int, tasks: int, chunk: int) -> None:
        self._schema, self._items, self._most, self._size, self._tasks, self._chunk = schema, items, most, size, tasks, chunk

    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing arrives."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = self._items if isinstance(limit, ReadAllAvailable) else self._most
        return {"at": min(self._items, start["at"] + most)}

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is held."""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        rows = end["at"] - start["at"]
        return [Rows(rows * (task + 1) // self._tasks - rows * task // self._tasks) for task in range(self._tasks)] if rows else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Rows)
        whole = _rows(to_arrow_schema(self._schema, timezone="UTC"), min(self._chunk, partition.rows), self._size)
        left = partition.rows
        while left:
            batch = whole.slice(0, min(left, self._chunk))
            left -= batch.num_rows
            yield batch


def _rows(schema: pa.Schema, rows: int, size: int) -> pa.RecordBatch:
    """Rows as of items that were produced with a payload alone: the other optional columns are null."""
    values: dict[str, Any] = {"payload": b"x" * size, "id": "k7f3q2ma.0.123456", "origin": "k7f3q2ma.0.123456"}
    values |= {"queue": "bench", "lease_id": "k7f3q2ma.0.L1", "attempts": 1, "partition": 0, "offset": 0, "enqueued_at": 0}

    def column(field: pa.Field) -> pa.Array:
        if field.name not in values:
            return pa.nulls(rows, field.type)
        return pa.repeat(pa.scalar(values[field.name], field.type), rows)

    return pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)
