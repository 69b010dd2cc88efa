"""What is known of each key's items, outside of the server: which were settled, and who may hold some now. All of it goes by columns."""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]

_BODY = struct.Struct("<II")


class Run(NamedTuple):
    """Items of a key in one lease: the places from `first` on in the answer, by the key and the first one's number."""

    key: int
    number: int
    first: int
    items: int


def body(key: int, number: int) -> bytes:
    """The payload of the key's item of that number."""
    return _BODY.pack(key, number)


def bodies(payloads: pa.ChunkedArray) -> tuple[Numbers, Numbers]:
    """Key and number of each item."""
    column = payloads.combine_chunks() if isinstance(payloads, pa.ChunkedArray) else payloads
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(memoryview(column.buffers()[2])[int(ends[0]) : int(ends[-1])], np.uint32).astype(np.int64)
    return data[0::2], data[1::2]


class KeyLedger:
    """Items of a key are numbered in the order in which they were stored. `wrong` is what must not be."""

    def __init__(self, keys: int) -> None:
        self.certain = np.zeros(keys, np.int64)
        """Items of each key that are certainly settled: the first ones."""
        self.possible = np.zeros(keys, np.int64)
        """Those that may be settled, since a call was not answered."""
        self.held_until = np.zeros(keys)
        """Until when a consumer surely holds items of the key."""
        self.delivered = 0
        self.wrong: list[str] = []

    def delivers(self, keys: Numbers, numbers: Numbers, until: float) -> list[Run]:
        """A lease has these items, in that order; it surely lasts `until` then. Returns its runs."""
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_numbers = keys[order], numbers[order]
        edges = np.flatnonzero(np.diff(sorted_keys)) + 1
        firsts = np.concatenate(([0], edges))
        inside = np.ones(len(keys), bool)
        inside[firsts] = False
        gaps = np.flatnonzero(inside & (np.diff(sorted_numbers, prepend=0) != 1))
        self._note(gaps, sorted_keys, sorted_numbers, "does not follow the one before it in its lease")
        first_keys, first_numbers = sorted_keys[firsts], sorted_numbers[firsts]
        now = time.monotonic()
        for what, where in (
            ("comes before others of its key", first_numbers > self.possible[first_keys]),
            ("comes again after it was completed", first_numbers < self.certain[first_keys]),
            ("comes while another consumer holds its key", self.held_until[first_keys] > now),
        ):
            self._note(firsts[where], sorted_keys, sorted_numbers, what)
        self.held_until[first_keys] = until
        self.delivered += len(keys)
        counts = np.diff(np.concatenate((firsts, [len(keys)])))
        places = zip(first_keys.tolist(), first_numbers.tolist(), firsts.tolist(), counts.tolist(), strict=True)
        return [Run(key, number, first, items) for key, number, first, items in places]

    def _note(self, at: Numbers, keys: Numbers, numbers: Numbers, what: str) -> None:
        for place in at[:3].tolist():
            self.wrong.append(f"item {numbers[place]} of key {keys[place]} {what}")

    def settles(self, keys: Numbers, upto: Numbers) -> None:
        """The first `upto` items of these keys may be settled from now on."""
        self.possible[keys] = np.maximum(self.possible[keys], upto)

    def settled(self, keys: Numbers, upto: Numbers) -> None:
        """They are."""
        self.certain[keys] = np.maximum(self.certain[keys], upto)

    def let_go(self, keys: Numbers) -> None:
        """Their consumer settles them or gives them back: others may have the keys now."""
        self.held_until[keys] = 0
