"""A bucket of the tests' own, as a process on loopback: it can be made to fail, and tells who wrote what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from bench.bucket_costs import bucket


class Request(NamedTuple):
    """A request that was answered. Times are of the machine's monotonic clock, in seconds. `name`: the object's; the prefix of a LIST."""

    began: float
    ended: float
    key_id: str
    method: str
    name: str
    status: int


class FaultyBucket:
    """A bucket with that URL. faulty_bucket_process.FAULTS has the faults."""

    def __init__(self, url: str) -> None:
        self.url = url

    def inject(self, fault: str, share: float) -> None:
        """Let that share of the requests fail so, until `mend`."""
        self._ask(f"faults/{fault}?{share}")

    def struck(self) -> int:
        """How many requests the fault has struck by now."""
        return int(self._ask("struck"))

    def mend(self) -> int:
        """End the fault; how many requests it has struck."""
        return int(self._ask("faults"))

    def stop(self) -> None:
        """No request is answered until `start`."""
        self.inject("reset", 1.0)

    def start(self) -> None:
        self.mend()

    def cycles(self, first: int) -> list[tuple[str, str, str, tuple[int, int, int], int]]:
        """The openings and cycles that were taken, from that index on: object, the partition's head, key id, fence, number of the cycle."""
        return [(name, head, key_id, tuple(fence), txn) for name, head, key_id, fence, txn in self._ask(f"cycles/{first}")]

    def requests(self, since: float) -> list[Request]:
        """The requests that began then or later, and were answered, in the order of their answers."""
        return [Request(*each) for each in self._ask(f"requests/{since}")]

    def _ask(self, call: str) -> Any:
        return httpx.get(f"{self.url}/-/{call}", trust_env=False, timeout=60).raise_for_status().json()


@contextlib.contextmanager
def faulty_bucket(median: float = 0.0, p99: float = 0.0) -> Iterator[FaultyBucket]:
    """One for the length of a block, with these latencies in milliseconds; 0: none."""
    with bucket(median, p99, "tests.servers.faulty_bucket_process") as url:
        yield FaultyBucket(url)
