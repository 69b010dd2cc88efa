"""The partition map in a browser: a rebalance followed from its plan to its audit without leaving the page, by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from sluiceway.client import Client
from tests.e2e.conftest import Opens
from tests.e2e.filled_server import BACKENDS, key, sign_in
from tests.e2e.harness import LOOKS, PHONE, WIDE_DARK, Look, axe, changes, fits, is_shown
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e

VACATED = BACKENDS.replace("affinity = 0.5", "affinity = 0.0")


@pytest.fixture
def client(server: Child) -> Client:
    return Client(server.url)


def tile(page: Page, partition: int, *says: str) -> None:
    """Waits until the partition's tile is there and says that."""
    page.locator(f"#tile-{partition}" + "".join(f"[aria-label*='{each}']" for each in says)).wait_for(state="attached")


def vacate(server: Child, client: Client) -> None:
    """A queue `orders` with 100 items in each partition, of which a rebalance would take two from the backend `wide`."""
    client.create_queue("orders", requested_partitions=6)
    for partition in range(6):
        # A produce passes over a partition that is slow for a moment.
        server.ask("storage/items.import", queue_name="orders", partition=partition, items=[{"payload": "eA=="}] * 100)
    server.file.write_text(VACATED)
    client.reload_config()


def drained(server: Child) -> list[int]:
    return [int(each) for each in server.ask("rebalances.plan", queue_name="orders")["plan"]["drains"]]


def start(page: Page) -> None:
    """Presses the plan's button, and the one that means it."""
    page.get_by_role("button", name="Start rebalance").click()
    page.locator("#dialog button.primary").click()
    is_shown(page, "#dialog [role=status]", "started")
    page.locator("#dialog [data-close]").click()


def test_a_rebalance_from_plan_to_audit_on_one_page(
    server: Child, client: Client, reader: Opens, shot: Callable[[Page, str], None]
) -> None:
    vacate(server, client)
    page = reader(server).open("/ui/map")
    page.get_by_text("Plan a rebalance", exact=True).click()
    page.get_by_role("button", name="Show plan").click()
    page.wait_for_url("**/ui/map?*partitions=6*")
    first, second = drained(server)
    for number in (first, second):
        tile(page, number, "would drain")
    for number in (6, 7):
        tile(page, number, "planned", "on fast")
    assert page.locator(".arrow.plan").count() == 2
    shot(page, "map-plan")
    start(page)
    changes(page, "#map-says", lambda text: "running" in text and "drain" in text)
    for number in (first, second):
        tile(page, number, "draining", "left")
    for number in (6, 7):
        tile(page, number, "available", "on fast")
    # It drains naturally: nothing happens without consumers, which is to be seen as well.
    assert page.locator(".arrow.natural").count() == 2
    changes(page, "[data-draining=rate]", lambda text: text == "0 items/s")
    shot(page, "map-natural")
    while leased := client.lease("orders", batch_size=100, max_partitions=8):
        client.complete("orders", [item.id for item in leased])
    changes(page, "#rebalance", lambda text: "Last rebalance" in text)
    for number in (first, second):
        page.locator(f"#tile-{number}").wait_for(state="detached")
    changes(page, "section[aria-labelledby=rebalance]", lambda text: "rebalance.finish" in text and " removed" in text)
    changes(page, "#map-says", lambda text: text.strip() == "6 partitions")
    assert not page.locator(".arrow").count()
    # The address has the queue that was chosen for the reader.
    assert "queue=orders" in page.url
    shot(page, "map-done")


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
def test_a_copy_is_seen_to_flow(look: Look, server: Child, client: Client, reader: Opens, shot: Callable[[Page, str], None]) -> None:
    vacate(server, client)
    moving = client.rebalance("orders", drain="copy", rate=8)
    page = reader(server, look).open("/ui/queues/orders/map")
    page.locator(".arrow.copy.flows").first.wait_for(state="attached")
    shot(page, f"map-copy-{look.name}")
    fits(page)
    axe(page)
    if look is WIDE_DARK:
        changes(page, "[data-draining=rate]", lambda text: text[0].isdigit() and text[0] != "0")
        changes(page, "[data-draining=time]", lambda text: text.endswith(" s"))
        assert server.ask("rebalances.get", id=moving.id)["state"] == "running"


def test_a_rebalance_is_cancelled(server: Child, client: Client, reader: Opens) -> None:
    vacate(server, client)
    client.rebalance("orders")
    page = reader(server).open("/ui/queues/orders/map")
    changes(page, "#map-says", lambda text: "drain" in text)
    page.get_by_role("button", name="Cancel…").click()
    is_shown(page, "#dialog form", "Rolls back")
    page.locator("#dialog button.primary").click()
    is_shown(page, "#dialog [role=status]", "cancelling")
    page.locator("#dialog [data-close]").click()
    changes(page, "section[aria-labelledby=rebalance]", lambda text: "cancelled" in text and "rebalances.cancel" in text)
    page.locator("#tile-6").wait_for(state="detached")


def test_the_map_by_keyboard(server: Child, client: Client, reader: Opens) -> None:
    vacate(server, client)
    page = reader(server).open("/ui/queues/orders/map")
    tile(page, 0)
    order = page.evaluate("[...document.querySelectorAll('.tile')].map(each => each.id)")
    page.locator(".tile[tabindex='0']").focus()
    focused = "document.activeElement.id"
    assert page.evaluate(focused) == order[0]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == order[1]
    page.keyboard.press("End")
    assert page.evaluate(focused) == order[-1]
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    below = page.evaluate(focused)
    assert below not in order[:2]
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == order[0]
    assert page.locator(".tile[tabindex='0']").count() == 1
    assert page.locator(f"#{order[0]}").get_attribute("aria-selected") == "true"
    chosen = order[0].removeprefix("tile-")
    is_shown(page, ".map-detail", f"Partition {chosen}")
    # What goes on does not take the focus away.
    before = page.locator(f"#{order[0]}").get_attribute("aria-label")
    leased = client.lease("orders", batch_size=10_000, max_partitions=6)
    page.wait_for_function("([id, before]) => document.getElementById(id).getAttribute('aria-label') !== before", arg=[order[0], before])
    assert page.evaluate(focused) == order[0]
    # One that goes hands it on.
    going = drained(server)[0]
    client.rebalance("orders")
    tile(page, going, "draining")
    page.locator(f"#tile-{going}").focus()
    client.complete("orders", [item.id for item in leased])
    page.locator(f"#tile-{going}").wait_for(state="detached")
    page.wait_for_function("() => document.activeElement.matches('.tile[aria-selected=true]')")
    is_shown(page, ".map [role=status]", f"Partition {going} was removed")


def test_who_may_not_rebalance_is_told_the_scope(locked: Child, reader: Opens) -> None:
    owner = key(locked, "owner", "manage:*", "produce:*", "read:*")
    with Client(locked.url, api_key=owner) as client:
        client.create_queue("orders", requested_partitions=2)
    them = reader(locked, PHONE)
    page = sign_in(them, key(locked, "looks", "read:orders"))
    them.open("/ui/map?partitions=3", page)
    tile(page, 2, "planned")
    is_shown(page, ".planned .cannot", "manage:orders")
    fits(page)
    axe(page)
