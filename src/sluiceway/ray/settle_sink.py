"""A sink for Ray Data that settles leased items, by row, once their results are stored.

Write tasks stage outcomes in the items' leases. The driver closes these when all tasks have ended well, and that puts the outcomes into
effect. So a task may run twice, and a job that fails has settled nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from ray.data import Datasink
from ray.data.block import BlockAccessor
from ray.data.datasource.datasink import WriteResult

from sluiceway.client.outcome_rows import OUTCOMES, outcome_table
from sluiceway.kernel.errors import invalid
from sluiceway.ray.queue_source import QueueSource

_OF_OUTCOMES = ("outcome", "retry_after_ms", "reason")


@dataclass(frozen=True)
class Staged:
    """What one write task did: the ids whose outcomes are staged, and what the sink of the results returned, with rows and bytes."""

    ids: pa.Array
    returned: Any = None
    rows: int = 0
    size_bytes: int = 0


class SettleSink(Datasink):  # type: ignore[misc]
    """Settles the items of a `QueueSource`, for `Dataset.write_datasink`. Give it the source that was read.

    A row names its item by `id`. Without a column `outcome`, each row's item is done. With it, a row has `done`, `retry` or `dead`, and may
    have `retry_after_ms` (with `retry`) and `reason` (see `Client.settle_arrow`). Items without a row are released when the sink ends.

    `after` is the sink that stores the results: it gets the rows that are done, without the columns of outcomes. Items are settled after it
    has stored all of them, and its `on_write_complete` has returned. If anything fails, no item is settled, though some results may be
    stored: write such that it may be repeated, or drop doubles by `origin`.
    """

    def __init__(self, source: QueueSource, after: Datasink | None = None) -> None:
        self._source: QueueSource | None = source
        self._address = source.address
        self._after = after

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        if self._after is not None:
            self._after.on_write_start(_without_outcomes(schema))

    def write(self, blocks: Iterable[Any], ctx: Any) -> Staged | None:
        tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
        tables = [table for table in tables if len(table)]
        if not tables:
            return None
        outcomes = pa.concat_tables(map(_outcomes, tables), promote_options="default")
        returned, rows, size = None, 0, 0
        if self._after is not None:
            results = [_results(table) for table in tables]
            returned = self._after.write(results, ctx)
            rows, size = sum(map(len, results)), sum(table.nbytes for table in results)
        with self._address.client() as client:
            ignored = {each.id: each.reason for each in client.settle_arrow(self._address.queue_name, outcomes).ignored}
        if "unknown" in ignored.values():
            raise invalid("id", f"an id is of no item of the queue {self._address.queue_name!r}")
        ids = outcomes["id"].combine_chunks()
        return Staged(ids.filter(pc.invert(pc.is_in(ids, pa.array(list(ignored), pa.utf8())))), returned, rows, size)

    def on_write_complete(self, write_result: WriteResult[Staged]) -> None:
        if self._source is None:
            raise invalid("source", "only the driver's own sink settles")
        # Tasks without rows have none.
        staged = [each for each in write_result.write_returns if isinstance(each, Staged)]
        if self._after is not None:
            returned = [each.returned for each in staged]
            rows, size = sum(each.rows for each in staged), sum(each.size_bytes for each in staged)
            self._after.on_write_complete(WriteResult(rows, size, returned))
        self._source.settle([each.ids for each in staged])

    def on_write_failed(self, error: Exception) -> None:
        if self._after is not None:
            self._after.on_write_failed(error)

    @property
    def supports_distributed_writes(self) -> bool:
        return self._after is None or bool(self._after.supports_distributed_writes)

    @property
    def min_rows_per_write(self) -> int | None:
        return None if self._after is None else self._after.min_rows_per_write

    def get_name(self) -> str:
        return "Settle" if self._after is None else f"{self._after.get_name()}+Settle"

    def __getstate__(self) -> dict[str, Any]:
        """The copies in write tasks stage; only the driver's own closes leases."""
        return self.__dict__ | {"_source": None}


def _outcomes(table: pa.Table) -> pa.Table:
    """The columns of an outcome. Raises `invalid_request` if there is no `id`, and as `outcome_table` does."""
    if "id" not in table.schema.names:
        raise invalid("id", f"this column is required; the columns are {', '.join(table.schema.names)}")
    chosen = table.select(["id", *(name for name in _OF_OUTCOMES if name in table.schema.names)])
    if "outcome" not in chosen.schema.names:
        chosen = chosen.append_column("outcome", pa.repeat(OUTCOMES[0], len(chosen)))
    return outcome_table(chosen)


def _results(table: pa.Table) -> pa.Table:
    """The rows that are done, for the sink of the results."""
    if "outcome" in table.schema.names:
        table = table.filter(pc.equal(table["outcome"], OUTCOMES[0]))
    return table.drop_columns([name for name in _OF_OUTCOMES if name in table.schema.names])


def _without_outcomes(schema: Any) -> Any:
    if not isinstance(schema, pa.Schema):
        return schema
    return pa.schema([field for field in schema if field.name not in _OF_OUTCOMES])
