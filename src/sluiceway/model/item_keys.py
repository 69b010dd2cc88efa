"""Keys of items: a customer, a tenant, the name of a model. Order, fairness and limits go by them. And priorities of items.

Not to be confused with idempotency keys, which belong to calls, and lease keys, which belong to consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.model.requests import Offsets
from sluiceway.model.small_batch import Rows, SmallBatch

Hashes = npt.NDArray[np.uint64]
KEY = "key"
NO_KEY = 0
"""Hash of no key."""
PRIORITY = "priority"
DEFAULT_PRIORITY = 4
"""Of an item that has none, as in Java Message Service."""
MAX_HASH = (1 << 64) - 1
_NO_SLOT = -1


class Runs(NamedTuple):
    """Runs of rows with equal values, hashes of keys or priorities: the first row of each, and its value."""

    firsts: Sequence[int]
    values: Sequence[int]


@lru_cache(1 << 16)
def hash_of(key: str) -> int:
    """A hash of 64 bits, which is never NO_KEY. It is on disk."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def has_keys(rows: Rows) -> bool:
    """Whether any of the rows has a key."""
    return has_values(rows, KEY)


def has_values(rows: Rows, column: str) -> bool:
    """Whether any of the rows has a value in that optional column."""
    if isinstance(rows, SmallBatch):
        return column in rows.others
    return column in rows.schema.names and rows.column(column).null_count < rows.num_rows


def has_only_payloads(rows: Rows) -> bool:
    """Whether the rows have payloads and nothing else. False also for rows with other columns that have no values."""
    return not rows.others if isinstance(rows, SmallBatch) else rows.num_columns == 1


def has_priorities(rows: Rows) -> bool:
    """Whether any of the rows has a priority of its own."""
    return has_values(rows, PRIORITY)


def key_runs(rows: Rows) -> Runs:
    """The runs of equal keys, in order of the rows. Costs per run."""
    if not has_keys(rows):
        return Runs((0,), (NO_KEY,))
    firsts, keys = _runs(rows, KEY)
    return Runs(firsts, [NO_KEY if key is None else hash_of(key) for key in keys])


def priority_runs(rows: Rows) -> Runs:
    """The same of priorities."""
    if not has_priorities(rows):
        return Runs((0,), (DEFAULT_PRIORITY,))
    firsts, priorities = _runs(rows, PRIORITY)
    return Runs(firsts, [DEFAULT_PRIORITY if priority is None else priority for priority in priorities])


def _runs(rows: Rows, column: str) -> tuple[list[int], list[Any]]:
    if isinstance(rows, SmallBatch):
        values: Sequence[Any] = rows.others[column]
        firsts = [at for at, value in enumerate(values) if not at or values[at - 1] != value]
        return firsts, [values[at] for at in firsts]
    encoded = pc.run_end_encode(rows.column(column))
    return [0, *encoded.run_ends.to_pylist()[:-1]], encoded.values.to_pylist()


class Division(NamedTuple):
    """The rows of a batch that belong to one place, sorted by slot, then by key, then, where that matters, by falling priority, otherwise
    in the order in which they came. `numbers`: which of the batch each is. `slots`: each slot among them, with the number of its rows."""

    place: int
    rows: Rows
    numbers: Offsets
    slots: tuple[tuple[int, int], ...]


def divided(rows: Rows, slots_of: Callable[[Hashes], Offsets], places: Sequence[int], by_priority: bool = False) -> list[Division]:
    """Divide rows by the places of their keys' slots, which `slots_of` finds. Rows without a key go with the first that has one."""
    keys, codes = _coded(rows, KEY)
    of_key, places_of_keys = _slots_of(keys, slots_of, places)
    ranks = np.empty(len(keys), np.int64)
    ranks[np.lexsort((of_key, places_of_keys))] = np.arange(len(keys))
    return _cut(rows, np.lexsort((*_falling(rows, by_priority), ranks[codes])), of_key[codes], places_of_keys[codes])


def divided_by(
    by: Sequence[str], rows: Rows, slots_of: Callable[[Hashes], Offsets], places: Sequence[int], by_key: bool, by_priority: bool
) -> list[Division]:
    """The same by the first of the columns `by` in which each row has a text. `by_key`: the rows of a slot are sorted by key."""
    slots = np.full(rows.num_rows, _NO_SLOT)
    for texts, codes in (_coded(rows, name) for name in by):
        hashes = _hashes(texts)
        of_text = np.where(hashes == NO_KEY, _NO_SLOT, slots_of(hashes))
        slots = np.where(slots == _NO_SLOT, of_text[codes], slots)
    slots[slots == _NO_SLOT] = slots[np.argmax(slots != _NO_SLOT)]
    of_row = np.array(places)[slots]
    keys = [_coded(rows, KEY)[1]] if by_key else []
    return _cut(rows, np.lexsort((*_falling(rows, by_priority), *keys, slots, of_row)), slots, of_row)


def _cut(rows: Rows, order: Offsets, slots: Offsets, places: Offsets) -> list[Division]:
    """The rows in that order, which is by place, then by slot. `slots` and `places` are those of each row, before it is sorted."""
    slots, places = slots[order], places[order]
    edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(order)]
    return [
        Division(int(places[begin]), _chosen(rows, order[begin:end]), order[begin:end], _runs_of(slots[begin:end]))
        for begin, end in pairwise(edges)
    ]


def _slots_of(keys: Sequence[str | None], slots_of: Callable[[Hashes], Offsets], places: Sequence[int]) -> tuple[Offsets, Offsets]:
    """The slot of each key, and its place."""
    hashes = _hashes(keys)
    slots = slots_of(hashes)
    slots[hashes == NO_KEY] = slots[np.flatnonzero(hashes != NO_KEY)[0]]
    return slots, np.array(places)[slots]


def _hashes(texts: Sequence[str | None]) -> Hashes:
    return np.array([NO_KEY if text is None else hash_of(text) for text in texts], np.uint64)


def divided_again(part: Division, places: Sequence[int]) -> list[Division]:
    """Divide a part by the places that its slots have now."""
    of_row = np.repeat([slot for slot, _ in part.slots], [rows for _, rows in part.slots])
    place_of_row = np.repeat([places[slot] for slot, _ in part.slots], [rows for _, rows in part.slots])
    return [
        Division(int(place), _chosen(part.rows, those), part.numbers[those], _runs_of(of_row[those]))
        for place in np.unique(place_of_row)
        for those in [np.flatnonzero(place_of_row == place)]
    ]


def rows_of_slots(rows: Rows, slots: Sequence[tuple[int, int]], chosen: Container[int]) -> Rows:
    """Those of a part's rows that belong to the chosen slots."""
    return _chosen(rows, np.flatnonzero(np.repeat([slot in chosen for slot, _ in slots], [count for _, count in slots])))


def _runs_of(slots: Offsets) -> tuple[tuple[int, int], ...]:
    """Each slot of sorted rows, with their number."""
    edges = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)]
    return tuple(zip(slots[edges[:-1]].tolist(), [end - begin for begin, end in pairwise(edges)], strict=True))


def in_runs(rows: Rows, by_key: bool, by_priority: bool) -> Division:
    """All rows at one place, sorted by what matters of the two, of which any row has one."""
    order = np.lexsort((*_falling(rows, by_priority), *([_coded(rows, KEY)[1]] if by_key else ())))
    return Division(0, _chosen(rows, order), order, ())


def _falling(rows: Rows, by_priority: bool) -> list[Offsets]:
    """The column to sort by: a number for each row that falls with its priority. None if it does not matter, or all have the same."""
    if not by_priority or not has_priorities(rows):
        return []
    if isinstance(rows, SmallBatch):
        return [np.array([-DEFAULT_PRIORITY if each is None else -each for each in rows.others[PRIORITY]])]
    return [-rows.column(PRIORITY).fill_null(DEFAULT_PRIORITY).to_numpy()]


def _coded(rows: Rows, name: str) -> tuple[list[str | None], Offsets]:
    """The distinct texts of that column in order of their first row, and for each row the index of its text."""
    if isinstance(rows, SmallBatch):
        ranks: dict[str | None, int] = {}
        codes = [ranks.setdefault(text, len(ranks)) for text in rows.others.get(name, [None] * rows.num_rows)]
        return list(ranks), np.array(codes)
    if name not in rows.schema.names:
        return [None], np.zeros(rows.num_rows, np.int64)
    encoded = pc.dictionary_encode(rows.column(name), null_encoding="encode")
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _chosen(rows: Rows, numbers: Offsets) -> Rows:
    if len(numbers) == rows.num_rows and bool((np.diff(numbers) == 1).all()):
        return rows
    return rows.take(numbers.tolist() if isinstance(rows, SmallBatch) else pa.array(numbers))
