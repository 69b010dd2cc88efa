"""Workloads: clients that produce, lease, settle, redrive and rebalance until they are told to stop."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import httpx

from tests.campaigns.blackbox.http_clients import MARGIN, Answer, Caller, Door, ask
from tests.campaigns.blackbox.item_stories import TICK, Delivered
from tests.campaigns.blackbox.operation_log import Operation, RoundLog, are_away, name_of, payload_of
from tests.campaigns.blackbox.waits import Waits

LEASE_TIMEOUT: Final = 4.0
"""Seconds: long enough that a server which is killed and started again must still know the lease."""
CALL_TIMEOUT: Final = 5.0
PLAN_TIMEOUT: Final = 25.0
"""Of a call that writes no item, but waits for the meta store."""
WAIT: Final = 0.3
"""Seconds that a lease waits for an item."""
BACKLOG: Final = 1_000
"""Items of a queue that may be under way, so that it can be emptied soon."""
EMPTY_WITHIN: Final = 90.0
"""Seconds after all faults are over within which something must leave the queues again and again."""
EMPTY_AT_LAST: Final = 600.0
"""Within which they must be empty."""
LONG_LEASE: Final = 20.0
"""Of clients that hold items: longer than a server takes to start again on a busy machine, and its other clients to get to these items."""
SCHEDULES: Final = 4
JOBS, KEYS, MOVING, SINGLE, TICKS = "jobs", "keys", "moving", "single", "ticks"

PLAIN: Final[dict[str, Any]] = {
    "lease_timeout": f"{round(LEASE_TIMEOUT * 1000)}ms",
    "max_attempts": 0,
    "retry_backoff": None,
    "dead_queue": None,
}
QUEUES: Final[dict[str, dict[str, Any]]] = {
    f"{JOBS}-dead": {**PLAIN, "requested_partitions": 2},
    JOBS: {**PLAIN, "requested_partitions": 4, "max_attempts": 12, "dead_queue": f"{JOBS}-dead"},
    KEYS: {**PLAIN, "requested_partitions": 3, "order": "key"},
    MOVING: {**PLAIN, "requested_partitions": 3},
    SINGLE: {**PLAIN, "requested_partitions": 2, "unique": "until_settled"},
    TICKS: {**PLAIN, "requested_partitions": 1},
}
COUNTERS: Final = ("produced", "moved_in", "completed", "dead", "cleared", "redriven", "moved", "total", "transferring", "unavailable")


class Goal(NamedTuple):
    """What the clients of a round share."""

    http: httpx.AsyncClient
    doors: Sequence[Door]
    log: RoundLog
    number: int
    """Of the round: part of every name, so that items of two rounds are never the same."""
    seed: int


class Backlog:
    """How many items of each queue are under way, as far as clients can tell."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def came(self, queue: str, count: int) -> None:
        self._counts[queue] += count

    def went(self, queue: str, count: int) -> None:
        self._counts[queue] -= count

    def is_full(self, queue: str) -> bool:
        return self._counts[queue] > BACKLOG


class Client(Protocol):
    """Works until it is told that the time is over, and then ends what it is at."""

    async def run(self, is_over: asyncio.Event) -> None: ...


class Crew:
    """Clients that work from `start` to `stop`."""

    def __init__(self, workers: Sequence[Client]) -> None:
        self._workers = workers
        self._is_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(each.run(self._is_over)) for each in self._workers]

    async def stop(self, patience: float) -> None:
        """Returns when every client has ended what it was at. What takes longer than `patience` seconds is cut off: then its last call is
        in the history without an end."""
        self._is_over.set()
        if not self._tasks:
            return
        _, hanging = await asyncio.wait(self._tasks, timeout=patience)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()):
                raise error


def load(goal: Goal) -> Crew:
    """All clients of a round."""
    backlog = Backlog()
    return Crew(
        [
            *(Producer(goal, backlog, f"p{n}", JOBS) for n in range(2)),
            *(KeyProducer(goal, backlog, f"k{n}", KEYS) for n in range(2)),
            Producer(goal, backlog, "m0", MOVING),
            *(UniqueProducer(goal, backlog, f"u{n}", SINGLE) for n in range(2)),
            *(Consumer(goal, backlog, f"c{n}", JOBS) for n in range(3)),
            *(Consumer(goal, backlog, f"o{n}", KEYS) for n in range(2)),
            *(Consumer(goal, backlog, f"v{n}", MOVING) for n in range(2)),
            *(Holder(goal, backlog, f"h-{queue}", queue) for queue in (JOBS, MOVING)),
            Consumer(goal, backlog, "s0", SINGLE),
            Consumer(goal, backlog, "t0", TICKS),
            Redriver(goal, backlog, "r0", f"{JOBS}-dead"),
            Rebalancer(goal, backlog, "b0", MOVING),
        ]
    )


class Worker:
    """One client: does a piece of `work` again and again."""

    pause = 0.1

    def __init__(self, goal: Goal, backlog: Backlog, name: str, queue: str) -> None:
        self.name = f"{goal.number}{name}"
        self.queue = queue
        self.backlog = backlog
        self.random = random.Random(f"{goal.seed} {self.name}")
        self.caller = Caller(self.name, goal.http, goal.doors, goal.log, home=self.random.randrange(len(goal.doors)))
        self.numbers = itertools.count(1)
        self._is_over = asyncio.Event()

    async def run(self, is_over: asyncio.Event) -> None:
        self._is_over = is_over
        while not is_over.is_set():
            await self.work()
            await self.rest(self.pause * self.random.uniform(0.2, 1.8))

    async def work(self) -> None:
        raise NotImplementedError

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until the round ends."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)

    async def until_done(self, *what: Any, **more: Any) -> Operation:
        """Repeat a call that is safe to repeat until it is done. It is repeated also when the round is over: only then is it known what
        became of it."""
        while True:
            operation = await self.caller.call(*what, **more)
            if operation.outcome == "done" or operation.problem.startswith("unexpected"):
                return operation
            await asyncio.sleep(0.1)


# ---- producers ----------------------------------------------------------------------------------------------------------


def item(name: str, **more: Any) -> dict[str, Any]:
    return {"utf8": payload_of(name), **more}


def produced(body: Any) -> dict[str, Any]:
    """The ids that a produce was answered with."""
    incarnation = body["first_id"].split(".")[0]
    first = int(body["first_id"].split(".")[2])
    offsets = body["offsets"] or range(first, first + body["count"])
    partitions = body["partitions"] or [body["partition"]] * body["count"]
    ids = [f"{incarnation}.{partition}.{offset}" for partition, offset in zip(partitions, offsets, strict=True)]
    return {"ids": ids, "repeated": body["deduplicated"], "duplicates": body["duplicates"] or []}


class Producer(Worker):
    """Calls without a key, which are not repeated, and with one, some of which are repeated later; some of their items are due later."""

    pause = 0.15

    def __init__(self, goal: Goal, backlog: Backlog, name: str, queue: str) -> None:
        super().__init__(goal, backlog, name, queue)
        self._answered: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Calls with a key that are done."""

    async def work(self) -> None:
        if self._answered and self.random.random() < 0.15:
            fields, given = self.random.choice(self._answered[-20:])
            await self.until_done("produce", "queue.produce", self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=produced)
        elif not self.backlog.is_full(self.queue):
            await self._produce()

    async def _produce(self) -> None:
        number = next(self.numbers)
        names = [f"{self.name}.{number}.{n}" for n in range(self.random.choice((1, 2, 5, 12)))]
        given: dict[str, Any] = {"names": names}
        more: dict[str, Any] = {}
        if self.random.random() < 0.2:
            given["due"] = round(time.time() + self.random.uniform(0.5, 3.0), 3)
            more["enqueue_at"] = datetime.fromtimestamp(given["due"], UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"items": [item(name, **more) for name in names]}
        if self.random.random() < 0.4:
            operation = await self.caller.call(
                "produce", "queue.produce", self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=produced
            )
        else:
            given["key"] = fields["idempotency_key"] = f"{self.name}-{number}"
            operation = await self.until_done(
                "produce", "queue.produce", self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=produced
            )
            if operation.outcome == "done":
                self._answered.append((fields, given))
        if operation.outcome != "refused":
            self.backlog.came(self.queue, len(names))


class KeyProducer(Worker):
    """Items with keys of its own, one call after the other, so that their order is known."""

    pause = 0.2
    keys = 5

    async def work(self) -> None:
        if self.backlog.is_full(self.queue):
            return
        number = next(self.numbers)
        keys = self.random.sample([f"{self.name}-{n}" for n in range(self.keys)], self.random.choice((1, 1, 2, 3)))
        names = [f"{self.name}.{number}.{n}" for n in range(len(keys))]
        fields = {"items": [item(name, key=key) for name, key in zip(names, keys, strict=True)], "idempotency_key": f"{self.name}-{number}"}
        given = {"names": names, "item_keys": keys, "key": fields["idempotency_key"]}
        await self.until_done("produce", "queue.produce", self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=produced)
        self.backlog.came(self.queue, len(names))


class UniqueProducer(Worker):
    """Items with unique keys, which both of these producers use; so most of them are not stored."""

    pause = 0.3
    keys = 12

    async def work(self) -> None:
        number = next(self.numbers)
        keys = self.random.sample([f"only-{n}" for n in range(self.keys)], 2)
        names = [f"{self.name}.{number}.{n}" for n in range(len(keys))]
        items = [item(name, unique_key=key) for name, key in zip(names, keys, strict=True)]
        fields = {"items": items, "idempotency_key": f"{self.name}-{number}"}
        given = {"names": names, "unique_keys": keys, "key": fields["idempotency_key"]}
        await self.until_done("produce", "queue.produce", self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=produced)


# ---- consumers ----------------------------------------------------------------------------------------------------------


def leased(body: Any) -> dict[str, Any]:
    """The items of a lease, as `Delivered`."""
    return {"items": [_delivered(each) for each in body["items"]]}


def _delivered(each: dict[str, Any]) -> Delivered:
    headers = each["headers"] or {}
    payload = base64.b64decode(each["bytes"]).decode(errors="replace")
    if "scheduled_at" in headers:
        name: str | None = f"{TICK}{headers['schedule']}@{round(_seconds(headers['scheduled_at']))}" if name_of(payload) else None
    else:
        name = name_of(payload)
    return Delivered(name, each["id"], each["origin"], each["lease_id"], _seconds(each["lease_deadline"]))


def _seconds(time_stamp: str) -> float:
    return datetime.fromisoformat(time_stamp).timestamp()


def settled(body: Any) -> dict[str, Any]:
    ignored = {each["id"]: each["reason"] for each in body["ignored"]}
    return {"ignored": ignored, "completed": body.get("completed", 0), "dead": body.get("dead", 0)}


def extended(body: Any) -> dict[str, Any]:
    return {"deadlines": {each["lease_id"]: _seconds(each["lease_deadline"]) for each in body["leases"]}}


class Consumer(Worker):
    """Leases items, and ends them in one of the ways that there are."""

    pause = 0.05

    async def work(self) -> None:
        if items := await self._lease(LEASE_TIMEOUT):
            await self.rest(self.random.choice((0.0, 0.0, 0.05, 0.3)))
            ways = (self._complete, self._one_by_one, self._mix, self._release, self._extend, self._forget, self._come_late)
            await self.random.choices(ways, (45, 14, 18, 5, 8, 6, 4))[0](items)

    async def _lease(self, timeout: float) -> list[Delivered]:
        batch = self.random.choice((1, 3, 10, 25))
        fields: dict[str, Any] = {"client_id": self.name, "batch_size": batch, "max_partitions": self.random.choice((1, 3))}
        fields["lease_timeout"] = f"{round(timeout * 1000)}ms"
        if self.random.random() < 0.5:
            # A lost answer is asked for again, at once: it has the same leases while they live.
            fields["lease_key"] = f"{self.name}-{next(self.numbers)}"
        for _ in range(2):
            operation = await self.caller.call(
                "lease", "queue.lease", self.queue, fields, given={"batch": batch}, timeout=WAIT, read=leased
            )
            if operation.outcome != "unknown" or "lease_key" not in fields:
                break
        return [each for each in operation.got.get("items", ()) if each.name is not None]

    async def _settle(self, call: str, items: Sequence[Delivered], **more: Any) -> None:
        """Repeated until it is answered."""
        ids = {each.id: each.name for each in items}
        fields: dict[str, Any]
        given = {"ids": ids, **{name: value for name, value in more.items() if name == "after"}}
        if call in ("retry", "dead"):
            entry = {"dead": True, "reason": "asked"} if call == "dead" else {"retry_after": f"{round(more.get('after', 0.0) * 1000)}ms"}
            path, fields = "queue.retry", {"items": [{"id": id, **entry} for id in ids]}
        else:
            path, fields = f"queue.{call}", {"ids": list(ids)}
        # Of ids of several partitions some may be settled although the call fails.
        more_ids = len(ids) > 1
        operation = await self.until_done(
            call, path, self.queue, fields, given=given, timeout=CALL_TIMEOUT, read=settled, in_parts=more_ids
        )
        if call == "complete" and operation.outcome == "done":
            self.backlog.went(self.queue, operation.got["completed"])

    async def _complete(self, items: Sequence[Delivered]) -> None:
        await self._settle("complete", items)

    async def _one_by_one(self, items: Sequence[Delivered]) -> None:
        """Complete them in parts, as a client does that handles them one after the other."""
        for number in range(0, len(items), 4):
            await self.rest(LEASE_TIMEOUT / 8)
            await self._settle("complete", items[number : number + 4])

    async def _mix(self, items: Sequence[Delivered]) -> None:
        """Some are put back, some die where there is a dead queue, the rest is completed."""
        ways = ("complete", "retry", "dead") if QUEUES[self.queue]["dead_queue"] else ("complete", "retry")
        chosen = [self.random.choices(ways, (5, 3, 2)[: len(ways)])[0] for _ in items]
        for way in dict.fromkeys(chosen):
            those = [each for each, choice in zip(items, chosen, strict=True) if choice == way]
            more = {"after": self.random.choice((0.0, 0.4, 1.5))} if way == "retry" else {}
            await self._settle(way, those, **more)

    async def _release(self, items: Sequence[Delivered]) -> None:
        await self._settle("release", items)

    async def _extend(self, items: Sequence[Delivered]) -> None:
        """Hold the items for longer than the lease was at first."""
        leases = list(dict.fromkeys(each.lease for each in items))
        await self.rest(LEASE_TIMEOUT * 0.6)
        await self.caller.call(
            "extend", "queue.extend", self.queue, {"lease_ids": leases}, given={"leases": leases}, timeout=CALL_TIMEOUT, read=extended
        )
        await self.rest(LEASE_TIMEOUT * 0.6)
        await self._settle("complete", items)

    async def _forget(self, items: Sequence[Delivered]) -> None:
        """Let the lease run out, as a client does that dies."""

    async def _come_late(self, items: Sequence[Delivered]) -> None:
        """Complete them when the lease has run out."""
        await self.rest(LEASE_TIMEOUT + 0.5)
        await self._settle("complete", items)


class Holder(Consumer):
    """Holds items for long, with leases that are as long."""

    async def work(self) -> None:
        if items := await self._lease(LONG_LEASE):
            await self.rest(self.random.uniform(0.2, 0.8) * LONG_LEASE)
            await self.random.choice((self._complete, self._mix))(items)


# ---- operators ----------------------------------------------------------------------------------------------------------


class Redriver(Worker):
    """Sends dead items back to where they died."""

    pause = 5.0

    async def work(self) -> None:
        def read(body: Any) -> dict[str, Any]:
            return {"redriven": body["redriven"]}

        await self.caller.call("redrive", "queue.redrive", self.queue, {"limit": 50}, given={}, timeout=CALL_TIMEOUT, read=read)


class Rebalancer(Worker):
    """Adds and removes partitions."""

    pause = 8.0
    expected = ("rebalance_open", "nothing_to_rebalance")

    async def work(self) -> None:
        wanted = self.random.randint(2, 5)
        # It has no `request_timeout`: it ends when the plan is recorded.
        fields = {"requested_partitions": wanted, "drain": self.random.choice(("natural", "copy")), "request_timeout": None}
        await self.caller.call(
            "rebalance", "queue.rebalance", self.queue, fields, given={"partitions": wanted}, timeout=PLAN_TIMEOUT, expected=self.expected
        )


class Setup:
    """What is made once, before the first round; and what the server says of it."""

    def __init__(self, http: httpx.AsyncClient, doors: Sequence[Door]) -> None:
        self._http = http
        self._doors = doors

    async def create(self) -> None:
        """Create the queues and the schedules. Safe to repeat."""
        for queue, settings in QUEUES.items():
            await self._ask("queues.create", {"queue_name": queue, **settings}, ("queue_exists",))
        for name in schedule_names():
            schedule = {"name": name, "queue_name": TICKS, "cron": "* * * * *", "item": item(name), "catch_up": "all"}
            await self._ask("schedules.create", schedule, ("schedule_exists",))

    async def counters(self) -> dict[str, dict[str, int]]:
        """What the partitions of each queue count, added up."""
        found = {}
        for queue in QUEUES:
            body = await self._ask("queue.stats", {"queue_name": queue})
            partitions = [each for share in body["logical_queues"] for each in share["partitions"]]
            sums = Counter(dict.fromkeys(COUNTERS, 0))
            for each in partitions:
                sums.update({name: each[name] or 0 for name in COUNTERS if name in each})
            sums["unavailable"] = sum(each["state"] in ("unavailable", "error") for each in partitions)
            found[queue] = {name: sums[name] for name in COUNTERS}
        return found

    async def is_rebalanced(self) -> bool:
        """Whether no rebalance is open."""
        return not (await self._ask("rebalances.list", {"queue_name": MOVING, "open": True}))["items"]

    async def _ask(self, call: str, fields: dict[str, Any], expected: Sequence[str] = ()) -> Any:
        """The answer of any member. Raises AssertionError without one in time."""
        for number in range(600):
            door = self._doors[number % len(self._doors)]
            answer: Answer = await ask(self._http, door.url, call, fields, CALL_TIMEOUT, expected)
            if answer.outcome == "done" or answer.problem in expected:
                return answer.body
            if answer.problem.startswith("unexpected"):
                break
            await asyncio.sleep(0.1)
        raise AssertionError(f"{call}: {answer.problem}")


def schedule_names() -> list[str]:
    return [f"each-minute-{n}" for n in range(SCHEDULES)]


class Patience:
    """Whether it is still worth waiting for queues to become empty. Times are those in which servers had a processor, in seconds."""

    def __init__(self, now: float) -> None:
        self._began = self._moved = now
        self._least: int | None = None

    def is_over(self, left: int, now: float) -> bool:
        """`left`: how many items are there."""
        if self._least is None or left < self._least:
            self._least, self._moved = left, now
        return now - self._moved >= EMPTY_WITHIN or now - self._began >= EMPTY_AT_LAST


async def drain(goal: Goal, setup: Setup, waits: Waits) -> tuple[bool, dict[str, dict[str, int]]]:
    """Complete all that is there. Whether all was gone in time, and the counters then."""

    def now() -> float:
        return time.monotonic() - waits.total

    ticks = _Ticks(goal.log, time.time())
    crew = Crew([Drainer(goal, Backlog(), f"d-{queue}-{n}", queue) for queue in QUEUES for n in range(2)])
    crew.start()
    patience, is_over = Patience(now()), False
    looks = 0
    """In a row at which all was gone: two, since an item may go from a queue that is looked at later to one that was looked at before."""
    try:
        while looks < 2 and not is_over:
            await asyncio.sleep(0.0 if looks else 0.3)
            counters = await setup.counters()
            left = sum(each["total"] + each["transferring"] + each["unavailable"] for each in counters.values())
            is_over = patience.is_over(left, now())
            looks = looks + 1 if not left and ticks.are_all_there() and await setup.is_rebalanced() else 0
    finally:
        await crew.stop(CALL_TIMEOUT + MARGIN)
    if looks < 2:
        return False, counters
    # A schedule may have fired since, and its items were completed. An instance that is away for a moment counts nothing.
    while True:
        counters = await setup.counters()
        if not are_away(counters) or patience.is_over(0, now()):
            return not are_away(counters), counters
        await asyncio.sleep(0.3)


class Drainer(Consumer):
    """Completes whatever there is."""

    async def work(self) -> None:
        fields = {"client_id": self.name, "batch_size": 200, "max_partitions": 5}
        operation = await self.caller.call("lease", "queue.lease", self.queue, fields, given={"batch": 200}, timeout=WAIT, read=leased)
        if items := [each for each in operation.got.get("items", ()) if each.name is not None]:
            await self._settle("complete", items)


class _Ticks:
    """The items of schedules whose times had passed at `time`."""

    def __init__(self, log: RoundLog, time: float) -> None:
        self._log = log
        began = log.round.began
        minutes = range(int(began // 60) + 1, int(time // 60) + 1)
        self._missing = {f"{TICK}{name}@{minute * 60}" for name in schedule_names() for minute in minutes}
        self._looked = 0

    def are_all_there(self) -> bool:
        operations = self._log.round.operations
        for each in operations[self._looked :]:
            self._missing -= {delivered[0] for delivered in each.got.get("items", ())}
        self._looked = len(operations)
        return not self._missing
