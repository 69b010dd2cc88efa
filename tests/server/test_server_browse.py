"""`/v1/queue.browse` over real HTTP: what its items say, in both forms, by the clients, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.adapters.system import now
from sluiceway.client import CallError, Client
from sluiceway.kernel.clock import format_time
from tests.client.client_faces import Blocking
from tests.server.server_running import ARROW, Running, running

CURSOR = "0a" * 24 + ".0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as served:
        yield served


@pytest.fixture(scope="module")
def filled(server: Running) -> dict[str, Any]:
    """A queue with an item in each state, two of them ready."""
    name = server.queue(expire_timeout="1h")
    due = format_time(now() + 3_600_000)
    server.produce(name, "leased")
    leased = server.lease(name)["items"][0]
    more = {"kind": "k", "encoding": "e", "reference": "r", "headers": {"a": "b"}}
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "one", **more}, {"utf8": "due", "enqueue_at": due}])
    server.produce(name, "two")
    return {"name": name, "lease": leased, "due": due}


def pages(server: Running, name: str, **fields: object) -> list[list[dict[str, Any]]]:
    page = server.ask("queue.browse", queue_name=name, partition=0, **fields)
    found = [page["items"]]
    while page["cursor"]:
        fields = {key: value for key, value in fields.items() if key != "states"}
        page = server.ask("queue.browse", queue_name=name, partition=0, cursor=page["cursor"], **fields)
        found.append(page["items"])
    return found


def table(server: Running, name: str, **fields: object) -> tuple[dict[str, Any], pa.Table]:
    answer = server.http.post("/v1/queue.browse", json={"queue_name": name, "partition": 0, **fields}, headers={"accept": ARROW})
    assert answer.status_code == 200, answer.text
    reader = pa.ipc.open_stream(pa.py_buffer(answer.content))
    return json.loads(reader.schema.metadata[b"sluiceway"]), reader.read_all()


def test_an_item_says_how_it_stands(server: Running, filled: dict[str, Any]) -> None:
    name, lease = filled["name"], filled["lease"]
    (items,) = pages(server, name, states=["scheduled", "ready", "leased"])
    leased, one, two, due = items
    assert [base64.b64decode(item["bytes"]) for item in items] == [b"leased", b"one", b"two", b"due"]
    assert [item["state"] for item in items] == ["leased", "ready", "ready", "scheduled"]
    assert {key: leased[key] for key in ("id", "lease_id", "lease_deadline", "attempts")} == {
        key: lease[key] for key in ("id", "lease_id", "lease_deadline", "attempts")
    }
    assert [one[key] for key in ("kind", "encoding", "reference", "headers")] == ["k", "e", "r", {"a": "b"}]
    assert (one["lease_id"], one["lease_deadline"], one["enqueue_at"], one["attempts"], one["kind"]) == (None, None, None, 0, "k")
    assert one["expire_deadline"] > two["enqueued_at"]
    assert (due["enqueue_at"], due["lease_id"]) == (filled["due"], None)
    assert {item["id"]: item["origin"] for item in items} == {item["id"]: item["id"] for item in items}
    assert server.ask("queue.stats", queue_name=name)["logical_queues"][0]["partitions"][0]["leased"] == 1, "nothing is taken"


def test_what_is_asked_for_is_what_comes(server: Running, filled: dict[str, Any]) -> None:
    name = filled["name"]
    states = ["leased", "ready", "scheduled"]
    (whole,) = pages(server, name, states=states)
    assert [item for page in pages(server, name, states=states, limit=1) for item in page] == whole
    assert [item["state"] for item in pages(server, name)[0]] == ["ready", "ready"]
    for state, count in (("leased", 1), ("ready", 2), ("scheduled", 1)):
        assert [item["state"] for item in pages(server, name, states=[state])[0]] == [state] * count
    assert {item["bytes"] for item in pages(server, name, states=states, payload=False)[0]} == {None}


def test_as_arrow(server: Running, filled: dict[str, Any]) -> None:
    name = filled["name"]
    states = ["leased", "ready", "scheduled"]
    (items,) = pages(server, name, states=states)
    about, got = table(server, name, states=states)
    assert (about["queue_name"], about["partition"], about["cursor"]) == (name, 0, None)
    assert got.column("state").to_pylist() == [item["state"] for item in items]
    assert got.column("payload").to_pylist() == [base64.b64decode(item["bytes"]) for item in items]
    ids = [f"{about['incarnation']}.0.{offset}" for offset in got.column("offset").to_pylist()]
    assert ids == [item["id"] for item in items]
    for column in ("enqueued_at", "enqueue_at", "expire_deadline", "lease_deadline"):
        millis = got.column(column).cast(pa.int64()).to_pylist()
        assert [None if each is None else format_time(each) for each in millis] == [item[column] for item in items], column
    bare = table(server, name, states=states, payload=False)[1]
    assert bare.column_names == [each for each in got.column_names if each != "payload"]
    first, one = table(server, name, states=states, limit=1)
    assert (one.num_rows, first["cursor"] is not None) == (1, True)
    assert table(server, name, cursor=first["cursor"])[1].num_rows == 3
    nothing = table(server, server.queue())[1]
    assert (nothing.num_rows, "state" in nothing.column_names) == (0, True)


@pytest.mark.parametrize("face", [Client, Blocking])
def test_the_clients_read_page_by_page(server: Running, filled: dict[str, Any], face: Any) -> None:
    with face(server.url, retry_for="0s") as client:
        page = client.browse(filled["name"], 0, states=["ready", "scheduled"], limit=2)
        assert [item.payload for item in page] == [b"one", b"two"]
        last = client.browse(filled["name"], 0, cursor=page.cursor, payload=False)
        assert [(item.state, item.payload, item.attempts) for item in last] == [("scheduled", None, 0)]
        assert (len(last), last.cursor) == (1, None)
        rows = client.browse_arrow(filled["name"], 0, states=["leased"])
        assert (len(rows), rows.cursor, rows.partition) == (1, None, 0)
        assert rows.table.column("state").to_pylist() == ["leased"]
        with pytest.raises(CallError) as gone:
            client.browse_arrow(filled["name"], 0, cursor=CURSOR)
        assert gone.value.code == "snapshot_gone"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "partition"),
        ({"partition": 1}, "partition"),
        ({"partition": -1}, "partition"),
        ({"partition": 0, "states": []}, "states"),
        ({"partition": 0, "states": ["ready", "ready"]}, "states"),
        ({"partition": 0, "states": ["dead"]}, "states[0]"),
        ({"partition": 0, "states": ["ready"], "cursor": CURSOR}, "states"),
        ({"partition": 0, "limit": 0}, "limit"),
        ({"partition": 0, "limit": 10_001}, "limit"),
        *(
            ({"partition": 0, "cursor": cursor}, "cursor")
            for cursor in ("", "x", CURSOR + "1" * 20, CURSOR.replace(".0", ".-1"), CURSOR.replace(".0", ".01"), CURSOR + "\n", "é" * 67)
        ),
    ],
)
def test_what_is_refused(server: Running, filled: dict[str, Any], fields: dict[str, object], field: str) -> None:
    answer = server.post("queue.browse", queue_name=filled["name"], **fields)
    assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


def test_a_cursor_is_good_for_its_partition_only_and_for_no_place_beyond_it(server: Running) -> None:
    name, other = server.queue(requested_partitions=2), server.queue()
    for text in "abcdef":
        server.produce(name, text)
        server.produce(other, text)
    cursor = server.ask("queue.browse", queue_name=name, partition=0, limit=1)["cursor"]
    for queue, number in ((name, 1), (other, 0)):
        refused = server.post("queue.browse", queue_name=queue, partition=number, cursor=cursor)
        assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (409, "snapshot_gone", False)
    beyond = server.ask("queue.browse", queue_name=name, partition=0, cursor=cursor.partition(".")[0] + "." + "9" * 18)
    assert (beyond["items"], beyond["cursor"]) == ([], None)
