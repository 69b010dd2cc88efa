"""Load of `sluiceway dev`: queues in use, items that fail and die, and partitions that move to another backend.

It is an ordinary user of the server: it only calls the API.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Final

from sluiceway.adapters.disk import keep_private
from sluiceway.client import Backoff, Client, Item, Leased, LeasedItem, Retry
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.run import write_whole

log = logging.getLogger("sluiceway.demo")

ORDERS: Final = "demo-orders"
EMAILS: Final = "demo-emails"
DEAD: Final = "demo-dead"
QUEUES: Final = frozenset((ORDERS, EMAILS, DEAD))
WORKERS: Final = ("demo-worker-1", "demo-worker-2", "demo-worker-3")
_MAILER: Final = "demo-mailer"

FILE: Final = "demo.toml"
_BACKENDS: Final = ("default", "second")
_AFFINITIES: Final = (1.0, 0.25)

_FIRST: Final = 800
"""Orders that wait before consumption starts; about as many wait from then on."""
_PER_CALL: Final = 40
_CARD: Final = 5
"""One order in this many is paid by card, through a processor that has outages."""
_STRANGER: Final = 200
"""One order in this many is of an unknown customer."""
_OUTAGES: Final = (150, 40, 85)
"""Turns per cycle, first turn of the outage, and first turn after it. An outage is long enough to fail retries, too."""
_BACKOFF: Final = Backoff("2s", "20s")
_REFUSED: Final = frozenset(("unauthenticated", "forbidden", "not_found"))


@dataclass(frozen=True)
class Pace:
    """Timing of the demo. `turn`: seconds; `first_move`: turn of the partitions' first move; `moves`: turns between moves.
    `drain`: approximate seconds to copy their items; `backoff`: delay of a retry, or None."""

    turn: float = 1.0
    first_move: int = 20
    moves: int = 120
    drain: float = 10
    backoff: Backoff | None = _BACKOFF


class OtherQueuesError(Exception):
    """The server has queues that are not the demo's."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Demo:
    """Acts as many users would, a turn at a time. `config`: configuration file that the server was started with, made by `prepare`."""

    def __init__(self, client: Client, workers: Sequence[Client], mailer: Client, config: Path, pace: Pace | None = None) -> None:
        self._client, self._workers, self._mailer, self._config = client, workers, mailer, config
        self._pace = pace or Pace()
        self._turn = 0
        self._order = 0
        self._held: dict[Client, Leased] = {}

    def begin(self, beside_others: bool = False) -> None:
        """Create the missing queues. Raises OtherQueuesError if there are other queues, unless `beside_others`, and SluicewayError."""
        there = {each.queue_name for each in self._client.list_queues(limit=1_000).items}
        if (others := sorted(there - QUEUES)) and not beside_others:
            raise OtherQueuesError(others)
        if DEAD not in there:
            self._client.create_queue(DEAD, expire_timeout="10m", reference="sluiceway dev: what was given up on, for ten minutes")
        for name, partitions, attempts in ((ORDERS, 6, 2), (EMAILS, 2, 5)):
            if name not in there:
                self._client.create_queue(
                    name,
                    requested_partitions=partitions,
                    dead_queue=DEAD,
                    max_attempts=attempts,
                    lease_timeout="30s",
                    retry_backoff=self._pace.backoff,
                    reference="sluiceway dev: the demo produces into it, and consumes from it",
                )
        self._order = sum(part.produced for part in self._client.stats(ORDERS).partitions)
        if not self._order:
            self._produce_orders(_FIRST)

    def turn(self) -> None:
        """Produce, settle the items leased in the last turn, lease, and move partitions if due. Raises SluicewayError."""
        self._turn += 1
        since = self._turn - self._pace.first_move
        ready = sum(part.ready for part in self._client.stats(ORDERS).partitions)
        self._produce_orders(round(40 + 25 * math.sin(self._turn / 15)))
        self._produce_emails()
        for worker in self._workers:
            self._settle(worker, ORDERS)
            # Workers keep up: the longer the backlog, the more they lease.
            size = min(1_000, max(5, ready // (_FIRST // 40) // len(self._workers)))
            self._held[worker] = worker.lease(ORDERS, batch_size=size, max_partitions=3)
        self._settle(self._mailer, EMAILS)
        self._held[self._mailer] = self._mailer.lease(EMAILS, batch_size=20, max_partitions=2)
        if since >= 0 and since % self._pace.moves == 0:
            self._move(ready)

    def _produce_orders(self, count: int) -> None:
        items = [self._new_order() for _ in range(count)]
        # One call stores all of its items in one partition.
        for first in range(0, count, _PER_CALL):
            self._client.produce(ORDERS, items[first : first + _PER_CALL])

    def _new_order(self) -> Item:
        self._order += 1
        number = self._order
        paid = "card" if number % _CARD == 0 else "transfer"
        about = {"order": number, "customer": number * 7919 % 4_001, "paid_by": paid, "amount": f"{number * 37 % 20_000 / 100:.2f}"}
        return Item(json.dumps(about), kind=paid, encoding="application/json", reference=f"order-{number}")

    def _produce_emails(self) -> None:
        later = datetime.now(UTC) + timedelta(seconds=30) if self._turn % 3 == 0 else None
        texts = [f"Your order {self._order - place} is on its way" for place in range(8)]
        self._client.produce(EMAILS, [Item(text, kind="email", enqueue_at=later) for text in texts])

    def _settle(self, worker: Client, queue_name: str) -> None:
        """Settle the items leased in the last turn. On an error, items come back when their lease runs out."""
        held = self._held.pop(worker, None)
        if not held:
            return
        failed = list(self._failures(held)) if queue_name == ORDERS else []
        if failed:
            worker.retry(queue_name, failed)
        gone = {each.id for each in failed}
        if done := [item.id for item in held if item.id not in gone]:
            worker.complete(queue_name, done)

    def _failures(self, held: Leased) -> Iterator[Retry]:
        turns, first, end = _OUTAGES
        is_down = first <= self._turn % turns < end
        for item in held:
            if _number(item) % _STRANGER == 0:
                yield Retry(item.id, dead=True, reason="no such customer")
            elif is_down and item.kind == "card":
                yield Retry(item.id, reason="card processor not reachable")

    def _move(self, ready: int) -> None:
        """Swap the backends' affinities, which moves most of the partitions from one backend to the other."""
        if self._client.list_rebalances(queue_name=ORDERS, only_open=True).items:
            return
        write_whole(self._config, _configuration(reversed(_affinities(self._config))))
        self._client.reload_config()
        try:
            # Two thirds of the items move.
            self._client.rebalance(ORDERS, drain="copy", rate=max(20, round(ready / self._pace.drain * 2 / 3)))
        except SluicewayError as error:
            # Another client was faster.
            if error.code not in ("rebalance_open", "nothing_to_rebalance"):
                raise


def _number(item: LeasedItem) -> int:
    try:
        return int(json.loads(item.payload)["order"])
    except (ValueError, KeyError, TypeError):
        # An item of another producer.
        return 1


# ---- configuration --------------------------------------------------------------------------------------------------


_HEAD: Final = """# Written by the demo of `sluiceway dev`, again each time that it moves partitions from one backend to the other.
# A dozen requests a second are no news.
[log]
level = "warning"
"""


def prepare(data: Path) -> Path:
    """Return the configuration file, with two backends, for a server on that data folder; create it if missing."""
    file = data / FILE
    if not file.exists():
        keep_private(data)
        write_whole(file, _configuration(_AFFINITIES))
    return file


def _configuration(affinities: Sequence[float] | Iterator[float]) -> str:
    tables = [
        f'\n[backends.{name}]\nkind = "sqlite"\npartition_affinity = {affinity}\n'
        for name, affinity in zip(_BACKENDS, affinities, strict=True)
    ]
    return _HEAD + "".join(tables)


def _affinities(file: Path) -> list[float]:
    backends = tomllib.loads(file.read_text(encoding="utf-8")).get("backends", {})
    found = [float(backends.get(name, {}).get("partition_affinity", 1.0)) for name in _BACKENDS]
    return found if sorted(found) == sorted(_AFFINITIES) else list(_AFFINITIES)


# ---- runner ---------------------------------------------------------------------------------------------------------


class Runner:
    """Runs a demo in a thread beside a server in this process. `say` gets one message, whether it runs; it ends with the server."""

    def __init__(self, config: Path, say: Callable[[str], None], *, beside_others: bool = False, pace: Pace | None = None) -> None:
        self._config, self._say, self._beside_others = config, say, beside_others
        self._pace = pace or Pace()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        """Start once the server takes requests."""
        self._thread = threading.Thread(target=self._run, args=(url,), name="sluiceway-demo", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; returns once the call in flight, if any, has ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, url: str) -> None:
        with ExitStack() as stack:

            def client(name: str) -> Client:
                return stack.enter_context(Client(url, client_id=name, retry_for="0s"))

            demo = Demo(client("demo"), [client(name) for name in WORKERS], client(_MAILER), self._config, self._pace)
            try:
                demo.begin(self._beside_others)
            except OtherQueuesError as error:
                self._say(f"No demo: the server has other queues ({_some(error.names)}). Pass --demo to run it beside them.")
                return
            except SluicewayError as error:
                self._say(f"No demo: {error.detail}")
                return
            self._say(
                f"A demo uses {ORDERS} and {EMAILS}: some items fail and die, and after {self._pace.first_move * self._pace.turn:.0f} s "
                "partitions move, and then again from time to time. Pass --no-demo to leave it out."
            )
            while not self._stop.is_set():
                began = monotonic()
                try:
                    demo.turn()
                except SluicewayError as error:
                    if error.code in _REFUSED:
                        self._say(f"The demo ends: {error.detail}")
                        return
                    if not self._stop.is_set():
                        log.debug("a turn of the demo: %s", error)
                self._stop.wait(max(0.0, began + self._pace.turn - monotonic()))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
