"""Which instance of a cluster has which partition of a queue, as far as one client has heard. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

AGAIN = 1.0
"""Seconds between two looks at the owners of one queue."""


class About(NamedTuple):
    """What a call is about: these partitions of that queue. None among them is one that cannot be told."""

    queue: str
    partitions: frozenset[int | None]


def about(body: Mapping[str, object]) -> About | None:
    """By the body of a JSON call. None: it is about no partition, so whoever is asked may do it."""
    ids = [*_texts(body.get("lease_ids")), *_texts(body.get("ids"))]
    if body.get("lease_id"):
        ids.append(str(body["lease_id"]))
    numbers: set[int | None] = {_partition_of(each) for each in ids}
    if isinstance(number := body.get("partition"), int):
        numbers.add(number)
    return About(str(body.get("queue_name")), frozenset(numbers)) if numbers else None


class Owners:
    """For a client of the server at `url`. What it says may be out of date, and then costs a hop or a second attempt, never more."""

    def __init__(self, url: str) -> None:
        self._scheme = urlsplit(url).scheme
        self._addresses: dict[str, dict[int, str]] = {}
        self._look_at: dict[str, float] = {}

    def to_look(self, queue: str, now: float) -> bool:
        """Whether to learn the queue's owners now: they are not known, and the last look is long enough ago (`now` in seconds)."""
        if queue in self._addresses or now < self._look_at.get(queue, now):
            return False
        self._look_at[queue] = now + AGAIN
        return True

    def learn(self, queue: str, partitions: Iterable[Mapping[str, Any]]) -> None:
        """The partitions as `queues.info` has them; a server that is no cluster names no addresses.

        An address of another scheme counts as none: how a client knows a server goes with the scheme, and so does whether others can read
        its key.
        """
        found = {each["partition"]: str(each.get("address") or "").rstrip("/") for each in partitions}
        self._addresses[queue] = {number: address for number, address in found.items() if self._is_good(address)}

    def _is_good(self, address: str) -> bool:
        try:
            parts = urlsplit(address)
            return parts.scheme == self._scheme and bool(parts.hostname) and parts.port != 0
        except ValueError:
            return False

    def forget(self, queue: str) -> None:
        """They are not as they were."""
        self._addresses.pop(queue, None)

    def of(self, about: About) -> str | None:
        """The address of the one instance that has all of it; None: there are several, or nobody knows."""
        known = self._addresses.get(about.queue, {})
        found = {None if number is None else known.get(number) for number in about.partitions}
        return found.pop() if len(found) == 1 else None


def _texts(ids: object) -> Sequence[str]:
    return ids if isinstance(ids, list | tuple) else ()


def _partition_of(id_: str) -> int | None:
    """Of an item's or a lease's id."""
    parts = id_.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else None
