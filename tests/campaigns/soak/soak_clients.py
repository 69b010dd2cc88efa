"""The clients of a soak: they keep a pace together, produce, lease, and end items in every way, and book what they were told."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from tests.campaigns.blackbox.http_clients import MARGIN, Answer, Door, ask
from tests.campaigns.blackbox.operation_log import name_of, payload_of
from tests.campaigns.soak.item_books import ItemBook

CALL_TIMEOUT: Final = 10.0
PLAN_TIMEOUT: Final = 30.0
"""Of a call that writes no item, but waits for the meta store."""
LEASE_TIMEOUT: Final = 5.0
BACKLOG: Final = 1_000
"""Items of a queue that may be under way: consumers keep up at half of the load, and the disk is not measured for a backlog."""
KEYS: Final = 200
SLACK: Final = 0.5
"""Seconds by which the clients may be behind their pace, as after a fault. They do not make up for more."""
BACK_OFF: Final = (0.05, 0.3)
"""Seconds, from and to, after a call that was not done."""
JOBS, DEAD, EVENTS, SINGLE, MOVING, TICKS, SHORT = "jobs", "jobs-dead", "events", "single", "moving", "ticks", "short"
TICK: Final = "tick"

_SETTINGS: Final[dict[str, Any]] = {
    "lease_timeout": f"{LEASE_TIMEOUT:.0f}s",
    "idempotency_window": "10m",
    "retry_backoff": None,
    "dead_queue": None,
}
QUEUES: Final[dict[str, dict[str, Any]]] = {
    DEAD: {**_SETTINGS, "requested_partitions": 1},
    JOBS: {
        **_SETTINGS,
        "requested_partitions": 4,
        "max_attempts": 8,
        "retry_backoff": {"first": "200ms", "most": "2s"},
        "dead_queue": DEAD,
    },
    EVENTS: {**_SETTINGS, "requested_partitions": 3, "max_attempts": 0, "order": "key"},
    SINGLE: {**_SETTINGS, "requested_partitions": 2, "max_attempts": 0, "unique": "until_settled"},
    MOVING: {**_SETTINGS, "requested_partitions": 3, "max_attempts": 0},
    TICKS: {**_SETTINGS, "requested_partitions": 1, "max_attempts": 0},
}
SHORT_LIVED: Final[dict[str, Any]] = {**_SETTINGS, "requested_partitions": 2, "max_attempts": 0}
_TIMED: Final = tuple(f"queue.{each}" for each in ("produce", "complete", "retry", "release", "extend", "settle", "redrive"))
"""Calls that take a `request_timeout`, and have a longer one by default; beside leases, which wait only if asked to."""
COUNTERS: Final = ("produced", "moved_in", "completed", "dead", "cleared", "redriven", "moved", "total", "transferring", "unavailable")


class Pace:
    """How many calls a second all clients may make together."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """None: as many as they can."""
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for one's turn to call."""
        if wait := self.take(time.monotonic()):
            await asyncio.sleep(wait)

    def take(self, now: float) -> float:
        """Take the next turn; the seconds until it comes. Pure but for what was taken before."""
        if self.rate is None:
            return 0.0
        self._next = max(self._next + 1 / self.rate, now - SLACK)
        return max(0.0, self._next - now)


class CallTimes:
    """What calls took, by kind."""

    def __init__(self) -> None:
        self.done = 0
        self._failed = 0
        self._took: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: float) -> None:
        self.done += 1
        self._took[kind].append(1_000 * seconds)

    def failed(self) -> None:
        self._failed += 1

    def take(self) -> tuple[dict[str, tuple[int, float, float]], int]:
        """Since the last look, by kind: how many were done, their median and 99th percentile in milliseconds; and how many failed."""
        took, failed = self._took, self._failed
        self._took, self._failed = defaultdict(list), 0
        return {kind: (len(times), *_median_and_late(times)) for kind, times in took.items()}, failed


def _median_and_late(times: Sequence[float]) -> tuple[float, float]:
    ranked = sorted(times)
    return ranked[len(ranked) // 2], ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]


@dataclass
class Scene:
    """What the clients share."""

    http: httpx.AsyncClient
    door: Door
    seed: int
    command: Sequence[str]
    """The product's command line."""
    folder: Path
    """For backups."""
    pace: Pace = field(default_factory=Pace)
    times: CallTimes = field(default_factory=CallTimes)
    books: dict[str, ItemBook] = field(default_factory=dict)
    ticks: set[int] = field(default_factory=set)
    """The minutes whose item of the schedule was delivered."""
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.books = {queue: ItemBook(queue) for queue in (JOBS, EVENTS, SINGLE, MOVING, SHORT)}

    async def call(
        self, kind: str, path: str, fields: Mapping[str, Any], timeout: float = CALL_TIMEOUT, expected: Collection[str] = ()
    ) -> Answer:
        """One call, at once. What it took is noted; an answer that it must not get is a finding."""
        began = time.perf_counter()
        answer = await ask(self.http, self.door.url, path, fields, timeout + MARGIN, expected)
        took = time.perf_counter() - began
        if answer.outcome == "done":
            self.times.add(kind, took)
        elif answer.problem not in expected:
            self.times.failed()
            if answer.problem.startswith("unexpected"):
                self.findings.append(f"{kind}: {answer.problem}")
            elif answer.problem == "no answer":
                self.findings.append(f"{kind}: no answer after {took:.0f} s")
        return answer

    async def counters(self, queue: str) -> dict[str, int]:
        """What the partitions of the queue count, added up. Raises AssertionError without an answer."""
        answer = await self.call("stats", "queue.stats", {"queue_name": queue}, PLAN_TIMEOUT)
        assert answer.outcome == "done", f"queue.stats of {queue}: {answer.problem}"
        sums = Counter(dict.fromkeys(COUNTERS, 0))
        for share in answer.body["logical_queues"]:
            for each in share["partitions"]:
                sums.update({name: each[name] or 0 for name in COUNTERS if name in each})
                sums["unavailable"] += each["state"] in ("unavailable", "error")
        return {name: sums[name] for name in COUNTERS}


class Actor:
    """One client: does a piece of `work` again and again, with rests of `pause` seconds on the average."""

    pause = 0.0

    def __init__(self, scene: Scene, name: str, queue: str = "") -> None:
        self.scene = scene
        self.name = name
        self.queue = queue
        self.random = random.Random(f"{scene.seed} {name}")
        self.numbers = itertools.count(1)
        self._is_over = asyncio.Event()

    async def run(self, is_over: asyncio.Event) -> None:
        self._is_over = is_over
        while not is_over.is_set():
            await self.work()
            if self.pause:
                await self.rest(self.pause * self.random.uniform(0.5, 1.5))

    async def work(self) -> None:
        raise NotImplementedError

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until the soak ends."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)

    @property
    def book(self) -> ItemBook:
        return self.scene.books[self.queue]

    async def once(self, kind: str, path: str, expected: Collection[str] = (), timeout: float = CALL_TIMEOUT, **fields: Any) -> Answer:
        """One call, at the pace of the soak."""
        await self.scene.pace.turn()
        asked = {"queue_name": self.queue, **({"request_timeout": f"{CALL_TIMEOUT:.0f}s"} if path in _TIMED else {}), **fields}
        answer = await self.scene.call(kind, path, asked, timeout, expected)
        if answer.outcome != "done" and answer.problem not in expected:
            await asyncio.sleep(self.random.uniform(*BACK_OFF))
        return answer

    async def until_done(self, kind: str, path: str, expected: Collection[str] = (), **fields: Any) -> Answer:
        """Repeat a call that is safe to repeat until it is done, also when the soak is over: only then it is known what became of it."""
        while True:
            answer = await self.once(kind, path, expected, **fields)
            if answer.outcome == "done" or answer.problem in expected or answer.problem.startswith("unexpected"):
                return answer


# ---- producers ----------------------------------------------------------------------------------------------------------


class Producer(Actor):
    """Calls without a key, which are not repeated, and calls with one of a group, of which the server remembers the last alone."""

    async def work(self) -> None:
        if self.book.outstanding > BACKLOG:
            await self.rest(0.05)
            return
        numbers = self.book.new(self.random.choice((1, 1, 2, 5, 12)))
        items = [{"utf8": payload_of(f"{self.queue}.{number}")} | self.more() for number in numbers]
        if self.is_safe:
            answer = await self.until_done("produce", "queue.produce", items=items, **self._key())
        else:
            answer = await self.once("produce", "queue.produce", items=items)
        if answer.outcome == "done":
            duplicates = set(answer.body["duplicates"] or ())
            self.book.stored(number for n, number in enumerate(numbers) if n not in duplicates)
            self.book.refused([number for n, number in enumerate(numbers) if n in duplicates])
        elif answer.outcome == "refused":
            self.book.refused(numbers)

    def more(self) -> dict[str, Any]:
        """Of one item."""
        if self.random.random() < 0.05:
            due = datetime.fromtimestamp(time.time() + self.random.uniform(0.5, 3.0), UTC)
            return {"enqueue_at": due.isoformat(timespec="milliseconds")}
        return {}

    @property
    def is_safe(self) -> bool:
        return self.random.random() < 0.6

    def _key(self) -> dict[str, Any]:
        number = next(self.numbers)
        key: dict[str, Any] = {"idempotency_key": f"{self.name}-{number}"}
        # A key without a group costs memory for ten minutes.
        return key if self.random.random() < 0.05 else {**key, "idempotency_group": self.name, "idempotency_sequence": number}


class KeyProducer(Producer):
    """Items with keys, in an order."""

    is_safe = True

    def more(self) -> dict[str, Any]:
        return {"key": f"key-{self.random.randrange(KEYS)}"}

    def _key(self) -> dict[str, Any]:
        return {"idempotency_key": f"{self.name}-{next(self.numbers)}"}


class UniqueProducer(KeyProducer):
    """Items with unique keys, some of which are taken."""

    pause = 0.3

    def more(self) -> dict[str, Any]:
        return {"unique_key": f"key-{self.random.randrange(10 * KEYS)}"}


# ---- consumers ----------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """An item that was leased."""

    number: int
    id: str
    lease: str


class Consumer(Actor):
    """Leases items, and ends them in one of the ways that there are."""

    wait = 0.0
    """Seconds that a lease waits for an item."""
    idle = 0.3
    """Seconds of rest if there was none."""

    def __init__(self, scene: Scene, name: str, queue: str) -> None:
        super().__init__(scene, name, queue)
        self._held: list[Taken] = []
        """Items that the next lease completes."""

    async def work(self) -> None:
        items = await self._lease()
        if not items:
            await self.rest(self.idle * self.random.uniform(0.5, 1.5))
            return
        ways = (self._complete, self._hold, self._mix, self._release, self._extend, self._close, self._forget)
        await self.random.choices(ways, (45, 20, 18, 4, 5, 5, 3))[0](items)

    async def _lease(self, batch: int = 0) -> list[Taken]:
        done, self._held = self._held, []
        fields: dict[str, Any] = {
            "client_id": self.name,
            "batch_size": batch or self.random.choice((1, 5, 20)),
            "max_partitions": self.random.choice((1, 3)),
            "request_timeout": f"{round(1_000 * self.wait)}ms",
        }
        if done:
            fields["complete"] = {"ids": [each.id for each in done]}
            self._try(done)
        answer = await self.once("lease, waiting" if self.wait else "lease", "queue.lease", **fields)
        body = answer.body if answer.outcome == "done" else None
        if done:
            completed = body["completed"] if body else None
            self._completed(done, completed) if completed else await self._complete(done)
        return self._taken(body["items"]) if body else []

    def _taken(self, items: Sequence[dict[str, Any]]) -> list[Taken]:
        found = []
        for each in items:
            queue, number = told(base64.b64decode(each["bytes"]).decode(errors="replace"))
            book = self.scene.books.get(queue) or self.scene.books[JOBS]
            if book.delivered(number, each["id"]) and number is not None:
                found.append(Taken(number, each["id"], each["lease_id"]))
        return found

    @property
    def book(self) -> ItemBook:
        return self.scene.books[JOBS if self.queue == DEAD else self.queue]

    def _try(self, items: Sequence[Taken]) -> None:
        self.book.trying(each.number for each in items)

    def _completed(self, items: Sequence[Taken], body: Mapping[str, Any]) -> None:
        ignored = {each["id"] for each in body["ignored"]}
        self.book.completed(each.number for each in items if each.id not in ignored)

    async def _complete(self, items: Sequence[Taken]) -> None:
        self._try(items)
        answer = await self.until_done("complete", "queue.complete", ids=[each.id for each in items])
        if answer.outcome == "done":
            self._completed(items, answer.body)

    async def _hold(self, items: Sequence[Taken]) -> None:
        """Complete them by the next lease, as the client libraries do."""
        self._held = list(items)

    async def _mix(self, items: Sequence[Taken]) -> None:
        """Some are put back, some die where there is a dead queue, the rest is completed."""
        back, rest = [], []
        for each in items:
            way = self.random.random()
            if way < 0.1 and QUEUES[self.queue]["dead_queue"]:
                back.append({"id": each.id, "dead": True, "reason": "asked to die"})
            elif way < 0.4:
                back.append({"id": each.id, "retry_after": self.random.choice(("0s", "300ms", "1500ms")), "reason": "failed"})
            else:
                rest.append(each)
        if back:
            await self.until_done("retry", "queue.retry", items=back)
        if rest:
            await self._complete(rest)

    async def _release(self, items: Sequence[Taken]) -> None:
        await self.until_done("release", "queue.release", ids=[each.id for each in items])

    async def _extend(self, items: Sequence[Taken]) -> None:
        """Hold the items for longer than the lease was at first."""
        leases = list(dict.fromkeys(each.lease for each in items))
        await self.rest(LEASE_TIMEOUT * 0.6)
        await self.once("extend", "queue.extend", lease_ids=leases)
        await self.rest(LEASE_TIMEOUT * 0.6)
        await self._complete(items)

    async def _close(self, items: Sequence[Taken]) -> None:
        """State outcomes, then close the leases: they take effect together."""
        await self.until_done("settle", "queue.settle", items=[{"id": each.id, "outcome": "done"} for each in items])
        self._try(items)
        leases = list(dict.fromkeys(each.lease for each in items))
        answer = await self.until_done("complete", "queue.complete", lease_ids=leases)
        if answer.outcome == "done" and not answer.body["ignored"] and answer.body["completed"] == len(items):
            self.book.completed(each.number for each in items)

    async def _forget(self, items: Sequence[Taken]) -> None:
        """Let the leases run out, as a client does that dies."""


class Waiter(Consumer):
    """Waits for items in place of asking again and again."""

    wait = 2.0
    idle = 0.0


class Drainer(Consumer):
    """Completes whatever there is."""

    async def work(self) -> None:
        items = await self._lease(200)
        await (self._complete(items) if items else self.rest(0.2))


class TickConsumer(Actor):
    """Takes the items of the schedule."""

    pause = 2.0

    async def work(self) -> None:
        answer = await self.once("lease", "queue.lease", client_id=self.name, batch_size=10, request_timeout="0s")
        if answer.outcome == "done" and (items := answer.body["items"]):
            self.scene.ticks |= {round(datetime.fromisoformat(each["headers"]["scheduled_at"]).timestamp()) // 60 for each in items}
            await self.until_done("complete", "queue.complete", ids=[each["id"] for each in items])


def told(payload: str) -> tuple[str, int | None]:
    """The queue and the number of an item. No number: its bytes were never sent."""
    queue, _, number = (name_of(payload) or "").rpartition(".")
    return queue, int(number) if number.isdigit() else None
