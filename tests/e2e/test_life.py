"""A page goes on by itself: it shows what happens, says when it is cut off, and goes on when it is not any more."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from sluiceway.client import Client
from sluiceway.kernel.limits import MAX_KEY_STREAMS
from sluiceway.server.ui.counts import Counts
from tests.e2e.conftest import Opens
from tests.e2e.filled_server import BACKENDS, EVIL, key, sign_in
from tests.e2e.harness import PATIENCE, WIDE, axe, changes, is_shown
from tests.server.server_guarded import guarded as in_process
from tests.server.server_process import wait_until
from tests.server.test_server_reload import Child, child

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
        # 503: a server that stops still answers.
        page = reader(server, WIDE, *CUT_OFF, "status of 503").open("/ui")
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


def test_who_looks_away_sees_what_is_so_on_coming_back(server: Child, reader: Opens) -> None:
    hidden = """hidden => { Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange")); }"""
    with Client(server.url) as client:
        client.create_queue("orders")
        them = reader(server)
        page = them.open("/ui/queues/orders/partitions")
        server.ask("partition.pause", queue_name="orders", partition=0)
        changes(page, "#p-0", lambda text: "paused" in text)
        page.evaluate(hidden, True)
        # It is as it was when the page was loaded.
        server.ask("partition.resume", queue_name="orders", partition=0)
        page.evaluate(hidden, False)
        changes(page, "#p-0", lambda text: "available" in text)


def test_a_page_that_cannot_go_on_yet_stays_and_says_so(locked: Child, reader: Opens) -> None:
    """As many pages as a key may have are open."""
    own = key(locked, "ann", "read:*", "manage:*")
    page = sign_in(reader(locked, WIDE, *CUT_OFF, "status of 429"), own)
    cookies = {str(each["name"]): str(each["value"]) for each in page.context.cookies()}
    page.goto("about:blank")
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=locked.url, cookies=cookies, timeout=PATIENCE, limits=limits) as http, ExitStack() as stack:
        for _ in range(MAX_KEY_STREAMS):
            wait_until(lambda: stack.enter_context(http.stream("GET", "/ui/live")).status_code == 200, "a stream")
        page.goto("/ui")
        page.locator("#lost").wait_for()
        assert page.locator("h1").inner_text() == "Overview"
        assert "too_many_requests" not in page.locator("#live").inner_text()
    page.locator("#lost").wait_for(state="hidden")
    with Client(locked.url, api_key=own) as client:
        client.create_queue("live")
    is_shown(page, "#q-live")


def test_a_page_that_cannot_be_made_says_so_and_comes_back(tmp_path: Path, reader: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()
    real = Counts.rates

    def fails(counts: Counts, queue_name: str) -> Mapping[str, float]:
        if broken.is_set():
            raise RuntimeError("a fault")
        return real(counts, queue_name)

    monkeypatch.setattr(Counts, "rates", fails)
    with in_process(tmp_path / "data", keys=False) as server:
        name = server.queue()
        page = reader(server).open("/ui/queues")
        page.locator(f"#q-{name} a").first.focus()
        broken.set()
        is_shown(page, "#live [role=alert]", "unexpected")
        # Whoever was at what is gone is told, and not sent to the page's beginning.
        page.wait_for_function("() => document.activeElement.closest('.problem') !== null")
        axe(page)
        broken.clear()
        is_shown(page, f"#q-{name}")
        assert not page.locator("#live [role=alert]").count()
        # Away before the server is: a page that has lost its server complains.
        page.goto("about:blank")


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
        page.get_by_role("button", name="Delete queue").click()
        confirm = page.locator("#f-confirm")
        confirm.fill("mad")
        page.get_by_label("Delete remaining items").check()
        page.locator("#dialog").get_by_role("button", name="Delete").click()
        assert page.evaluate("document.querySelector('#f-confirm').validity.patternMismatch")
        assert [each.queue_name for each in client.list_queues().items] == ["made"]
        confirm.fill("made")
        page.locator("#dialog").get_by_role("button", name="Delete").click()
        page.wait_for_function("() => !document.querySelector('#dialog #f-confirm')")
        assert client.list_queues().items == []
        told = reader(server).open("/ui/audit").locator("#main").inner_text()
        assert all(action in told for action in ("queues.create", "queue.pause", "queues.delete"))
