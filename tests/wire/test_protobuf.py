"""Querator's messages into JSON calls, and answers into its messages."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.message import Message

from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.wire import protobuf
from sluiceway.wire.protobuf import CALLS, message_class, refusal

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "querator-requests.json").read_text())
GO_ZERO_TIME = -62_135_596_800
KNOWN_STATUSES = {200, 400, 401, 403, 404, 409, 429, 452, 453, 454, 455, 500, 501, 512}
"""All others Querator's client takes for those of a proxy, whose body it does not read."""

ITEM = {
    "id": "k7f3q2ma.2.7",
    "origin": "k7f3q2ma.2.3",
    "partition": 2,
    "lease_id": "k7f3q2ma.2.L1",
    "lease_deadline": "2026-01-31T08:00:00.250Z",
    "attempts": 2,
    "enqueued_at": "2026-01-31T07:00:00.000Z",
    "kind": "k",
    "encoding": None,
    "reference": "r",
    "key": "customer-7",
    "priority": 0,
    "unique_key": "order-8",
    "headers": {"a": "b"},
    "bytes": "AP8=",
}
QUEUE = {
    "queue_name": "q",
    "incarnation": "k7f3q2ma",
    "created_at": "2026-01-31T08:00:00.000Z",
    "updated_at": "2026-01-31T08:00:00.001Z",
    "version": 3,
    "lease_timeout": "1m",
    "max_lease_timeout": "30d",
    "max_attempts": 4,
    "dead_queue": None,
    "expire_timeout": "1d1h30m500ms",
    "retry_backoff": None,
    "idempotency_window": "1d",
    "write_timeout": None,
    "logical_queues": None,
    "reference": "mine",
    "paused": [],
    "requested_partitions": 2,
    "partitions": [{"partition": n, "backend": "b", "state": "available", "parents": [], "owner": None, "address": None} for n in range(2)],
    "rebalance": None,
}


def fields(path: str, **values: Any) -> Any:
    """The JSON call that a message of these values becomes."""
    _, body = CALLS[path].read(message_class(CALLS[path].request)(**values).SerializeToString())
    return json.loads(body)


def answered(path: str, answer: object, kind: str, **request: Any) -> tuple[int, Any]:
    """The status, and the message that a client reads."""
    form = CALLS[path]
    status, body = form.write(message_class(form.request)(**request), msgspec.json.encode(answer))
    return status, message_class(kind).FromString(body)


def refused(path: str, body: bytes) -> SluicewayError:
    with pytest.raises(SluicewayError) as caught:
        CALLS[path].read(body)
    assert caught.value.kind.status == 400
    return caught.value


# ---- the schema -----------------------------------------------------------------------------------------------


def test_what_is_compiled_is_what_is_written() -> None:
    text = files("sluiceway.wire").joinpath("querator.proto").read_text()
    written = {}
    for name, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE):
        for kind, field, number in re.findall(r"^  ((?:repeated )?[\w.<>, ]+?) (\w+) = (\d+);", body, re.MULTILINE):
            written[name, field] = (int(number), kind.split()[-1].rpartition(".")[2] if "map" not in kind else "map", "repeated" in kind)
    assert written["Reply", "details"] == (4, "map", False)
    assert len(written) > 80
    scalars = {5: "int32", 8: "bool", 9: "string", 12: "bytes"}
    for name in {message for message, _ in written}:
        for field in message_class(name).DESCRIPTOR.fields:
            number, kind, repeated = written.pop((name, field.name))
            known = "map" if kind == "map" else field.message_type.name if field.message_type else scalars[field.type]
            several = isinstance(getattr(message_class(name)(), field.name), Message | int | str | bytes) is False and kind != "map"
            assert (field.number, known, several) == (number, kind, repeated), (name, field.name)
    assert not written


# ---- requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=[f"{n}-{each['path'].rpartition('/')[2]}" for n, each in enumerate(GOLDEN)])
def test_a_request_of_querators_own_client(golden: Any) -> None:
    _, body = CALLS[golden["path"]].read(bytes.fromhex(golden["request"]))
    # What this API gives to new queues is declined, because Querator does not.
    declined = {"max_attempts": None, "retry_backoff": None, "dead_queue": None} if golden["path"] == "/v1/queues.create" else {}
    assert json.loads(body) == declined | golden["fields"]


def test_every_call_has_a_request_of_querators_own_client() -> None:
    assert {each["path"] for each in GOLDEN} == set(CALLS)


def test_bytes_go_before_text_and_neither_is_an_empty_payload() -> None:
    items = [{"bytes": b"\x00\xff", "utf8": "ignored"}, {"utf8": "é"}, {}]
    assert fields("/v1/queue.produce", queue_name="q", items=items)["items"] == [{"bytes": "AP8="}, {"utf8": "é"}, {"utf8": ""}]


def test_a_key_is_carried_in_and_an_empty_one_is_none() -> None:
    for name in ("key", "unique_key"):
        items = [{"utf8": "x", name: "customer-7"}, {"utf8": "y", name: ""}]
        assert fields("/v1/queue.produce", queue_name="q", items=items)["items"] == [{"utf8": "x", name: "customer-7"}, {"utf8": "y"}]
        (item,) = fields("/v1/storage/items.import", queue_name="q", items=[{"payload": b"x", name: "customer-7"}])["items"]
        assert item[name] == "customer-7"


@pytest.mark.parametrize("path", ["/v1/queue.produce", "/v1/storage/items.import"])
def test_a_priority_of_0_is_one(path: str) -> None:
    payload = {"utf8": "x"} if path == "/v1/queue.produce" else {"payload": b"x"}
    items = fields(path, queue_name="q", items=[payload | {"priority": 0}, payload | {"priority": 9}, payload])["items"]
    assert [item.get("priority") for item in items] == [0, 9, None]


def test_a_lease_may_ask_for_runs() -> None:
    assert fields("/v1/queue.lease", queue_name="q", client_id="c", runs=True)["runs"] is True
    assert "runs" not in fields("/v1/queue.lease", queue_name="q", client_id="c")


@pytest.mark.parametrize(
    ("seconds", "nanos", "given"),
    [
        (-62_135_596_800, 0, None),
        (0, 0, None),
        (1, 0, "1970-01-01T00:00:01.000Z"),
        (1_769_846_400, 1, "2026-01-31T08:00:00.001Z"),
        (1_769_846_400, 999_999_999, "2026-01-31T08:00:01.000Z"),
    ],
)
def test_a_time_is_never_earlier_than_it_was_said(seconds: int, nanos: int, given: str | None) -> None:
    item = {"utf8": "x", "enqueue_at": {"seconds": seconds, "nanos": nanos}}
    assert fields("/v1/queue.produce", queue_name="q", items=[item])["items"][0].get("enqueue_at") == given


@pytest.mark.parametrize(("seconds", "nanos"), [(253_402_300_799, 999_999_999), (1 << 62, 0), (5, -1), (5, 1_000_000_000)])
def test_what_is_no_time_is_refused(seconds: int, nanos: int) -> None:
    item = {"id": "k7f3q2ma.0.1", "retry_at": {"seconds": seconds, "nanos": nanos}}
    error = refused("/v1/queue.retry", message_class("RetryRequest")(queue_name="q", items=[item]).SerializeToString())
    assert error.field == "items[0].retry_at"


def test_a_dead_item_has_no_time() -> None:
    item = {"id": "k7f3q2ma.0.1", "retry_at": {"seconds": 1_769_846_400}, "dead": True}
    assert fields("/v1/queue.retry", queue_name="q", items=[item])["items"] == [{"id": "k7f3q2ma.0.1", "dead": True}]


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [
        ("/v1/queues.create", {"namespace": "acme"}, "namespace"),
        ("/v1/queues.update", {"namespace": "acme"}, "namespace"),
        ("/v1/queues.list", {"namespace": "acme"}, "namespace"),
        ("/v1/queue.clear", {"queue": True, "destructive": True}, "destructive"),
        ("/v1/queue.clear", {}, "queue"),
    ],
)
def test_what_is_not_here_is_said(path: str, values: dict[str, Any], field: str) -> None:
    assert refused(path, message_class(CALLS[path].request)(**values).SerializeToString()).field == field


def test_a_page_begins_with_its_pivot() -> None:
    """Nothing lies between the pivot that is sent on and the one that was asked for, in whatever names there are."""
    random_names = random.Random(5)
    alphabet = "-.019AZ_az"
    names = {"0", "00", "a", "a-", "a-a", "a.", "a0", "_", "z" * 128, "z" * 127, "b" + "-" * 127, "Z", "A", "9"}
    while len(names) < 500:
        names.add(random_names.choice("019AZ_az") + "".join(random_names.choices(alphabet, k=random_names.randint(0, 4))))
    for pivot in names:
        after = fields("/v1/queues.list", pivot=pivot)["pivot"] or ""
        assert sorted(name for name in names if name > after) == sorted(name for name in names if name >= pivot), pivot
        assert len(after) <= 128
    assert fields("/v1/queues.list", pivot="no name") == {"pivot": "no name", "limit": 1_000}


@pytest.mark.parametrize(
    ("pivot", "after"),
    [("k7f3q2ma.2.10", "k7f3q2ma.2.9"), ("k7f3q2ma.2.0", None), ("", None), ("nonsense", "nonsense"), ("k7f3q2ma.2.x", "k7f3q2ma.2.x")],
)
def test_a_page_of_items_begins_with_its_pivot(pivot: str, after: str | None) -> None:
    assert fields("/v1/storage/items.list", queue_name="q", partition=2, pivot=pivot, limit=5) == {
        "queue_name": "q",
        "partition": 2,
        "pivot": after,
        "limit": 5,
    }


# ---- hostile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"\x0a\x05ab", b"\xff", b"\x0a\x02\xff\xfe", b"\x0b" * 100_000, b"\x82\x01" * 50_000, b"\x07", b"{}"],
    ids=["cut", "varint", "utf8", "groups", "lengths", "wire-type", "json"],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    assert refused("/v1/queue.lease", body).code in ("invalid_body", "too_many_items", "invalid_request")


def test_an_unknown_field_is_refused_by_number() -> None:
    assert refused("/v1/queues.info", b"\x0a\x01q\x98\x06\x01").field == "field 99"
    assert refused("/v1/queue.retry", b"\x0a\x01q\x1a\x03\x98\x06\x01").field == "items[0].field 99"
    assert refused("/v1/queue.retry", b"\x1a\x05\x12\x03\x98\x06\x01").field == "items[0].retry_at.field 99"


@pytest.mark.parametrize("path", ["/v1/queue.produce", "/v1/queue.retry", "/v1/storage/items.import"])
def test_too_many_items_are_refused(path: str) -> None:
    assert refused(path, b"\x1a\x00" * (MAX_ITEMS_JSON + 1)).code == "too_many_items"
    assert refused(path, b"\x1a\x00" * 1_000_000).code == "too_many_items"
    assert refused(path, b"\x1a\x00" * 2_000 + b"\xff").code == "too_many_items", "decoded before it was counted"
    _, body = CALLS[path].read(b"\x1a\x00" * MAX_ITEMS_JSON)
    assert len(json.loads(body)["items"]) == MAX_ITEMS_JSON


def test_items_behind_a_group_are_counted() -> None:
    """No message has a group, so nothing was counted behind one, and 32 MiB of empty items took gigabytes."""
    group = b"\x9b\x06\x08\x01\x9c\x06"
    assert refused("/v1/queue.produce", group + b"\x1a\x00" * 2_000).code == "too_many_items"
    assert refused("/v1/queue.produce", group).field == "field 99"


def test_of_many_unknown_fields_none_is_looked_for() -> None:
    """Each became an object of 200 bytes."""
    unknown = b"\x98\x06\x01" * 40_000
    item = b"\x1a" + bytes([len(unknown) & 0x7F | 0x80, len(unknown) >> 7 & 0x7F | 0x80, len(unknown) >> 14]) + unknown
    error = refused("/v1/queue.produce", item)
    assert (error.code, error.field) == ("invalid_request", None)
    assert "bytes of the ProduceRequest are unknown fields" in error.detail


# ---- answers --------------------------------------------------------------------------------------------------


def test_done() -> None:
    for path in ("/v1/queue.produce", "/v1/queue.complete", "/v1/queue.retry", "/v1/queues.create", "/v1/queue.reload"):
        status, reply = answered(path, {}, "Reply")
        assert (status, reply.code, reply.code_text) == (200, 200, "OK")


def test_a_lease() -> None:
    status, said = answered("/v1/queue.lease", {"queue_name": "q", "partition": 2, "leases": [], "items": [ITEM]}, "LeaseAnswer")
    assert (status, said.queue_name, said.partition) == (200, "q", 2)
    (item,) = said.items
    assert (item.id, item.attempts, item.kind, item.reference, item.encoding) == ("k7f3q2ma.2.7", 2, "k", "r", "")
    assert (item.key, item.HasField("priority"), item.priority, item.unique_key) == ("customer-7", True, 0, "order-8")
    assert (item.bytes, item.lease_deadline.seconds, item.lease_deadline.nanos) == (b"\x00\xff", 1_769_846_400, 250_000_000)


def test_an_empty_lease_is_to_be_tried_again() -> None:
    status, reply = answered("/v1/queue.lease", {"queue_name": "q", "partition": None, "leases": [], "items": []}, "Reply")
    assert (status, reply.code, reply.code_text, reply.details["code"]) == (454, 454, "Retry Request", "nothing_to_lease")


def test_an_empty_lease_says_what_querators_clients_compare() -> None:
    reply = answered("/v1/queue.lease", {"queue_name": "q", "partition": None, "leases": [], "items": []}, "Reply")[1]
    assert reply.message == "request timeout; no items are in the queue, try again"


@pytest.mark.parametrize(
    ("ours", "gos"),
    [("0s", "0s"), ("5ms", "5ms"), ("1s500ms", "1.5s"), ("1m", "1m0s"), ("1m1ms", "1m0.001s"), ("1h", "1h0m0s"), ("30d", "720h0m0s")],
)
def test_durations_are_written_as_go_writes_them(ours: str, gos: str) -> None:
    assert answered("/v1/queues.info", {**QUEUE, "lease_timeout": ours}, "QueueInfo")[1].lease_timeout == gos


def test_a_queues_info() -> None:
    status, said = answered("/v1/queues.info", QUEUE, "QueueInfo")
    assert (status, said.lease_timeout, said.expire_timeout, said.max_attempts) == (200, "1m0s", "25h30m0.5s", 4)
    assert (said.created_at.seconds, said.updated_at.nanos, said.dead_queue, said.reference) == (1_769_846_400, 1_000_000, "", "mine")
    assert (said.requested_partitions, [each.partition for each in said.partitions], said.namespace) == (2, [0, 1], "")
    never = answered("/v1/queues.list", {"items": [{**QUEUE, "expire_timeout": "0s"}], "next": None}, "QueuesAnswer")[1]
    assert [(each.queue_name, each.expire_timeout) for each in never.items] == [("q", "0s")]


def test_counts_stay_within_their_fields() -> None:
    zero = ("ready", "transferring", "leases", "failures", "produced", "deduplicated", "leased", "completed", "retried", "expired")
    counters = dict.fromkeys((*zero, "dead", "released", "cleared", "redriven", "moved", "moved_in"), 0)
    partition = {**counters, "partition": 1, "backend": "b", "state": "available", "commit_time_ms": 1.5, "degraded": False}
    waiting = {"instance": "i-1", "produce_waiting": 1, "lease_waiting": 2, "complete_waiting": 3, "in_flight": 4}
    full = {**partition, "total": 1 << 40, "total_leased": 5, "scheduled": 6}
    said = answered(
        "/v1/queue.stats", {"queue_name": "q", "logical_queues": [{**waiting, "partitions": [full]}]}, "StatsAnswer", queue_name="q"
    )[1]
    (queue,) = said.logical_queues
    assert (queue.produce_waiting, queue.lease_waiting, queue.complete_waiting, queue.in_flight) == (1, 2, 3, 4)
    (counts,) = queue.partitions
    assert (counts.partition, counts.total, counts.total_leased, counts.scheduled) == (1, (1 << 31) - 1, 5, 6)
    few = {**full, "total": 11}
    said = answered("/v1/queue.stats", {"queue_name": "q", "logical_queues": [{**waiting, "partitions": [few]}]}, "StatsAnswer")[1]
    assert said.logical_queues[0].partitions[0].total == 5, "scheduled items are counted apart"


def test_stored_items() -> None:
    listed = {name: value for name, value in ITEM.items() if name not in ("partition", "enqueued_at", "bytes")}
    listed |= {"is_leased": True, "expire_deadline": None, "created_at": "2026-01-31T07:00:00.000Z", "enqueue_at": None, "max_attempts": 3}
    items = [{**listed, "payload": "AP8="}, {**listed, "origin": "m2m2m2m2.0.5", "payload": ""}]
    said = answered("/v1/storage/items.list", {"items": items, "next": None}, "ItemsAnswer")[1]
    assert [(item.id, item.source_id, item.payload) for item in said.items] == [
        ("k7f3q2ma.2.7", "", b"\x00\xff"),
        ("k7f3q2ma.2.7", "m2m2m2m2.0.5", b""),
    ]
    first = said.items[0]
    assert (first.key, first.HasField("priority"), first.priority, first.unique_key) == ("customer-7", True, 0, "order-8")
    assert (first.is_leased, first.attempts, first.max_attempts, first.lease_deadline.nanos) == (True, 2, 3, 250_000_000)
    assert not first.HasField("enqueue_at")
    assert first.expire_deadline.seconds == GO_ZERO_TIME, "a time that does not apply: Go's IsZero() is true of it"


def test_imported_items_that_are_gone_already_are_told_as_they_were_sent() -> None:
    produced = {"ids": ["k7f3q2ma.0.41", "k7f3q2ma.0.42"], "items": []}
    before = {
        "id": "old",
        "key": "customer-7",
        "priority": 0,
        "unique_key": "order-8",
        "is_leased": True,
        "attempts": 9,
        "lease_deadline": {"seconds": 5},
        "kind": "k",
        "payload": b"x",
    }
    later = {"payload": b"y", "enqueue_at": {"seconds": 1_769_846_400}}
    said = answered("/v1/storage/items.import", produced, "ImportAnswer", items=[before, later])[1]
    one, two = said.items
    assert (one.key, one.unique_key, two.key) == ("customer-7", "order-8", "")
    assert (one.HasField("priority"), two.HasField("priority")) == (True, False)
    assert (one.id, one.kind, one.payload, one.is_leased, one.attempts) == ("k7f3q2ma.0.41", "k", b"x", False, 0)
    assert not one.HasField("lease_deadline")
    assert (two.id, two.payload) == ("k7f3q2ma.0.42", b"y")


def test_a_leased_item_that_stays_is_no_success() -> None:
    path = "/v1/storage/items.delete"
    left = [{"id": "k7f3q2ma.0.1", "reason": "gone"}, {"id": "k7f3q2ma.0.2", "reason": "unknown"}]
    assert answered(path, {"deleted": 1, "ignored": left}, "Reply")[0] == 200
    status, reply = answered(path, {"deleted": 1, "ignored": [*left, {"id": "k7f3q2ma.0.3", "reason": "leased"}]}, "Reply")
    assert (status, reply.code, reply.details["code"]) == (400, 400, "leased")
    assert "k7f3q2ma.0.3" in reply.message


# ---- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", KINDS)
def test_every_error_has_a_status_that_querators_client_knows(code: str) -> None:
    status, body = refusal(SluicewayError(code, "what happened", "items[0].id"), "r-1")
    reply = message_class("Reply").FromString(body)
    assert status in KNOWN_STATUSES
    assert (reply.code, reply.message) == (status, "what happened")
    assert reply.code_text
    assert dict(reply.details) == {"code": code, "request_id": "r-1", "field": "items[0].id"}
    if KINDS[code].retryable:
        assert status in (429, 454)
    else:
        assert status not in (429, 454, 500) or code == "internal"


def test_the_statuses_of_the_table() -> None:
    wanted = {
        "invalid_request": 400,
        "queue_not_found": 400,
        "queue_exists": 400,
        "body_too_large": 400,
        "unauthenticated": 401,
        "forbidden": 403,
        "rate_limited": 429,
        "partition_damaged": 453,
        "unavailable": 454,
        "outcome_unknown": 454,
        "unsupported_media_type": 455,
        "internal": 500,
        "not_found": 501,
    }
    assert {code: refusal(SluicewayError(code, ""), "")[0] for code in wanted} == wanted
    assert protobuf.CONTENT_TYPE == b"application/protobuf"
