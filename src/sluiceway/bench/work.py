"""The measured work, and its execution by a client's process. A system only defines its produce, lease and complete."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import uvloop

T = TypeVar("T")

Kind = Literal["cycle", "produce", "latency"]
Form = Literal["arrow", "json", "protobuf"]
FORMS: tuple[Form, ...] = ("arrow", "json", "protobuf")

SINGLE = 100
"""Payload bytes in the cases with one item per call."""
PACE = 200
"""Cycles per second in a `latency` case."""
WARM_UP = 0.5
"""Seconds of warm-up; at most a quarter of the slice."""

_BATCH = re.compile(r"(arrow|json|protobuf)-(\d+)x(\d+)-c(\d+)")
_SINGLE = re.compile(r"single-(cycle|produce|latency)-c(\d+)")


@dataclass(frozen=True)
class Work:
    """Work that each of `clients` clients repeats with `batch` items of `payload` bytes.

    `cycle`: produce, lease, complete, where a batch is completed as the next one is leased; `produce`: produce only; `latency`: PACE cycles
    a second, each of its three calls timed. `form` applies to our systems: a peer has its own protocol.
    """

    kind: Kind
    form: Form
    batch: int
    payload: int
    clients: int

    @property
    def name(self) -> str:
        if self.batch == 1 and self.form == "json":
            return f"single-{self.kind}-c{self.clients}"
        return f"{self.form}-{self.batch}x{self.payload}-c{self.clients}"

    @classmethod
    def named(cls, name: str) -> Work:
        """Parse the name of a work. Raises ValueError if it is invalid."""
        if found := _BATCH.fullmatch(name):
            form = next(each for each in FORMS if each == found[1])
            work = cls("cycle", form, *(int(found[number]) for number in (2, 3, 4)))
        elif found := _SINGLE.fullmatch(name):
            kinds: tuple[Kind, ...] = ("cycle", "produce", "latency")
            work = cls(next(each for each in kinds if each == found[1]), "json", 1, SINGLE, int(found[2]))
        if not found or work.name != name or not (work.batch and work.payload and work.clients):
            raise ValueError(
                f"{name!r} is no case: they are such as arrow-1000x100-c8 (or json, protobuf), single-cycle-c64, single-latency-c1"
            )
        return work


@dataclass(frozen=True)
class Done:
    """Result of a slice: items that completed the cycle, seconds of the clock, in a `latency` case the seconds of each call by name
    (`produce`, `lease`, `complete`, `cycle`), and what else the load measured, by name."""

    items: int
    seconds: float
    latencies: dict[str, list[float]] | None = None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A running system: its address for clients, and the processes that count, with all their descendants, as the server."""

    address: str
    pids: list[int] = field(default_factory=list)


class Client(Protocol):
    """One client of a system, with its own connection. Its calls are sequential."""

    async def produce(self) -> None:
        """Produce a batch; returns when it is confirmed as durable."""

    async def lease(self) -> tuple[int, Any]:
        """Lease up to a batch. Returns the number of items, each checked for its size, and the argument for `complete`; 0 without items."""

    async def complete(self, leased: Any) -> None:
        """Complete the leased items; returns when that is confirmed."""

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        """`complete` and `lease`: in one exchange, or one after the other where the system, or its client, has no such exchange."""
        await self.complete(leased)
        return await self.lease()


listeners: list[Callable[[str], None]] = []
"""Called at the beginning and end of a slice; in a client's process they report to the harness (`slice_process.py`)."""


@contextmanager
def timed() -> Iterator[None]:
    """Mark the slice: setup comes before it and cleanup after it, so neither counts in the servers' processor time."""
    for tell in listeners:
        tell("begin")
    yield
    for tell in listeners:
        tell("end")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on a uvloop event loop, as all loads here do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def warm_up_of(seconds: float) -> float:
    """Seconds of the warm-up of a slice."""
    return min(WARM_UP, seconds / 4)


async def repeat(clients: Sequence[Client], work: Work, seconds: float) -> Done:
    """Have the clients repeat the work for `seconds`, after a warm-up that does not count."""
    warm_up = time.perf_counter() + warm_up_of(seconds)
    await asyncio.gather(*(_cycles(each, work, warm_up) for each in clients))
    latencies: dict[str, list[float]] = {"produce": [], "lease": [], "complete": [], "cycle": []}
    with timed():
        began = time.perf_counter()
        if work.kind == "latency":
            items = sum(await asyncio.gather(*(_paced(each, began + seconds, latencies) for each in clients)))
        else:
            items = await together(clients, work, seconds)
        elapsed = time.perf_counter() - began
    return Done(items, elapsed, latencies if work.kind == "latency" else None)


async def together(clients: Sequence[Client], work: Work, seconds: float) -> int:
    """Have the clients repeat a `cycle` or a `produce` for `seconds`. Returns the number of items, none of which is leased at the end."""
    do, until = _produces if work.kind == "produce" else _cycles, time.perf_counter() + seconds
    return sum(await asyncio.gather(*(do(each, work, until) for each in clients)))


async def _produces(client: Client, work: Work, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await client.produce()
        done += work.batch
    return done


async def _cycles(client: Client, work: Work, until: float) -> int:
    done = count = 0
    leased: Any = None
    while time.perf_counter() < until:
        await client.produce()
        before = count
        count, leased = await (client.complete_and_lease(leased) if count else client.lease())
        done += before
    if count:
        await client.complete(leased)
    return done + count


async def _paced(client: Client, until: float, latencies: dict[str, list[float]]) -> int:
    """Run PACE cycles a second; a late one does not speed up the next ones."""
    done = 0
    clock = time.perf_counter
    due = clock()
    while due < until:
        await asyncio.sleep(max(0.0, due - clock()))
        began = clock()
        await client.produce()
        produced = clock()
        count, leased = await client.lease()
        taken = clock()
        if count != 1:
            raise RuntimeError(f"{count} items leased after one was produced")
        await client.complete(leased)
        ended = clock()
        for name, each in (
            ("produce", produced - began),
            ("lease", taken - produced),
            ("complete", ended - taken),
            ("cycle", ended - began),
        ):
            latencies[name].append(each)
        done += 1
        due = max(due + 1 / PACE, ended)
    return done
