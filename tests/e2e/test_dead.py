"""Dead letters, audit, keys and configuration in a browser: the wizard to its end, and what comes by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from sluiceway.client import Client, Retry
from tests.e2e.conftest import Opens
from tests.e2e.filled_server import EVIL, key, sign_in
from tests.e2e.harness import PHONE_DARK, WIDE, Look, axe, changes, fits, is_shown
from tests.server.server_process import wait_until
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e


def bury(url: str, count: int) -> None:
    """So many items that came from `orders` and died."""
    with Client(url) as client:
        client.create_queue("orders-dead")
        client.create_queue("orders", dead_queue="orders-dead")
        client.produce("orders", [f"order {number}" for number in range(count)])
        leased = client.lease("orders", batch_size=count)
        client.retry("orders", [Retry(item.id, dead=True, reason=EVIL) for item in leased])
        wait_until(lambda: ready(client, "orders-dead") == count, "the burial")


def ready(client: Client, queue_name: str) -> int:
    return sum(part.ready for part in client.stats(queue_name).partitions)


def sent(text: str) -> int:
    found = re.search(r"([\d,]+) items sent back", text)
    return int(found[1].replace(",", "")) if found else 0


@pytest.mark.parametrize("look", [WIDE, PHONE_DARK], ids=lambda look: look.name)
def test_a_redrive_from_filter_to_end(look: Look, server: Child, reader: Opens) -> None:
    bury(server.url, 60)
    page = reader(server, look).open("/ui/dead")
    page.locator("#dead-orders-dead a", has_text="Redrive").click()
    page.get_by_label("Reason contains").fill("<img")
    page.get_by_label("Items per second").fill("20")
    page.keyboard.press("Enter")
    is_shown(page, "#redrive-go", "Redrive 60 items")
    axe(page)
    fits(page)
    with Client(server.url) as client:
        assert ready(client, "orders-dead") == 60, "a dry run moves nothing"
        page.locator("#redrive-go").click()
        changes(page, "#redrive-told", lambda text: sent(text) >= 20)
        assert not page.locator("#redrive-go").is_visible()
        page.locator("#redrive-stop").click()
        changes(page, "#redrive-told", lambda text: text.startswith("Stopped."))
        half = sent(page.locator("#redrive-told").inner_text())
        assert 0 < half < 60
        # Stopped is stopped; what is watched beneath is what the server says.
        changes(page, "#live .figures", lambda text: f"{60 - half}\nwaiting" in text)
        axe(page)
        page.get_by_role("button", name="Continue with the rest").click()
        changes(page, "#redrive-told", lambda text: text.startswith("Done. 60 items sent back: 60 to orders."))
        assert page.evaluate("document.activeElement.id") == "redrive-told"
        assert (ready(client, "orders-dead"), ready(client, "orders")) == (0, 60)
        entries = client.list_audit(queue_name="orders-dead", action="queue.redrive").items
        assert len(entries) >= 3


def test_a_redrive_that_cannot_go_on_says_so_and_goes_on_later(server: Child, reader: Opens) -> None:
    bury(server.url, 10)
    page = reader(server, WIDE, "status of 404").open("/ui/queues/orders-dead/redrive?check=1&target=elsewhere&rate=5")
    is_shown(page, "#problem", "elsewhere")
    page = reader(server, WIDE, "status of 4").open("/ui/queues/orders-dead/redrive?check=1&rate=5")
    with Client(server.url) as client:
        client.update_queue("orders", dead_queue=None)
        client.delete_queue("orders", force=True)
        page.locator("#redrive-go").click()
        is_shown(page, "#redrive-problem", "there is no queue 'orders'")
        assert ready(client, "orders-dead") == 10
        client.create_queue("orders")
        page.get_by_role("button", name="Continue with the rest").click()
        changes(page, "#redrive-told", lambda text: text.startswith("Done. 10 items"))


def test_the_trail_goes_on_and_what_is_open_stays_open(server: Child, reader: Opens) -> None:
    with Client(server.url) as client:
        client.create_queue("orders", reference=EVIL)
        page = reader(server).open("/ui/audit")
        page.locator(".timeline summary").first.click()
        is_shown(page, ".timeline details[open]")
        client.pause("orders")
        changes(page, ".timeline", lambda text: "queue.pause on orders by anybody" in text)
        is_shown(page, ".timeline li:nth-child(2) details[open]")
        assert page.locator(".timeline details[open]").count() == 1
        axe(page)


def dialog(page: Page, button: str) -> None:
    page.locator("main [role=button]", has_text=button).first.click()
    is_shown(page, "#dialog form")


def test_a_key_is_made_and_revoked(locked: Child, reader: Opens) -> None:
    page = sign_in(reader(locked), key(locked, "boss", "admin"))
    page.goto("/ui/settings/keys")
    dialog(page, "Create key")
    axe(page)
    page.get_by_label("Name").fill("worker")
    page.get_by_label("Scopes").fill("consume:orders-*")
    page.locator("#dialog button", has_text="Create key").click()
    is_shown(page, "#dialog [role=status]", "It is not shown again")
    axe(page)
    found = re.search(r"slw_\w+", page.locator("#dialog").inner_text())
    assert found is not None
    own = locked.http.post("/v1/keys.self", json={}, headers={"authorization": f"Bearer {found[0]}"}).json()
    assert own["name"] == "worker"
    page.locator("#dialog [data-close]").click()
    is_shown(page, f"#key-{own['key_id']}", "worker")
    assert found[0] not in page.content()
    page.locator(f"#key-{own['key_id']} [role=button]").click()
    is_shown(page, "#dialog form")
    page.locator("#f-confirm").fill(own["key_id"])
    page.locator("#dialog button", has_text="Revoke").click()
    is_shown(page, "#dialog [role=status]", "done")
    page.locator("#dialog [data-close]").click()
    page.wait_for_selector(f"#key-{own['key_id']}", state="detached")


def test_who_may_not_see_a_page_is_told_what_it_takes(locked: Child, reader: Opens) -> None:
    them = reader(locked)
    page = sign_in(them, key(locked, "guest", "read:mine"))
    for path in ("/ui/audit", "/ui/settings", "/ui/settings/keys", "/ui/captures"):
        page.goto(path)
        is_shown(page, "section.problem h2", "Missing scope")
        axe(page)
        fits(page)


def test_a_change_of_the_configuration_is_reloaded_and_seen(server: Child, reader: Opens) -> None:
    page = reader(server).open("/ui/settings")
    server.file.write_text(server.file.read_text() + "\n[limits]\nrequests_per_second = 777\n")
    dialog(page, "Reload")
    page.locator("#dialog button", has_text="Reload").click()
    is_shown(page, "#dialog [role=status]", "done")
    page.locator("#dialog [data-close]").click()
    changes(page, "[id='set-limits.requests_per_second']", lambda text: "777" in text and "sluiceway.toml:" in text)
    server.file.write_text("[nonsense]\n")
    changes(page, "#live [role=alert]", lambda text: "changed nothing" in text)
    axe(page)
