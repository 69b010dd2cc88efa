"""Schedules: the list is paged and searched, a schedule is shown with its next times, and the forms change it with an audit entry."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sluiceway.server.ui.render import duration
from sluiceway.testing import server as memory_server
from tests.dashboard.test_ui import ORIGIN, blocks, signed
from tests.dashboard.test_ui_dead import EVIL, words
from tests.server.server_guarded import Guarded, guarded

OWN = {ORIGIN: "same-origin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("schedules") / "data", keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("schedules-keyed") / "data") as found:
        yield found


def created(server: Guarded, name: str, queue: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.ask(
        "schedules.create", **{"name": name, "queue_name": queue, "cron": "0 3 * * *", "item": {"utf8": "x"}, **fields}
    )
    return found


def post(client: httpx.Client, command: str, **fields: str) -> str:
    answer = client.post(f"/ui/do/{command}", data=fields, headers=OWN)
    assert answer.status_code == 200
    return answer.text


def row(shown: str, name: str) -> str:
    found = re.search(rf'<tr id="s-{name}">(.*?)</tr>', shown, re.DOTALL)
    assert found is not None, name
    return words(found[1])


def test_without_schedules_the_page_says_how_to_create_one(keyed: Guarded) -> None:
    with signed(keyed, "read:*") as page:
        shown = page.get("/ui/schedules").text
        assert "No schedules yet" in shown
        assert "needs the scope <code>produce:*</code>" in shown
    with signed(keyed, "produce:*") as page:
        assert "This key cannot read schedules" in page.get("/ui/schedules").text


def test_each_schedule_has_its_state_and_its_times(server: Guarded) -> None:
    queue = server.queue()
    made = created(server, "nightly", queue, timezone="Europe/Berlin")
    created(server, "stopped", queue, paused=True)
    created(server, "never-again", queue, cron="0 0 29 2 *")
    created(server, "lost", server.queue())
    server.ask("queues.delete", queue_name=server.ask("schedules.get", name="lost")["queue_name"])
    shown = server.http.get("/ui/schedules").text
    told = row(shown, "nightly")
    assert "active" in told
    assert "0 3 * * *" in told
    assert "Europe/Berlin" in told
    assert made["next_at"] in shown
    assert "paused" in row(shown, "stopped")
    assert "failing queue not found" in row(shown, "lost")


def test_a_list_is_searched_and_paged(server: Guarded) -> None:
    queue, other = server.queue(), server.queue()
    for number in range(205):
        created(server, f"many-{number:03}", queue)
    created(server, "MANY-too", other)
    names: list[str] = []
    url = f"/ui/schedules?queue_name={queue}&name_contains=Many-"
    while url:
        shown = server.http.get(url).text
        assert f"sluiceway schedule list --queue {queue} --contains Many-" in shown or f"--contains Many- --queue {queue}" in shown
        names += re.findall(r'<tr id="s-([^"]+)">', shown)
        more = re.search(r'href="(/ui/schedules\?[^"]*pivot=[^"]+)">Next page', shown)
        url = html.unescape(more[1]) if more else ""
    assert names == [f"many-{number:03}" for number in range(205)]
    assert "First page" in shown
    assert re.findall(r'<tr id="s-([^"]+)">', server.http.get("/ui/schedules?name_contains=many-t").text) == ["MANY-too"]
    assert "No schedule matches" in server.http.get(f"/ui/schedules?queue_name={other}&name_contains=00").text


def test_a_schedule_is_shown_with_its_next_times_and_its_item(server: Guarded) -> None:
    queue = server.queue()
    item = {"utf8": '{"a":1}', "kind": EVIL, "headers": {"note": EVIL}}
    created(server, "detail", queue, cron="30 2 * * *", timezone="Asia/Kolkata", jitter="5m", catch_up="all", item=item)
    shown = server.http.get("/ui/schedules/detail").text
    told = words(shown)
    assert "<img src=x" not in shown
    assert EVIL in told
    assert '"a": 1' in told
    assert "each is fired" in told
    assert len(re.findall(r"[A-Z][a-z]{2} \d{4}-\d\d-\d\d 02:30", told)) == 5
    assert shown.count("T21:00:00.000Z") >= 5
    assert "None of its times has been fired yet" in told
    assert "Not found" in server.http.get("/ui/schedules/nobody").text


def test_what_is_done_to_it_is_seen_at_once_and_audited(server: Guarded) -> None:
    queue, name = server.queue(), "acted-on"
    form = {
        "name": name,
        "queue_name": queue,
        "cron": "@daily",
        "catch_up": "skip",
        "utf8": "hello",
        "kind": "job",
        "priority": "0",
        "headers": "a=b\n",
        "paused": "1",
    }
    answer = post(server.http, "schedules.create", **form)
    assert f'href="/ui/schedules/{name}"' in answer
    line = (
        f"sluiceway schedule create {name} --queue {queue} --cron @daily --catch-up skip"
        " --payload hello --kind job --priority 0 --header a=b --paused"
    )
    assert line in html.unescape(answer)
    found = server.ask("schedules.get", name=name)
    item = {"utf8": "hello", "kind": "job", "priority": 0, "headers": {"a": "b"}}
    assert (found["paused"], found["catch_up"], found["item"]) == (True, "skip", item)
    shown = server.http.get(f"/ui/schedules/{name}").text
    assert "<dt>priority</dt><dd>0</dd>" in shown
    assert "those that pass before it is resumed are never fired" in shown
    with server.http.stream("GET", f"/ui/live/schedules/{name}") as stream:
        parts = blocks(stream)
        assert "schedules.resume" in next(parts)
        known = {"name": name, "queue_name": queue}
        assert f"sluiceway schedule resume {name}<" in post(server.http, "schedules.resume", **known)
        assert any("schedules.pause" in text for text in parts)
    assert queue in post(server.http, "schedules.run", **known)
    assert server.ask("queue.lease", queue_name=queue, client_id="c")["items"][0]["bytes"] == "aGVsbG8="
    post(server.http, "schedules.update", **known, cron="@hourly", catch_up="")
    found = server.ask("schedules.get", name=name)
    assert (found["cron"], found["catch_up"]) == ("@hourly", "skip")
    post(server.http, "schedules.pause", **known)
    assert "type &#39;acted-on&#39; to confirm" in post(server.http, "schedules.delete", **known, confirm=queue)
    post(server.http, "schedules.delete", **known, confirm=name)
    assert "Not found" in server.http.get(f"/ui/schedules/{name}").text
    actions = [each["action"] for each in server.ask("audit.list", queue_name=queue)["items"]]
    verbs = ["delete", "pause", "update", "run", "resume", "create"]
    assert actions == [*(f"schedules.{verb}" for verb in verbs), "queues.create"]


def test_a_wrong_expression_is_said_at_its_field(server: Guarded) -> None:
    answer = post(server.http, "schedules.create", name="wrong", queue_name=server.queue(), cron="0 25 * * *", utf8="x")
    assert re.search(r'name="cron"[^>]*value="0 25 \* \* \*"[^>]*aria-invalid="true"', answer)
    assert "hour: 25 is not between 0 and 23" in words(answer)


def test_a_reader_sees_only_schedules_of_its_queues_and_is_told_what_a_change_takes(keyed: Guarded) -> None:
    everything = keyed.client("produce:*", "manage:*")
    for queue, name in (("own", "mine"), ("others", "theirs")):
        everything.post("/v1/queues.create", json={"queue_name": queue}).raise_for_status()
        call = {"name": name, "queue_name": queue, "cron": "@daily", "item": {"utf8": "x"}}
        everything.post("/v1/schedules.create", json=call).raise_for_status()
    with signed(keyed, "read:own") as page:
        shown = page.get("/ui/schedules").text
        assert "theirs" not in shown
        told = page.get("/ui/schedules/mine").text
        assert told.count("needs the scope <code>produce:own</code>") == 4
        assert "Not found" in page.get("/ui/schedules/theirs").text


def test_a_firing_shows_its_item_and_how_late_it_was() -> None:
    with memory_server() as server, httpx.Client(base_url=server.url) as http:
        server.client.create_queue("orders")
        server.client.create_schedule("each-minute", cron="* * * * *", queue_name="orders", item="x")
        server.clock.advance("1m")
        fired = server.client.get_schedule("each-minute").last_fired
        assert fired is not None
        late = (fired.fired_at - fired.scheduled_at).total_seconds()
        shown = http.get("/ui/schedules/each-minute").text
        assert f'<a href="/ui/queues/orders/items?id={fired.id}">' in shown
        assert f"late by {duration(late)} " in words(shown)
        assert duration(late) in row(http.get("/ui/schedules").text, "each-minute")
