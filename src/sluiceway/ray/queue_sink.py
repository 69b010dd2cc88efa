"""A sink for Ray Data: rows become items in keyed chunks, so that a write task that runs again adds nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from ray.data import Datasink
from ray.data.block import BlockAccessor
from ray.data.datasource.datasink import WriteResult

from sluiceway.client import DEFAULT_URL
from sluiceway.client.arrow import ROWS
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.ray.address import Address

_PRODUCED = ("payload", "kind", "encoding", "reference", "key", "priority", "unique_key", "headers", "enqueue_at")
_CHUNK_BYTES = 16 << 20


class QueueSink(Datasink):  # type: ignore[misc]
    """Produces a dataset's rows into a queue, for `Dataset.write_datasink`.

    The column `payload` (bytes or text) is required; `kind`, `encoding`, `reference`, `key`, `priority`, `unique_key`, `headers` and
    `enqueue_at` are optional. The other columns of a `QueueSource` are left out; any further column is an error.

    A task sends its rows in chunks of up to `chunk_items`, each stored whole in one partition under an idempotency key. So a task that Ray
    runs again stores nothing twice, unless its rows differ then: that fails with `key_conflict`. A write that fails leaves the chunks that
    it has stored, and the same write begun anew stores all rows again.
    """

    def __init__(self, queue_name: str, *, url: str = DEFAULT_URL, chunk_items: int = 4_000, api_key: str = "", ca_file: str = "") -> None:
        if not 1 <= chunk_items <= MAX_ITEMS_ARROW:
            raise invalid("chunk_items", f"expected 1 to {MAX_ITEMS_ARROW}")
        self._address = Address(url, queue_name, api_key, ca_file)
        self._chunk_items = chunk_items
        self._write_id = uuid.uuid4().hex

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """Nothing to prepare: the queue must exist."""

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Returns the number of rows."""
        rows = number = 0
        with self._address.client() as client:
            for block in blocks:
                for chunk in _chunks(_items(BlockAccessor.for_block(block).to_arrow()), self._chunk_items):
                    key = f"{self._write_id}/{ctx.task_idx}/{number}"
                    client.produce_arrow(self._address.queue_name, chunk, idempotency_key=key)
                    rows, number = rows + len(chunk), number + 1
        return rows

    def on_write_complete(self, write_result: WriteResult[int]) -> None:
        # Another write has keys of its own.
        self._write_id = uuid.uuid4().hex

    def on_write_failed(self, error: Exception) -> None:
        self._write_id = uuid.uuid4().hex

    def get_name(self) -> str:
        return f"Queue({self._address.queue_name})"


def _items(table: pa.Table) -> pa.Table:
    """The columns of items. Raises `invalid_request` for a column that is neither theirs nor a source's."""
    for name in table.schema.names:
        if name not in _PRODUCED and name not in ROWS.names:
            raise invalid(name, f"unknown column of an item; expected {', '.join(_PRODUCED)}")
    # Ray makes each block's types of its values: a column without any has none, whatever it is in other blocks.
    given = [name for name in table.schema.names if name == "payload" or not pa.types.is_null(table.schema.field(name).type)]
    return table.select([name for name in _PRODUCED if name in given])


def _chunks(table: pa.Table, chunk_items: int) -> Iterator[pa.Table]:
    """The rows, cut by their number, and in halves as long as they are too large for a call."""
    for start in range(0, len(table), chunk_items):
        yield from _halved(table.slice(start, chunk_items))


def _halved(part: pa.Table) -> Iterator[pa.Table]:
    if len(part) == 1 or part.nbytes <= _CHUNK_BYTES:
        yield part
        return
    half = len(part) // 2
    yield from _halved(part.slice(0, half))
    yield from _halved(part.slice(half))
