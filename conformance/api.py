"""What a case knows of a server: its address, and how to post JSON to it."""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx

PATIENCE = 60.0
"""Seconds until something that should have happened has failed. Only a failing case takes as long."""

POLL = "50s"
"""The `request_timeout` of a call that is expected to be answered before it."""


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until the condition holds; fail by name when it does not."""
    deadline, pause = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:.0f} s"
        pause.wait(0.02)


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def at(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def millis(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def texts(answer: Any) -> list[str]:
    return [base64.b64decode(item["bytes"]).decode() for item in answer["items"]]


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer["items"]]


def reasons(answer: Any) -> dict[str, str]:
    """What was ignored, and why."""
    return {entry["id"]: entry["reason"] for entry in answer["ignored"]}


def nth(first_id: str, offset: int) -> str:
    """The id that many places after the first one."""
    incarnation, partition, first = first_id.split(".")
    return f"{incarnation}.{partition}.{int(first) + offset}"


class Api:
    """Posts calls; those made with `later` wait in the background."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, limits=limits)
        self._pool = ThreadPoolExecutor(64)

    def post(self, call: str, **fields: object) -> httpx.Response:
        return self.http.post(f"/v1/{call}", json=fields)

    def ask(self, call: str, **fields: object) -> Any:
        """The answer of a call that must succeed."""
        answer = self.post(call, **fields)
        assert answer.status_code == 200, f"{call}: {answer.text}"
        return answer.json()

    def refused(self, call: str, status: int, code: str, **fields: object) -> Any:
        """The problem with which a call must end."""
        answer = self.post(call, **fields)
        assert answer.status_code == status, f"{call}: {answer.text}"
        problem = answer.json()
        assert (problem["status"], problem["code"]) == (status, code)
        return problem

    def later(self, call: str, **fields: object) -> Future[httpx.Response]:
        return self._pool.submit(self.post, call, **fields)

    def queue(self, **settings: object) -> Queue:
        """A new queue of the case's own, with nothing that the case does not name. Its leases outlive a slow machine's case."""
        name = f"case-{secrets.token_hex(6)}"
        off: dict[str, object] = {"max_attempts": None, "retry_backoff": None, "dead_queue": None}
        self.ask("queues.create", **{"queue_name": name, "lease_timeout": "10m", **off, **settings})
        return Queue(self, name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.http.close()


class Queue:
    """The calls on one queue."""

    def __init__(self, api: Api, name: str) -> None:
        self.api = api
        self.name = name

    def ask(self, call: str, **fields: object) -> Any:
        return self.api.ask(call, queue_name=self.name, **fields)

    def refused(self, call: str, status: int, code: str, **fields: object) -> Any:
        return self.api.refused(call, status, code, queue_name=self.name, **fields)

    def produce(self, *payloads: str, **fields: object) -> Any:
        return self.ask("queue.produce", items=[{"utf8": payload} for payload in payloads], **fields)

    def fill(self, count: int) -> Any:
        return self.produce(*(str(number) for number in range(count)))

    def schedule(self, due: int, *payloads: str) -> Any:
        items = [{"utf8": payload, "enqueue_at": at(due)} for payload in payloads]
        return self.ask("queue.produce", items=items)

    def lease(self, batch_size: int = 1, client_id: str = "consumer", **fields: object) -> Any:
        return self.ask("queue.lease", client_id=client_id, batch_size=batch_size, **fields)

    def one(self, **fields: Any) -> Any:
        """The one item that is leased, waiting for it if need be."""
        (item,) = self.lease(request_timeout=POLL, **fields)["items"]
        return item

    def drained(self) -> list[str]:
        """What one consumer is served until nothing is ready. Several leases, as items of expired ones come in smaller ones."""
        served: list[str] = []
        while found := texts(self.lease(7)):
            served += found
        return served

    def park(self, batch_size: int = 1, client_id: str = "waiting", **fields: object) -> Callable[[], Any]:
        """Begin a long poll and see that it waits; calling the result waits for its answer."""
        waiting = self.waiting()
        fields = {"client_id": client_id, "batch_size": batch_size, "request_timeout": POLL, **fields}
        answer = self.api.later("queue.lease", queue_name=self.name, **fields)
        until(lambda: self.waiting() > waiting or answer.done(), "a long poll's waiting")
        assert not answer.done(), answer.result().text

        def result() -> Any:
            response = answer.result(PATIENCE)
            assert response.status_code == 200, response.text
            return response.json()

        return result

    def complete(self, item_ids: list[str], **fields: object) -> Any:
        return self.ask("queue.complete", ids=item_ids, **fields)

    def retry(self, item_id: str, **fields: object) -> Any:
        return self.ask("queue.retry", items=[{"id": item_id, **fields}])

    def expire(self, lease_id: str) -> None:
        """Let a lease run out, as if its consumer had died."""
        before = self.total("expired") + self.total("dead")
        self.ask("queue.extend", lease_ids=[lease_id], lease_timeout="100ms")
        until(lambda: self.total("expired") + self.total("dead") > before, "the end of a lease")

    def waiting(self) -> int:
        return sum(part["lease_waiting"] for part in self.ask("queue.stats")["logical_queues"])

    def partitions(self) -> list[dict[str, Any]]:
        """The stats of the partitions, by number."""
        found = [partition for part in self.ask("queue.stats")["logical_queues"] for partition in part["partitions"]]
        return sorted(found, key=lambda partition: int(partition["partition"]))

    def ready(self) -> list[int]:
        """How many items are ready, by partition."""
        return [partition["ready"] for partition in self.partitions()]

    def total(self, counter: str) -> int:
        return sum(partition[counter] for partition in self.partitions())

    def balances(self) -> bool:
        """Every item that was produced is somewhere, and in one place."""
        gone = sum(self.total(counter) for counter in ("completed", "dead", "cleared", "redriven"))
        return self.total("produced") == gone + self.total("total") + self.total("transferring")
