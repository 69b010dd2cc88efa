"""A page goes on by itself: it shows what happens, says when it is cut off, and goes on when it is not any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.conftest import Opens
from e2e.harness import WIDE, changes, is_shown
from e2e.servers import BACKENDS, EVIL, key, sign_in
from sluiceway.client import Client
from test_server_reload import Child, child

pytestmark = pytest.mark.e2e

CUT_OFF = ("net::ERR_", "status of 401", "htmx:sse:error")
"""What a browser says of a connection that is not there, and of a key that is refused."""


@pytest.mark.parametrize("path", ["/ui", "/ui/queues"])
def test_numbers_follow_what_happens(path: str, server: Child, reader: Opens) -> None:
    with Client(server.url) as client:
        client.create_queue("live")
        page = reader(server).open(path)
        ready = "#q-live td.n"
        changes(page, ready, lambda text: text == "0")
        for _ in range(2):
            client.produce("live", [str(number) for number in range(617)])
        changes(page, ready, lambda text: text == "1,234")
        client.lease("live", batch_size=234)
        changes(page, ready, lambda text: text == "1,000")
        client.create_queue("another")
        is_shown(page, "#q-another")
        client.delete_queue("another")
        page.locator("#q-another").wait_for(state="detached")


def test_what_the_reader_is_at_stays_when_the_page_changes(server: Child, reader: Opens) -> None:
    with Client(server.url) as client:
        client.create_queue("live")
        page = reader(server).open("/ui/queues")
        page.locator("#q-live a").focus()
        client.produce("live", ["one"])
        changes(page, "#q-live td.n", lambda text: text == "1")
        assert page.evaluate("document.activeElement.textContent") == "live"
        page.locator("#name").fill("no such")
        page.locator("#q-live").wait_for(state="hidden")
        client.create_queue("another")
        page.locator("#q-another").wait_for(state="attached")
        page.locator("#q-another").wait_for(state="hidden")
        assert page.locator("#name").input_value() == "no such"


def test_a_lost_connection_is_said_and_found_again(tmp_path: Path, reader: Opens) -> None:
    with child(tmp_path, BACKENDS) as server:
        address = server.url.removeprefix("http://")
        with Client(server.url) as client:
            client.create_queue("live")
        page = reader(server, WIDE, *CUT_OFF).open("/ui")
        changes(page, "#q-live td.n", lambda text: text == "0")
        assert page.locator("#lost").is_hidden()
    is_shown(page, "#lost", "Connection lost")
    page.evaluate("window.here = true")
    with child(tmp_path, BACKENDS, "--listen", address) as server:
        assert server.url.endswith(address)
        page.locator("#lost").wait_for(state="hidden")
        with Client(server.url) as client:
            client.produce("live", ["after all"])
        changes(page, "#q-live td.n", lambda text: text == "1")
        assert page.evaluate("window.here === true"), "the page was loaded anew"


def test_signing_in_and_out(locked: Child, reader: Opens) -> None:
    them = reader(locked, WIDE, *CUT_OFF)
    page = them.page()
    page.goto("/ui/queues?sort=name")
    assert page.url.startswith(f"{locked.url}/ui/sign-in")
    page.get_by_label("API key").fill("slw_wrong")
    page.get_by_role("button", name="Sign in").click()
    is_shown(page, "[role=alert]")
    assert page.get_by_label("API key").input_value() == ""
    page.get_by_label("API key").fill(key(locked, "ann", "read:*"))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/ui/queues?sort=name")
    is_shown(page, ".who", "ann")
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/ui/sign-in")
    page.goto("/ui")
    assert "/ui/sign-in" in page.url


def test_who_may_not_is_told_what_is_missing(locked: Child, reader: Opens) -> None:
    with Client(locked.url, api_key=key(locked, "boss", "manage:*")) as boss:
        for name in ("orders", "secret"):
            boss.create_queue(name)
    page = sign_in(reader(locked), key(locked, "ann", "read:orders"))
    assert "secret" not in page.locator("body").inner_text()
    page.goto("/ui/queues/orders")
    pause = page.get_by_role("button", name="Pause", exact=True).first
    assert pause.get_attribute("aria-disabled") == "true"
    said = pause.get_attribute("aria-describedby")
    assert page.locator(f"[id='{said}']").inner_text() == "needs the scope manage:orders"
    pause.click(force=True)
    assert page.locator("#dialog").is_hidden()


def test_a_key_that_is_revoked_ends_what_it_shows(locked: Child, reader: Opens) -> None:
    with Client(locked.url, api_key=key(locked, "boss", "manage:*")) as boss:
        boss.create_queue("orders")
    page = sign_in(reader(locked, WIDE, *CUT_OFF), key(locked, "ann", "read:*"))
    is_shown(page, "#q-orders")
    (own,) = [each for each in locked.ask("keys.list")["items"] if each["name"] == "ann"]
    locked.ask("keys.revoke", key_id=own["key_id"])
    page.wait_for_url("**/ui/sign-in**")


def test_what_is_done_on_a_page_is_done_and_audited(server: Child, reader: Opens) -> None:
    with Client(server.url) as client:
        page = reader(server).open("/ui/queues")
        page.get_by_role("button", name="Create a queue").click()
        page.get_by_label("Name", exact=True).fill("made")
        page.get_by_label("Partitions", exact=True).fill("3")
        page.locator("#cli", has_text="sluiceway queue create made --partitions 3").wait_for()
        page.locator("#dialog").get_by_role("button", name="Create a queue").click()
        is_shown(page, "#dialog", "done")
        assert client.queue_info("made").requested_partitions == 3
        client.produce("made", [EVIL])

        page.goto("/ui/queues/made")
        page.get_by_role("button", name="Pause", exact=True).first.click()
        page.locator("#dialog").get_by_role("button", name="Pause").click()
        is_shown(page, "#dialog", "done")
        assert client.queue_info("made").paused
        page.keyboard.press("Escape")
        page.locator("#dialog").wait_for(state="hidden")

        page.goto("/ui/queues/made/settings")
        page.get_by_role("button", name="Delete the queue").click()
        confirm = page.locator("#f-confirm")
        confirm.fill("mad")
        page.get_by_label("Also if items are left in it").check()
        page.locator("#dialog").get_by_role("button", name="Delete").click()
        assert page.evaluate("document.querySelector('#f-confirm').validity.patternMismatch")
        assert [each.queue_name for each in client.list_queues().items] == ["made"]
        confirm.fill("made")
        page.locator("#dialog").get_by_role("button", name="Delete").click()
        page.wait_for_function("() => !document.querySelector('#dialog #f-confirm')")
        assert client.list_queues().items == []
        told = reader(server).open("/ui/audit").locator("#main").inner_text()
        assert all(action in told for action in ("queues.create", "queue.pause", "queues.delete"))
