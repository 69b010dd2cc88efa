"""Item filter: which items a search finds. Works on columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.kernel.ids import ItemId
from sluiceway.model.items import OPTIONAL, PAYLOAD

REASON_HEADER: Final = "sluiceway-reason"
"""Header with the reason for which an item died."""
SOURCE_HEADER: Final = "sluiceway-queue"
"""Header with the queue in which an item died."""

_BITS: Final = {column.name: 1 << bit for bit, column in enumerate(OPTIONAL)}


@dataclass(slots=True)
class ItemFilter:
    """What an item must be or have; None: anything. All that is given must hold.

    `item`: its id or its origin. `headers`: values by name; None as a value: any. `contains`: bytes of the payload. `reason`: text in the
    reason for which it died.
    """

    item: ItemId | None = None
    kind: str | None = None
    reference: str | None = None
    key: str | None = None
    unique_key: str | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    contains: bytes | None = None
    reason: str | None = None

    def columns(self) -> list[str]:
        """The stored columns that `matches` compares."""
        wanted = {
            "kind": self.kind is not None,
            "reference": self.reference is not None,
            "key": self.key is not None,
            "unique_key": self.unique_key is not None,
            "headers": bool(self.headers) or self.reason is not None,
            PAYLOAD.name: self.contains is not None,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def may_match(self, columns: int) -> bool:
        """Whether a blob whose stored columns have that mask can have such an item: it need not be read otherwise."""
        return all(columns & _BITS[name] for name in self.columns() if name in _BITS)

    def matches(self, rows: pa.RecordBatch) -> pa.Array:
        """For each row, whether it matches, but for `item`. The rows have `columns()`, which are some."""
        tests: list[pa.Array] = []
        texts = {"kind": self.kind, "reference": self.reference, "key": self.key, "unique_key": self.unique_key}
        for name, text in texts.items():
            if text is not None:
                tests.append(pc.equal(rows.column(name), text))
        for name, value in self.headers.items():
            given = _header(rows, name)
            tests.append(pc.is_valid(given) if value is None else pc.equal(given, value))
        if self.reason is not None:
            tests.append(pc.match_substring(_header(rows, REASON_HEADER), self.reason))
        if self.contains is not None:
            tests.append(pc.match_substring(rows.column(PAYLOAD.name), self.contains))
        found = tests[0]
        for test in tests[1:]:
            found = pc.and_kleene(found, test)
        return pc.fill_null(found, False)


def column_bit(name: str) -> int:
    """Bit of the optional column in a blob's column mask."""
    return _BITS[name]


def _header(rows: pa.RecordBatch, name: str) -> pa.Array:
    return pc.map_lookup(rows.column("headers"), pa.scalar(name), "last")
