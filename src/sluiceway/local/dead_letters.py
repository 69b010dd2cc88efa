"""Dead letters and other transferred items: payload and origin, plus, in a dead queue, headers that record the death."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.contract.item_answers import FAILURES_HEADER
from sluiceway.model.item_filter import REASON_HEADER, SOURCE_HEADER
from sluiceway.model.items import HEADERS, PAYLOAD, PRODUCED, fit
from sluiceway.model.leased_items import common_schema
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Offsets

_OURS = "sluiceway-"
_UNCHANGED = (PAYLOAD.name, *(name for name in PRODUCED if name != "headers"))
"""Columns that an item keeps as they are when it dies, and when it is redriven."""


def dead_rows(
    source: QueueRecord, reason: str, batches: list[pa.RecordBatch], failures: Sequence[tuple[Offsets, str]] = ()
) -> pa.RecordBatch:
    """Return a transfer's rows as a batch to produce. Headers are kept, but for those of an earlier death; `origin` is the first id.

    `failures`: what the header `sluiceway-failures` says, by the indexes of the rows that share it.

    The same transfer always gives the same rows, so they contain no time of death: that is when the dead queue took the item.
    """
    schema = common_schema(batches)
    rows = pa.concat_batches([fit(batch, schema) for batch in batches])
    names = [name for name in _UNCHANGED if name in schema.names]
    headers = _headers(source, reason, rows, failures)
    arrays = [rows.column(name) for name in names] + [headers, _origins(source, rows)]
    return pa.RecordBatch.from_arrays(arrays, names=[*names, "headers", "origin"])


def moved_rows(source: QueueRecord, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return a transfer's rows for another partition of the same queue: unchanged, with their origin."""
    schema = common_schema(batches)
    rows = pa.concat_batches([fit(batch, schema) for batch in batches])
    names = [name for name in ("payload", *PRODUCED) if name in schema.names]
    return pa.RecordBatch.from_arrays([*(rows.column(name) for name in names), _origins(source, rows)], names=[*names, "origin"])


def redriven_rows(source: QueueRecord, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return a transfer's rows for a redrive out of a dead queue: unchanged, with their origin, without the headers of their death."""
    schema = common_schema(batches)
    rows = pa.concat_batches([fit(batch, schema) for batch in batches])
    names = [name for name in _UNCHANGED if name in schema.names]
    arrays = [rows.column(name) for name in names]
    if "headers" in schema.names:
        own = [_without_ours(pairs) or None for pairs in rows.column("headers").to_pylist()]
        names, arrays = [*names, "headers"], [*arrays, pa.array(own, HEADERS)]
    return pa.RecordBatch.from_arrays([*arrays, _origins(source, rows)], names=[*names, "origin"])


def _origins(source: QueueRecord, rows: pa.RecordBatch) -> pa.Array:
    prefix = pc.binary_join_element_wise(source.incarnation, rows.column("partition").cast(pa.utf8()), ".")
    first = pc.binary_join_element_wise(prefix, rows.column("origin_offset").cast(pa.utf8()), ".")
    return pc.coalesce(rows.column("origin"), first) if "origin" in rows.schema.names else first


def _headers(source: QueueRecord, reason: str, rows: pa.RecordBatch, failures: Sequence[tuple[Offsets, str]]) -> pa.Array:
    """Each row's own headers, followed by those that record its death. Those of an earlier death go: a key stands in a map once."""
    same = {REASON_HEADER: reason, SOURCE_HEADER: source.queue_name}
    count = rows.num_rows
    if len(failures) == 1 and len(failures[0][0]) == count:
        same[FAILURES_HEADER] = failures[0][1]
    each = {
        "sluiceway-attempts": rows.column("attempts").cast(pa.utf8()),
        "sluiceway-enqueued-at": pc.strftime(rows.column("enqueued_at"), format="%Y-%m-%dT%H:%M:%SZ"),
    }
    values = [pa.array([value] * count, pa.utf8()) for value in same.values()] + list(each.values())
    width = len(values)
    # Row by row: the values are laid out column by column, and taken in row order.
    order = (np.arange(width)[None, :] * count + np.arange(count)[:, None]).ravel()
    added_values = pa.concat_arrays(values).take(pa.array(order))
    added_keys = pa.array([*same, *each] * count, pa.utf8())
    if "headers" not in rows.schema.names and (not failures or FAILURES_HEADER in same):
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
        return pa.MapArray.from_arrays(offsets, added_keys, added_values)
    own = rows.column("headers").to_pylist() if "headers" in rows.schema.names else [None] * count
    keys, texts = added_keys.to_pylist(), added_values.to_pylist()
    added = [list(zip(keys[i * width : (i + 1) * width], texts[i * width : (i + 1) * width], strict=True)) for i in range(count)]
    for those, text in failures if FAILURES_HEADER not in same else ():
        for row in those.tolist():
            added[row].append((FAILURES_HEADER, text))
    return pa.array([[*_without_ours(pairs), *more] for pairs, more in zip(own, added, strict=True)], HEADERS)


def _without_ours(pairs: list[tuple[str, str]] | None) -> list[tuple[str, str]]:
    return [pair for pair in pairs or () if not pair[0].startswith(_OURS)]
