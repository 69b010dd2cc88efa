"""Load on queues whose partitions come, go and move; by the Python client where no call may fail, by single calls where servers die."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from sluiceway.client import Client, http_messages
from sluiceway.client.connections import Connections
from sluiceway.client.errors import CallError
from sluiceway.client.protocol import About, call
from tests.campaigns.kit.fleet import Fleet
from tests.campaigns.kit.ledger import Ledger
from tests.campaigns.kit.load import Answer, Consumer, Load, Producer, Worker
from tests.campaigns.kit.report import quantile
from tests.campaigns.kit.traffic import PAUSE, REQUEST_TIMEOUT, Door, Traffic, only

KEPT_KEYS = 300
"""So many produces of each producer are repeated now and then, long after they were done."""
REPEATED = 0.15
MIN_CLIENTS = 3
"""So many producers each queue has at least, and twice as many consumers: no backlog is to keep a partition from being drained."""
ENOUGH = 100
"""So many calls of one kind it takes to say what the slowest hundredth of them is."""


class MovingLedger(Ledger):
    """Partitions that go take their counters along, so only those that are there are asked whether their books balance."""

    def check_totals(self, new: Counter[str], landed: int, arrived: int) -> None:
        """Nothing can be said of them."""

    def check_balance(self, now: Counter[str]) -> None:
        came = now["produced"] + now["moved_in"]
        went = now["completed"] + now["dead"] + now["moved"] + now["total"] + now["transferring"]
        if came != went:
            self.tally.wrong("other", f"the books do not balance: {dict(now)}")


class Timed(NamedTuple):
    at: float
    """When it was answered, `time.monotonic`."""
    name: str
    seconds: float


class Calls:
    """What the calls of the Python client took, its repetitions included, and what it kept from its user."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._timed: list[Timed] = []
        self.hidden: Counter[str] = Counter()
        """Answers that it dealt with by itself, by their code."""

    def add(self, name: str, seconds: float) -> None:
        with self._mutex:
            self._timed.append(Timed(time.monotonic(), name, seconds))

    def p99(self, since: float, until: float, least: int = ENOUGH) -> dict[str, float]:
        """Of each kind of call, in seconds, if there were enough of them to say."""
        with self._mutex:
            timed = [each for each in self._timed if since <= each.at < until]
        by_name: dict[str, list[float]] = {}
        for each in timed:
            by_name.setdefault(each.name, []).append(each.seconds)
        return {name: quantile(values, 0.99) for name, values in by_name.items() if len(values) >= least}

    def slowest(self, since: float, until: float, count: int) -> list[Timed]:
        with self._mutex:
            return sorted((each for each in self._timed if since <= each.at < until), key=lambda each: -each.seconds)[:count]


class _Listening(Connections):
    """Ordinary connections that note what the client will not tell."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def exchange(self, request: http_messages.Request) -> http_messages.Answer:
        answer = super().exchange(request)
        if answer.status != 200:
            self._calls.hidden[str(json.loads(answer.body).get("code"))] += 1
        return answer


class RepeatingProducer(Producer):
    """Repeats a produce of long ago now and then: wherever the key's home is by now, the first answer must come."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._done: list[tuple[dict[str, Any], str]] = []

    def work(self) -> None:
        super().work()
        if self._done and self.random.random() < REPEATED:
            fields, first_id = self.random.choice(self._done)
            again, _ = super().until_done("queue.produce", **fields)
            if (again["first_id"], again["deduplicated"]) != (first_id, True):
                self.ledger.tally.wrong("doubled", f"{fields['idempotency_key']} was {first_id}, and long after {again}")
            self.ledger.tally.counts["repeated long after"] += 1

    def until_done(self, call_name: str, **fields: Any) -> tuple[Any, bool]:
        body, in_doubt = super().until_done(call_name, **fields)
        # Of a group only the newest sequence may be repeated, which the load itself does.
        if call_name == "queue.produce" and "idempotency_group" not in fields and not body["deduplicated"]:
            self._done.append((fields, body["first_id"]))
            del self._done[:-KEPT_KEYS]
        return body, in_doubt


class _ByClient(Worker):
    """Makes its calls by the Python client, as any user does. That one fails is wrong."""

    calls: Calls
    client: Client | None = None

    def once(self, call_name: str, **fields: Any) -> Answer:
        fields = {"queue_name": self._queue, "request_timeout": f"{self._request_timeout}ms", **fields}
        timeout = fields.pop("request_timeout")
        named = [*fields.get("ids", ()), *fields.get("lease_ids", ()), *(item["id"] for item in fields.get("items", ()) if "id" in item)]
        about = About(self._queue, named, takes=call_name == "queue.lease") if named or call_name == "queue.lease" else None
        repeatable = {"queue.produce": "idempotency_key" in fields, "queue.lease": "lease_key" in fields}.get(call_name, True)
        begun = time.monotonic()
        try:
            # As its methods do; these would take the answers apart, which the ledger reads as they come.
            made = call(f"/v1/{call_name}", dict, fields, repeatable=repeatable, request_timeout=timeout, about=about)
            body: dict[str, Any] = self._reached()._channel.run(made)
        except CallError as error:
            self.ledger.tally.wrong("other", f"a client was told {error.code} by {call_name}: {error}")
            threading.Event().wait(0.5)
            return Answer("unknown" if error.outcome_unknown else "refused", problem=error.code)
        if call_name != "queue.lease" or body["items"]:
            self.calls.add(call_name, time.monotonic() - begun)
        return Answer("done", body)

    def _reached(self) -> Client:
        if self.client is None:
            url = self._address.get()
            assert url is not None
            # Half of them go to the owners themselves.
            self.client = Client(url, client_id=self.name, direct=self.random.random() < 0.5, transport=_Listening(self.calls))
        return self.client


class ClientProducer(_ByClient, RepeatingProducer):
    """A producer by the Python client."""


class ClientConsumer(_ByClient, Consumer):
    """A consumer by the Python client."""


class RepeatingLoad(Load):
    """Whose producers repeat what was long ago."""

    def _thread(self, kind: type[Worker], name: str, goes_on: threading.Event) -> threading.Thread:
        return super()._thread(self._kind(kind), name, goes_on)

    def _kind(self, kind: type[Worker]) -> type[Worker]:
        return RepeatingProducer if kind is Producer else kind


class ClientLoad(RepeatingLoad):
    """All calls are made by the Python client."""

    def __init__(self, calls: Calls, *given: Any, **more: Any) -> None:
        self._calls = calls
        super().__init__(*given, **more)

    def _kind(self, kind: type[Worker]) -> type[Worker]:
        base: type[Worker] = ClientProducer if kind is Producer else ClientConsumer
        return type(base.__name__, (base,), {"calls": self._calls})


class MovingTraffic(Traffic):
    """`by_client`: the Python client makes the calls; no instance may be killed then, as each of its users has one URL."""

    ledger = MovingLedger

    def __init__(self, fleet: Fleet, queues: Mapping[str, int], by_client: bool) -> None:
        super().__init__(fleet, queues)
        self.calls = Calls()
        self._by_client = by_client

    def _load(self, queue: str, home: int) -> Load:
        each = max(1, MIN_CLIENTS // self.fleet.homes)
        size: dict[str, Any] = {"request_timeout": REQUEST_TIMEOUT, "producers": each, "consumers": 2 * each, "pause": PAUSE}
        who = queue, self._who(queue, home)
        if self._by_client:
            return ClientLoad(self.calls, self.ledgers[queue], only(self.fleet, home), *who, **size)
        return RepeatingLoad(self.ledgers[queue], Door(self.fleet, home), *who, **size)
