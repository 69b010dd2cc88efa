"""Requests to buckets, counted: by kind and outcome, with their latencies, bytes and price."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.latency import Latencies
from sluiceway.model.bucket_prices import BucketPrices, BucketRequest
from sluiceway.ports.object_store import Object, ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

META: Final = "(meta)"
"""Name of the meta store among the backends, none of which can be called so."""

_NAMES_AT_ONCE: Final = 1_000
"""Names in one request to list or delete."""
_THROTTLED: Final = re.compile(r"status code: (?:429|503)\b")
"""How the library words the answer of a store that wants fewer requests; it has no error of its own for it."""

Outcome = Literal["ok", "precondition_failed", "throttled", "unavailable", "unknown", "cancelled"]
"""`precondition_failed`: the object exists, or has changed. `throttled`: the store wants fewer requests. `unavailable`: no answer, or an
error. `unknown`: the same for a write, which may have landed. `cancelled`: its caller has gone, as for the slower of two hedged reads."""


class BackendRequests:
    """Counts of the requests to one backend's bucket."""

    def __init__(self, prices: BucketPrices) -> None:
        self.prices = prices
        self.outcomes: Counter[tuple[BucketRequest, Outcome]] = Counter()
        self.latencies: defaultdict[BucketRequest, Latencies] = defaultdict(Latencies)
        self.read = self.written = 0
        """Bytes of the objects in answers, and in writes that were done."""

    @property
    def dollars(self) -> float:
        """Estimated price. All requests count, whatever their outcome."""
        requests = sum(count * self.prices.of(request) for (request, _), count in list(self.outcomes.items()))
        return requests + (self.written * self.prices.gib_written + self.read * self.prices.gib_read) / 2**30

    @property
    def total(self) -> int:
        """All requests."""
        return sum(list(self.outcomes.values()))

    @property
    def throttled(self) -> int:
        """Requests that the store refused because there were too many."""
        return sum(count for (_, outcome), count in list(self.outcomes.items()) if outcome == "throttled")


class BucketRequests:
    """Counts of a process's requests by backend. Updated on the event loop, and read from any thread."""

    def __init__(self) -> None:
        self.backends: dict[str, BackendRequests] = {}

    def of(self, backend: str, prices: BucketPrices) -> BackendRequests:
        """The counts of that backend. They start anew if its bucket has become one of other prices."""
        found = self.backends.get(backend)
        if found is None or found.prices != prices:
            found = self.backends[backend] = BackendRequests(prices)
        return found


class _Attempt:
    """One call to the store: how it ends, and how many requests it takes."""

    __slots__ = ("outcome", "requests")

    def __init__(self) -> None:
        self.outcome: Outcome = "ok"
        self.requests = 1


class CountedObjects:
    """An ObjectStore that counts its requests. It belongs below HedgedReads, whose repetitions cost as much as other requests."""

    def __init__(self, objects: ObjectStore, counts: BackendRequests) -> None:
        self._objects = objects
        self._counts = counts
        self.close = objects.close

    async def get(self, name: str) -> Object | None:
        with self._counted("get"):
            found = await self._objects.get(name)
        self._counts.read += 0 if found is None else len(found.data)
        return found

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        with self._counted("get_range"):
            found = await self._objects.get_range(name, start, length)
        self._counts.read += len(found or b"")
        return found

    async def create(self, name: str, data: bytes) -> bool:
        with self._counted("create") as attempt:
            if not (is_created := await self._objects.create(name, data)):
                attempt.outcome = "precondition_failed"
        self._counts.written += len(data) * is_created
        return is_created

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        with self._counted("replace") as attempt:
            if (new := await self._objects.replace(name, data, tag)) is None:
                attempt.outcome = "precondition_failed"
        self._counts.written += 0 if new is None else len(data)
        return new

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        with self._counted("list") as attempt:
            found = await self._objects.list(prefix, after)
            attempt.requests = _requests(len(found))
        return found

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        with self._counted("list") as attempt:
            found = await self._objects.sizes(prefix)
            attempt.requests = _requests(len(found))
        return found

    async def delete(self, names: Sequence[str]) -> None:
        with self._counted("delete") as attempt:
            attempt.requests = _requests(len(names))
            await self._objects.delete(names)

    @contextmanager
    def _counted(self, request: BucketRequest) -> Iterator[_Attempt]:
        attempt, began = _Attempt(), stopwatch()
        try:
            yield attempt
        except UnknownWriteError as error:
            attempt.outcome = "throttled" if _THROTTLED.search(str(error)) else "unknown"
            raise
        except StoreUnavailableError as error:
            attempt.outcome = "throttled" if _THROTTLED.search(str(error)) else "unavailable"
            raise
        except asyncio.CancelledError:
            attempt.outcome = "cancelled"
            raise
        finally:
            self._counts.outcomes[request, attempt.outcome] += attempt.requests
            self._counts.latencies[request].add(stopwatch() - began)


def _requests(names: int) -> int:
    return max(1, -(-names // _NAMES_AT_ONCE))
