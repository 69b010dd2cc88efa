"""Keys of items: a customer, a tenant, the name of a model. Order, fairness and limits go by them.

Not to be confused with idempotency keys, which belong to calls, and lease keys, which belong to consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.model.requests import Offsets
from sluiceway.model.small_batch import Rows, SmallBatch

KEY = "key"
NO_KEY = 0
"""Hash of no key."""


class KeyRuns(NamedTuple):
    """Runs of rows with equal keys: the first row of each, and its key's hash, or NO_KEY."""

    firsts: Sequence[int]
    keys: Sequence[int]


@lru_cache(1 << 16)
def hash_of(key: str) -> int:
    """A hash of 64 bits, which is never NO_KEY. It is on disk."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") or 1


def has_keys(rows: Rows) -> bool:
    """Whether any of the rows has a key."""
    if isinstance(rows, SmallBatch):
        return KEY in rows.others
    return KEY in rows.schema.names and rows.column(KEY).null_count < rows.num_rows


def key_runs(rows: Rows) -> KeyRuns:
    """The runs of equal keys, in order of the rows. Costs per run."""
    if not has_keys(rows):
        return KeyRuns((0,), (NO_KEY,))
    if isinstance(rows, SmallBatch):
        keys: Sequence[str | None] = rows.others[KEY]
        firsts = [at for at, key in enumerate(keys) if not at or keys[at - 1] != key]
        keys = [keys[at] for at in firsts]
    else:
        encoded = pc.run_end_encode(rows.column(KEY))
        firsts, keys = [0, *encoded.run_ends.to_pylist()[:-1]], encoded.values.to_pylist()
    return KeyRuns(firsts, [NO_KEY if key is None else hash_of(key) for key in keys])


class Division(NamedTuple):
    """The rows of a batch that belong to one place, sorted by key, otherwise in the order in which they came. `numbers`: which of the
    batch each is."""

    place: int
    rows: Rows
    numbers: Offsets


def divided(rows: Rows, place_of: Callable[[str], int]) -> list[Division]:
    """Divide rows by their keys' places. Those without a key go to the place of the first that has one."""
    keys, codes = _coded(rows)
    places = [None if key is None else place_of(key) for key in keys]
    first = next(place for place in places if place is not None)
    of_row = np.array([first if place is None else place for place in places])[codes]
    order = np.lexsort((codes, of_row))
    edges = np.flatnonzero(np.diff(of_row[order])) + 1
    return [Division(int(of_row[those[0]]), _chosen(rows, those), those) for those in np.split(order, edges)]


def _coded(rows: Rows) -> tuple[list[str | None], Offsets]:
    """The distinct keys in order of their first row, and for each row the index of its key."""
    if isinstance(rows, SmallBatch):
        ranks: dict[str | None, int] = {}
        codes = [ranks.setdefault(key, len(ranks)) for key in rows.others[KEY]]
        return list(ranks), np.array(codes)
    encoded = pc.dictionary_encode(rows.column(KEY), null_encoding="encode")
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def _chosen(rows: Rows, numbers: Offsets) -> Rows:
    if len(numbers) == rows.num_rows and bool((np.diff(numbers) == 1).all()):
        return rows
    return rows.take(numbers.tolist() if isinstance(rows, SmallBatch) else pa.array(numbers))
