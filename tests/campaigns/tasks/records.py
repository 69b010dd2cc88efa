"""What a stream's producer was told, kept outside, and what follows from it for the queue that a capture fills.

Records have names and payloads as the items of the crash rounds do. The queue has one partition, so it tells in which order they came.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluiceway.client import Client
from tests.campaigns.kit.ledger import Tally, name_of

Lineage = Mapping[str, Sequence[str]]
"""Each partition of the stream, with its parents."""


class Taken(NamedTuple):
    """An item of the queue."""

    payload: str
    reference: str | None
    id: str


class Place(NamedTuple):
    """Where the stream put a record: `number` rises within a partition."""

    partition: str
    number: int


class Book:
    """The producer's own. Thread safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sent: dict[str, Place | None] = {}

    def sending(self, names: Sequence[str]) -> None:
        with self._mutex:
            self._sent.update(dict.fromkeys(names))

    def stored(self, name: str, place: Place) -> None:
        with self._mutex:
            self._sent[name] = place

    def refused(self, names: Sequence[str]) -> None:
        with self._mutex:
            for name in names:
                self._sent.pop(name, None)

    @property
    def stored_count(self) -> int:
        with self._mutex:
            return sum(place is not None for place in self._sent.values())

    def judge(self, tally: Tally, taken: Sequence[Taken], lineage: Lineage) -> None:
        """The queue is as it will stay: each record once, each partition in its order, each child after all of its parents."""
        with self._mutex:
            sent = dict(self._sent)
        order: list[str] = []
        for item in taken:
            name = name_of(item.payload)
            if name is None:
                tally.wrong("torn", item.payload[:60])
            elif name not in sent:
                tally.wrong("phantom", f"{name} was never sent")
            else:
                order.append(name)
        for name, times in Counter(order).items():
            if times > 1:
                tally.wrong("doubled", f"{name} is there {times} times")
        arrived = set(order)
        for name, place in sent.items():
            if place is not None and name not in arrived:
                tally.wrong("lost", f"{name}, number {place.number} of {place.partition}, is nowhere")
        tally.counts["records"] += len(order)
        _judge_order(tally, [place for name in dict.fromkeys(order) if (place := sent[name]) is not None], lineage)


def _judge_order(tally: Tally, places: Sequence[Place], lineage: Lineage) -> None:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    newest: dict[str, int] = {}
    for at, (partition, number) in enumerate(places):
        if number <= newest.get(partition, -1):
            tally.wrong("out of order", f"number {number} of {partition} came after {newest[partition]}")
        newest[partition] = number
        first.setdefault(partition, at)
        last[partition] = at
    for child, begun in first.items():
        for ancestor in _ancestors(child, lineage):
            if last.get(ancestor, -1) > begun:
                tally.wrong("out of order", f"{child} began at {begun}, before its ancestor {ancestor} was over at {last[ancestor]}")


def _ancestors(child: str, lineage: Lineage) -> set[str]:
    found: set[str] = set()
    open_ones = list(lineage.get(child, ()))
    while open_ones:
        each = open_ones.pop()
        if each not in found:
            found.add(each)
            open_ones += lineage.get(each, ())
    return found


# ---- the queue ----------------------------------------------------------------------------------------------------------


def produced(client: Client, queue: str) -> int:
    """How many items were ever added to the queue."""
    return sum(part.produced for part in client.stats(queue).partitions)


def ids(client: Client, queue: str) -> list[str]:
    """Of all items that wait, in their order; at most 10,000."""
    return [item.id for item in client.peek(queue, partition=0, limit=10_000)]


def take_all(client: Client, queue: str) -> list[Taken]:
    """Empty the queue, in its order."""
    found: list[Taken] = []
    while leased := client.lease(queue, batch_size=1_000):
        found += [Taken(item.payload.decode("utf-8", "replace"), item.reference, item.id) for item in leased]
        client.complete(queue, lease_ids=leased.lease_ids)
    return found
