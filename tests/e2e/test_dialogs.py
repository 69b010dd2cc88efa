"""A form in a dialog: it is sent once, its answer is told where the reader is, and so is that there was none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from sluiceway.client import Client
from tests.e2e.conftest import Opens
from tests.e2e.filled_server import ADMIN_KEY, sign_in
from tests.e2e.harness import WIDE, axe, is_shown
from tests.server.test_server_reload import Child

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.e2e

UNSENT = ("net::ERR_", "htmx:error")
"""What a browser says of a request that has no answer."""
FOCUSED = "document.activeElement"


def ask(page: Page, button: str) -> None:
    """Opens the dialog of a button of the page."""
    page.locator("main [role=button]", has_text=button).first.click()
    is_shown(page, "#dialog form")


def send(page: Page) -> None:
    page.locator("#dialog form button").click()


def test_a_form_that_is_pressed_twice_is_sent_once(locked: Child, reader: Opens) -> None:
    them = reader(locked)
    page = sign_in(them, ADMIN_KEY)
    them.open("/ui/settings/keys", page)
    ask(page, "Create key")
    page.get_by_label("Name").fill("twice")
    page.get_by_label("Scopes").fill("read:x")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    held: list[Route] = []
    page.route("**/ui/do/**", lambda route: held.append(route))
    page.locator("#dialog form button").dblclick()
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    is_shown(page, "#dialog [role=status]", "done")
    # What was waiting for its turn would have been sent before this.
    page.evaluate("fetch('/ui/line/keys.create')")
    assert len(sent) == 1
    assert [each["name"] for each in locked.ask("keys.list")["items"]].count("twice") == 1


def test_the_focus_is_where_the_answer_is(server: Child, reader: Opens) -> None:
    page = reader(server).open("/ui/queues")
    ask(page, "Create a queue")
    assert page.evaluate(f"{FOCUSED}.name") == "queue_name"
    page.get_by_label("Name", exact=True).fill("no name")
    send(page)
    is_shown(page, "#dialog [role=alert]")
    page.wait_for_function(f"() => {FOCUSED}.matches('[name=queue_name][aria-invalid=true]')")
    page.get_by_label("Name", exact=True).fill("orders")
    send(page)
    is_shown(page, "#dialog [role=status]", "done")
    page.wait_for_function(f"() => {FOCUSED}.id === 'dialog-title'")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{FOCUSED}.textContent") == "Continue"


def test_a_form_without_an_answer_says_that_nobody_knows(server: Child, reader: Opens) -> None:
    page = reader(server, WIDE, *UNSENT).open("/ui/queues")
    ask(page, "Create a queue")
    page.get_by_label("Name", exact=True).fill("orders")
    page.route("**/ui/do/**", lambda route: route.abort())
    send(page)
    is_shown(page, "#dialog [role=alert]", "may or may not have been made")
    axe(page)
    assert page.get_by_label("Name", exact=True).input_value() == "orders"
    assert page.locator("#lost").is_hidden()
    # It is said once, however often it is so.
    send(page)
    page.locator("#dialog form:not(.htmx-request) #unanswered").wait_for()
    assert page.locator("#dialog [role=alert]").count() == 1
    page.unroute("**/ui/do/**")
    send(page)
    is_shown(page, "#dialog [role=status]", "done")
    assert not page.locator("#dialog [role=alert]").count()


def test_what_is_no_page_of_the_server_is_not_shown_as_one(server: Child, reader: Opens) -> None:
    page = reader(server, WIDE, "status of 502").open("/ui/queues")
    ask(page, "Create a queue")
    page.get_by_label("Name", exact=True).fill("orders")
    page.route("**/ui/do/**", lambda route: route.fulfill(status=502, content_type="text/html", body="<h1>of a proxy</h1>"))
    send(page)
    is_shown(page, "#dialog [role=alert]", "502")
    assert page.get_by_label("Name", exact=True).input_value() == "orders"
    assert "of a proxy" not in page.locator("body").inner_text()


def test_a_dialog_that_does_not_come_says_so(server: Child, reader: Opens) -> None:
    page = reader(server, WIDE, *UNSENT).open("/ui/queues")
    page.route("**/ui/ask/**", lambda route: route.abort())
    page.get_by_role("button", name="Create a queue").click()
    is_shown(page, "#dialog [role=alert]", "no answer")
    axe(page)
    assert page.locator("#lost").is_hidden()
    page.locator("#dialog").get_by_role("button", name="Close").click()
    page.locator("#dialog").wait_for(state="hidden")
    page.unroute("**/ui/ask/**")
    ask(page, "Create a queue")


def test_the_command_line_is_that_of_the_form_as_it_is(server: Child, reader: Opens) -> None:
    with Client(server.url) as client:
        page = reader(server).open("/ui/queues")
        ask(page, "Create a queue")
        late: list[Route] = []
        page.route("**/ui/line/**?queue_name=first*", lambda route: late.append(route))
        page.get_by_label("Name", exact=True).fill("first")
        while not late:
            page.wait_for_timeout(20)
        page.get_by_label("Name", exact=True).fill("second")
        is_shown(page, "#cli", "sluiceway queue create second")
        with page.expect_response(lambda answer: "first" in answer.url) as overtaken:
            late[0].continue_()
        overtaken.value.finished()
        # Each answer is told in turn, so whatever the late one does is done before this one is.
        page.evaluate("fetch('/ui/line/queues.create?queue_name=x').then(answer => answer.text())")
        assert page.locator("#cli").inner_text() == "sluiceway queue create second"
        assert client.list_queues().items == []


def test_a_schedule_from_its_form_to_its_end(server: Child, reader: Opens, shot: Callable[[Page, str], None]) -> None:
    """By the forms alone: each change shows by itself."""
    with Client(server.url) as client:
        client.create_queue("orders")
    page = reader(server).open("/ui/schedules")
    ask(page, "Create a schedule")
    for label, text in (("Name", "nightly"), ("Queue", "orders"), ("Cron expression", "0 25 * * *"), ("Payload", '{"job": "report"}')):
        page.locator("#dialog").get_by_label(label, exact=True).fill(text)
    send(page)
    is_shown(page, "#dialog [role=alert]", "25 is not between 0 and 23")
    shot(page, "schedule-form")
    axe(page)
    page.locator("#dialog").get_by_label("Cron expression").fill("0 2 * * *")
    page.wait_for_function("() => document.getElementById('cli').textContent.includes('0 2 * * *')")
    send(page)
    is_shown(page, "#dialog [role=status]", "done")
    page.get_by_role("link", name="Continue").click()
    page.wait_for_url("**/ui/schedules/nightly")
    for button, state in (("Pause", "paused"), ("Resume", "active")):
        ask(page, button)
        send(page)
        is_shown(page, "#dialog [role=status]", "done")
        page.locator("#dialog [data-close]").click()
        is_shown(page, "#live .state", state)
    ask(page, "Delete")
    page.get_by_label("To confirm").fill("nightly")
    send(page)
    is_shown(page, "#dialog [role=status]", "done")
    with Client(server.url) as client:
        assert client.list_schedules().items == []
