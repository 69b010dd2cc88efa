"""Partition owners in a cluster, as last learnt by one client. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

AGAIN = 1.0
"""Seconds between two lookups of a queue's owners."""


class About(NamedTuple):
    """The subject of a call: these partitions of that queue. None stands for a partition that cannot be determined."""

    queue: str
    partitions: frozenset[int | None]


def about(body: Mapping[str, object]) -> About | None:
    """The subject of a JSON call, from its body. None: it concerns no partition, so any instance may do it."""
    ids = [*_texts(body.get("lease_ids")), *_texts(body.get("ids"))]
    if body.get("lease_id"):
        ids.append(str(body["lease_id"]))
    numbers: set[int | None] = {_partition_of(each) for each in ids}
    if isinstance(number := body.get("partition"), int):
        numbers.add(number)
    return About(str(body.get("queue_name")), frozenset(numbers)) if numbers else None


class Owners:
    """Owners known to a client of the server at `url`. Outdated knowledge costs a hop or a second attempt, never more."""

    def __init__(self, url: str) -> None:
        self._scheme = urlsplit(url).scheme
        self._addresses: dict[str, dict[int, str]] = {}
        self._look_at: dict[str, float] = {}

    def to_look(self, queue: str, now: float) -> bool:
        """Whether to look up the queue's owners: they are unknown, and the last lookup is old enough (`now` in seconds)."""
        if queue in self._addresses or now < self._look_at.get(queue, now):
            return False
        self._look_at[queue] = now + AGAIN
        return True

    def learn(self, queue: str, partitions: Iterable[Mapping[str, Any]]) -> None:
        """Learn the owners from the partitions in `queues.info`; a server outside a cluster names no addresses.

        Addresses of another scheme are ignored: certificates, and whether the key is readable in transit, depend on the scheme.
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
        """Forget the queue's owners: they have changed."""
        self._addresses.pop(queue, None)

    def of(self, about: About) -> str | None:
        """The address of the instance that owns all of it; None: there are several, or they are unknown."""
        known = self._addresses.get(about.queue, {})
        found = {None if number is None else known.get(number) for number in about.partitions}
        return found.pop() if len(found) == 1 else None


def _texts(ids: object) -> Sequence[str]:
    return ids if isinstance(ids, list | tuple) else ()


def _partition_of(id_: str) -> int | None:
    """The partition in an item's or a lease's id."""
    parts = id_.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else None
