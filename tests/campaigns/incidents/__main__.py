"""Incidents staged on a real server: each must be named by the overview page, `sluiceway doctor` and `sluiceway top` within 15 s, and a
healthy server must name none.

`make test-incidents` runs all of it, `make test-incidents ARGS='no_consumer healthy'` a part; `MINUTES=60` makes the healthy run an hour
long. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from sluiceway.client import Backoff, Client, Item, Retry
from tests.campaigns.incidents.actors import Cast, on_stage
from tests.campaigns.incidents.outlets import LIMIT, watch
from tests.campaigns.kit import command
from tests.campaigns.kit.report import Report
from tests.server.server_process import ServerProcess, wait_until
from tests.servers.postgres_server import PostgresServer

_BACKOFF = Backoff("1s", "10m")
"""As new queues have it: what fails comes back ever more rarely, and must be named all the same."""
_WARM_UP = 6.0
"""Seconds of healthy work before an incident begins: a queue that never worked is another incident."""


class Campaign(command.Campaign):
    name = "incidents"

    def __init__(self, given: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        super().__init__(given, folder, stack)
        self._server = stack.enter_context(ServerProcess(folder / "data"))

    @classmethod
    def _add_options(cls, parser: argparse.ArgumentParser) -> None:
        minutes = float(os.environ.get("MINUTES") or 1)
        parser.add_argument("--minutes", type=float, default=minutes, help="length of the healthy run; also MINUTES=…")

    @contextmanager
    def _scene(self, queue: str, **settings: object) -> Iterator[Cast]:
        with on_stage(self._server.url, queue, **settings) as cast:
            yield cast

    def _expect(self, report: Report, kind: str, subject: str, began: float, url: str = "") -> None:
        seen = watch(url or self._server.url, kind, subject, began)
        for outlet, seconds in seen.items():
            report.within(f"{kind} of {subject} on {outlet}", seconds, LIMIT)
        report.figure(", ".join(f"{outlet} {seconds:.1f} s" for outlet, seconds in sorted(seen.items())))

    # ---- the incidents ----------------------------------------------------------------------------------------------

    def no_consumer(self, report: Report) -> None:
        """the consumer stops, and items go on coming"""
        with self._scene("orders") as cast:
            cast.produces(5, 0.5)
            stop = cast.works(cast.completes())
            time.sleep(_WARM_UP)
            stop()
            self._expect(report, "no_consumer", "orders", time.monotonic())

    def poison_item(self, report: Report) -> None:
        """one item fails whenever it is tried, and all others are completed"""
        with self._scene("parcels", retry_backoff=_BACKOFF) as cast, Client(cast.url) as client:
            cast.produces(5, 0.5)

            def handle(consumer: Client, id: str, text: str) -> None:
                if text == "poison":
                    consumer.retry(cast.queue, [id])
                    time.sleep(0.2)
                else:
                    consumer.complete(cast.queue, [id])

            cast.works(handle)
            time.sleep(_WARM_UP)
            client.produce(cast.queue, ["poison"])
            self._expect(report, "poison_item", "parcels", time.monotonic())

    def held_up_key(self, report: Report) -> None:
        """one item fails whenever it is tried, and the later ones of its key wait for it"""
        with self._scene("events", retry_backoff=_BACKOFF, order="key") as cast, Client(cast.url) as client:
            cast.produces(5, 0.5)

            def handle(consumer: Client, id: str, text: str) -> None:
                if text == "poison":
                    consumer.retry(cast.queue, [Retry(id, retry_after="200ms")])
                else:
                    consumer.complete(cast.queue, [id])

            cast.works(handle)
            time.sleep(_WARM_UP)
            client.produce(cast.queue, [Item(text, key="ada") for text in ("poison", "one", "two")])
            self._expect(report, "key_held_up", "ada", time.monotonic())

    def failing_dependency(self, report: Report) -> None:
        """what the handlers depend on fails, so that every item is retried"""
        with self._scene("invoices", retry_backoff=_BACKOFF) as cast:
            cast.produces(5, 0.5)
            stop = cast.works(cast.completes())
            time.sleep(_WARM_UP)
            stop()
            began = time.monotonic()
            cast.works(cast.fails())
            self._expect(report, "failure_rate", "invoices", began)

    def slow_handlers(self, report: Report) -> None:
        """three handlers that took no time take half a minute"""
        with self._scene("thumbnails") as cast:
            cast.produces(5, 0.5)
            stops = [cast.works(cast.completes()) for _ in range(3)]
            time.sleep(_WARM_UP)
            for stop in stops:
                stop()
            began = time.monotonic()
            for _ in range(3):
                cast.works(cast.completes(30.0))
            self._expect(report, "slow_handlers", "thumbnails", began)

    def paused_and_forgotten(self, report: Report) -> None:
        """an operator pauses a queue, and goes home"""
        with self._scene("mails") as cast, Client(cast.url) as client:
            cast.produces(5, 0.5)
            cast.works(cast.completes())
            time.sleep(_WARM_UP)
            began = time.monotonic()
            client.pause(cast.queue)
            self._expect(report, "queue_paused", "mails", began)

    def expired_leases(self, report: Report) -> None:
        """a consumer takes items and never settles them"""
        with self._scene("scans", lease_timeout="2s") as cast:
            cast.produces(5, 0.5)
            stop = cast.works(cast.completes())
            time.sleep(_WARM_UP)
            stop()
            began = time.monotonic()
            cast.works(lambda *_: None, batch=5)
            self._expect(report, "leases_expiring", "scans", began)

    def hoarding_consumer(self, report: Report) -> None:
        """one consumer leases all there is and works on one at a time, while another waits"""
        with self._scene("letters") as cast:
            cast.produces(20, 1.0)
            stop = cast.works(cast.completes())
            time.sleep(_WARM_UP)
            began = time.monotonic()

            def hoard(client: Client) -> None:
                while True:
                    leased = client.lease(cast.queue, batch_size=1_000, request_timeout="1s")
                    for item in leased.items[:1]:
                        client.complete(cast.queue, [item.id])
                    if not leased.items or time.monotonic() - began > 60:
                        return

            stop()
            cast.start(hoard, "greedy")
            time.sleep(2)
            cast.works(cast.completes())
            self._expect(report, "consumer_hoarding", "greedy[-0-9]*", began)

    def blocked_backend(self, report: Report) -> None:
        """PostgreSQL stands still, as on a machine that hangs; no other process can block a SQLite file, whose lock the server holds"""
        with PostgresServer() as postgres:
            config = self._folder / "postgres.toml"
            config.write_text(f'[backends.db]\nkind = "postgres"\nurl = "{postgres.dsn()}"\n')
            with ServerProcess(self._folder / "on-postgres", config=config) as server, on_stage(server.url, "bookings") as cast:
                cast.produces(5, 0.5)
                cast.works(cast.completes())
                time.sleep(_WARM_UP)
                began = time.monotonic()
                postgres.pause()
                try:
                    self._expect(report, "backend_(slow|down)", "db", began, server.url)
                finally:
                    postgres.resume()
                wait_until(lambda: _is_ready(server.url), "the server serves again")

    # ---- and none ---------------------------------------------------------------------------------------------------

    def healthy(self, report: Report) -> None:
        """work of every healthy kind, during which nothing may be named"""
        url = self._server.url
        wait_until(lambda: not _problems(url), "the incidents of before are over")
        with ExitStack() as stack:
            scenes = {
                name: stack.enter_context(self._scene(name)) for name in ("steady", "bursty", "slow", "failing", "restarting", "empty")
            }
            _healthy_actors(scenes)
            found: dict[str, float] = {}
            until = time.monotonic() + 60 * self._given.minutes
            began = time.monotonic()
            looks = 0
            while time.monotonic() < until:
                for each in _problems(url):
                    if found.setdefault(each, time.monotonic() - began) > time.monotonic() - began - 0.01:
                        report.fail(f"{each}, after {time.monotonic() - began:.0f} s")
                looks += 1
                time.sleep(0.5)
            report.figure(f"{looks} looks in {time.monotonic() - began:.0f} s, {len(found)} problems named")


def _healthy_actors(scenes: dict[str, Cast]) -> None:
    steady, bursty, slow = scenes["steady"], scenes["bursty"], scenes["slow"]
    steady.produces(10, 0.5)
    for _ in range(2):
        steady.works(steady.completes())
    bursty.produces(300, 20.0)
    bursty.works(bursty.completes(0.02), batch=10)
    # One at a time, three seconds each, and a little less comes in.
    slow.produces(1, 4.0)
    slow.works(slow.completes(3.0))
    failing = scenes["failing"]
    failing.produces(5, 0.5)
    handled = iter(range(1_000_000_000))

    def seldom(client: Client, id: str, text: str) -> None:
        if next(handled) % 20 == 0:
            client.retry(failing.queue, [id])
        else:
            client.complete(failing.queue, [id])

    failing.works(seldom)
    restarting = scenes["restarting"]
    restarting.produces(2, 0.5)

    def comes_and_goes(client: Client) -> None:
        until = time.monotonic() + 15
        while time.monotonic() < until:
            leased = client.lease(restarting.queue, batch_size=20, request_timeout="1s")
            client.complete(restarting.queue, [item.id for item in leased.items]) if leased.items else None
        time.sleep(4)

    restarting.start(comes_and_goes, "consumer")


def _problems(url: str) -> list[str]:
    answer = httpx.post(f"{url}/v1/problems.list", json={}, timeout=60.0).json()
    return [f"{each['kind']} of {each['subject']}" for each in answer["items"]]


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=60.0).status_code == 200


if __name__ == "__main__":
    sys.exit(Campaign.run())
