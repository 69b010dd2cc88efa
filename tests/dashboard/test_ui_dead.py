"""The pages of dead letters: what died and why, and the wizard that sends it back."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.dashboard.test_ui import ORIGIN, blocks, signed
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import Running, eventually

EVIL = '"><img src=x onerror=alert(1)><script>alert(1)</script></textarea>'
JSON = {"accept": "application/json", ORIGIN: "same-origin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("dead") / "data", keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("dead-keyed") / "data") as found:
        yield found


def dead(server: Running, count: int, reason: str = "no such customer", partitions: int = 1) -> tuple[str, str]:
    """A dead queue with so many items, and the queue that they came from."""
    grave = server.queue(requested_partitions=partitions)
    source = server.queue(dead_queue=grave)
    server.produce(source, *(f"item {number}" for number in range(count)))
    items = server.lease(source)["items"]
    server.ask("queue.retry", queue_name=source, items=[{"id": item["id"], "dead": True, "reason": reason} for item in items])
    eventually(lambda: server.totals(grave)["ready"] == count)
    return grave, source


def wizard(server: Running, grave: str, **query: str) -> str:
    answer = server.http.get(f"/ui/queues/{grave}/redrive", params={"check": "1", **query})
    assert answer.status_code == 200, answer.text
    return answer.text


def words(page: str) -> str:
    """What is to be read of it."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_dead_queues_are_those_that_others_send_their_dead_to(server: Guarded) -> None:
    grave, source = dead(server, 3)
    dropping = server.queue()
    server.produce(dropping, "a")
    ids = [{"id": item["id"], "dead": True} for item in server.lease(dropping)["items"]]
    server.ask("queue.retry", queue_name=dropping, items=ids)

    def is_shown(text: str) -> bool:
        row = re.search(rf'<tr id="dead-{grave}">(.*?)</tr>', text, re.DOTALL)
        assert f'id="dead-{source}"' not in text
        return row is not None and f"{source} (3 dead)" in words(row[1]) and f'id="dropping-{dropping}"' in text and ">3<" in row[1]

    with server.http.stream("GET", "/ui/live/dead") as answer:
        assert next(text for text in blocks(answer) if is_shown(text))
    assert f'href="/ui/queues/{grave}/redrive"' in server.http.get("/ui/dead").text


def test_where_no_queue_has_a_dead_queue_it_says_how_to_get_one(keyed: Guarded) -> None:
    with signed(keyed, "read:none") as page:
        assert "sluiceway queue update QUEUE --dead-queue DEAD" in page.get("/ui/dead").text


def test_who_may_not_redrive_is_told_what_is_missing(keyed: Guarded) -> None:
    client = keyed.client("manage:*")
    for name, its_own in (("grave", None), ("source", "grave")):
        assert client.post("/v1/queues.create", json={"queue_name": name, "dead_queue": its_own}).status_code == 200
    with signed(keyed, "read:*") as page:
        assert "needs the scope <code>manage:grave</code>" in page.get("/ui/dead").text
        shown = page.get("/ui/queues/grave/redrive?check=1").text
        assert "manage:grave" in shown
        assert 'id="redrive"' not in shown
        refused = page.post("/ui/do/queue.redrive", data={"queue_name": "grave"}, headers=JSON)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


def test_a_key_that_may_not_manage_every_queue_names_where_items_go(keyed: Guarded) -> None:
    client = keyed.client("manage:*")
    for name, its_own in (("grave-1", None), ("source-1", "grave-1")):
        client.post("/v1/queues.create", json={"queue_name": name, "dead_queue": its_own})
    with signed(keyed, "read:*", "manage:grave-1", "manage:source-1") as page:
        asked = page.get("/ui/queues/grave-1/redrive?check=1").text
        assert 'role="alert"' in asked
        assert re.search(r'id="r-target"[^>]*aria-invalid="true"', asked)
        assert "No matching items" in page.get("/ui/queues/grave-1/redrive?check=1&source=source-1").text


def test_a_dry_run_moves_nothing_and_shows_examples(server: Guarded) -> None:
    grave, source = dead(server, 7, partitions=2)
    shown = wizard(server, grave, rate="50")
    assert "7 items match. Nothing has moved yet." in words(shown)
    assert f"{source} (7)" in words(shown)
    assert shown.count("no such customer") == 5
    assert f"sluiceway redrive {grave} --all --rate 50/s" in shown
    assert server.totals(grave)["ready"] == 7
    assert server.ask("audit.list", queue_name=grave, action="queue.redrive")["items"] == []


def test_a_dry_run_is_of_what_was_filled_in(server: Guarded) -> None:
    grave, source = dead(server, 4, reason="it's broken")
    other = server.queue()
    shown = wizard(server, grave, source=source, reason="it's", limit="3", target=other)
    assert "3 items match" in words(shown)
    assert f"sluiceway redrive {grave} --source {source} --reason 'it'\"'\"'s' --to {other} --limit 3" in html.unescape(shown)
    assert re.search(r'name="reason" value="it&#39;s"', shown)
    assert "No matching items" in wizard(server, grave, reason="else")


@pytest.mark.parametrize(("field", "text"), [("limit", "many"), ("limit", "0"), ("rate", "-1"), ("target", "no/name"), ("target", "none")])
def test_what_is_wrong_is_said_at_the_field(server: Guarded, field: str, text: str) -> None:
    grave, _ = dead(server, 1)
    shown = wizard(server, grave, **{field: text})
    assert 'role="alert"' in shown
    assert re.search(rf'id="r-{field}"[^>]*aria-invalid="true"', shown)


def calls(server: Guarded, page: str) -> Iterator[httpx.Response]:
    """What the page's script sends, until nothing is left."""
    form = re.search(r'<form id="redrive"(.*?)</form>', page, re.DOTALL)
    assert form is not None
    fields = {name: html.unescape(value) for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', form[1])}
    while True:
        answer = server.http.post("/ui/do/queue.redrive", data=fields, headers=JSON)
        yield answer
        if not answer.json()["matched"]:
            return


def test_the_page_sends_them_back_a_slice_at_a_time(server: Guarded) -> None:
    grave, source = dead(server, 25)
    page = wizard(server, grave, rate="10")
    assert 'data-slice="10"' in page
    assert 'data-most="25"' in page
    answers = [answer.json() for answer in calls(server, page)]
    assert [each["matched"] for each in answers] == [10, 10, 5, 0]
    assert answers[0]["targets"] == {source: 10}
    eventually(lambda: (server.totals(grave)["ready"], server.totals(source)["ready"]) == (0, 25))
    entries = server.ask("audit.list", queue_name=grave, action="queue.redrive")["items"]
    assert len(entries) == 4


def test_no_more_is_sent_than_the_dry_run_has_found(server: Guarded) -> None:
    grave, source = dead(server, 6)
    server.produce(source, "more", "and more")
    ids = [{"id": item["id"], "dead": True, "reason": "broken"} for item in server.lease(source)["items"]]
    server.ask("queue.retry", queue_name=source, items=ids)
    eventually(lambda: server.totals(grave)["ready"] == 8)
    shown = wizard(server, grave, reason="broken")
    assert "Redrive 2 items" in words(shown)
    assert 'data-most="2"' in shown
    assert 'name="limit" value="2"' in shown


def test_without_a_script_a_call_is_made_by_the_form(server: Guarded) -> None:
    grave, _ = dead(server, 2)
    done = server.http.post("/ui/do/queue.redrive", data={"queue_name": grave, "limit": "2"}, headers={ORIGIN: "same-origin"})
    assert "Redrive: done" in done.text
    assert f"sluiceway redrive {grave} --limit 2" in done.text


def test_a_script_of_another_site_does_nothing(server: Guarded) -> None:
    grave, _ = dead(server, 1)
    answer = server.http.post("/ui/do/queue.redrive", data={"queue_name": grave}, headers={**JSON, ORIGIN: "cross-site"})
    assert answer.status_code == 403
    assert server.totals(grave)["ready"] == 1


def test_what_goes_on_is_the_counts_and_no_dry_run(server: Guarded) -> None:
    grave, source = dead(server, 2)
    with server.http.stream("GET", f"/ui/live/queues/{grave}/redrive?check=1") as answer:
        shown = blocks(answer)
        first = next(shown)
        assert f'id="source-{source}"' in first
        assert 'id="redrive"' not in first
        server.ask("queue.redrive", queue_name=grave)
        assert next(text for text in shown if re.search(r'figure">2</span> redriven in total', text))


def test_hostile_texts_stay_texts(server: Guarded) -> None:
    grave, _ = dead(server, 2, reason=EVIL)
    shown = wizard(server, grave, reason="<script>", target="")
    assert shown.count("&lt;script&gt;alert(1)") == 2
    for text in (shown, server.http.get("/ui/dead").text, wizard(server, grave, source=EVIL, target=EVIL, limit=EVIL)):
        assert "<script>alert" not in text
        assert "<img src=x" not in text
