"""What is measured, and how a client's process goes about it. Each system says only how it produces, leases and completes."""

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
"""Payload bytes of the cases with one item a call."""
PACE = 200
"""Cycles a second of a `latency` case."""
WARM_UP = 0.5
"""Seconds, or a quarter of the slice where that is less."""

_BATCH = re.compile(r"(arrow|json|protobuf)-(\d+)x(\d+)-c(\d+)")
_SINGLE = re.compile(r"single-(cycle|produce|latency)-c(\d+)")


@dataclass(frozen=True)
class Work:
    """What each of `clients` clients repeats with `batch` items of `payload` bytes.

    `cycle`: produce, lease, complete; `produce`: that alone; `latency`: PACE cycles a second, each call timed. `form` is ours: a peer has
    its own protocol.
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
        """The work of that name. Raises ValueError if there is none."""
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
    """What a slice did: items that went the whole way, seconds by the clock, and of a `latency` case the seconds of each call by its name
    (`produce`, `lease`, `complete`, `cycle`)."""

    items: int
    seconds: float
    latencies: dict[str, list[float]] | None = None


@dataclass(frozen=True)
class Served:
    """A system that runs: where its clients find it, and the processes whose time counts as the server's, with all their descendants."""

    address: str
    pids: list[int] = field(default_factory=list)


class Client(Protocol):
    """One client of a system with its own connection. Its calls come one after another."""

    async def produce(self) -> None:
        """Produce a batch; return when it is confirmed to be durable."""

    async def lease(self) -> tuple[int, Any]:
        """Lease up to a batch: how many items there were, each of the right size, and what `complete` needs; 0 items if there were none."""

    async def complete(self, leased: Any) -> None:
        """Complete what was leased; return when that is confirmed."""


listeners: list[Callable[[str], None]] = []
"""Who is told when a slice begins and ends; in a client's process that is the harness (`client.py`)."""


@contextmanager
def timed() -> Iterator[None]:
    """What is in it is the slice: setting up is before it, cleaning up after it, and so is not in the servers' processor time either."""
    for tell in listeners:
        tell("begin")
    yield
    for tell in listeners:
        tell("end")


def run(main: Coroutine[Any, Any, T]) -> T:
    """On an event loop of uvloop, as every load here."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def repeat(clients: Sequence[Client], work: Work, seconds: float) -> Done:
    """Let the clients do the work for so long, after a warm-up that is not counted."""
    warm_up = time.perf_counter() + min(WARM_UP, seconds / 4)
    await asyncio.gather(*(_cycles(each, work, warm_up) for each in clients))
    latencies: dict[str, list[float]] = {"produce": [], "lease": [], "complete": [], "cycle": []}
    with timed():
        began = time.perf_counter()
        if work.kind == "latency":
            items = sum(await asyncio.gather(*(_paced(each, began + seconds, latencies) for each in clients)))
        elif work.kind == "produce":
            items = sum(await asyncio.gather(*(_produces(each, work, began + seconds) for each in clients)))
        else:
            items = sum(await asyncio.gather(*(_cycles(each, work, began + seconds) for each in clients)))
        elapsed = time.perf_counter() - began
    return Done(items, elapsed, latencies if work.kind == "latency" else None)


async def _produces(client: Client, work: Work, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await client.produce()
        done += work.batch
    return done


async def _cycles(client: Client, work: Work, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await client.produce()
        count, leased = await client.lease()
        if count:
            await client.complete(leased)
            done += count
    return done


async def _paced(client: Client, until: float, latencies: dict[str, list[float]]) -> int:
    """PACE cycles a second; one that comes late does not make the next ones come faster."""
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
