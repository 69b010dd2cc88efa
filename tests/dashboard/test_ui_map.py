"""The partition map, rebalances, instances and rounds in the dashboard: they show what the API has, and a rebalance from plan to audit."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import jinja2
import pytest
from click.testing import CliRunner

from sluiceway.cli.main import cli
from sluiceway.server.ui.pages.cluster import chosen_round
from sluiceway.server.ui.pages.map import COMMANDS
from sluiceway.server.ui.pages.rebalances import STEPS, stage
from sluiceway.server.ui.render import Pages
from tests.dashboard.test_ui import signed
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import Running, eventually

EVIL = '"><img src=x onerror="document.title=\'owned\'"></script>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with guarded(tmp_path_factory.mktemp("open") / "data", keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("keyed") / "data") as found:
        yield found


def page(server: Running, path: str, **query: object) -> str:
    answer = server.http.get(f"/ui{path}", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.text


def island(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="map-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def fill(server: Running, queue_name: str) -> None:
    """Items into each of its two partitions; a produce passes over one that is slow for a moment."""
    for partition in range(2):
        server.ask("storage/items.import", queue_name=queue_name, partition=partition, items=[{"payload": "eA=="}] * 10)


def start_of(text: str) -> dict[str, str]:
    """What the button that starts the plan is pressed with."""
    found = re.search(r'hx-get="(/ui/ask/queue\.rebalance[^"]*)"', text)
    assert found is not None
    return dict(httpx.URL(html.unescape(found[1])).params)


def do(client: httpx.Client, command: str, **given: str) -> str:
    answer = client.post(f"/ui/do/{command}", data=given, headers={"sec-fetch-site": "same-origin"})
    assert answer.status_code == 200, answer.text
    return answer.text


# ---- the map ------------------------------------------------------------------------------------------------------------


def test_the_map_has_the_partitions_as_the_api_has_them(server: Running) -> None:
    name = server.queue(requested_partitions=3)
    server.produce(name, *"abcd")
    server.lease(name, batch_size=1)
    text = page(server, f"/queues/{name}/map")
    data = island(text)
    counted = {
        each["partition"]: each for share in server.ask("queue.stats", queue_name=name)["logical_queues"] for each in share["partitions"]
    }
    assert [each[:3] for each in data["parts"]] == [[number, "default", "available"] for number in range(3)]
    assert [each[5:8] for each in data["parts"]] == [
        [counted[number][key] for key in ("ready", "total_leased", "scheduled")] for number in range(3)
    ]
    assert data["backends"] == [{"backend": "default", "kind": "sqlite", "partition_affinity": 1.0, "problem": None}]
    assert data["moving"] is data["plan"] is None
    assert all(f'id="part-{number}"' in text for number in range(3))
    assert "No rebalances yet" in text


def test_a_queue_with_very_many_partitions_has_its_table_elsewhere(server: Running) -> None:
    name = server.queue(requested_partitions=201)
    text = page(server, f"/queues/{name}/map")
    assert len(island(text)["parts"]) == 201
    assert f'href="/ui/queues/{name}/partitions">Table of all partitions' in text
    assert 'id="part-0"' not in text


def test_the_map_begins_with_the_queue_that_moves_else_with_the_fullest(tmp_path_factory: pytest.TempPathFactory) -> None:
    with guarded(tmp_path_factory.mktemp("own") / "data", keys=False) as server:
        assert "sluiceway queue create" in page(server, "/map")
        moves, full = server.queue(requested_partitions=2), server.queue()
        server.produce(full, *"abcdefghijklmnopqrstuvwxyz")
        fill(server, moves)
        text = page(server, "/map")
        assert island(text)["queue"] == full
        # What goes on is of that queue, whichever is the fullest by then.
        assert f'hx-sse:connect="/ui/live/map?queue={full}&' in text
        # Nobody takes what is in the partition that goes, so it stays open.
        server.ask("queue.rebalance", queue_name=moves, requested_partitions=1)
        assert island(page(server, "/map"))["queue"] == moves
        assert island(page(server, "/map", queue=full))["queue"] == full


def test_what_a_plan_would_do_is_shown_and_nothing_is_done(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    server.produce(name, "x")
    text = page(server, f"/queues/{name}/map", partitions=3, drain="copy", rate=50)
    assert island(text)["plan"] == {"creates": [{"partition": 2, "backend": "default", "parents": []}], "drains": []}
    assert "Creates 1, drains 0, keeps 2" in text
    planned = server.ask("rebalances.plan", queue_name=name, requested_partitions=3)["plan_id"]
    assert start_of(text) == {"queue_name": name, "requested_partitions": "3", "drain": "copy", "rate": "50", "plan_id": planned}
    same = page(server, f"/queues/{name}/map", partitions="")
    assert "No changes needed" in same
    assert "/ui/ask/queue.rebalance" not in same
    assert server.ask("rebalances.list", queue_name=name)["items"] == []


@pytest.mark.parametrize("partitions", ["0", "1001", "many", "9" * 5_000, EVIL])
def test_a_number_that_cannot_be_planned_is_refused_in_words(server: Running, partitions: str) -> None:
    name = server.queue()
    text = page(server, f"/queues/{name}/map", partitions=partitions)
    assert 'role="alert"' in text
    assert "/ui/ask/queue.rebalance" not in text
    assert "<img src=x" not in text
    assert 'role="alert"' in do(server.http, "queue.rebalance", queue_name=name, requested_partitions=partitions)


def test_a_rebalance_from_its_plan_to_its_audit_on_one_page(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    fill(server, name)
    given = start_of(page(server, f"/queues/{name}/map", partitions=1, drain="natural"))
    asked = server.http.get("/ui/ask/queue.rebalance", params=given).text
    assert html.escape(given["plan_id"]) in asked
    said = do(server.http, "queue.rebalance", **given)
    assert ": started" in said
    (begun,) = server.ask("rebalances.list", queue_name=name)["items"]
    assert begun["drain"] == "natural"

    # It is under way: nobody has taken what is in the partition that goes.
    def draining() -> bool:
        return bool(server.ask("rebalances.get", id=begun["id"])["step"] == "drain")

    eventually(draining)
    text = page(server, f"/queues/{name}/map")
    data = island(text)
    assert data["moving"] == {"drain": "natural", "back": False, "drains": begun["plan"]["drains"]}
    assert {each[0]: each[2] for each in data["parts"]}[begun["plan"]["drains"][0]] == "draining"
    left = server.ask("rebalances.get", id=begun["id"])["progress"]["items_left"]
    assert f"<strong>{left}</strong> of {left} items left" in text
    assert "<strong>drain</strong> Draining" in text
    assert "<strong>finish</strong> pending" in text
    # A plan has to wait, and says nothing beside it.
    assert 'id="planned"' not in page(server, f"/queues/{name}/map", partitions=4)
    assert f"/ui/rebalances/{begun['id']}" in page(server, "/rebalances")
    assert f"{left}</strong> of {left} items left" in page(server, f"/rebalances/{begun['id']}")

    for lease in server.lease(name, max_partitions=2)["leases"]:
        server.ask("queue.complete", queue_name=name, lease_ids=[lease["lease_id"]])
    eventually(lambda: server.ask("rebalances.get", id=begun["id"])["state"] == "done")
    ended = page(server, f"/queues/{name}/map")
    assert island(ended)["moving"] is None
    assert "Last rebalance" in ended
    assert " removed" in ended
    for step in STEPS:
        assert f"<strong>rebalance.{step}</strong> by system" in ended, step
    assert "<strong>queue.rebalance</strong> by anybody" in ended
    assert "/ui/ask/rebalances.cancel" not in ended
    assert "<strong>rebalance.finish</strong>" in page(server, f"/rebalances/{begun['id']}")


def test_what_was_not_planned_is_not_done(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    given = start_of(page(server, f"/queues/{name}/map", partitions=3))
    server.ask("queue.rebalance", queue_name=name, requested_partitions=4)
    eventually(lambda: server.ask("rebalances.list", queue_name=name, open=True)["items"] == [])
    assert 'role="alert"' in do(server.http, "queue.rebalance", **given)
    assert len(server.ask("rebalances.list", queue_name=name)["items"]) == 1


def test_a_rebalance_is_cancelled_from_the_map(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    fill(server, name)
    begun = server.ask("queue.rebalance", queue_name=name, requested_partitions=1)["id"]
    eventually(lambda: server.ask("rebalances.get", id=begun)["step"] == "drain")
    assert "/ui/ask/rebalances.cancel" in page(server, f"/queues/{name}/map")
    assert f"sluiceway rebalance cancel {begun}" in do(server.http, "rebalances.cancel", id=begun)
    eventually(lambda: server.ask("rebalances.get", id=begun)["state"] == "cancelled")
    text = page(server, f"/queues/{name}/map")
    assert "<strong>rebalances.cancel</strong> by anybody" in text
    assert "cancelled" in text


def test_a_long_drain_shows_where_most_is_left() -> None:
    plan = {"drains": list(range(40)), "creates": [], "keeps": [], "reopens": [], "in_order": False}
    found = stage(
        {"ended_at": None, "plan": plan, "step": "drain", "steps": [], "items": 100},
        [{"partition": number, "total": number, "transferring": 1} for number in range(40)],
    )
    assert [each["partition"] for each in found["left"]] == list(range(16, 40))
    assert found["not_shown"] == 16
    assert found["items_left"] == sum(range(40)) + 40
    assert found["to_come"] == ["finish"]


def test_of_very_many_steps_the_last_are_on_the_map() -> None:
    step = {"step": "drain", "at": "2026-11-22T20:00:00Z", "instance": "i"}
    plan = {"drains": list(range(40)), "creates": [], "keeps": [], "reopens": [], "in_order": False}
    it: dict[str, Any] = {"ended_at": None, "plan": plan, "step": "drain", "state": "running", "items": 0}
    it["steps"] = [{**step, "partition": number} for number in range(40)]
    parts = jinja2.Environment(loader=jinja2.PackageLoader("sluiceway.server.ui"), autoescape=True)
    parts.filters.update(number=str, time=str)
    text = parts.from_string('{% import "rebalance_parts.html" as r %}{{ r.steps(it, stage, 24) }}').render(it=it, stage=stage(it, []))
    assert "16 earlier steps" in text
    assert "Partition 15 removed" not in text
    assert all(f"Partition {number} removed" in text for number in range(16, 40))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_command_line_does_the_same(command: Any) -> None:
    given = {"queue_name": "q", "id": "0-q", "requested_partitions": "3", "drain": "copy", "rate": "50", "plan_id": "x"}
    program, *words = shlex.split(command.line(given))
    answer = CliRunner().invoke(cli, [*words, "--url", "http://127.0.0.1:1"], input="")
    assert program == "sluiceway"
    assert "--plan" not in words
    assert answer.exit_code != 2 or "--yes" in answer.output, answer.output


# ---- what a reader may not do or see ------------------------------------------------------------------------------------


def test_who_may_only_read_sees_the_map_and_what_is_missing(keyed: Guarded) -> None:
    owner = keyed.client("manage:*", "read:*")
    owner.post("/v1/queues.create", json={"queue_name": "mine", "requested_partitions": 2}).raise_for_status()
    begun = owner.post("/v1/queue.rebalance", json={"queue_name": "mine", "requested_partitions": 3}).json()["id"]
    eventually(lambda: owner.post("/v1/rebalances.get", json={"id": begun}).json()["state"] == "done")
    with signed(keyed, "read:mine") as reader:
        text = reader.get("/ui/queues/mine/map", params={"partitions": 4}).text
        # How the backends are is for administrators; where the partitions lie is not.
        assert island(text)["backends"] == [{"backend": "default", "kind": None, "partition_affinity": None, "problem": None}]
        assert "<code>manage:mine</code>" in text
        assert "/ui/ask/" not in text
        assert "needs the scope <code>admin</code>" in text
        assert island(reader.get("/ui/map").text)["queue"] == "mine"
        for path in ("/ui/instances", "/ui/rounds"):
            assert "<code>read:*</code>" in reader.get(path).text
        # Not more than what is its own.
        assert reader.get("/ui/queues/other/map").status_code == 403
    with signed(keyed, "read:*") as reader:
        assert "this server owns all partitions" in reader.get("/ui/instances").text
    with signed(keyed, "read:other") as reader:
        assert "No ended rebalances yet" in reader.get("/ui/rebalances").text
        assert reader.get(f"/ui/rebalances/{begun}").status_code == 404


# ---- instances and rounds -----------------------------------------------------------------------------------------------


def test_a_server_that_is_alone_says_so(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    server.produce(name, *"ab")
    text = page(server, "/instances", queue=name)
    (instance,) = server.ask("instances.list")["items"]
    assert f'id="i-{instance["instance"]}"' in text
    assert "0, 1</td>" in text
    assert "No rounds" in page(server, "/rounds")
    assert 'role="alert"' in page(server, "/instances", queue="none")


def test_zones_loads_and_pins_are_shown() -> None:
    items = [
        {"instance": "a", "here": True, "state": "alive", "partitions": 3, "release": "1", "address": None, "joined_at": None}
        | {"zone": "east", "load": 0.246},
        {"instance": "b", "here": False, "state": "alive", "partitions": 3, "release": "1", "address": None, "joined_at": None}
        | {"zone": None, "load": None},
    ]
    pins = [
        {"queue_name": "orders", "partition": 7, "instance": None, "zone": "east"},
        {"queue_name": "orders", "partition": 8, "instance": EVIL, "zone": None},
    ]
    cluster = {"items": items, "strategy": "rounds", "era": 2, "level": 11, "reachable_level": 11, "round": None, "parameters": None}
    facts: dict[str, Any] = {"refused": None, "queues": [], "queue_name": "", "shares": None, "most": 3}
    text = Pages().html("instances.html", facts | {"cluster": cluster | {"pins": pins}})
    assert '<td class="n">25 %</td><td>east</td>' in text
    assert '<td class="n">–</td><td>–</td>' in text
    assert '<td class="n">7</td><td>zone east</td>' in text
    assert "<img src=x" not in text
    assert "Pinned partitions" not in Pages().html("instances.html", facts | {"cluster": cluster | {"pins": []}})


@pytest.mark.parametrize("partition", ["one", "-1", "²", "9" * 5_000])
def test_what_is_no_partition_is_refused_in_words(server: Running, partition: str) -> None:
    assert "is not a whole number of at least 0" in html.unescape(page(server, "/rounds", queue=server.queue(), partition=partition))


def test_who_comes_first_can_choose_from_all_queues(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nobody has looked before, so that no counts have come."""
    with guarded(tmp_path_factory.mktemp("fresh") / "data", keys=False) as server:
        names = [server.queue(), server.queue()]

        def choices(text: str) -> list[str]:
            (found,) = re.findall(r'<select id="queue".*?</select>', text, re.DOTALL)
            return re.findall(r"<option[^>]*>(queue[^<]*)", found)

        assert choices(page(server, "/map", queue=names[0])) == names
        assert choices(page(server, "/instances")) == names


def test_why_a_partition_is_there(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    why = server.ask("queue.explain", queue_name=name, partition=1)
    text = page(server, "/rounds", queue=name, partition=1)
    assert html.escape(why["reason"]) in text
    assert why["backend"] in text
    for query in ({"queue": name, "partition": "7"}, {"queue": EVIL, "partition": "0"}, {"queue": name, "partition": EVIL}):
        refused = page(server, "/rounds", **query)
        assert 'role="alert"' in refused
        assert "<img src=x" not in refused


def test_a_round_shows_what_moved_from_where_to_where() -> None:
    def sealed(number: int, *participants: str, moves: list[dict[str, object]] | None = None, moved: int = 0) -> dict[str, object]:
        found: dict[str, object] = {"number": number, "trigger": f"{participants[-1]} has joined", "participants": list(participants)}
        found |= {"moved": moved, "kept": 1, "duration": "100ms", "sealed_at": "2026-11-22T20:00:00Z", "sealed_by": "a"}
        return found | {"moves": moves or []}

    moves: list[dict[str, object]] = [{"queue_name": "q", "partition": number, "before": "a", "owner": "b"} for number in (10, 2)]
    moves += [{"queue_name": None, "partition": 5, "before": None, "owner": EVIL}]
    rounds = [sealed(2, "b", "c", moves=moves, moved=7), sealed(1, "a", "b")]
    chosen = chosen_round(rounds, "2")
    assert chosen is not None
    assert (chosen["came"], chosen["went"], chosen["untold"]) == (["c"], ["a"], 4)
    assert [each["partitions"] for each in chosen["ways"]] == [[5], [2, 10]]
    assert chosen_round(rounds, "3") is chosen_round(rounds, EVIL) is None

    text = Pages().html("rounds.html", {"refused": None, "why": None, "rounds": rounds, "chosen": chosen, "visit": None})
    assert re.search(r"<td>a</td><td>.*→</span> b</td>", text)
    assert "<td>none</td>" in text
    assert "deleted queue" in text
    assert "4 more moves" in text
    assert "<img src=x" not in text
