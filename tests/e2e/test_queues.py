"""The pages about queues in a browser: they go on by themselves, and each button does what it says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from sluiceway.client import Client, Item
from tests.e2e.conftest import Opens
from tests.e2e.filled_server import key, sign_in
from tests.e2e.harness import PHONE, WIDE, WIDE_DARK, Look, axe, changes, fits, is_shown
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.e2e


@pytest.fixture
def client(server: Child) -> Client:
    return Client(server.url)


def confirm(page: Page, button: str, **fields: str) -> None:
    """Fill in the dialog that is open, and press its button; returns when it is done."""
    for name, text in fields.items():
        page.locator(f"#dialog [name='{name}']").fill(text)
    page.locator("#dialog button", has_text=button).click()
    is_shown(page, "#dialog [role=status]", "done")


def press(page: Page, text: str) -> None:
    """A button of the page, which opens the dialog."""
    page.locator("main [role=button]", has_text=text).first.click()
    is_shown(page, "#dialog form")


def inked(page: Page, selector: str) -> bool:
    """Whether something is drawn on the canvas there."""
    return bool(
        page.evaluate(
            """selector => { const canvas = document.querySelector(selector + " canvas");
              if (canvas === null) return false;
              return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(each => each); }""",
            selector,
        )
    )


# ---- what goes on -------------------------------------------------------------------------------------------------------


def test_the_list_follows_the_queues(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server).open("/ui/queues")
    client.produce("orders", [f"{number}" for number in range(7)])
    changes(page, "#q-orders", lambda text: "\t7\t" in text)
    client.create_queue("new")
    changes(page, "#queues", lambda text: "new" in text)


def test_the_list_is_filtered_as_one_types_and_stays_so(server: Child, client: Client, reader: Opens) -> None:
    for name in ("orders", "emails", "invoices"):
        client.create_queue(name)
    page = reader(server).open("/ui/queues")
    page.get_by_label("Name contains").type("voi")
    is_shown(page, "#q-invoices")
    assert not page.locator("#q-orders").is_visible()
    client.produce("invoices", ["x"])
    changes(page, "#q-invoices", lambda text: "\t1\t" in text)
    assert not page.locator("#q-orders").is_visible()
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/queues?name=voi")
    assert page.locator("#queues tbody tr").count() == 1


@pytest.mark.parametrize("look", [WIDE, PHONE, WIDE_DARK], ids=lambda look: look.name)
def test_charts_are_drawn_and_go_on(look: Look, server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server, look).open("/ui/queues/orders")
    page.wait_for_selector("#chart-depth .u-legend")
    client.produce("orders", [f"{number}" for number in range(30)])
    changes(page, "#chart-depth .u-legend", lambda text: "30" in text)
    assert inked(page, "#chart-depth")
    assert inked(page, "#chart-flow")
    # They were not made anew for it.
    page.evaluate("document.querySelector('#chart-depth canvas').id = 'same'")
    client.lease("orders", batch_size=10)
    changes(page, "#chart-depth .u-legend", lambda text: "20" in text and "10" in text)
    assert page.locator("#chart-depth #same").count() == 1
    fits(page)
    axe(page)


def test_charts_take_the_colours_of_the_scheme_and_the_width_of_the_page(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server).open("/ui/queues/orders")
    page.wait_for_selector("#chart-depth .u-legend")

    def marker() -> str:
        return str(page.evaluate("getComputedStyle(document.querySelectorAll('#chart-depth .u-marker')[1]).borderTopColor"))

    def width() -> int:
        return int(page.evaluate("document.querySelector('#chart-depth .uplot').clientWidth"))

    light, wide = marker(), width()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "light => getComputedStyle(document.querySelectorAll('#chart-depth .u-marker')[1]).borderTopColor !== light", arg=light
    )
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_function("wide => document.querySelector('#chart-depth .uplot').clientWidth !== wide", arg=wide)
    fits(page)
    page.locator("#table summary").click()
    client.produce("orders", ["x"])
    changes(page, "#minute-now", lambda text: text.split("\t")[4] == "1")
    assert page.locator("#table").get_attribute("open") is not None


def test_a_page_that_slept_catches_up_with_the_minutes_it_missed(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server).open("/ui/queues/orders")
    page.wait_for_selector("#chart-depth .u-legend")
    with page.expect_request(lambda request: request.url.endswith("/ui/queues/orders") and request.resource_type == "fetch"):
        page.evaluate(
            """() => { const island = document.getElementById("history-tail"), told = JSON.parse(island.textContent);
              told.from += 3600; island.textContent = JSON.stringify(told); document.dispatchEvent(new CustomEvent("ui:shown")); }"""
        )


def test_partitions_follow_the_queue(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders", requested_partitions=3)
    page = reader(server).open("/ui/queues/orders/partitions")
    where = client.produce("orders", ["a", "b"]).partition
    changes(page, f"#p-{where}", lambda text: "\t2\t" in text)
    page.locator(f"#p-{where} a").click()
    is_shown(page, "#one", f"Partition {where}")
    is_shown(page, ".panel", "single server: it owns")


# ---- what is done -------------------------------------------------------------------------------------------------------


def test_a_queue_is_created(server: Child, client: Client, reader: Opens) -> None:
    page = reader(server).open("/ui/queues")
    press(page, "Create a queue")
    page.locator("#dialog [name=queue_name]").fill("orders")
    page.locator("#dialog [name=requested_partitions]").fill("3")
    is_shown(page, "#cli", "sluiceway queue create orders --partitions 3")
    axe(page)
    confirm(page, "Create a queue")
    page.locator("#dialog a", has_text="Continue").click()
    page.wait_for_url("**/ui/queues/orders")
    assert client.queue_info("orders").requested_partitions == 3


def test_a_queue_is_paused_and_resumed(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server).open("/ui/queues/orders")
    press(page, "Pause")
    page.locator("#dialog select").select_option("produce")
    is_shown(page, "#cli", "sluiceway queue pause orders --produce")
    confirm(page, "Pause")
    page.locator("#dialog [data-close]").click()
    changes(page, "#live .head", lambda text: "paused" in text and "(produce)" in text)
    press(page, "Resume")
    confirm(page, "Resume")
    page.locator("#dialog [data-close]").click()
    changes(page, "#live .head", lambda text: "available" in text)
    assert client.queue_info("orders").paused == []


def test_a_partition_is_paused_and_resumed(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders", requested_partitions=2)
    page = reader(server).open("/ui/queues/orders/partitions?partition=1")
    press(page, "Pause")
    is_shown(page, "#cli", "sluiceway partition pause orders 1")
    confirm(page, "Pause")
    page.locator("#dialog [data-close]").click()
    changes(page, "#p-1", lambda text: "paused" in text)
    press(page, "Resume")
    confirm(page, "Resume")
    page.locator("#dialog [data-close]").click()
    changes(page, "#p-1", lambda text: "available" in text)


def test_settings_are_changed(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    page = reader(server).open("/ui/queues/orders/settings")
    press(page, "Change settings")
    page.locator("#dialog [name=retry_backoff]").fill("1s")
    page.locator("#dialog button", has_text="Change settings").click()
    is_shown(page, "#dialog [role=alert]", "two durations")
    assert page.locator("#dialog [name=retry_backoff]").get_attribute("aria-invalid") == "true"
    page.locator("#dialog [name=retry_backoff]").fill("1s 10m")
    is_shown(page, "#cli", "sluiceway queue update orders --if-version 1 --retry-backoff 1s 10m")
    confirm(page, "Change settings")
    page.locator("#dialog a", has_text="Continue").click()
    is_shown(page, "#settings tr", "up to 10m")
    assert str(client.queue_info("orders").lease_timeout) == "1m"


def test_items_are_found_read_and_deleted(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    first = client.produce("orders", ['{"order": 17}', "other"]).first_id
    client.produce("orders", [Item("later", enqueue_at=datetime.now(UTC) + timedelta(hours=1))])
    page = reader(server).open("/ui/queues/orders/items")
    page.locator("#items a", has_text=first).click()
    is_shown(page, ".payload", '"order": 17')
    page.locator(".panel [role=button]", has_text="Delete").click()
    is_shown(page, "#cli", f"sluiceway drop orders {first}")
    confirm(page, "Delete", confirm="orders")
    page.locator("#dialog a", has_text="Continue").click()
    page.wait_for_url("**/ui/queues/orders/items")
    assert first not in page.locator("#items").inner_text()
    page.get_by_label("State", exact=True).select_option("scheduled")
    page.get_by_role("button", name="Show").click()
    is_shown(page, "#items td", "later")
    page.get_by_label("Item id").fill(first)
    page.keyboard.press("Enter")
    is_shown(page, ".panel", "gone")


def test_items_are_searched_checked_and_run_and_one_is_sent_again(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders", requested_partitions=2)
    later = datetime.now(UTC) + timedelta(hours=1)
    for number in range(4):
        client.produce("orders", [Item(f'{{"order": {number}}}', kind=f"kind {number % 2}", enqueue_at=later, headers={"tenant": "x"})])
    them = reader(server, PHONE)
    page = them.open("/ui/queues/orders/items")
    page.locator("summary", has_text="Search all partitions").click()
    page.get_by_label("Kind", exact=True).fill("kind 1")
    page.get_by_label("Header").fill("tenant=x")
    page.get_by_role("button", name="Search", exact=True).click()
    is_shown(page, ".cli", "sluiceway search orders --kind 'kind 1' --header tenant=x")
    assert page.locator("#items tbody tr").count() == 2
    fits(page)
    axe(page)
    page.get_by_label("Check all").check()
    page.get_by_role("button", name="Run now…").click()
    is_shown(page, "#dialog #cli", "sluiceway run-now orders")
    axe(page)
    confirm(page, "Run now")
    assert sum(part.ready for part in client.stats("orders").partitions) == 2
    page.locator("#dialog a", has_text="Continue").click()
    page.wait_for_url("**/ui/queues/orders/items")
    # Both may be in the partition that this page does not list.
    them.open("/ui/queues/orders/items?in=ready", page)
    page.locator("#items a").first.click()
    is_shown(page, ".payload", '"order"')
    page.locator(".panel [role=button]", has_text="Edit and send again").click()
    is_shown(page, "#dialog form")
    page.locator("#dialog [name=utf8]").fill('{"order": "edited"}')
    is_shown(page, "#cli", "--header copy-of=")
    axe(page)
    confirm(page, "Produce")
    found = client.search("orders", headers={"copy-of": None}).items
    assert [item.payload for item in found] == [b'{"order": "edited"}']


def test_a_queue_is_cleared_and_deleted_by_its_name_alone(server: Child, client: Client, reader: Opens) -> None:
    client.create_queue("orders")
    client.produce("orders", ["a", "b"])
    page = reader(server).open("/ui/queues/orders/settings")
    press(page, "Clear queue")
    page.locator("#dialog [name=confirm]").fill("order")
    page.locator("#dialog button").first.click()
    # The browser itself holds back what has not the name.
    assert page.locator("#dialog [name=confirm]:invalid").count() == 1
    confirm(page, "Clear", confirm="orders")
    page.locator("#dialog [data-close]").click()
    assert sum(part.ready for part in client.stats("orders").partitions) == 0
    press(page, "Delete queue")
    confirm(page, "Delete", confirm="orders")
    page.locator("#dialog a", has_text="Continue").click()
    page.wait_for_url("**/ui/queues")
    is_shown(page, ".empty", "sluiceway queue create")


def test_who_may_only_look_has_pages_for_everybody_too(locked: Child, reader: Opens) -> None:
    with Client(locked.url, api_key=key(locked, "boss", "manage:*", "produce:*")) as boss:
        boss.create_queue("orders", requested_partitions=2)
        item = boss.produce("orders", ["x"]).first_id
    them = reader(locked, PHONE)
    page = sign_in(them, key(locked, "ann", "read:orders"))
    for path in ("", "/items", f"/items?id={item}", "/partitions?partition=1", "/dead", "/settings"):
        them.open(f"/ui/queues/orders{path}", page)
        is_shown(page, "#main")
        fits(page)
        axe(page)
