"""Audit, Spark, tasks and settings: the pages show what the API says, to whom it says so, and do what their forms say."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.server.ui.pages.tasks import tree
from sluiceway.server.ui.routes import PARTS, ROOMS
from tests.cli.test_cli_tasks import KEPT, RECORDS, write_alarms, write_capture
from tests.dashboard.test_ui import ORIGIN, blocks, signed
from tests.dashboard.test_ui_dead import EVIL, words
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import eventually

OWN = {ORIGIN: "same-origin"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("more") / "data"


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Guarded]:
    with guarded(data, keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("more-keyed") / "data") as found:
        yield found


@pytest.mark.parametrize(
    ("path", "scope"), [("/ui/audit", "admin"), ("/ui/settings", "admin"), ("/ui/settings/keys", "admin"), ("/ui/captures", "read:*")]
)
def test_who_may_not_see_it_is_told_which_scope_it_takes(keyed: Guarded, path: str, scope: str) -> None:
    with signed(keyed, "read:mine") as page:
        shown = page.get(path)
        assert shown.status_code == 200
        assert "Missing scope" in shown.text
        assert f"sluiceway key create NAME --scope {scope}" in html.unescape(shown.text).replace("'", "")
        assert "keys.create" not in shown.text
    with signed(keyed, scope) as page:
        assert "Missing scope" not in page.get(path).text


# -- audit ------------------------------------------------------------------------------------------------------------


def test_the_trail_is_told_by_day_with_its_details(server: Guarded) -> None:
    name = server.queue()
    server.ask("queues.update", queue_name=name, reference=EVIL)
    (entry, _) = server.ask("audit.list", queue_name=name)["items"]
    shown = server.http.get("/ui/audit", params={"queue_name": name}).text
    assert f'<h2 id="day-{entry["at"][:10]}">' in shown
    assert re.findall(r'<li id="e-([^"]+)">', shown)[0] == entry["id"]
    assert entry["request_id"] in shown
    assert f"reference → {EVIL}" in words(shown)
    assert "<img src=x" not in shown
    assert f"sluiceway audit list --queue {name}" in shown


def test_the_trail_is_read_as_far_as_one_wants(server: Guarded) -> None:
    for number in range(52):
        server.ask("queues.create", queue_name=f"audited-{number}")
    names: list[str] = []
    url = "/ui/audit?action=queues.create&since=1h"
    while url:
        shown = server.http.get(url).text
        names += re.findall(r'on <a href="/ui/queues/(audited-\d+)">', shown)
        older = re.search(r'href="(/ui/audit/older\?[^"]+)"', shown)
        url = html.unescape(older[1]) if older else ""
        assert "hx-sse:connect" not in shown or url.startswith("/ui/audit/older?action=queues.create&since=1h&pivot=") or len(names) == 52
    assert names == [f"audited-{number}" for number in reversed(range(52))]


def test_new_entries_come_by_themselves(server: Guarded) -> None:
    name = server.queue()
    with server.http.stream("GET", f"/ui/live/audit?queue_name={name}") as answer:
        shown = blocks(answer)
        assert next(shown).count('<li id="e-') == 1
        server.ask("queue.pause", queue_name=name)
        assert next(text for text in shown if text.count('<li id="e-') == 2)


WRONG = [
    ("since", "yesterday"),
    ("queue_name", "no/name"),
    ("until", "<script>alert(1)</script>"),
    # In UTC they are before and after all years that there are.
    ("since", "0001-01-01T00:00:00+14:00"),
    ("until", "9999-12-31T23:59:59-14:00"),
]


@pytest.mark.parametrize(("field", "text"), WRONG)
def test_a_filter_that_is_wrong_is_said_and_kept(server: Guarded, field: str, text: str) -> None:
    answer = server.http.get("/ui/audit", params={field: text})
    assert answer.status_code == 200
    (kept,) = re.findall(rf'id="a-{field}"[^>]*value="([^"]*)"[^>]*aria-invalid="true"', answer.text)
    assert html.unescape(kept) == text
    assert "<script>alert" not in answer.text


def test_times_are_moments_or_how_long_ago(server: Guarded) -> None:
    name = server.queue()
    for fields, count in (
        ({"since": "1h"}, 1),
        ({"until": "1h"}, 0),
        ({"since": "2100-01-01"}, 0),
        ({"until": "2100-01-01T00:00:00+02:00"}, 1),
    ):
        shown = server.http.get("/ui/audit", params={"queue_name": name, **fields}).text
        assert shown.count('<li id="e-') == count, fields


# -- spark ------------------------------------------------------------------------------------------------------------


def test_queries_are_shown_as_consumers(server: Guarded) -> None:
    assert "from sluiceway.spark import watch" in server.http.get("/ui/spark").text
    name = server.queue()
    server.produce(name, "a", "b", "c")
    server.ask("queue.lease", queue_name=name, client_id="billing", batch_size=2)
    query = {"id": "q-1", "name": "bill", "state": "running", "batch": 7, "items": 5_000, "input_per_s": 120.0, "processed_per_s": 8_112.0}
    server.ask("consumers.report", queue_name=name, client_id="billing", query={**query, "batch_duration": "1500ms"})
    server.ask("consumers.report", queue_name=name, client_id=EVIL[:60], query={"id": EVIL[:60], "state": "failed", "error": EVIL})
    shown = server.http.get("/ui/spark").text
    row = re.search(rf'<tr id="spark-{name}-billing-q-1">(.*?)</tr>', shown, re.DOTALL)
    assert row is not None
    told = words(row[1])
    for each in ("bill", "billing · q-1", "running", name, "5,000", "120/s", "8,112/s", "1s500ms"):
        assert each in told
    assert [int(each) for each in re.findall(r'class="n">(\d)<', row[1])][:3] == [1, 2, 7]
    assert EVIL in html.unescape(shown)
    assert "<img src=x" not in shown


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_captures_are_shown_with_their_partitions_as_a_tree(server: Guarded, data: Path) -> None:
    assert "sluiceway spark capture NAME --resident" in server.http.get("/ui/captures").text
    asyncio.run(write_capture(data / "meta.sqlite", "feed", RECORDS, KEPT))
    asyncio.run(write_alarms(data / "meta.sqlite"))
    eventually(lambda: 'id="task-feed"' in server.http.get("/ui/captures").text)
    shown = server.http.get("/ui/captures/feed").text
    assert re.findall(r'<tr id="part-(shard-\d)">', shown) == ["shard-0", "shard-3", "shard-4", "shard-1", "shard-5", "shard-2"]
    told = words(shown)
    for each in ("1, led by one", "├─ shard-3", "└─ shard-4", "waiting for shard-2", "moving to one", "joining, not yet in the term"):
        assert each in told
    assert "one: partition shard-0 is stalled: the key has no scope for this" in told
    assert server.http.get("/ui/captures/none").status_code == 404


def test_a_partition_stands_below_the_first_parent_that_is_left() -> None:
    parts = [
        {"partition": name, "parents": parents} for name, parents in (("a", []), ("b", ["gone", "a"]), ("c", ["b", "a"]), ("d", ["a"]))
    ]
    assert [(lead, each["partition"]) for lead, each in tree(parts)] == [("", "a"), ("├─ ", "b"), ("│  └─ ", "c"), ("└─ ", "d")]
    loop = [{"partition": "x", "parents": ["y"]}, {"partition": "y", "parents": ["x"]}]
    assert [each["partition"] for _, each in tree(loop)] == ["x", "y"]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_every_value_of_the_configuration_is_there_with_its_origin(server: Guarded) -> None:
    found = server.ask("config.show")["configuration"]
    # All of its tables.
    assert found.keys() == {"server", "cluster", "log", "limits", "trace", "backends"}
    shown = server.http.get("/ui/settings").text
    for section, values in found.items():
        for key, value in values.items() if section != "backends" else ():
            row = re.search(rf'<tr id="set-{section}\.{key}">(.*?)</tr>', shown, re.DOTALL)
            assert row is not None, key
            assert value["origin"] in words(row[1])
            assert ("on restart" in row[1]) == value["restart"]
    assert 'id="backend-default"' in shown


def test_the_configuration_is_reloaded(server: Guarded) -> None:
    assert "sluiceway config reload" in server.http.get("/ui/ask/config.reload").text
    assert "Reload the configuration: done" in server.http.post("/ui/do/config.reload", headers=OWN).text


def test_a_key_is_made_shown_once_and_revoked(keyed: Guarded) -> None:
    with signed(keyed, "admin") as page:
        form = {"name": "worker", "scopes": "consume:orders\nread:orders", "expires_after": "30d"}
        line = page.get("/ui/line/keys.create", params=form).text
        assert line == "sluiceway key create worker --scope consume:orders --scope read:orders --expires-after 30d"
        made = page.post("/ui/do/keys.create", data=form)
        assert made.headers["cache-control"] == "no-store"
        assert "It is not shown again" in made.text
        (text,) = set(re.findall(r"slw_[A-Za-z0-9_]+", made.text))
        own = keyed.with_key(text).post("/v1/keys.self", json={}).json()
        assert (own["name"], own["scopes"]) == ("worker", ["consume:orders", "read:orders"])
        listed = page.get("/ui/settings/keys").text
        assert text not in listed
        assert f'id="key-{own["key_id"]}"' in listed
        refused = page.post("/ui/do/keys.revoke", data={"key_id": own["key_id"], "confirm": "another"})
        assert "nothing changed" in refused.text
        assert keyed.with_key(text).post("/v1/keys.self", json={}).status_code == 200
        assert ": done" in page.post("/ui/do/keys.revoke", data={"key_id": own["key_id"], "confirm": own["key_id"]}).text
        eventually(lambda: keyed.with_key(text).post("/v1/keys.self", json={}).status_code == 401)


def test_a_key_with_a_scope_that_is_none_is_refused_at_the_field(keyed: Guarded) -> None:
    with signed(keyed, "admin") as page:
        answer = page.post("/ui/do/keys.create", data={"name": "worker", "scopes": "all:*"})
        assert 'role="alert"' in answer.text
        assert "all:*" in answer.text


def test_earlier_paths_lead_to_the_present_pages_and_the_navigation_is_short(server: Guarded) -> None:
    assert len(ROOMS) <= 7
    for old, new in (("/ui/tasks", "/ui/captures"), ("/ui/tasks/feed?x=1", "/ui/captures/feed?x=1"), ("/ui/cluster", "/ui/map")):
        answer = server.http.get(old, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (308, new)
    for parts in PARTS.values():
        for name, path in parts:
            page = server.http.get(path).text
            assert all(f'<a href="{other}"' in page for _, other in parts)
            assert f'<a href="{path}" aria-current="page">{name}</a>' in page
