"""What a client of Querator meets: its messages over HTTP, and its calls on items where they lie."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sluiceway import __version__
from sluiceway.adapters.system import now
from sluiceway.client import Client
from sluiceway.kernel.clock import format_time
from sluiceway.wire.protobuf import CALLS, message_class
from tests.server.server_guarded import guarded
from tests.server.server_running import Running, balances, eventually, running

PROTOBUF = "application/protobuf"
_ANSWERS = {
    "queue.lease": "LeaseAnswer",
    "queue.stats": "StatsAnswer",
    "queues.info": "QueueInfo",
    "queues.list": "QueuesAnswer",
    "storage/items.list": "ItemsAnswer",
    "storage/scheduled.list": "ItemsAnswer",
    "storage/items.import": "ImportAnswer",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("querator") / "data") as served:
        yield served


def send(server: Running, call: str, **values: Any) -> tuple[int, Any]:
    """The status and the message that a client of Querator reads."""
    body = message_class(CALLS[f"/v1/{call}"].request)(**values).SerializeToString()
    answer = server.http.post(f"/v1/{call}", content=body, headers={"content-type": PROTOBUF})
    assert answer.headers["content-type"] == PROTOBUF
    kind = _ANSWERS.get(call, "Reply") if answer.status_code == 200 else "Reply"
    return answer.status_code, message_class(kind).FromString(answer.content)


def ask(server: Running, call: str, **values: Any) -> Any:
    status, message = send(server, call, **values)
    assert status == 200, message
    return message


def day(ahead: int) -> str:
    """So many days from now."""
    return format_time(now() + ahead * 86_400_000)


def ids(page: Any) -> list[str]:
    return [item["id"] for item in page["items"]]


# ---- by protobuf ----------------------------------------------------------------------------------------------


def test_an_items_life(server: Running) -> None:
    ask(server, "queues.create", queue_name="life-dead")
    ask(server, "queues.create", queue_name="life", dead_queue="life-dead", lease_timeout="1m0s", expire_timeout="24h0m0s")
    ask(server, "queue.produce", queue_name="life", items=[{"bytes": b"\x00\xff", "kind": "k"}, {"utf8": "two"}, {}])
    leased = ask(server, "queue.lease", queue_name="life", batch_size=10, client_id="c", request_timeout="1m")
    assert [item.bytes for item in leased.items] == [b"\x00\xff", b"two", b""]
    assert [item.attempts for item in leased.items] == [1, 1, 1]
    one, two, three = (item.id for item in leased.items)
    ask(server, "queue.complete", queue_name="life", ids=[one], request_timeout="1m")
    ask(server, "queue.complete", queue_name="life", ids=[one], request_timeout="1m")
    ask(server, "queue.retry", queue_name="life", items=[{"id": two}, {"id": three, "dead": True}])
    again = ask(server, "queue.lease", queue_name="life", batch_size=10, client_id="c", request_timeout="1m")
    assert [(item.bytes, item.attempts) for item in again.items] == [(b"two", 2)]
    dead = ask(server, "queue.lease", queue_name="life-dead", batch_size=10, client_id="c", request_timeout="1m")
    assert [item.bytes for item in dead.items] == [b""]
    (stored,) = ask(server, "storage/items.list", queue_name="life-dead").items
    assert (stored.id, stored.source_id, stored.is_leased) == (dead.items[0].id, three, True)
    counts = ask(server, "queue.stats", queue_name="life").logical_queues[0].partitions[0]
    assert (counts.total, counts.total_leased) == (1, 1)


def test_nothing_to_lease_is_to_be_tried_again(server: Running) -> None:
    queue_name = server.queue()
    status, reply = send(server, "queue.lease", queue_name=queue_name, client_id="c", batch_size=1, request_timeout="1ms")
    assert (status, reply.code, reply.details["code"]) == (454, 454, "nothing_to_lease")
    assert server.lease(queue_name)["items"] == [], "in JSON it is an empty answer"


def test_a_lease_waits(server: Running) -> None:
    queue_name = server.queue()
    found: list[Any] = []
    waiter = threading.Thread(
        target=lambda: found.append(send(server, "queue.lease", queue_name=queue_name, client_id="c", batch_size=1, request_timeout="2m"))
    )
    waiter.start()
    eventually(lambda: server.waiting(queue_name) == 1)
    server.produce(queue_name, "x")
    waiter.join()
    assert [item.bytes for item in found[0][1].items] == [b"x"]


def test_settings_are_replaced_as_a_client_of_querator_expects(server: Running) -> None:
    queue_name = server.queue(max_attempts=3, reference="mine", retry_backoff={"first": "1s", "most": "1m"}, requested_partitions=2)
    info = ask(server, "queues.info", queue_name=queue_name)
    info.lease_timeout = "2m0s"
    body = info.SerializeToString()
    assert server.http.post("/v1/queues.update", content=body, headers={"content-type": PROTOBUF}).status_code == 200
    same = server.ask("queues.info", queue_name=queue_name)
    assert (same["lease_timeout"], same["max_attempts"], same["reference"]) == ("2m", 3, "mine")
    ask(server, "queues.update", queue_name=queue_name, expire_timeout="36h")
    bare = server.ask("queues.info", queue_name=queue_name)
    assert (bare["lease_timeout"], bare["expire_timeout"], bare["max_attempts"], bare["reference"]) == ("2m", "1d12h", 0, "")
    assert bare["retry_backoff"] == {"first": "1s", "most": "1m"}
    status, reply = send(server, "queues.update", queue_name=queue_name, requested_partitions=3)
    assert (status, reply.details["field"]) == (400, "requested_partitions")


def test_queues_are_listed_from_the_pivot_on(server: Running) -> None:
    names = ["page-a", "page-a-", "page-a0", "page-b"]
    for name in names:
        server.ask("queues.create", queue_name=name)
    page = ask(server, "queues.list", pivot="page-a", limit=3)
    assert [each.queue_name for each in page.items] == names[:3]
    page = ask(server, "queues.list", pivot="page-a0", limit=2)
    assert [each.queue_name for each in page.items] == names[2:]


def test_a_page_has_as_many_as_querator_allows(server: Running) -> None:
    queue_name = server.queue()
    with Client(server.url) as client:
        for _ in range(2):
            client.produce_arrow(queue_name, pa.table({"payload": pa.array([b"x"] * 10_000, pa.binary())}))
    assert len(ask(server, "storage/items.list", queue_name=queue_name, limit=20_000).items) == 20_000
    assert send(server, "storage/items.list", queue_name=queue_name, limit=65_536)[0] == 200
    assert send(server, "queues.list", limit=65_536)[0] == 200
    status, reply = send(server, "queues.list", limit=65_537)
    assert (status, reply.details["field"]) == (400, "limit")


def test_references_and_kinds_are_as_long_as_there(server: Running) -> None:
    queue_name = server.queue(reference="r" * 2_000)
    ask(server, "queue.produce", queue_name=queue_name, items=[{"utf8": "x", "kind": "k" * 2_000, "reference": "r" * 2_000}])
    (item,) = ask(server, "queue.lease", queue_name=queue_name, client_id="c", batch_size=1).items
    assert (len(item.kind), len(item.reference)) == (2_000, 2_000)


def test_imported_items_are_told_with_their_times(server: Running) -> None:
    queue_name = server.queue(expire_timeout="1h")
    began = now() // 1_000
    later = {"payload": b"later", "enqueue_at": {"seconds": began + 86_400}}
    ready, due = ask(server, "storage/items.import", queue_name=queue_name, items=[{"payload": b"ready", "attempts": 9}, later]).items
    (stored,) = ask(server, "storage/items.list", queue_name=queue_name).items
    assert (ready.id, ready.created_at, ready.expire_deadline) == (stored.id, stored.created_at, stored.expire_deadline)
    assert (ready.attempts, ready.is_leased, ready.payload) == (0, False, b"ready")
    assert began <= ready.created_at.seconds <= now() // 1_000
    assert ready.expire_deadline.seconds - ready.created_at.seconds == 3_600
    assert ready.lease_deadline.seconds < 0, "Go's zero time"
    assert (due.payload, due.enqueue_at.seconds) == (b"later", began + 86_400)


def test_health_in_querators_form(server: Running) -> None:
    answer = server.http.get("/health")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/health+json")
    health = answer.json()
    assert (health["status"], health["version"]) == ("pass", __version__)
    assert health["checks"] == {"queues:storage": [{"componentType": "datastore", "status": "pass"}]}


def test_errors_are_replies(server: Running) -> None:
    status, reply = send(server, "queue.produce", queue_name="no-such-queue", items=[{"utf8": "x"}])
    assert (status, reply.code, reply.code_text, reply.details["code"]) == (400, 400, "Bad Request", "queue_not_found")
    assert reply.details["request_id"]
    for path, content, wanted in [
        ("/v1/namespaces.create", b"", (501, "not_found")),
        ("/v1/queue.peek", b"", (455, "unsupported_media_type")),
        ("/v1/queue.lease", b"\xff", (400, "invalid_body")),
        ("/v1/queue.lease?a=b", b"", (400, "invalid_request")),
        ("/v1/queue.lease", b"\x0a" * (9 << 20), (400, "body_too_large")),
    ]:
        answer = server.http.post(path, content=content, headers={"content-type": PROTOBUF})
        reply = message_class("Reply").FromString(answer.content)
        assert (answer.status_code, reply.details["code"]) == wanted, path
        assert reply.code == answer.status_code


def test_a_json_client_sees_no_change(server: Running) -> None:
    answer = server.http.post("/v1/queue.produce", json={"queue_name": "no-such-queue", "items": [{"utf8": "x"}]})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    plain = server.http.post("/v1/queue.lease", content=b"{}", headers={"content-type": "text/plain"})
    assert (plain.status_code, plain.json()["code"]) == (415, "unsupported_media_type")
    assert PROTOBUF in plain.json()["detail"]


def test_a_message_does_not_ask_for_arrow(server: Running) -> None:
    queue_name = server.queue()
    server.produce(queue_name, "x")
    body = message_class("LeaseRequest")(queue_name=queue_name, client_id="c", batch_size=1).SerializeToString()
    headers = {"content-type": PROTOBUF, "accept": "application/vnd.apache.arrow.stream"}
    answer = server.http.post("/v1/queue.lease", content=body, headers=headers)
    assert [item.bytes for item in message_class("LeaseAnswer").FromString(answer.content).items] == [b"x"]


# ---- items where they lie -------------------------------------------------------------------------------------


def test_items_are_listed_page_by_page_and_nothing_is_disturbed(server: Running) -> None:
    queue_name = server.queue(max_attempts=5)
    server.produce(queue_name, *"abcdef")
    leased = server.lease(queue_name, 3)
    server.ask("queue.complete", queue_name=queue_name, ids=[leased["items"][1]["id"]])
    before = server.totals(queue_name)
    seen, pivot = [], None
    while True:
        page = server.ask("storage/items.list", queue_name=queue_name, limit=2, pivot=pivot)
        seen += page["items"]
        assert len(page["items"]) <= 2
        pivot = page["next"]
        if pivot is None:
            break
    assert [base64.b64decode(item["payload"]).decode() for item in seen] == list("acdef")
    assert [item["is_leased"] for item in seen] == [True, True, False, False, False]
    first, ready = seen[0], seen[-1]
    assert (first["lease_id"], first["attempts"], first["max_attempts"]) == (leased["leases"][0]["lease_id"], 1, 5)
    assert first["lease_deadline"] == leased["leases"][0]["lease_deadline"]
    assert (ready["lease_id"], ready["lease_deadline"], ready["attempts"], ready["enqueue_at"]) == (None, None, 0, None)
    assert server.totals(queue_name) == before
    assert len(server.lease(queue_name)["items"]) == 3, "listed items can be leased"


def test_a_page_may_begin_after_an_item_that_is_gone(server: Running) -> None:
    queue_name = server.queue()
    server.produce(queue_name, *"abc")
    gone = server.lease(queue_name, 2)["items"][1]["id"]
    server.ask("queue.complete", queue_name=queue_name, ids=[gone])
    page = server.ask("storage/items.list", queue_name=queue_name, pivot=gone)
    assert [base64.b64decode(item["payload"]) for item in page["items"]] == [b"c"]


def test_scheduled_items_are_listed_by_the_id_of_their_production(server: Running) -> None:
    queue_name = server.queue()
    later = [day(days) for days in (3, 1, 2)]
    items = [{"utf8": "ready"}, *({"utf8": str(n), "enqueue_at": at} for n, at in enumerate(later))]
    first = server.ask("queue.produce", queue_name=queue_name, items=items)["first_id"]
    server.ask("queue.retry", queue_name=queue_name, items=[{"id": server.lease(queue_name)["items"][0]["id"], "retry_after": "1h"}])
    page = server.ask("storage/scheduled.list", queue_name=queue_name, limit=3)
    place = first.rpartition(".")[0]
    assert ids(page) == [f"{place}.{offset}" for offset in (0, 1, 2)]
    assert page["next"] == f"{place}.2"
    assert page["items"][0]["attempts"] == 1
    assert [item["enqueue_at"] for item in page["items"][1:]] == later[:2]
    assert ids(server.ask("storage/scheduled.list", queue_name=queue_name, pivot=page["next"])) == [f"{place}.3"]
    assert server.ask("storage/items.list", queue_name=queue_name)["items"] == []


def test_what_was_listed_can_be_imported_as_new(server: Running) -> None:
    source, target = server.queue(), server.queue(requested_partitions=3)
    items = [{"utf8": "x", "kind": "k", "headers": {"a": "b"}}, {"utf8": "y", "enqueue_at": day(1)}]
    server.ask("queue.produce", queue_name=source, items=items)
    server.lease(source)
    listed = [server.ask(f"storage/{call}.list", queue_name=source)["items"][0] for call in ("items", "scheduled")]
    answer = server.ask("storage/items.import", queue_name=target, partition=2, items=listed)
    assert (answer["partition"], answer["count"]) == (2, 2)
    (new,) = server.ask("storage/items.list", queue_name=target, partition=2)["items"]
    assert (new["id"], new["is_leased"], new["attempts"]) == (answer["first_id"], False, 0)
    assert (new["kind"], new["headers"], new["payload"]) == ("k", {"a": "b"}, listed[0]["payload"])
    (due,) = server.ask("storage/scheduled.list", queue_name=target, partition=2)["items"]
    assert due["enqueue_at"] == listed[1]["enqueue_at"]


def test_deleted_items_are_gone_for_good_and_the_books_balance(tmp_path: Path) -> None:
    with running(tmp_path / "data") as first:
        queue_name = first.queue(requested_partitions=2)
        for partition in (0, 1):
            items = [{"payload": base64.b64encode(each.encode()).decode()} for each in "abc"]
            later = {"payload": "", "enqueue_at": day(1)}
            first.ask("storage/items.import", queue_name=queue_name, partition=partition, items=[*items, later, later])
        held = ids(first.lease(queue_name, 1))
        listed = [ids(first.ask("storage/items.list", queue_name=queue_name, partition=number)) for number in (0, 1)]
        due = [ids(first.ask("storage/scheduled.list", queue_name=queue_name, partition=number)) for number in (0, 1)]
        doomed = [listed[0][1], listed[1][2], due[0][0], due[1][1], *held]
        answer = first.ask("storage/items.delete", queue_name=queue_name, ids=doomed)
        assert answer == {"deleted": 4, "ignored": [{"id": held[0], "reason": "leased"}]}
        again = first.ask("storage/items.delete", queue_name=queue_name, ids=doomed)
        assert (again["deleted"], sorted(each["reason"] for each in again["ignored"])) == (0, ["gone"] * 4 + ["leased"])
        sums = first.totals(queue_name)
        assert (sums["produced"], sums["cleared"], sums["ready"], sums["scheduled"], sums["total_leased"]) == (10, 4, 3, 2, 1)
        assert balances(sums)
    with running(tmp_path / "data") as second:
        assert balances(second.totals(queue_name))
        left = [ids(second.ask("storage/items.list", queue_name=queue_name, partition=number)) for number in (0, 1)]
        assert left == [[each for each in those if each not in doomed or each in held] for those in listed]
        still = [ids(second.ask("storage/scheduled.list", queue_name=queue_name, partition=number)) for number in (0, 1)]
        assert still == [[due[0][1]], [due[1][0]]]


def test_reload_keeps_all_that_was_promised(server: Running) -> None:
    queue_name = server.queue(requested_partitions=3)
    for _ in range(3):
        server.produce(queue_name, "a", "b")
    leased = server.lease(queue_name, 4, max_partitions=2)
    before = server.totals(queue_name)
    assert server.ask("queue.reload", queue_name=queue_name) == {}
    assert server.totals(queue_name) == before
    assert server.ask("queue.complete", queue_name=queue_name, ids=ids(leased), strict=True)["completed"] == 4
    assert len(server.lease(queue_name)["items"]) == 2


@pytest.mark.parametrize(
    ("call", "fields", "field"),
    [
        ("items.list", {"partition": 7}, "partition"),
        ("items.list", {"limit": 0}, "limit"),
        ("items.list", {"pivot": "nonsense"}, "pivot"),
        ("items.list", {"pivot": "zzzzzzzz.0.1"}, "pivot"),
        ("scheduled.list", {"limit": 65_537}, "limit"),
        ("items.import", {"items": []}, "items"),
        ("items.import", {"items": [{"kind": "k" * 2_049}]}, "items[0].kind"),
        ("items.import", {"items": [{"enqueue_at": "soon"}]}, "items[0].enqueue_at"),
        ("items.import", {"items": [{"payload": "AA=="}], "partition": 7}, "partition"),
        ("items.delete", {"ids": []}, "ids"),
        ("items.delete", {"ids": ["nonsense"]}, "ids[0]"),
        ("items.delete", {"ids": ["k7f3q2ma.0.1"], "partition": 7}, "partition"),
    ],
)
def test_a_refusal_names_its_field(server: Running, call: str, fields: dict[str, Any], field: str) -> None:
    answer = server.post(f"storage/{call}", queue_name=server.queue(), **fields)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_what_each_call_needs_to_be_allowed(tmp_path: Path) -> None:
    with guarded(tmp_path / "data") as server:
        reader, manager = server.client("read:q"), server.client("manage:q")
        manager.post("/v1/queues.create", json={"queue_name": "q"}).raise_for_status()
        body = message_class("ItemsRequest")(queue_name="q").SerializeToString()
        for call, allowed in [
            ("storage/items.list", reader),
            ("storage/scheduled.list", reader),
            ("storage/items.import", manager),
            ("storage/items.delete", manager),
            ("queue.reload", manager),
        ]:
            other = manager if allowed is reader else reader
            fields: dict[str, Any] = {"items": [{}]} if "import" in call else {"ids": ["k7f3q2ma.0.1"]} if "delete" in call else {}
            assert allowed.post(f"/v1/{call}", json={"queue_name": "q", **fields}).status_code == 200, call
            assert other.post(f"/v1/{call}", json={"queue_name": "q", **fields}).status_code == 403, call
            assert allowed.post(f"/v1/{call}", json={"queue_name": "other", **fields}).status_code == 403, call
        for client, status in ((server.http, 401), (manager, 403), (reader, 200)):
            answer = client.post("/v1/storage/items.list", content=body, headers={"content-type": PROTOBUF})
            assert answer.status_code == status
            assert answer.headers["content-type"] == PROTOBUF
