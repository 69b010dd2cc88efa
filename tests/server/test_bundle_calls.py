"""The calls on bundles: their answers, their refusals, and what they tell a key of the bundles of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow as pa
import pytest

from sluiceway.kernel.limits import MAX_STORED_ITEM
from tests.server.server_guarded import Guarded, guarded

OWN, OTHERS, THEN = "orders-1", "secret-1", "orders-then"
ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        everything = served.client("produce:*", "manage:*", "read:*")
        for name in (OWN, OTHERS, THEN):
            everything.post("/v1/queues.create", json={"queue_name": name}).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def client(server: Guarded) -> httpx.Client:
    return server.client("produce:orders-*", "read:orders-*", "consume:orders-*")


@pytest.fixture(scope="module")
def theirs(server: Guarded) -> str:
    """A bundle of another queue."""
    return str(created(server.client("produce:*"), queue_name=OTHERS).json()["id"])


def created(client: httpx.Client, **fields: Any) -> httpx.Response:
    follow_up = {"queue_name": THEN, "item": {"utf8": "x", "kind": "k", "headers": {"a": "b"}}}
    return client.post("/v1/bundles.create", json={"queue_name": OWN, "follow_up": follow_up, **fields})


def call(client: httpx.Client, verb: str, id: str) -> httpx.Response:
    return client.post(f"/v1/bundles.{verb}", json={"id": id})


def test_a_bundle_from_its_creation_to_its_end(client: httpx.Client) -> None:
    made = created(client).json()
    id = made["id"]
    assert (made["queue_name"], made["state"], made["items"], made["closed_at"], made["ended_at"]) == (OWN, "open", None, None, None)
    assert made["follow_up"] == {"queue_name": THEN, "item": {"utf8": "x", "kind": "k", "headers": {"a": "b"}}, "id": None}
    assert [made[name] for name in ("stored", "completed", "dead", "dropped", "left")] == [0] * 5
    assert call(client, "get", id).json() == made
    client.post("/v1/queue.produce", json={"queue_name": OWN, "items": [{"utf8": "a"}], "bundle": id}).raise_for_status()
    rows = pa.record_batch({"payload": pa.array([b"b", b"c"])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    params = {"queue_name": OWN, "bundle": id}
    client.post(
        "/v1/queue.produce", params=params, content=sink.getvalue().to_pybytes(), headers={"content-type": ARROW}
    ).raise_for_status()
    closed = call(client, "close", id).json()
    assert (closed["state"], closed["stored"], closed["left"]) == ("closed", 3, 3)
    assert call(client, "close", id).json()["closed_at"] == closed["closed_at"]
    leased = client.post("/v1/queue.lease", json={"queue_name": OWN, "client_id": "c", "batch_size": 10}).json()
    ids = [item["id"] for item in leased["items"]]
    client.post("/v1/queue.complete", json={"queue_name": OWN, "ids": ids[:2]}).raise_for_status()
    client.post("/v1/queue.retry", json={"queue_name": OWN, "items": [{"id": ids[2], "dead": True}]}).raise_for_status()
    lease = {"queue_name": THEN, "client_id": "c", "request_timeout": "50s"}
    (follow_up,) = client.post("/v1/queue.lease", json=lease, timeout=60).json()["items"]
    headers = {"a": "b", "bundle": id, "bundle_stored": "3", "bundle_completed": "2", "bundle_dead": "1", "bundle_dropped": "0"}
    assert (follow_up["kind"], follow_up["headers"]) == ("k", headers)
    ended: dict[str, Any] = {}
    while ended.get("state") != "done":
        ended = call(client, "get", id).json()
    assert (ended["completed"], ended["dead"], ended["left"], ended["follow_up"]["id"]) == (2, 1, 0, follow_up["id"])
    refused = call(client, "cancel", id)
    assert (refused.status_code, refused.json()["code"]) == (409, "bundle_closed")
    assert call(client, "close", id).json() == ended


def test_bundles_are_listed_page_by_page(client: httpx.Client, theirs: str) -> None:
    made = [created(client, follow_up=None).json()["id"] for _ in range(3)]
    found, pivot = [], None
    while True:
        page = client.post("/v1/bundles.list", json={"limit": 2, "pivot": pivot, "queue_name": OWN}).json()
        found += [each["id"] for each in page["items"]]
        if (pivot := page["next"]) is None:
            break
    assert found == sorted(found)
    assert set(made) <= set(found)
    everything = [each["id"] for each in client.post("/v1/bundles.list", json={"limit": 1000}).json()["items"]]
    assert everything == found
    assert theirs not in everything


def test_a_bundle_of_another_queue_does_not_exist(client: httpx.Client, theirs: str) -> None:
    for verb in ("get", "close", "cancel"):
        there, missing = call(client, verb, theirs), call(client, verb, "nope")
        assert (there.status_code, there.json()["code"]) == (missing.status_code, missing.json()["code"]) == (404, "bundle_not_found")
    for bundle in (theirs, "nope"):
        refused = client.post("/v1/queue.produce", json={"queue_name": OWN, "items": [{"utf8": "a"}], "bundle": bundle})
        assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (404, "bundle_not_found", "bundle")
    follow_up = {"queue_name": OTHERS, "item": {"utf8": "x"}}
    refused = created(client, follow_up=follow_up)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"utf8": "x", "enqueue_at": "2099-01-01T00:00:00Z"}, "follow_up.item.enqueue_at"),
        ({"utf8": "x", "headers": {"bundle_dead": "0"}}, "follow_up.item.headers"),
        ({"utf8": "x" * MAX_STORED_ITEM}, "follow_up.item"),
        ({"utf8": "x", "key": ""}, "follow_up.item.key"),
        ({}, "follow_up.item.bytes"),
    ],
)
def test_a_follow_up_that_cannot_be_produced_is_refused_at_once(client: httpx.Client, item: dict[str, Any], field: str) -> None:
    refused = created(client, follow_up={"queue_name": THEN, "item": item})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert refused.json()["detail"].startswith(field)


def test_a_client_cannot_take_the_group_of_a_follow_up(client: httpx.Client) -> None:
    key = {"idempotency_key": "k", "idempotency_group": "bundle/x", "idempotency_sequence": 1}
    refused = client.post("/v1/queue.produce", json={"queue_name": OWN, "items": [{"utf8": "a"}], **key})
    assert (refused.status_code, refused.json()["field"]) == (400, "idempotency_group")
