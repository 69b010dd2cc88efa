"""Groups the items of a blob by why they died, from their headers. Works on columns: no item is looked at by itself."""

from __future__ import annotations

from sys import intern
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.core.partition.records import ReasonGroup, from_array, pack_bits
from sluiceway.model.item_filter import REASON_HEADER, SOURCE_HEADER
from sluiceway.model.small_batch import Rows, SmallBatch

MAX_GROUPS = 32
"""Groups of a blob that are kept, the largest. The items of the others are not grouped."""
MAX_REASON = 200
"""Characters of a reason that are compared and kept."""

_EXCEPTION: Final = r"(?s)^((?:max_attempts \d+ reached: )?[A-Za-z_][\w.]*): .*$"
"""An exception, whose message often differs from item to item."""


def may_have_died(rows: Rows) -> bool:
    """Whether any row has headers in which a reason can be. Cheap for a few rows: many blobs are single items with other headers."""
    if isinstance(rows, SmallBatch):
        return any(pairs is not None and REASON_HEADER in pairs for pairs in rows.others.get("headers", ()))
    return "headers" in rows.schema.names


def reason_groups(rows: pa.RecordBatch) -> tuple[ReasonGroup, ...]:
    """The groups of a blob's rows, the largest first; none if no row has the header of a death.

    Items are alike if they died in the same queue of the same type of exception, whatever its message, or of the same other reason.
    """
    headers = rows.column("headers")
    if not pc.any(pc.equal(headers.keys, REASON_HEADER)).as_py():
        return ()
    reasons = pc.map_lookup(headers, pa.scalar(REASON_HEADER), "last")
    alike = pc.utf8_slice_codeunits(pc.replace_substring_regex(reasons, _EXCEPTION, r"\1"), 0, MAX_REASON)
    sources = pc.fill_null(pc.map_lookup(headers, pa.scalar(SOURCE_HEADER), "last"), "")
    alike, sources = alike.dictionary_encode(), sources.dictionary_encode()
    width = len(sources.dictionary)
    # -1: not dead.
    codes = pc.fill_null(pc.add(pc.multiply(alike.indices.cast(pa.int64()), width), sources.indices.cast(pa.int64())), -1).to_numpy()
    found, counts = np.unique(codes[codes >= 0], return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:MAX_GROUPS]
    groups = []
    for code, count in zip(found[largest].tolist(), counts[largest].tolist(), strict=True):
        reason, source = alike.dictionary[code // width].as_py(), sources.dictionary[code % width].as_py()
        bits = b"" if count == rows.num_rows else pack_bits(from_array(np.flatnonzero(codes == code)))
        groups.append(ReasonGroup(intern(reason), intern(source), count, bits))
    return tuple(groups)
