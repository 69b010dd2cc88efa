"""A key for some queues learns nothing of the others: not what is in them, and not whether there are any."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pyarrow as pa
import pytest
from google.protobuf.json_format import ParseDict

from sluiceway.instance.api_keys import ApiKeys, Holder
from sluiceway.model.access import ACTIONS, ApiKey
from sluiceway.wire import protobuf
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_process import PATIENCE
from tests.server.server_running import ARROW

OWN, SECRET, MISSING = "orders-1", "secret-1", "secret-2"
MINE = ["produce:orders-*", "consume:orders-*", "read:orders-*", "manage:orders-*"]
ITEM = "aaaaaaaa.0.0"
KEY = ApiKey("aaaaaaaa", "etl", ("read:*",), b"", 0)

CALLS: dict[str, dict[str, Any]] = {
    "/v1/queue.produce": {"items": [{"utf8": "x"}]},
    "/v1/queue.lease": {"client_id": "c"},
    "/v1/queue.complete": {"ids": [ITEM]},
    "/v1/queue.retry": {"items": [{"id": ITEM}]},
    "/v1/queue.release": {"ids": [ITEM]},
    "/v1/queue.extend": {"lease_ids": ["aaaaaaaa.0.L0"]},
    "/v1/queue.settle": {"items": [{"id": ITEM, "outcome": "done"}]},
    "/v1/queue.peek": {},
    "/v1/queue.browse": {"partition": 0},
    "/v1/queue.explain": {"id": ITEM},
    "/v1/queue.stats": {},
    "/v1/queue.keys": {},
    "/v1/queue.reasons": {},
    "/v1/queue.history": {},
    "/v1/queue.pause": {},
    "/v1/queue.resume": {},
    "/v1/queue.clear": {},
    "/v1/queue.redrive": {"target": OWN},
    "/v1/queue.reload": {},
    "/v1/queues.create": {},
    "/v1/queues.update": {"reference": "mine"},
    "/v1/queues.info": {},
    "/v1/queues.delete": {"force": True},
    "/v1/queue.rebalance": {},
    "/v1/rebalances.plan": {},
    "/v1/partition.pause": {"partition": 0},
    "/v1/partition.resume": {"partition": 0},
    "/v1/partition.pin": {"partition": 0, "zone": "z"},
    "/v1/partition.unpin": {"partition": 0},
    "/v1/storage/items.list": {},
    "/v1/storage/scheduled.list": {},
    "/v1/storage/items.import": {"items": [{"payload": "eA=="}]},
    "/v1/storage/items.delete": {"ids": [ITEM]},
    "/v1/storage/items.run_now": {"ids": [ITEM]},
    "/v1/storage/items.move": {"ids": [ITEM], "target": OWN},
    "/v1/queue.search": {},
    "/v1/consumers.list": {},
    "/v1/problems.list": {},
    "/v1/schedules.create": {"name": "s", "cron": "@daily", "item": {"utf8": "x"}},
    "/v1/bundles.create": {},
    "/v1/consumers.report": {"client_id": "c", "query": {"id": "q", "state": "running"}},
}
"""What each call on one queue needs beside its name."""
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/queues.create", "dead_queue"): {"queue_name": "orders-new"},
    ("/v1/queues.update", "dead_queue"): {"queue_name": OWN},
    ("/v1/queue.redrive", "target"): {"queue_name": OWN},
    ("/v1/queue.redrive", "source"): {"queue_name": OWN},
    ("/v1/storage/items.move", "target"): {"queue_name": OWN, "ids": [ITEM]},
}
"""Where else a queue is named: the call and its field, and the rest of it."""
NO_QUEUE = {
    "/v1/queues.list",
    "/v1/instances.list",
    "/v1/rounds.list",
    "/v1/rebalances.list",
    "/v1/tasks.list",
    "/v1/tasks.get",
    "/v1/schedules.list",
    "/v1/bundles.list",
}
BY_ID = {"/v1/rebalances.get", "/v1/rebalances.cancel"}
"""Of one queue, which the call does not name: tests/server/test_server_rebalance.py has what they tell of those of others."""
BY_PATTERN = {"/v1/queues.rebalance"}
"""As those by id."""
BY_BUNDLE = {f"/v1/bundles.{verb}" for verb in ("get", "close", "cancel")}
"""Of a bundle, and the queue of a follow-up: tests/server/test_bundle_calls.py has what they tell of those of other queues."""
BY_NAME = {f"/v1/schedules.{verb}" for verb in ("get", "update", "pause", "resume", "run", "delete")}
"""Of a schedule: tests/server/test_schedule_calls.py has what they tell of those of other queues."""
ANY_KEY = {"/v1/keys.self", "/v1/schedules.next"}
PUBLIC = {"/livez", "/healthz", "/readyz", "/health", "/openapi.json", "/docs", "/docs/errors"}
PAGES = {"/metrics", "/metrics/targets", "/v1/events", "/v1/queue.depth"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        everything = served.client(*(f"{action}:*" for action in ACTIONS if action != "admin"))
        for name in (OWN, SECRET, "orders-dead"):
            everything.post("/v1/queues.create", json={"queue_name": name}).raise_for_status()
        everything.post("/v1/queues.update", json={"queue_name": SECRET, "dead_queue": "orders-dead"}).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def client(server: Guarded) -> httpx.Client:
    return server.client(*MINE)


def told(answer: httpx.Response, name: str) -> tuple[int, dict[str, str], str]:
    """All of the answer but the name that was asked for and what differs between any two requests."""
    request_id = answer.headers["x-request-id"]
    kept = {header: value for header, value in answer.headers.items() if header not in ("x-request-id", "date", "content-length")}
    return answer.status_code, kept, answer.content.decode("latin-1").replace(request_id, "ID").replace(name, "NAME")


def test_every_endpoint_has_its_case(server: Guarded) -> None:
    on_queues = {endpoint.path for endpoint in server.app.endpoints if endpoint.action != "admin"}
    assert on_queues == CALLS.keys() | NO_QUEUE | BY_ID | BY_BUNDLE | BY_NAME | BY_PATTERN | ANY_KEY
    assert {endpoint.path for endpoint in server.app.endpoints if endpoint.action is None} == ANY_KEY
    named = {
        (endpoint.path, field)
        for endpoint in server.app.endpoints
        for field in endpoint.call.__struct_fields__
        if field in ("target", "source") or (field.endswith("queue") and endpoint.action != "admin")
    }
    assert named == FIELDS.keys()
    assert {page.path for page in server.app.pages if page.action is None} == PUBLIC
    assert {page.path for page in server.app.pages if page.action is not None} == PAGES


@pytest.mark.parametrize("path", CALLS)
def test_another_queue_is_forbidden_whether_it_exists_or_not(client: httpx.Client, path: str) -> None:
    there, missing = (client.post(path, json={"queue_name": name, **CALLS[path]}) for name in (SECRET, MISSING))
    assert told(there, SECRET) == told(missing, MISSING)
    assert (there.status_code, there.json()["code"]) == (403, "forbidden")


def test_so_it_is_for_the_depth_of_a_queue(client: httpx.Client) -> None:
    there, missing = (client.get(f"/v1/queue.depth?queue_name={name}") for name in (SECRET, MISSING))
    assert told(there, SECRET) == told(missing, MISSING)
    assert (there.status_code, there.json()["code"]) == (403, "forbidden")
    assert client.get(f"/v1/queue.depth?queue_name={OWN}").json()["queue_name"] == OWN


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_so_it_is_where_a_call_names_a_second_queue(client: httpx.Client, path: str, field: str) -> None:
    there, missing = (client.post(path, json={**FIELDS[path, field], field: name}) for name in (SECRET, MISSING))
    assert told(there, SECRET) == told(missing, MISSING)
    assert (there.status_code, there.json()["code"]) == (403, "forbidden")


def test_so_it_is_in_arrow(server: Guarded, client: httpx.Client) -> None:
    columns = {
        "/v1/queue.produce": {"payload": pa.array([b"x"])},
        "/v1/queue.settle": {"partition": pa.array([0], pa.int32()), "offset": pa.array([0]), "outcome": pa.array(["done"])},
    }
    more = {"/v1/queue.settle": {"incarnation": "aaaaaaaa"}}
    assert {endpoint.path for endpoint in server.app.endpoints if endpoint.takes_arrow} == columns.keys()
    for path, named in columns.items():
        batch = pa.RecordBatch.from_arrays(list(named.values()), names=list(named))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        body = bytes(sink.getvalue())
        there, missing = (
            client.post(path, content=body, params={"queue_name": name, **more.get(path, {})}, headers={"content-type": ARROW})
            for name in (SECRET, MISSING)
        )
        assert told(there, SECRET) == told(missing, MISSING)
        assert there.status_code == 403


def test_so_it_is_in_protobuf(server: Guarded, client: httpx.Client) -> None:
    # One that the server makes may be longer the second time.
    headers = {"content-type": protobuf.CONTENT_TYPE.decode(), "x-request-id": "r-1"}
    assert {endpoint.path for endpoint in server.app.endpoints if endpoint.takes_protobuf} == protobuf.CALLS.keys()
    for path in protobuf.CALLS.keys() - NO_QUEUE:
        bodies = []
        for name in (SECRET, MISSING):
            message = protobuf.message_class(protobuf.CALLS[path].request)()
            fields = {"queue_name": name, **CALLS[path], **({"queue": True} if path == "/v1/queue.clear" else {})}
            bodies.append(ParseDict(fields, message, ignore_unknown_fields=True).SerializeToString())
        there, missing = (client.post(path, content=body, headers=headers) for body in bodies)
        assert told(there, SECRET) == told(missing, MISSING)
        assert there.status_code == 403, path


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "admin"])
def test_one_action_opens_its_own_calls_and_no_others(server: Guarded, action: str) -> None:
    client = server.client(f"{action}:orders-*")
    allowed = set()
    for path, fields in CALLS.items():
        # A queue that is not there, and is created and deleted by those two calls.
        answer = client.post(path, json={"queue_name": "orders-missing", **fields})
        if answer.status_code != 403:
            allowed.add(path)
    assert allowed == {endpoint.path for endpoint in server.app.endpoints if endpoint.action == action and endpoint.path in CALLS}


def test_what_is_for_administrators_is_for_no_other_key_and_administrators_touch_no_queue(server: Guarded) -> None:
    everything = server.client(*(f"{action}:*" for action in ACTIONS if action != "admin"))
    administrator = server.client("admin")
    for endpoint in server.app.endpoints:
        if endpoint.action == "admin":
            assert everything.post(endpoint.path, json={}).status_code == 403, endpoint.path
            assert administrator.post(endpoint.path, json={}).status_code != 403, endpoint.path
        elif endpoint.path in CALLS:
            answer = administrator.post(endpoint.path, json={"queue_name": SECRET, **CALLS[endpoint.path]})
            assert answer.status_code == 403, endpoint.path


def test_only_an_administrator_makes_keys(server: Guarded, client: httpx.Client) -> None:
    everything = server.client(*(f"{action}:*" for action in ACTIONS if action != "admin"))
    for scope in ("admin", "read:orders-1"):
        for caller in (client, everything, server.http):
            assert caller.post("/v1/keys.create", json={"name": "more", "scopes": [scope]}).status_code in (401, 403)
    # Who administers may give any right, and so take it: that key is the one to guard.
    assert server.client("admin").post("/v1/keys.create", json={"name": "more", "scopes": ["admin", "read:*"]}).status_code == 200


def test_any_key_and_only_a_key_is_told_what_it_may_do(server: Guarded) -> None:
    text = server.key("produce:orders-*", expires_after="1h", requests_per_second=1_000)
    own = server.with_key(text).post("/v1/keys.self", json={}).json()
    listed = {info["key_id"]: info for info in server.admin.post("/v1/keys.list", json={"limit": 1_000}).json()["items"]}
    assert own == listed[text.split("_")[1]]
    assert (own["scopes"], own["requests_per_second"], own["expires_at"] is None) == (["produce:orders-*"], 1_000, False)
    configured = server.admin.post("/v1/keys.self", json={}).json()
    assert (configured["key_id"], configured["name"], configured["scopes"]) == (None, "admin", ["admin"])
    assert server.http.post("/v1/keys.self", json={}).status_code == 401
    assert server.with_key("slw_aaaaaaaa_bbbb").post("/v1/keys.self", json={}).status_code == 401


def test_a_key_that_is_revoked_between_is_not_described(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    client = server.client("read:*")
    monkeypatch.setattr(ApiKeys, "known", lambda self, key_id: None)
    monkeypatch.setattr(ApiKeys, "find", find := AsyncMock(return_value=Holder(KEY, KEY.caller())))
    assert client.post("/v1/keys.self", json={}).json()["code"] == "unauthenticated"
    assert find.await_count == 1


def test_a_listing_has_only_what_may_be_read(server: Guarded, client: httpx.Client) -> None:
    for pivot in (None, "orders-1", "s", SECRET, "a"):
        answer = client.post("/v1/queues.list", json={} if pivot is None else {"pivot": pivot})
        assert all(item["queue_name"].startswith("orders-") for item in answer.json()["items"])
        assert "secret" not in answer.text
    first = client.post("/v1/queues.list", json={"limit": 1}).json()
    assert [item["queue_name"] for item in first["items"]] == [OWN]
    assert first["next"] == OWN
    assert client.post("/v1/queues.list", json={"limit": 2}).json()["next"] is None
    assert server.client("produce:*").post("/v1/queues.list", json={}).json() == {"items": [], "next": None}


def test_ids_of_another_queue_are_as_unknown_as_those_that_never_were(server: Guarded, client: httpx.Client) -> None:
    everything = server.client("produce:*", "consume:*")
    made = everything.post("/v1/queue.produce", json={"queue_name": SECRET, "items": [{"utf8": "x"}]}).json()["first_id"]
    lease = everything.post("/v1/queue.lease", json={"queue_name": SECRET, "client_id": "c"}).json()["leases"][0]["lease_id"]
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((path, {"ids": [made]}, {"ids": [ITEM]}) for path in ("/v1/queue.complete", "/v1/queue.release", "/v1/queue.extend")),
        *((path, {"lease_ids": [lease]}, {"lease_ids": ["aaaaaaaa.0.L1"]}) for path in ("/v1/queue.complete", "/v1/queue.extend")),
        ("/v1/queue.retry", {"items": [{"id": made}]}, {"items": [{"id": ITEM}]}),
        ("/v1/queue.settle", {"items": [{"id": made, "outcome": "done"}]}, {"items": [{"id": ITEM, "outcome": "done"}]}),
        ("/v1/queue.explain", {"id": made}, {"id": ITEM}),
        ("/v1/queue.peek", {"lease_id": lease}, {"lease_id": "aaaaaaaa.0.L1"}),
        ("/v1/storage/items.delete", {"ids": [made]}, {"ids": [ITEM]}),
        ("/v1/storage/items.run_now", {"ids": [made]}, {"ids": [ITEM]}),
        ("/v1/storage/items.move", {"ids": [made], "target": "orders-dead"}, {"ids": [ITEM], "target": "orders-dead"}),
        ("/v1/queue.search", {"id": made}, {"id": ITEM}),
    ]
    for path, theirs, nobodys in asked:
        answers = []
        for fields in (theirs, nobodys):
            answer = client.post(path, json={"queue_name": OWN, **fields})
            answers.append((answer.status_code, re.sub(r"[a-z2-9]{8}\.0\.L?\d+|[a-z2-9]{8}-\d+", "ID", answer.text)))
        assert answers[0] == answers[1], path


def test_a_refusal_because_of_another_queue_names_it_to_its_readers_only(server: Guarded, client: httpx.Client) -> None:
    path, fields, code = "/v1/queues.delete", {"queue_name": "orders-dead", "force": True}, "queue_in_use"
    refused = client.post(path, json=fields)
    assert refused.json()["code"] == code
    assert "secret" not in refused.text
    assert "this key may not read" in refused.json()["detail"]
    reader = server.client("manage:orders-*", "read:*").post(path, json=fields)
    assert reader.json()["code"] == code
    assert f"'{SECRET}'" in reader.json()["detail"]


def test_a_redrive_to_wherever_items_came_from_needs_the_right_to_all_queues(server: Guarded, client: httpx.Client) -> None:
    for dry_run in (True, False):
        answer = client.post("/v1/queue.redrive", json={"queue_name": "orders-dead", "dry_run": dry_run})
        assert (answer.status_code, answer.json()["field"]) == (400, "target")
    assert server.client("manage:*").post("/v1/queue.redrive", json={"queue_name": "orders-dead"}).status_code == 200


def test_a_move_to_wherever_items_came_from_needs_the_right_to_all_queues(server: Guarded, client: httpx.Client) -> None:
    move = {"queue_name": "orders-dead", "ids": [ITEM]}
    answer = client.post("/v1/storage/items.move", json=move)
    assert (answer.status_code, answer.json()["field"]) == (400, "target")
    assert server.client("manage:*").post("/v1/storage/items.move", json=move).status_code == 200


def test_who_asks_for_health_is_told_no_names(server: Guarded, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "problems", lambda: [f"partition 0 of queue {SECRET!r} is damaged"])
    for caller in (server.http, client, server.client("produce:*")):
        answer = caller.get("/readyz")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert "secret" not in answer.text
    assert server.http.get("/readyz?verbose").status_code == 401
    assert client.get("/readyz?verbose").status_code == 403
    for scope in ("read:*", "admin"):
        assert server.client(scope).get("/readyz?verbose").status_code in (200, 503)


def test_metrics_need_the_right_to_read_all_queues(server: Guarded, client: httpx.Client) -> None:
    refused = client.get("/metrics")
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    assert server.client("read:*").get("/metrics").status_code == 200


def test_events_of_other_queues_are_not_told(server: Guarded, client: httpx.Client) -> None:
    there, missing = (client.get("/v1/events", params={"queue_name": name}) for name in (SECRET, MISSING))
    assert told(there, SECRET) == told(missing, MISSING)
    assert there.status_code == 403
    assert server.client("produce:*").get("/v1/events").status_code == 403
    manager = server.client("manage:*")
    text, made = "", False
    with client.stream("GET", "/v1/events", timeout=PATIENCE) as stream:
        for line in stream.iter_lines():
            # The counts of what there was come with the first look; what is created after it is an event.
            if not made and line.startswith("data:"):
                made = True
                for name in ("secret-3", "orders-3"):
                    manager.post("/v1/queues.create", json={"queue_name": name}).raise_for_status()
            text += line + "\n"
            if "queue.created" in text and "orders-3" in text:
                break
    assert OWN in text
    assert "secret" not in text
