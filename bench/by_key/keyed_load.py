"""The load: clients that produce items with keys, lease and settle them, and check the order of each key.

Each client has keys of its own, `work.keys` of them, and numbers the items of each. So the items of a key have one producer, whose calls
are sequential, and the order in which they must be delivered is known. Any client may be delivered the items of any key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sluiceway.bench.work import Done, timed, warm_up_of

SIZE = 100
"""Bytes of a payload: ASCII, since some systems take only text."""
_WIDTHS = (6, 10, 16)
"""Digits of a payload's fields: the key's number, the item's number in its key, and the microsecond when it was to be sent."""
PATIENCE = 0.1
"""Seconds that a lease waits for items."""
DRAIN = 30.0
"""Seconds without a delivery after which what is missing is given up."""

Numbers = npt.NDArray[np.int64]


class KeyedWork(NamedTuple):
    """`clients` clients that produce batches of `batch` items, with `keys` different keys in each."""

    keys: int
    batch: int = 1_000
    clients: int = 8

    def keys_of(self, client: int) -> list[str]:
        """The key of each row of the client's batches. All have the same length."""
        return [f"customer-{client * self.keys + row % self.keys:06}" for row in range(self.batch)]


class KeyedClient(Protocol):
    """A client with one connection to produce, and one to lease and settle. Each has one call at a time."""

    async def produce(self, payloads: bytes) -> None:
        """Produce a batch with the client's keys; returns when it is confirmed. `payloads`: of the rows, SIZE bytes each, joined."""

    async def lease(self) -> tuple[bytes, Any]:
        """Lease up to a batch, in at most PATIENCE seconds. Returns the payloads, joined in the order in which those of a key are to be
        handled, and the argument for `complete`; no bytes without items."""

    async def complete(self, leased: Any) -> None:
        """Settle the leased items; returns when that is confirmed."""

    async def complete_and_lease(self, leased: Any) -> tuple[bytes, Any]:
        """`complete` and `lease`, in one exchange where the system has one."""
        await self.complete(leased)
        return await self.lease()


# ---- payloads -------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Fields of delivered payloads. `keys`: their numbers; `numbers`: of the item in its key; `sent`: in microseconds of the clock."""

    keys: Numbers
    numbers: Numbers
    sent: Numbers


class Batches:
    """The payloads of a client's batches, one after the other."""

    def __init__(self, work: KeyedWork, client: int) -> None:
        rows = np.arange(work.batch)
        self._text = np.full((work.batch, SIZE), ord("x"), np.uint8)
        self._each = work.batch // work.keys
        self._numbers = rows // work.keys
        self._write(0, client * work.keys + rows % work.keys)

    def make(self, sent: float) -> bytes:
        self._write(1, self._numbers)
        self._write(2, np.array([int(sent * 1e6)]))
        self._numbers = self._numbers + self._each
        return self._text.tobytes()

    def _write(self, field: int, values: Numbers) -> None:
        start, powers = _field(field)
        self._text[:, start : start + len(powers)] = values[:, None] // powers % 10 + ord("0")


def rows_of(payloads: bytes) -> Rows:
    """Raises RuntimeError if they are not all of SIZE bytes."""
    if len(payloads) % SIZE:
        raise RuntimeError(f"{len(payloads)} bytes of payload are not a number of items")
    text = np.frombuffer(payloads, np.uint8).reshape(-1, SIZE)
    fields = []
    for field in range(len(_WIDTHS)):
        start, powers = _field(field)
        fields.append((text[:, start : start + len(powers)] - np.int64(ord("0"))) @ powers)
    return Rows(*fields)


def _field(field: int) -> tuple[int, Numbers]:
    """Where a field begins, and the value of each of its digits."""
    return sum(_WIDTHS[:field]), 10 ** np.arange(_WIDTHS[field] - 1, -1, -1, dtype=np.int64)


def split(payloads: bytes) -> list[bytes]:
    return [payloads[at : at + SIZE] for at in range(0, len(payloads), SIZE)]


# ---- order ----------------------------------------------------------------------------------------------------


class OrderCheck:
    """Follows the deliveries of all clients, and counts what breaks the order of a key."""

    def __init__(self, keys: int) -> None:
        self._next: Numbers = np.zeros(keys, np.int64)
        self._holders: Numbers = np.full(keys, -1)
        self.inversions = 0
        """Items that came before an earlier one of their key."""
        self.repeats = 0
        """Items that came again, or after a later one."""
        self.overlaps = 0
        """Keys of which a client got items while another one had some that were not settled."""

    def delivered(self, client: int, rows: Rows) -> None:
        order = np.argsort(rows.keys, kind="stable")
        keys, numbers = rows.keys[order], rows.numbers[order]
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        due = np.empty_like(numbers)
        due[1:] = numbers[:-1] + 1
        due[firsts] = self._next[keys[firsts]]
        self.inversions += int((numbers > due).sum())
        self.repeats += int((numbers < due).sum())
        np.maximum.at(self._next, keys, numbers + 1)
        holders = self._holders[keys[firsts]]
        self.overlaps += int(((holders >= 0) & (holders != client)).sum())
        self._holders[keys[firsts]] = client

    def settling(self, client: int) -> None:
        """To be called before the client settles all that it holds."""
        self._holders[self._holders == client] = -1

    def missing(self, produced: int) -> int:
        """How many of the items produced have neither come nor been passed over."""
        return produced - int(self._next.sum())

    def figures(self) -> dict[str, float]:
        return {"inversions": self.inversions, "repeats": self.repeats, "overlaps": self.overlaps}


# ---- the two loads --------------------------------------------------------------------------------------------


async def saturate(clients: Sequence[KeyedClient], work: KeyedWork, seconds: float) -> Done:
    """Have the clients go through produce, lease and settle for `seconds`, after a warm-up. Together they keep as many batches waiting as
    they are."""
    load = _Saturation(clients, work)
    await load.run(warm_up_of(seconds))
    with timed():
        began = time.perf_counter()
        items = await load.run(seconds)
        elapsed = time.perf_counter() - began
    return Done(items, elapsed, figures=load.check.figures())


class _Saturation:
    def __init__(self, clients: Sequence[KeyedClient], work: KeyedWork) -> None:
        self._clients, self._work = clients, work
        self._batches = [Batches(work, client) for client in range(len(clients))]
        self._waiting = 0
        self.check = OrderCheck(work.keys * len(clients))

    async def run(self, seconds: float) -> int:
        """Returns the number of items that went the whole way. None is leased at the end."""
        until = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(self._cycles(number, until) for number in range(len(self._clients)))))

    async def _cycles(self, number: int, until: float) -> int:
        client, batches, done, count = self._clients[number], self._batches[number], 0, 0
        leased: Any = None
        while (now := time.perf_counter()) < until:
            if self._waiting < len(self._clients) * self._work.batch:
                self._waiting += self._work.batch
                await client.produce(batches.make(now))
            done += count
            if count:
                self.check.settling(number)
                payloads, leased = await client.complete_and_lease(leased)
            else:
                payloads, leased = await client.lease()
            count = len(payloads) // SIZE
            self._waiting -= count
            if count:
                self.check.delivered(number, rows_of(payloads))
        if count:
            self.check.settling(number)
            await client.complete(leased)
        return done + count


async def pace(clients: Sequence[KeyedClient], work: KeyedWork, rate: float, seconds: float) -> Done:
    """Have the clients together produce `rate` items a second for `seconds`, while they lease and settle what there is, until all of it is
    delivered.

    Figures: `wait_p50_ms` and `wait_p99_ms`, from the moment when an item was to be sent until a client has it. A late call does not move
    later ones, and counts for what waits behind it.
    """
    load = _Pacing(clients, work)
    with timed():
        began = time.perf_counter()
        await load.run(rate, seconds)
        elapsed = time.perf_counter() - began
    missing = load.check.missing(load.produced)
    waits = np.concatenate(load.waits or [np.zeros(0)]) / 1e3
    if not len(waits):
        raise RuntimeError("nothing was delivered that was sent after the warm-up")
    quantiles = {f"wait_p{part}_ms": float(np.quantile(waits, part / 100)) for part in (50, 99)}
    return Done(load.produced - missing, elapsed, figures={**load.check.figures(), **quantiles, "missing": missing, "rate": rate})


class _Pacing:
    def __init__(self, clients: Sequence[KeyedClient], work: KeyedWork) -> None:
        self._clients, self._work = clients, work
        self.produced = 0
        self.waits: list[npt.NDArray[np.floating]] = []
        """Microseconds."""
        self.check = OrderCheck(work.keys * len(clients))

    async def run(self, rate: float, seconds: float) -> None:
        numbers = range(len(self._clients))
        self._begin = time.perf_counter()
        self._warm = (self._begin + warm_up_of(seconds)) * 1e6
        self._delivery = self._begin
        self._producing = len(numbers)
        await asyncio.gather(*(self._produce(number, rate, seconds) for number in numbers), *(self._consume(number) for number in numbers))

    async def _produce(self, number: int, rate: float, seconds: float) -> None:
        batches = Batches(self._work, number)
        interval = self._work.batch * len(self._clients) / rate
        for turn in range(max(1, round(seconds / interval))):
            due = self._begin + interval * (turn + number / len(self._clients))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            # asyncio may wake a little early.
            await self._clients[number].produce(batches.make(min(due, time.perf_counter())))
            self.produced += self._work.batch
        self._producing -= 1
        self._delivery = time.perf_counter()

    async def _consume(self, number: int) -> None:
        client, count = self._clients[number], 0
        leased: Any = None
        while self._producing or self._wanted():
            if count:
                self.check.settling(number)
                payloads, leased = await client.complete_and_lease(leased)
            else:
                payloads, leased = await client.lease()
            count = len(payloads) // SIZE
            if count:
                self._delivered(number, rows_of(payloads))
        if count:
            await client.complete(leased)

    def _wanted(self) -> bool:
        return self.check.missing(self.produced) > 0 and time.perf_counter() < self._delivery + DRAIN

    def _delivered(self, number: int, rows: Rows) -> None:
        self._delivery = time.perf_counter()
        self.waits.append(self._delivery * 1e6 - rows.sent[rows.sent >= self._warm])
        self.check.delivered(number, rows)
