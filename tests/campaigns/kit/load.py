"""Producers and consumers over HTTP that go on over every crash, and write down what they were told."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import httpx

from sluiceway.core.queue.lease_scheduler import LEASE_PATIENCE
from tests.campaigns.kit.ledger import Ledger, payload_of

PRODUCERS, CONSUMERS = 2, 3
LEASE_TIMEOUT = 1_500
MAX_ATTEMPTS = 6
WAYS = ("keyed", "grouped", "unkeyed")
BACKLOG = 2_000
"""Items that are under way at most, so that a queue can be drained soon."""
REQUEST_TIMEOUT = 30_000
MARGIN = 5_000
"""Milliseconds past its `request_timeout` after which a call has not ended as it was promised."""


class Address:
    """Where the server is, while there is one."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._url = ""

    def set(self, url: str) -> None:
        self._url = url
        self._known.set()

    def clear(self) -> None:
        self._known.clear()

    def get(self) -> str | None:
        return self._url if self._known.wait(0.1) else None

    def failed(self, url: str) -> None:
        """A call there was not done."""

    def may_hang(self, _url: str) -> bool:
        """Whether a call there need not end, nor have ended lately."""
        return False


class Answer(NamedTuple):
    """How a call ended: `done` with a body, `refused`, or `unknown`."""

    outcome: str
    body: Any = None
    problem: str = ""
    """The code that the server gave, or `not reached`, or `no answer`."""
    detail: str = ""


def millis(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def call(http: httpx.Client, address: Address, name: str, fields: dict[str, Any], patience: int) -> Answer:
    """One call; an AssertionError for an answer that says neither, and for none within `patience` ms from a server that must end it."""
    url = address.get()
    if url is None:
        return Answer("refused")
    answer = _call(http, address, url, name, fields, patience)
    if answer.outcome != "done":
        address.failed(url)
    return answer


def _call(http: httpx.Client, address: Address, url: str, name: str, fields: dict[str, Any], patience: int) -> Answer:
    try:
        answer = http.post(f"{url}/v1/{name}", json=fields, timeout=patience / 1_000)
    except httpx.ConnectError:
        return Answer("refused", problem="not reached")
    except httpx.TimeoutException:
        if not address.may_hang(url):
            raise AssertionError(f"{name}: no answer within {patience} ms") from None
        return Answer("unknown", problem="no answer")
    except httpx.TransportError:
        return Answer("unknown", problem="no answer")
    if answer.status_code == 200:
        return Answer("done", answer.json())
    problem = answer.json()
    if not problem["retryable"]:
        raise AssertionError(f"{name}: {answer.text}")
    return Answer("unknown" if problem["code"] == "outcome_unknown" else "refused", problem=problem["code"], detail=problem["detail"])


class Load:
    """Threads that work from `start` to `stop`; what goes wrong with them is in the ledger's tally.

    Each call has `request_timeout` (ms) to end, but for a lease; `ways` are those in which items are produced; `pause` is what a thread
    waits (s) before each piece of work.
    """

    def __init__(
        self,
        ledger: Ledger,
        address: Address,
        queue: str,
        seed: str,
        request_timeout: int = REQUEST_TIMEOUT,
        ways: Sequence[str] = WAYS,
        producers: int = PRODUCERS,
        consumers: int = CONSUMERS,
        pause: float = 0.0,
    ) -> None:
        self._ledger = ledger
        self._address = address
        self._request_timeout = request_timeout
        self._ways = ways
        self._queue = queue
        self._pause = pause
        self._producing, self._consuming = threading.Event(), threading.Event()
        self._producing.set()
        self._consuming.set()
        self._producers = [self._thread(Producer, f"{seed}p{n}", self._producing) for n in range(producers)]
        self._consumers = [self._thread(Consumer, f"{seed}c{n}", self._consuming) for n in range(consumers)]

    def _thread(self, kind: type[Worker], name: str, goes_on: threading.Event) -> threading.Thread:
        def work() -> None:
            rest = threading.Event()
            try:
                with httpx.Client() as http:
                    worker = kind(name, http, self._address, self._ledger, self._request_timeout, self._ways, self._queue)
                    while goes_on.is_set():
                        worker.work()
                        rest.wait(self._pause)
            except Exception as error:
                self._ledger.tally.wrong("other", f"{name}: {error!r}")

        return threading.Thread(target=work, name=name, daemon=True)

    def start(self) -> None:
        for thread in (*self._producers, *self._consumers):
            thread.start()

    def stop_producing(self) -> None:
        """Returns when every keyed produce is answered, which takes a server."""
        self._producing.clear()
        self._join(self._producers)

    def stop_consuming(self) -> None:
        self._consuming.clear()
        self._join(self._consumers)

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                raise AssertionError(f"{thread.name} does not end")

    def abandon(self) -> None:
        """Stop without waiting for anything to be settled."""
        self._producing.clear()
        self._consuming.clear()
        for thread in (*self._producers, *self._consumers):
            if thread.ident is not None:
                thread.join(1)


class Worker:
    def __init__(
        self, name: str, http: httpx.Client, address: Address, ledger: Ledger, request_timeout: int, ways: Sequence[str], queue: str
    ) -> None:
        self.name = name
        self.ways = ways
        self._queue = queue
        self._request_timeout = request_timeout
        self.ledger = ledger
        self.random = random.Random(name)
        self.number = 0
        self._http = http
        self._address = address

    def work(self) -> None:
        raise NotImplementedError

    def once(self, call_name: str, **fields: Any) -> Answer:
        """One try."""
        fields = {"queue_name": self._queue, "request_timeout": f"{self._request_timeout}ms", **fields}
        # A lease may wait a little longer than it asked to, for what is just being written for it.
        patience = self._request_timeout + LEASE_PATIENCE + MARGIN
        answer = call(self._http, self._address, call_name, fields, patience)
        if answer.problem:
            self.ledger.tally.counts[answer.problem] += 1
        if answer.outcome != "done":
            threading.Event().wait(0.01)
        return answer

    def until_done(self, call_name: str, **fields: Any) -> tuple[Any, bool]:
        """Repeat a call that is safe to repeat until it is answered. The answer, and whether an earlier try may have done it already."""
        in_doubt = False
        while True:
            answer = self.once(call_name, **fields)
            if answer.outcome == "done":
                return answer.body, in_doubt
            in_doubt = in_doubt or answer.outcome == "unknown"


class Producer(Worker):
    def work(self) -> None:
        if self.ledger.outstanding > BACKLOG:
            threading.Event().wait(0.01)
            return
        self.number += 1
        names = [f"{self.name}.{self.number}.{n}" for n in range(self.random.choice((1, 3, 10, 40)))]
        delay = 300 if self.random.random() < 0.1 else 0
        not_before = time.time_ns() // 1_000_000 + delay if delay else 0
        items: list[dict[str, Any]] = [{"utf8": payload_of(name)} for name in names]
        if not_before:
            moment = datetime.fromtimestamp(not_before / 1_000).astimezone()
            items = [{**item, "enqueue_at": moment.isoformat(timespec="milliseconds")} for item in items]
        self.ledger.sending(names, not_before)
        key: dict[str, Any] = {"idempotency_key": f"{self.name}-{self.number}"}
        way = self.random.choice(self.ways)
        if way == "unkeyed":
            self._unkeyed(names, items)
            return
        if way == "grouped":
            key |= {"idempotency_group": self.name, "idempotency_sequence": self.number}
        body, _ = self.until_done("queue.produce", items=items, **key)
        self.ledger.stored(names, body["first_id"])
        if self.random.random() < 0.1:
            again, _ = self.until_done("queue.produce", items=items, **key)
            if (again["first_id"], again["deduplicated"]) != (body["first_id"], True):
                self.ledger.tally.wrong("doubled", f"{names[0]} produced again became {again['first_id']}")

    def _unkeyed(self, names: list[str], items: list[dict[str, Any]]) -> None:
        answer = self.once("queue.produce", items=items)
        if answer.outcome == "done":
            self.ledger.stored(names, answer.body["first_id"])
        elif answer.outcome == "refused":
            self.ledger.refused(names)


class Consumer(Worker):
    _held: Mapping[str, str] = {}
    """Items that the next lease completes: their names by id."""

    def work(self) -> None:
        self.number += 1
        want: dict[str, Any] = {
            "client_id": self.name,
            "batch_size": self.random.choice((1, 5, 25, 100)),
            "request_timeout": "100ms",
            "max_partitions": self.random.choice((1, 3)),
        }
        done, self._held = dict(self._held), {}
        if done:
            self.ledger.trying(list(done.values()), "done")
            want["complete"] = {"ids": list(done), "request_timeout": f"{self._request_timeout}ms"}
        if self.random.random() < 0.5:
            body, in_doubt = self.until_done("queue.lease", lease_key=f"{self.name}-{self.number}", **want)
        else:
            answer = self.once("queue.lease", **want)
            body, in_doubt = answer.body, answer.outcome == "unknown"
        if done:
            completed = body["completed"] if body else None
            in_doubt = in_doubt or completed is None
            self._settled(done, completed or self.until_done("queue.complete", ids=list(done))[0], in_doubt, "done")
        names: dict[str, str] = {}
        """Item id → name."""
        for item in body["items"] if body else ():
            deadline = millis(item["lease_deadline"])
            name = self.ledger.served(base64.b64decode(item["bytes"]).decode(), item, deadline - LEASE_TIMEOUT, deadline)
            if name is not None:
                names[item["id"]] = name
        if names:
            leases = {
                lease["lease_id"]: [item["id"] for item in body["items"] if item["lease_id"] == lease["lease_id"]]
                for lease in body["leases"]
            }
            actions = (self._complete, self._hold, self._mix, self._close, self._extend, self._forget)
            action = self.random.choices(actions, (25, 15, 20, 20, 15, 5))[0]
            action(names, leases)

    def _forget(self, _names: dict[str, str], _leases: dict[str, list[str]]) -> None:
        """Let the lease run out, as a consumer does that dies."""

    def _hold(self, names: dict[str, str], _leases: dict[str, list[str]]) -> None:
        """Complete them by the next lease."""
        self._held = names

    def _complete(self, names: dict[str, str], _leases: dict[str, list[str]]) -> None:
        self.ledger.trying(list(names.values()), "done")
        body, in_doubt = self.until_done("queue.complete", ids=list(names))
        self._settled(names, body, in_doubt, "done")

    def _settled(self, names: dict[str, str], body: Any, in_doubt: bool, verdict: str) -> None:
        ignored = {entry["id"] for entry in body["ignored"]}
        if verdict == "done" and body["completed"] != len(names) - len(ignored):
            self.ledger.tally.wrong("other", f"completed {body['completed']} of {len(names)}, ignored {len(ignored)}")
        self.ledger.fated([name for item_id, name in names.items() if item_id not in ignored], verdict)
        if not in_doubt:
            self.ledger.tally.counts["came too late"] += len(ignored)

    def _extend(self, names: dict[str, str], leases: dict[str, list[str]]) -> None:
        answer = self.once("queue.extend", lease_ids=list(leases))
        for lease in answer.body["leases"] if answer.body else ():
            self.ledger.extended(lease["lease_id"], millis(lease["lease_deadline"]))
        if self.random.random() < 0.8:
            self._complete(names, leases)

    def _mix(self, names: dict[str, str], leases: dict[str, list[str]]) -> None:
        """Some are put back, some die, the rest is completed."""
        dispositions = {item_id: self.random.choices(("done", "retry", "dead"), (5, 3, 2))[0] for item_id in names}
        for verdict in ("retry", "dead"):
            those = {item_id: names[item_id] for item_id, disposition in dispositions.items() if disposition == verdict}
            if those:
                more: dict[str, Any] = (
                    {"dead": True, "reason": "asked"} if verdict == "dead" else self.random.choice(({}, {"retry_after": "200ms"}))
                )
                self.ledger.trying(list(those.values()), verdict)
                body, in_doubt = self.until_done("queue.retry", items=[{"id": item_id, **more} for item_id in those])
                self._settled(those, body, in_doubt, verdict)
        rest = {item_id: names[item_id] for item_id, disposition in dispositions.items() if disposition == "done"}
        if rest:
            self._complete(rest, leases)

    def _close(self, names: dict[str, str], leases: dict[str, list[str]]) -> None:
        """State outcomes, then close the lease: they take effect together."""
        for lease, ids in leases.items():
            dispositions = {item_id: self.random.choices(("done", "retry", "dead"), (6, 2, 2))[0] for item_id in ids if item_id in names}
            stated = [{"id": item_id, "outcome": disposition} for item_id, disposition in dispositions.items() if disposition != "done"]
            if stated and self.until_done("queue.settle", items=stated)[0]["ignored"]:
                continue  # the lease has run out
            by_disposition = {
                disposition: [names[item_id] for item_id, each in dispositions.items() if each == disposition]
                for disposition in ("done", "retry", "dead")
            }
            for disposition, those in by_disposition.items():
                self.ledger.trying(those, disposition)
            body, _ = self.until_done("queue.complete", lease_ids=[lease])
            if not body["ignored"]:
                for disposition, those in by_disposition.items():
                    self.ledger.fated(those, disposition)
