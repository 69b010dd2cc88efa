"""Servers to look at: with queues in every state that they can have, and with API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sluiceway.client import Client, Item, Retry
from tests.e2e.harness import Reader
from tests.server.test_server_reload import Child, child

if TYPE_CHECKING:
    from playwright.sync_api import Page

BACKENDS: Final = "[backends.fast]\nkind = 'sqlite'\n[backends.wide]\nkind = 'sqlite'\npartition_affinity = 0.5\n"
ADMIN_KEY: Final = "0123456789abcdef" * 4
GUARDED: Final = f"[server]\nauth = 'keys'\nadmin_key = 'env:ADMIN'\n{BACKENDS}"
EVIL: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
"""What a payload, a reason or a client's name may be: text, whatever it says."""


@contextmanager
def guarded(folder: Path) -> Iterator[Child]:
    """A server that asks for API keys."""
    with child(folder, GUARDED, ADMIN=ADMIN_KEY) as server:
        server.http.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        yield server


def key(server: Child, name: str, *scopes: str) -> str:
    """A new API key."""
    return str(server.ask("keys.create", name=name, scopes=list(scopes))["key"])


def fill(server: Child) -> None:
    """Queues in every state, a rebalance that is done, and a capture `feed`, nobody of which is at work."""
    # Heavy, and only needed here.
    from tests.cli.test_cli_tasks import KEPT, RECORDS, write_capture

    # The browser has this thread's event loop.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(write_capture(server.file.parent / "data" / "meta.sqlite", "feed", RECORDS, KEPT))).result()
    with Client(server.url) as client:
        for name in ("orders-dead", "empty", "paused", "emails"):
            client.create_queue(name)
        client.create_queue("orders", requested_partitions=6, max_attempts=2, dead_queue="orders-dead", lease_timeout="1h", reference=EVIL)
        client.produce("paused", ["waits"])
        client.pause("paused")
        later = datetime.now(UTC) + timedelta(hours=1)
        client.produce("emails", [Item(f"later {number}", enqueue_at=later) for number in range(5)])
        client.produce("orders", [EVIL, b"\x00\xff binary", '{"order": 17, "amount": "12.50"}'])
        leased = client.lease("orders", batch_size=100, max_partitions=6)
        client.retry("orders", [Retry(item.id, dead=True, reason=EVIL) for item in leased])
        for call in range(20):
            client.produce("orders", [f"order {call}.{number}" for number in range(25)])
        client.create_schedule(
            "close-day",
            cron="30 18 * * mon-fri",
            queue_name="emails",
            item=Item({"job": EVIL}, kind="job", headers={"note": EVIL}),
            timezone="Europe/Berlin",
            jitter="5m",
        )
        client.create_schedule("nightly-report", cron="0 2 * * *", queue_name="orders", item={"job": "report"}, paused=True)
        for number in range(4):
            client.create_schedule(f"poll-{number}", cron="*/5 * * * *", queue_name="emails", item="poll")
    with Client(server.url, client_id=EVIL[:60]) as worker:
        worker.lease("orders", batch_size=40, max_partitions=6)
        moved = worker.rebalance("emails", requested_partitions=3)
        *_, last = worker.watch_rebalance(moved.id, interval="20ms")
        assert last.state == "done", last


def tell(server: Child) -> None:
    """What a Spark query tells of itself with each batch; it is remembered for a minute."""
    told = {"id": "id-1", "run_id": "run-1", "name": "billing", "state": "running", "batch": 3, "items": 10, "input_per_s": 1.5}
    told |= {"processed_per_s": 20.25, "batch_duration": "1500ms"}
    server.ask("consumers.report", queue_name="orders", client_id="billing", query=told)


def sign_in(reader: Reader, key: str) -> Page:
    """The first page, as whoever has that API key sees it."""
    page = reader.page()
    page.goto("/ui")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/ui")
    reader.follow(page)
    return page
