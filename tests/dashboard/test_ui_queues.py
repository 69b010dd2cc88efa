"""The dashboard's pages about queues: they show what the API has, as text whatever it says, and do what their buttons say."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode

import httpx
import pytest
from click.testing import CliRunner

from sluiceway.cli.main import cli
from sluiceway.contract.queue_settings import QUEUE_SETTINGS
from sluiceway.server.ui import payload
from sluiceway.server.ui.pages.item_commands import COMMANDS as ITEM_COMMANDS
from sluiceway.server.ui.pages.queue_commands import COMMANDS
from tests.dashboard.test_ui import blocks, signed
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import Running, eventually

EVIL = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
LATER = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
TABS = ("", "/items", "/partitions", "/consumers", "/dead", "/settings", "/audit")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with guarded(tmp_path_factory.mktemp("open") / "data", keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("keyed") / "data") as found:
        yield found


def page(server: Running, path: str, **query: object) -> str:
    answer = server.http.get(f"/ui/queues{path}", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.text


def do(server: Running, command: str, **given: str) -> str:
    """What the page says when the form is sent."""
    answer = server.http.post(f"/ui/do/{command}", data=given, headers={"sec-fetch-site": "same-origin"})
    assert answer.status_code == 200, answer.text
    return answer.text


def rows(text: str, table: str) -> list[list[str]]:
    """The texts of a table's cells, row by row."""
    found = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    cells = (
        [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", found[1], re.DOTALL)]
        if found
        else []
    )
    return [[" ".join(html.unescape(re.sub(r"<[^>]+>", "", cell)).split()) for cell in row] for row in cells]


def island(text: str, name: str) -> Any:
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# ---- all queues ---------------------------------------------------------------------------------------------------------


def test_all_queues_are_there_with_their_counts(server: Running) -> None:
    dead, name = server.queue(), server.queue(requested_partitions=3)
    server.ask("queues.update", queue_name=name, dead_queue=dead)
    server.produce(name, *"abcd")
    server.lease(name, batch_size=1)
    server.ask("queue.pause", queue_name=dead)

    def shown() -> dict[str, list[str]]:
        return {row[0]: row for row in rows(page(server, ""), "queues")}

    eventually(lambda: shown()[name][1:5] == ["● available", "3", "1", "0"])
    assert shown()[name][-2:] == ["3", dead]
    assert shown()[dead][1].endswith("paused")


def test_queues_are_sorted_searched_and_shown_page_by_page(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.ui.pages.queues.SHOWN", 2)
    for number, count in enumerate((2, 9, 5)):
        server.ask("queues.create", queue_name=f"sorted-{number}", requested_partitions=count)

    def names(**query: object) -> list[str]:
        return [row[0] for row in rows(page(server, "", name="sorted", **query), "queues")]

    assert names() == ["sorted-0", "sorted-1"]
    assert names(page=2) == ["sorted-2"]
    assert names(page=99) == ["sorted-2"]
    assert names(sort="-partitions") == ["sorted-1", "sorted-2"]
    assert names(sort="partitions", page="2") == ["sorted-1"]
    assert names(sort="<script>") == ["sorted-0", "sorted-1"]
    text = page(server, "", name="sorted", sort="-partitions")
    assert 'aria-sort="descending"' in text
    assert "/ui/queues?name=sorted&amp;sort=partitions" in text
    assert "None of" in page(server, "", name=EVIL)
    assert EVIL not in page(server, "", name=EVIL)


# ---- one queue ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tab", TABS)
def test_a_queue_that_is_not_there_is_said_to_be_so(server: Running, tab: str) -> None:
    answer = server.http.get(f"/ui/queues/no-such-queue{tab}")
    assert answer.status_code == 404
    assert "queue_not_found" in answer.text


@pytest.mark.parametrize("tab", TABS)
def test_an_empty_queue_has_all_of_its_pages(server: Running, tab: str) -> None:
    name = server.queue()
    text = page(server, f"/{name}{tab}")
    assert f'<a href="/ui/queues/{name}{tab}" aria-current="page">' in text
    assert text.count("<h1>") == 1


def test_the_summary_has_the_counts_and_the_history(server: Running) -> None:
    name = server.queue()
    server.produce(name, *"abcde")
    server.lease(name, batch_size=2)
    text = page(server, f"/{name}", minutes=360)
    eventually(lambda: '<span class="figure">3</span> ready' in page(server, f"/{name}"))
    told = island(text, "history")
    assert told["minutes"] == 360
    assert set(told["columns"]) == {"produced", "completed", "failed", "ready", "leased", "scheduled"}
    assert all(len(column) == 360 for column in told["columns"].values())
    tail = island(text, "history-tail")
    assert tail["from"] == told["from"] + 60 * 345
    assert island(page(server, f"/{name}", minutes="6'<"), "history")["minutes"] == 60


def test_the_summary_of_a_queue_with_order_has_its_keys(server: Running) -> None:
    name = server.queue(order="key", key_concurrency=2)
    for key in (EVIL, EVIL, "b"):
        server.ask("queue.produce", queue_name=name, items=[{"utf8": "x", "key": key}])
    server.lease(name, batch_size=2)
    text = page(server, f"/{name}")
    assert "<p>1 waiting, 1 of them blocked, 0 at their limit of 2</p>" in text
    assert [cells[:4] + cells[5:] for cells in rows(text, "keys-busiest")] == [[EVIL, "1", "1", "0", "an earlier item that is leased"]]
    assert rows(text, "keys-oldest") == rows(text, "keys-busiest")
    eventually(lambda: '<span class="figure">0</span> of them servable' in page(server, f"/{name}"))
    assert 'id="keys"' not in page(server, f"/{server.queue()}")


def test_the_summary_says_that_consumers_wait_for_the_rate(server: Running) -> None:
    name = server.queue(rate={"per_second": 0.001, "burst": 1})
    server.produce(name, *"abc")
    assert "at its rate" not in page(server, f"/{name}")
    server.lease(name, batch_size=1)
    with ThreadPoolExecutor(1) as waiting:
        parked = waiting.submit(server.lease, name, request_timeout="20s")
        eventually(lambda: "<p>at its rate of 0.001 a second</p>" in page(server, f"/{name}"))
        server.ask("queues.update", queue_name=name, rate=None)
        parked.result()


def test_the_summary_says_that_consumers_wait_for_the_limit(server: Running) -> None:
    name = server.queue(concurrency=2)
    server.produce(name, *"abc")
    # They wait: the quotas of a new queue are read first.
    for _ in range(2):
        assert server.lease(name, batch_size=1, request_timeout="20s")["leases"]
    with ThreadPoolExecutor(1) as waiting:
        parked = waiting.submit(server.lease, name, request_timeout="20s")
        eventually(lambda: "<p>at its limit of 2 leased items</p>" in page(server, f"/{name}"))
        server.ask("queues.update", queue_name=name, concurrency=0)
        parked.result()


def test_what_goes_on_of_the_summary_has_the_tail_alone(server: Running) -> None:
    name = server.queue()
    with server.http.stream("GET", f"/ui/live/queues/{name}?minutes=1440") as answer:
        shown = blocks(answer)
        text = next(shown)
        assert len(island(text, "history-tail")["columns"]["ready"]) == 15
        assert len(text) < 15_000
        server.produce(name, *"abc")
        assert next(text for text in shown if island(text, "history-tail")["now"]["ready"] == 3)


def test_partitions_are_shown_with_why_they_are_there(server: Running) -> None:
    name = server.queue(requested_partitions=3)
    where = server.produce(name, *"abc")["partition"]
    shown = {row[0]: row for row in rows(page(server, f"/{name}/partitions"), "partitions")}
    assert shown[str(where)][1:5] == ["● available", "3", "0", "0"]
    assert next(row[0] for row in rows(page(server, f"/{name}/partitions", sort="-ready"), "partitions")) == str(where)
    text = page(server, f"/{name}/partitions", partition=where)
    assert server.ask("queue.explain", queue_name=name, partition=where)["reason"] in text
    assert f"/ui/ask/partition.pause?queue_name={name}&amp;partition={where}" in text
    server.ask("partition.pause", queue_name=name, partition=where)
    assert "/ui/ask/partition.resume" in page(server, f"/{name}/partitions", partition=where)


def test_consumers_and_their_queries_are_shown(server: Running) -> None:
    name = server.queue()
    server.produce(name, *"abc")
    server.ask("queue.lease", queue_name=name, client_id=EVIL, batch_size=2)
    server.ask("consumers.report", queue_name=name, client_id="spark", query={"id": "7", "state": "failed", "name": EVIL, "error": EVIL})
    text = page(server, f"/{name}/consumers")
    assert [EVIL, "1", "2"] in [row[:3] for row in rows(text, "consumers")]
    ((query, state, *_),) = rows(text, "queries-of")
    assert (query, state) == (EVIL, f"✖ failed{EVIL}")
    assert "<img" not in text.split("<main")[1]


# ---- items --------------------------------------------------------------------------------------------------------------


def test_looking_at_items_takes_nothing_and_shows_them_as_text(server: Running) -> None:
    name = server.queue(max_attempts=3)
    item = {"utf8": EVIL, "kind": EVIL, "reference": EVIL, "key": EVIL, "priority": 0, "headers": {EVIL: EVIL}}
    server.ask("queue.produce", queue_name=name, items=[item, {"bytes": base64.b64encode(b"\xff\x00<b>").decode()}])
    text = page(server, f"/{name}/items")
    first, second = rows(text, "items")
    assert first[1:5] == ["○ ready", "0 of 3", EVIL, EVIL[: payload.PREVIEW]]
    assert second[4] == "ff 00 3c 62 3e binary"
    one = page(server, f"/{name}/items", id=first[0])
    assert html.unescape(one).count(EVIL) >= 6
    assert "<dt>priority</dt><dd>0</dd>" in one
    assert "it is next" in one
    for each in (text, one):
        assert "<img" not in each.split("<main")[1]
        assert "<script>" not in each
    assert server.totals(name)["total_leased"] == 0


def test_items_are_found_by_id_wherever_they_are(server: Running) -> None:
    name = server.queue()
    leased, ready = (server.produce(name, each)["first_id"] for each in "ab")
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": LATER}] * 3)
    server.lease(name, batch_size=1)
    scheduled = [item["id"] for item in server.ask("storage/scheduled.list", queue_name=name)["items"]]
    for item_id, state, text in ((ready, "ready", "b"), (leased, "leased", "a"), (scheduled[2], "scheduled", "later")):
        shown = page(server, f"/{name}/items", id=item_id)
        assert f"</span> {state}</span>" in shown
        assert f'aria-label="Payload">{text}</pre>' in shown
        # What is leased cannot be deleted.
        assert ("/ui/ask/items.delete?queue_name=" + name + "&amp;ids=" in shown) == (state != "leased")
    server.ask("queue.complete", queue_name=name, ids=[leased])
    gone = page(server, f"/{name}/items", id=leased)
    assert "it was completed" in gone
    assert 'aria-label="Payload"' not in gone
    assert 'role="alert"' in page(server, f"/{name}/items", id=EVIL)
    # One that is back under another id is a link away.
    server.lease(name, batch_size=1)
    server.ask("queue.release", queue_name=name, ids=[ready])
    (back,) = server.ask("storage/items.list", queue_name=name)["items"]
    assert re.search(rf'is now <a [^>]*id={re.escape(back["id"])}">', page(server, f"/{name}/items", id=ready))


def test_an_item_shows_its_failed_attempts_here_and_in_the_dead_queue(server: Running) -> None:
    name = server.queue(max_attempts=2, dead_queue=server.queue())
    dead = server.ask("queues.info", queue_name=name)["dead_queue"]
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}])
    failure = {
        "reason": "ValueError: <no> customer",
        "trace": "Traceback:\n  in handle\nValueError",
        "host": "node-7",
        "handler_time": "1500ms",
    }
    for attempt in (1, 2):
        (item,) = server.ask("queue.lease", queue_name=name, client_id="worker", request_timeout="30s")["items"]
        server.ask("queue.retry", queue_name=name, items=[{"id": item["id"], **failure}])
        if attempt == 1:
            (waiting,) = server.ask("queue.peek", queue_name=name)["items"]
            shown = page(server, f"/{name}/items", id=waiting["id"])
            for text in ("ValueError: &lt;no&gt; customer", "worker on node-7, took 1s500ms", "Traceback:\n  in handle\nValueError"):
                assert text in shown
    eventually(lambda: server.ask("queue.peek", queue_name=dead)["items"])
    (item,) = server.ask("queue.peek", queue_name=dead)["items"]
    shown = page(server, f"/{dead}/items", id=item["id"])
    assert shown.count("ValueError: &lt;no&gt; customer") >= 2
    assert shown.count("Traceback:\n  in handle\nValueError") == 1, "that of the last attempt"
    assert "sluiceway-failures" not in shown


def test_a_header_that_only_looks_like_failed_attempts_is_shown_as_it_is(server: Running) -> None:
    name = server.queue()
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "x", "headers": {"sluiceway-failures": "[1]"}}])
    (item,) = server.ask("queue.peek", queue_name=name)["items"]
    assert "sluiceway-failures" in page(server, f"/{name}/items", id=item["id"])


def test_items_are_listed_by_state_and_page_by_page(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.ui.pages.queue_items._SHOWN", 3)
    name = server.queue()
    server.produce(name, *"abcdefgh")
    server.lease(name, batch_size=4)
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": LATER}])

    def listed(state: str) -> list[str]:
        """The payloads of all pages."""
        found, query = [], f"state={state}"
        while query:
            text = server.http.get(f"/ui/queues/{name}/items?{query}").text
            found += [row[4] for row in rows(text, "items")]
            after = re.search(r'href="[^"]*/items\?([^"]*&amp;after=[^"]+)"', text)
            query = html.unescape(after[1]) if after else ""
        return found

    assert listed("line") == [*"abcdefgh"]
    assert listed("leased") == [*"abcd"]
    assert listed("ready") == [*"efgh"]
    assert listed("scheduled") == ["later"]
    monkeypatch.setattr("sluiceway.server.ui.pages.queue_items._LOOKED_AT", 3)
    assert "None of the 3 items" in page(server, f"/{name}/items", state="ready")
    assert listed("ready") == [*"efgh"]


def again(text: str) -> dict[str, str]:
    """The values with which a button of the page opens the form that sends an item again."""
    found = re.search(r'href="/ui/ask/queue.produce\?([^"]*utf8=[^"]*)"', text)
    assert found is not None
    return dict(parse_qsl(html.unescape(found[1]), keep_blank_values=True))


def test_a_search_finds_items_of_all_partitions_page_by_page(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.ui.pages.queue_items._SHOWN", 2)
    name = server.queue(requested_partitions=3)
    for at in range(6):
        item = {
            "utf8": f"order {at} {EVIL}",
            "kind": f"kind {at % 2}",
            "headers": {"tenant": "it's me"},
            "reference": EVIL,
            "key": f"c-{at}",
        }
        server.ask("queue.produce", queue_name=name, items=[item | ({"enqueue_at": LATER} if at == 5 else {})])

    def found(**query: str) -> list[str]:
        """The first words of the payloads of all pages."""
        words, path = [], f"/{name}/items?{urlencode(query)}"
        while path:
            text = server.http.get(f"/ui/queues{path}").text
            assert "<img" not in text.split("<main")[1]
            words += [row[4][:7] for row in rows(text, "items")] if 'id="items"' in text else []
            after = re.search(r'href="/ui/queues(/[^"]*&amp;next=[^"]+)"', text)
            path = html.unescape(after[1]) if after else ""
        return sorted(words)

    assert found(kind="kind 1") == ["order 1", "order 3", "order 5"]
    assert found(**{"in": "scheduled"}) == ["order 5"]
    assert found(header="tenant=it's me", contains="order 4") == ["order 4"]
    assert found(header="tenant", kind="kind 0", reference=EVIL) == ["order 0", "order 2", "order 4"]
    assert found(key="c-4") == ["order 4"]
    assert found(reason="it did not die") == []
    keyed = html.unescape(page(server, f"/{name}/items", key="c-4"))
    assert f"sluiceway search {name} --item-key c-4" in keyed
    text = page(server, f"/{name}/items", header="tenant=it's me", **{"in": "ready"})
    line = html.unescape(re.findall(r'<p class="cli"><code>(.*?)</code>', text)[0])
    assert shlex.split(line) == ["sluiceway", "search", name, "--header", "tenant=it's me", "--state", "ready"]
    assert "No match among the 6 items compared" in page(server, f"/{name}/items", kind="none")


def test_an_items_unique_key_is_shown_and_searched_for(server: Running) -> None:
    name = server.queue(unique="until_settled")
    for key in ("u-1", "u-2", "u-2"):
        server.ask("queue.produce", queue_name=name, items=[{"utf8": f"for {key}", "unique_key": key}])
    assert len(rows(page(server, f"/{name}/items"), "items")) == 2
    found = page(server, f"/{name}/items", unique_key="u-2")
    (row,) = rows(found, "items")
    assert f"sluiceway search {name} --unique-key u-2" in html.unescape(found)
    assert re.search(r"<dt>unique key</dt><dd>u-2</dd>", page(server, f"/{name}/items", id=row[0]))


def test_checked_items_are_run_moved_and_deleted(server: Running) -> None:
    name, other = server.queue(), server.queue()
    for _ in range(3):
        server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": LATER}])
    one, two, three = (row[0] for row in rows(page(server, f"/{name}/items", state="scheduled"), "items"))
    # Each check box sends its id.
    asked = server.http.get("/ui/ask/items.run_now", params=[("queue_name", name), ("ids", one), ("ids", two)])
    assert f"sluiceway run-now {name} {one} {two}" in asked.text
    assert re.search(rf"<textarea[^>]*>\s*{re.escape(one)} {re.escape(two)}</textarea>", asked.text)
    done = do(server, "items.run_now", queue_name=name, ids=f"{one} {two} {one[:8]}.0.99")
    assert "<dt>ready</dt><dd>2</dd>" in done
    assert f"{one[:8]}.0.99</code>: unknown" in done
    assert (server.totals(name)["ready"], server.totals(name)["scheduled"]) == (2, 1)
    assert "nothing changed" in do(server, "items.move", queue_name=name, ids=three)
    do(server, "items.move", queue_name=name, ids=three, target=other)
    assert (server.totals(name)["scheduled"], server.totals(other)["ready"]) == (0, 1)


def test_an_item_is_produced_and_sent_again_after_an_edit(server: Running) -> None:
    name = server.queue()
    body = '{"b": 1.50, "a": ["x"]}'
    do(server, "queue.produce", queue_name=name, utf8=body, kind="mail", priority="0", headers="tenant=a b\r\nempty=", after="1h")
    (item,) = server.ask("storage/scheduled.list", queue_name=name)["items"]
    assert (base64.b64decode(item["payload"]).decode(), item["kind"], item["headers"]) == (body, "mail", {"tenant": "a b", "empty": ""})
    shown = page(server, f"/{name}/items", id=item["id"])
    assert '{\n  "b": 1.50,\n  "a": [\n    "x"\n  ]\n}' in html.unescape(shown)
    do(server, "queue.produce", **again(shown) | {"utf8": "\nedited\r\ntwice"})
    (copy,) = server.ask("storage/items.list", queue_name=name)["items"]
    assert base64.b64decode(copy["payload"]) == b"\nedited\ntwice"
    assert (item["priority"], copy["priority"]) == (0, 0)
    assert (copy["kind"], copy["headers"]) == ("mail", {"tenant": "a b", "empty": "", "copy-of": item["origin"]})
    # The leading line break is not lost on the way through a form.
    asked = server.http.get("/ui/ask/queue.produce", params=again(page(server, f"/{name}/items", id=copy["id"]))).text
    assert '<textarea id="f-utf8" name="utf8" rows="3">\n\nedited' in asked
    assert "not of the form NAME=VALUE" in do(server, "queue.produce", queue_name=name, headers="tenant")
    server.ask("queue.produce", queue_name=name, items=[{"bytes": base64.b64encode(b"\xff").decode()}])
    binary = server.ask("storage/items.list", queue_name=name)["items"][1]["id"]
    assert "Edit and send again" not in page(server, f"/{name}/items", id=binary)


def test_payloads_are_cut_and_what_cannot_be_seen_is_spelt_out() -> None:
    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    assert payload.preview(encoded(b"a\nb\tc")) == ("a b c", "", 5)
    for count in (500, 719, 720, 721, 50_000):
        assert payload.preview(encoded(b"x" * count)) == ("x" * payload.PREVIEW + "…", "", count)
        assert payload.preview(encoded(("a" + "𝄞" * count).encode()))[:2] == ("a" + "𝄞" * (payload.PREVIEW - 1) + "…", "")
    # No more of it is looked at than is shown.
    assert payload.preview(encoded(b"x" * 1_000 + b"\xff")).note == ""
    # A character that is cut off by the item, and not by the preview.
    assert payload.preview(encoded("é".encode()[:1])).note == "binary"
    assert payload.whole(encoded(b'{"a":1.50,"b":[]}')) == ('{\n  "a": 1.50,\n  "b": []\n}', "JSON, indented", 17)
    assert payload.whole(encoded(b"[1")).note == ""
    assert payload.whole(encoded("\u202eabc\x00é\n".encode())).text == "\\u202eabc\\x00é\n"
    cut = payload.whole(encoded("é".encode() * payload.WHOLE))
    assert cut.text == "é" * (payload.WHOLE // 2)
    assert cut.note == f"the first {payload.WHOLE:,} of {2 * payload.WHOLE:,} bytes"
    binary = payload.whole(encoded(bytes(range(0xF0, 0x100)) + b"AB"))
    assert binary.text.splitlines() == [
        "000000  f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff  ················",
        f"000010  {'41 42':<47}  AB",
    ]
    assert "hexadecimal" in binary.note


# ---- the rest -----------------------------------------------------------------------------------------------------------


def test_the_dead_of_a_queue_are_told_by_their_reasons(server: Running) -> None:
    dead = server.queue()
    name = server.queue(dead_queue=dead)
    server.produce(name, *"abcdef")
    ids = [item["id"] for item in server.lease(name)["items"]]
    # Of an exception, whose message differs, the type.
    reasons = [EVIL, "too late", "too late", *(f"max_attempts 3 reached: ValueError: no order {number}" for number in range(3))]
    server.ask(
        "queue.retry", queue_name=name, items=[{"id": each, "dead": True, "reason": why} for each, why in zip(ids, reasons, strict=True)]
    )
    eventually(lambda: server.totals(dead)["ready"] == 6)
    for each in (name, dead):
        text = page(server, f"/{each}/dead")
        found = [row[:3] for row in rows(text.replace("<table>", '<table id="reasons">'), "reasons")]
        assert found == [["max_attempts 3 reached: ValueError", name, "3"], ["too late", name, "2"], [EVIL, name, "1"]]
        assert f"/ui/queues/{dead}/redrive?reason=too+late&amp;source={name}" in text
    assert "Dead queue of" in page(server, f"/{dead}/dead")
    assert "--dead-queue" in page(server, f"/{server.queue()}/dead")


def test_settings_are_told_apart_from_defaults(server: Running) -> None:
    origins = {row[0]: row[2] for row in rows(page(server, f"/{server.queue()}/settings"), "settings")}
    assert set(origins.values()) == {"default"}
    assert len(origins) == len(QUEUE_SETTINGS)
    name = server.queue(
        reference=EVIL, retry_backoff={"first": "1s", "most": "10m"}, lease_timeout="5m", circuit_breaker={"failure_rate": 0.5}
    )
    shown = {row[0]: row[1:3] for row in rows(page(server, f"/{name}/settings"), "settings")}
    assert shown["Reference"] == [EVIL, "set"]
    assert shown["Retry back-off"] == ["1s, doubling with each attempt, up to 10m", "set"]
    assert shown["Circuit breaker"] == ["opens at 20 failures beyond a share of 50%", "set"]
    assert shown["Lease timeout"] == ["5m", "set"]
    assert shown["Max attempts"] == ["no limit", "default"]


def test_the_audit_of_a_queue_is_its_own(server: Running) -> None:
    name, other = server.queue(reference=EVIL), server.queue()
    server.ask("queues.update", queue_name=name, lease_timeout="5m")
    text = page(server, f"/{name}/audit")
    update, created = rows(text, "audit")
    assert update[1:] == ["anybody", "queues.update", "lease timeout: 1m → 5m"]
    assert created[2] == "queues.create"
    assert EVIL in created[3]
    assert other not in text
    assert "<img" not in text.split("<main")[1]


# ---- what is done -------------------------------------------------------------------------------------------------------


def test_a_queue_is_created_changed_and_deleted(server: Running) -> None:
    dead = server.queue()
    given = {"requested_partitions": "2", "max_attempts": "5", "dead_queue": dead, "retry_backoff": "1s 10m", "logical_queues": "auto"}
    assert "/ui/queues/made" in do(server, "queues.create", queue_name="made", **given, circuit_breaker="0.25", reference="ours")
    info = server.ask("queues.info", queue_name="made")
    assert (info["requested_partitions"], info["max_attempts"], info["dead_queue"], info["reference"]) == (2, 5, dead, "ours")
    assert (info["retry_backoff"], info["logical_queues"]) == ({"first": "1s", "most": "10m"}, "auto")
    assert info["circuit_breaker"] == {"failure_rate": 0.25, "failures": 20}

    do(server, "queues.update", queue_name="made", version="1", lease_timeout="5m", no_dead_queue="1", logical_queues="3")
    info = server.ask("queues.info", queue_name="made")
    assert (info["lease_timeout"], info["dead_queue"], info["logical_queues"], info["max_attempts"]) == ("5m", None, 3, 5)
    assert "version_conflict" in do(server, "queues.update", queue_name="made", version="1", lease_timeout="7m")

    server.produce("made", "left")
    assert "nothing changed" in do(server, "queues.delete", queue_name="made", force="1", confirm="mad")
    assert "queue_not_empty" in do(server, "queues.delete", queue_name="made", confirm="made")
    assert 'href="/ui/queues"' in do(server, "queues.delete", queue_name="made", force="1", confirm="made")
    assert server.post("queues.info", queue_name="made").status_code == 404


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"retry_backoff": "1s"}, "retry_backoff"),
        ({"circuit_breaker": "50"}, "circuit_breaker"),
        ({"logical_queues": "many"}, "logical_queues"),
        ({"max_attempts": "five"}, "max_attempts"),
        ({"dead_queue": "x", "no_dead_queue": "1"}, "no_dead_queue"),
        ({"version": "v1"}, "version"),
        ({"lease_timeout": "soon"}, "lease_timeout"),
    ],
)
def test_a_setting_that_is_wrong_is_marked_and_changes_nothing(server: Running, given: dict[str, str], field: str) -> None:
    name = server.queue()
    text = do(server, "queues.update", queue_name=name, **given)
    assert 'role="alert"' in text
    assert field == "no_dead_queue" or re.search(rf'id="f-{field}"[^>]*aria-invalid="true"', text)
    assert server.ask("queues.info", queue_name=name)["version"] == 1


def test_a_queue_is_paused_in_part_resumed_and_cleared(server: Running) -> None:
    name = server.queue()
    server.produce(name, *"abc")
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": LATER}])
    do(server, "queue.pause", queue_name=name, verbs="lease")
    assert server.ask("queues.info", queue_name=name)["paused"] == ["lease"]
    do(server, "queue.resume", queue_name=name)
    assert server.ask("queues.info", queue_name=name)["paused"] == []
    do(server, "queue.clear", queue_name=name, confirm=name)
    assert (server.totals(name)["ready"], server.totals(name)["scheduled"]) == (0, 1)
    do(server, "queue.clear", queue_name=name, scheduled="1", confirm=name)
    assert server.totals(name)["total"] == 0


def test_a_partition_is_paused_and_resumed(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    do(server, "partition.pause", queue_name=name, partition="1")
    assert [part["state"] for part in server.ask("queues.info", queue_name=name)["partitions"]] == ["available", "paused"]
    do(server, "partition.resume", queue_name=name, partition="1")
    assert [part["state"] for part in server.ask("queues.info", queue_name=name)["partitions"]] == ["available", "available"]


def test_items_are_deleted_by_their_ids(server: Running) -> None:
    name = server.queue()
    one, two, three = (server.produce(name, each)["first_id"] for each in "abc")
    assert "to confirm" in do(server, "items.delete", queue_name=name, ids=f"{one} {two}")
    do(server, "items.delete", queue_name=name, ids=f"{one}\n{two}", confirm=name)
    assert [item["id"] for item in server.ask("storage/items.list", queue_name=name)["items"]] == [three]


FILLED = {
    "queue_name": "q",
    "requested_partitions": "2",
    "partition": "1",
    "version": "7",
    "verbs": "lease",
    "ids": "a.0.1 a.0.2",
    "target": "other",
    "utf8": "two\nlines",
    "kind": "mail",
    "encoding": "json",
    "headers": "a=1\r\nb=x y",
    "after": "5m",
    "lease_timeout": "1m",
    "max_lease_timeout": "2h",
    "max_attempts": "3",
    "dead_queue": "d",
    "expire_timeout": "1d",
    "retry_backoff": "1s 10m",
    "circuit_breaker": "0.5:20",
    "idempotency_window": "1d",
    "write_timeout": "20s",
    "logical_queues": "auto",
    "reference": "it's ours",
    "scheduled": "1",
    "force": "1",
}


@pytest.mark.parametrize("command", [*COMMANDS, *ITEM_COMMANDS], ids=lambda command: command.name)
def test_the_command_line_that_is_shown_is_one(command: Any) -> None:
    """With every field filled in, it asks a server that is not there; one that is wrong is refused before."""
    for given in ({"queue_name": "q", "partition": "1", "ids": "a.0.1", "lease_timeout": "1m"}, FILLED):
        program, *words = shlex.split(command.line(given))
        answer = CliRunner().invoke(cli, [*words, "--url", "http://127.0.0.1:1"], input="")
        assert program == "sluiceway"
        assert answer.exit_code != 2 or "--yes" in answer.output, answer.output


def test_what_can_be_unset_has_its_flag() -> None:
    update = next(command for command in COMMANDS if command.name == "queues.update")
    unset = {field.name: "1" for field in update.fields if field.gives is not None}
    assert len(unset) == 14
    assert update.values({"queue_name": "q", **unset}) == {"queue_name": "q"} | {
        field.gives[0]: None for field in update.fields if field.gives
    }
    words = shlex.split(update.line({"queue_name": "q", **unset}))[1:]
    assert CliRunner().invoke(cli, [*words, "--url", "http://127.0.0.1:1"]).exit_code != 2


# ---- with keys ----------------------------------------------------------------------------------------------------------


def test_who_may_only_read_sees_why_a_button_does_nothing(keyed: Guarded) -> None:
    keyed.client("manage:*").post("/v1/queues.create", json={"queue_name": "mine"})
    keyed.client("produce:*").post("/v1/queue.produce", json={"queue_name": "mine", "items": [{"utf8": "x"}]})
    with signed(keyed, "read:mine") as reader:
        for tab in ("", "/partitions?partition=0", "/settings", "/items"):
            text = reader.get(f"/ui/queues/mine{tab}").text
            assert "<code>manage:mine</code>" in text, tab
            assert "/ui/ask/" not in text
        text = reader.get("/ui/queues/mine/items").text
        assert all(label in text for label in ("Run now…", "Move…", "Delete…", "Produce an item…", "<code>produce:mine</code>"))
        assert "scope admin" in reader.get("/ui/queues/mine/audit").text
        assert "<code>manage:*</code>" in reader.get("/ui/queues").text
    with signed(keyed, "manage:mine*", "read:mine*") as manager:
        assert "/ui/ask/queues.create" in manager.get("/ui/queues").text
        assert "needs the scope" not in manager.get("/ui/queues/mine/settings").text
        assert 'role="alert"' in manager.post("/ui/do/queues.create", data={"queue_name": "other"}).text


@pytest.mark.parametrize("tab", TABS)
def test_a_queue_of_others_is_not_shown(keyed: Guarded, tab: str) -> None:
    keyed.client("manage:*").post("/v1/queues.create", json={"queue_name": "secret"})
    with signed(keyed, "read:mine") as reader:
        answers: list[httpx.Response] = [reader.get(f"/ui/queues/{name}{tab}") for name in ("secret", "missing")]
    assert [answer.status_code for answer in answers] == [403, 403]


def test_a_dead_queue_that_the_reader_may_not_see_stays_unseen(keyed: Guarded) -> None:
    maker = keyed.client("manage:*")
    maker.post("/v1/queues.create", json={"queue_name": "hidden-dead"})
    maker.post("/v1/queues.create", json={"queue_name": "seen", "dead_queue": "hidden-dead"})
    with signed(keyed, "read:seen") as reader:
        text = reader.get("/ui/queues/seen/dead").text
    assert 'role="alert"' in text
    assert "Reasons" not in text
