"""JSON requests: what is taken, what is refused, and that a refusal names its field."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.clock import format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON, MAX_ITEMS_UNREAD, MAX_PAYLOAD_BYTES, MAX_SCHEDULE, MAX_TEXT_BYTES
from sluiceway.model.leased_items import Slice, served
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import DONE, RELEASE, Disposition, Leased, LeaseInfo, Peek, Produce, ProduceKey, Selection
from sluiceway.model.small_batch import in_columns
from sluiceway.wire import answers, json_items, json_outcomes
from sluiceway.wire.outcome_selection import group_items

NOW = 1_700_000_000_000
RECORD = QueueRecord("q", "k7f3q2ma", NOW, NOW, tuple(PartitionRecord(n) for n in range(3)))
SHORT = msgspec.structs.replace(RECORD, max_lease_timeout=300_000, idempotency_window=600_000)
TOO_LATE = format_time(NOW + MAX_SCHEDULE + 1000)
LONG = "x" * (MAX_TEXT_BYTES + 1)
WIDE = "é" * (MAX_TEXT_BYTES // 2 + 1)
"""Within the limit in characters, over it in bytes."""


def produce(**fields: object) -> Produce:
    return json_items.decode_produce(msgspec.json.encode({"queue_name": "q", "items": [{"utf8": "x"}], **fields})).request(RECORD, NOW)


def item(**fields: object) -> Callable[[], object]:
    return lambda: produce(items=[{"utf8": "first"}, {"utf8": "x", **fields}])


def call(decode: Callable[[bytes], Any], *more: object, **fields: object) -> Any:
    return decode(msgspec.json.encode({"queue_name": "q", **fields})).request(*more)


def lease(**fields: object) -> Callable[[], object]:
    return lambda: call(json_items.decode_lease, RECORD, **{"client_id": "c", **fields})


def complete(**fields: object) -> Callable[[], object]:
    return lambda: call(json_outcomes.decode_select, RECORD, DONE, **fields)


def retry(**fields: object) -> Callable[[], object]:
    items = [{"id": "k7f3q2ma.0.1"}, {"id": "k7f3q2ma.0.2", **fields}]
    return lambda: call(json_outcomes.decode_retry, RECORD, NOW, items=items)


def settle(**fields: object) -> Callable[[], object]:
    return lambda: call(json_outcomes.decode_settle, RECORD, items=[{"id": "k7f3q2ma.0.2", "outcome": "done", **fields}])


def extend(**fields: object) -> Callable[[], object]:
    return lambda: call(json_outcomes.decode_extend, RECORD, **{"lease_ids": ["k7f3q2ma.0.L1"], **fields})


def peek(**fields: object) -> Callable[[], object]:
    return lambda: call(json_items.decode_peek, RECORD, **fields)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: produce(colour=1), "colour"),
    (lambda: produce(queue_name=7), "queue_name"),
    (lambda: json_items.decode_produce(b'{"items":[]}'), "queue_name"),
    (lambda: json_items.decode_produce(b'{"queue_name":"q"}'), "items"),
    (lambda: produce(items=[]), "items"),
    (lambda: produce(items={}), "items"),
    (lambda: produce(items=[1]), "items[0]"),
    (lambda: produce(items=[{"utf8": "x", "colour": 1}]), "items[0].colour"),
    (item(bytes="eA=="), "items[1].utf8"),
    (item(utf8=None), "items[1].bytes"),
    (item(utf8=None, bytes="!!"), "items[1].bytes"),
    (item(utf8=None, bytes="eA"), "items[1].bytes"),
    (item(utf8=None, bytes=7), "items[1].bytes"),
    (item(utf8=None, bytes=base64.b64encode(bytes(MAX_PAYLOAD_BYTES + 1)).decode()), "items[1].bytes"),
    (item(utf8="x" * (MAX_PAYLOAD_BYTES + 1)), "items[1].utf8"),
    (item(kind=3), "items[1].kind"),
    (item(kind=LONG), "items[1].kind"),
    (item(encoding=WIDE), "items[1].encoding"),
    (item(reference=LONG), "items[1].reference"),
    (item(key=""), "items[1].key"),
    (item(key="k" * 257), "items[1].key"),
    (item(key="é" * 129), "items[1].key"),
    (item(key=7), "items[1].key"),
    (item(priority=10), "items[1].priority"),
    (item(priority=-1), "items[1].priority"),
    (item(priority=1.5), "items[1].priority"),
    (item(priority="7"), "items[1].priority"),
    (item(priority=True), "items[1].priority"),
    (item(unique_key=""), "items[1].unique_key"),
    (item(unique_key="é" * 129), "items[1].unique_key"),
    (item(headers={"a": 1}), "items[1].headers[...]"),
    (item(headers={"a": None}), "items[1].headers[...]"),
    (item(headers={"a": "x" * 8_192}), "items[1].headers"),
    (item(enqueue_at="tomorrow"), "items[1].enqueue_at"),
    (item(enqueue_at=""), "items[1].enqueue_at"),
    (item(enqueue_at="2026-01-31T08:00:00"), "items[1].enqueue_at"),
    (item(enqueue_at=TOO_LATE), "items[1].enqueue_at"),
    (lambda: produce(request_timeout="-1s"), "request_timeout"),
    (lambda: produce(request_timeout=30), "request_timeout"),
    (lambda: produce(request_timeout="1h"), "request_timeout"),
    (lambda: produce(idempotency_key=""), "idempotency_key"),
    (lambda: produce(idempotency_key=LONG), "idempotency_key"),
    (lambda: produce(idempotency_group="g"), "idempotency_key"),
    (lambda: produce(idempotency_key="k", idempotency_group=""), "idempotency_group"),
    (lambda: produce(idempotency_key="k", idempotency_group="transfer/k7f3q2ma.0"), "idempotency_group"),
    (lambda: produce(idempotency_key="k", idempotency_group="move/k7f3q2ma.0"), "idempotency_group"),
    (lambda: produce(idempotency_key="k", idempotency_sequence=3), "idempotency_sequence"),
    (lambda: produce(idempotency_key="k", idempotency_window="25h"), "idempotency_window"),
    (lambda: produce(idempotency_key="k", idempotency_window="0s"), "idempotency_window"),
    (lambda: produce(idempotency_key="k", idempotency_group="g", idempotency_window="1h"), "idempotency_window"),
    (lambda: produce(idempotency_key="k", idempotency_group="g", idempotency_sequence=-1), "idempotency_sequence"),
    (lambda: produce(idempotency_key="k", idempotency_group="g", idempotency_sequence=1 << 63), "idempotency_sequence"),
    (lambda: json_items.decode_lease(b'{"queue_name":"q"}'), "client_id"),
    (lease(client_id=""), "client_id"),
    (lease(client_id=LONG), "client_id"),
    (lease(batch_size=0), "batch_size"),
    (lease(batch_size=-1), "batch_size"),
    (lease(batch_size=MAX_ITEMS_ARROW + 1), "batch_size"),
    (lease(batch_size=MAX_ITEMS_UNREAD + 1, payload=False), "batch_size"),
    (lease(batch_size=1.5), "batch_size"),
    (lease(batch_size=10**30), "batch_size"),
    (lease(batch_size="1"), "batch_size"),
    (lease(batch_size=True), "batch_size"),
    (lease(max_partitions=0), "max_partitions"),
    (lease(lease_timeout="0s"), "lease_timeout"),
    (lease(lease_timeout="31d"), "lease_timeout"),
    (lambda: call(json_items.decode_lease, SHORT, client_id="c", lease_timeout="5m1ms"), "lease_timeout"),
    (lambda: call(json_outcomes.decode_extend, SHORT, lease_ids=["k7f3q2ma.0.L1"], lease_timeout="6m"), "lease_timeout"),
    (
        lambda: call(json_items.decode_produce, SHORT, NOW, items=[{"utf8": "x"}], idempotency_key="k", idempotency_window="11m"),
        "idempotency_window",
    ),
    (lease(request_timeout="16m"), "request_timeout"),
    (lease(lease_key=""), "lease_key"),
    (lease(payload="yes"), "payload"),
    (complete(), "ids"),
    (complete(ids=[], lease_ids=[]), "ids"),
    (complete(ids="k7f3q2ma.0.1"), "ids"),
    (complete(ids=["k7f3q2ma.0.1", ""]), "ids[1]"),
    (complete(ids=["k7f3q2ma.0.1", 7]), "ids[1]"),
    (complete(ids=["k7f3q2ma.0.1", "k7f3q2ma.0.-1"]), "ids[1]"),
    (complete(ids=["k7f3q2ma.0.1", "k7f3q2ma.0.L1"]), "ids[1]"),
    (complete(ids=["k7f3q2ma.0.1", "k7f3q2ma.x.1"]), "ids[1]"),
    (complete(ids=["k7f3q2ma.0." + "9" * 19]), "ids[0]"),
    (complete(ids=["k7f3q2ma.0.1", "k7f3q2ma.1.1"], partition=0), "ids[1]"),
    (complete(ids=["k7f3q2ma.0.1"], partition=9), "partition"),
    (complete(ids=["k7f3q2ma.0.1"], partition=-1), "partition"),
    (complete(lease_ids=["k7f3q2ma.0.L1", "k7f3q2ma.0.1"]), "lease_ids[1]"),
    (complete(lease_ids=["k7f3q2ma.0.L1", "k7f3q2ma.1.L1"], partition=0), "lease_ids[1]"),
    (complete(ids=["k7f3q2ma.0.1"], client_id=""), "client_id"),
    (complete(ids=["k7f3q2ma.0.1"], client_id=LONG), "client_id"),
    (complete(ids=["k7f3q2ma.0.1"], client_id=7), "client_id"),
    (complete(ids=["k7f3q2ma.0.1"], strict=1), "strict"),
    (retry(retry_after="1s", retry_at=format_time(NOW)), "items[1].retry_after"),
    (retry(retry_after="soon"), "items[1].retry_after"),
    (retry(retry_after="400d"), "items[1].retry_after"),
    (retry(retry_at=TOO_LATE), "items[1].retry_at"),
    (retry(retry_at=7), "items[1].retry_at"),
    (retry(dead=True, retry_after="1s"), "items[1].dead"),
    (retry(dead="true"), "items[1].dead"),
    (retry(reason=LONG), "items[1].reason"),
    (retry(id="nonsense"), "items[1].id"),
    (retry(id="k7f3q2ma.0.1", dead=True), "items"),
    (settle(outcome="perhaps"), "items[0].outcome"),
    (settle(outcome="release"), "items[0].outcome"),
    (settle(retry_after="1s"), "items[0].retry_after"),
    (settle(outcome="retry", retry_after="-1s"), "items[0].retry_after"),
    (settle(reason=LONG), "items[0].reason"),
    (lambda: json_outcomes.decode_settle(b'{"queue_name":"q","items":[{"id":"k7f3q2ma.0.2"}]}'), "items[0].outcome"),
    (extend(lease_ids=[]), "ids"),
    (extend(lease_ids=["k7f3q2ma.0.1"]), "lease_ids[0]"),
    (extend(ids=["k7f3q2ma.0.L1"]), "ids[0]"),
    (extend(lease_timeout="0s"), "lease_timeout"),
    (extend(lease_timeout="31d"), "lease_timeout"),
    (extend(client_id=""), "client_id"),
    (extend(strict="yes"), "strict"),
    (extend(partition=0), "partition"),
    (peek(limit=0), "limit"),
    (peek(limit=MAX_ITEMS_ARROW + 1), "limit"),
    (peek(start=3), "start"),
    (peek(lease_id="k7f3q2ma.0.L1", start=-1), "start"),
    (peek(lease_id="k7f3q2ma.0.L1", partition=0), "partition"),
    (peek(lease_id="k7f3q2ma.0.1"), "lease_id"),
    (peek(partition=9), "partition"),
]


@pytest.mark.parametrize(("request_of", "field"), REFUSED, ids=[f"{n}-{field}" for n, (_, field) in enumerate(REFUSED)])
def test_refusal_names_its_field(request_of: Callable[[], object], field: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        request_of()
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    assert field in caught.value.detail


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nul",
        b"[]",
        b"7",
        b"{",
        b"\xff\xfe",
        b'{"queue_name":"\xff"}',
        b'{"queue_name":"\\ud800"}',
        b"[" * 100_000,
        b"{} {}",
        b'{"a":NaN}',
    ],
)
def test_what_is_no_json_object_is_an_invalid_body(body: bytes) -> None:
    with pytest.raises(SluicewayError) as caught:
        json_items.decode_lease(body)
    assert caught.value.code in ("invalid_body", "invalid_request")
    assert caught.value.kind.status == 400


@pytest.mark.parametrize(
    ("request_of", "field", "most"),
    [
        (lambda n: produce(items=[{"utf8": "x"}] * n), "items", MAX_ITEMS_JSON),
        (lambda n: complete(ids=[f"k7f3q2ma.0.{i}" for i in range(n)])(), "ids", MAX_ITEMS_JSON),
        (lambda n: complete(lease_ids=[f"k7f3q2ma.0.L{i}" for i in range(n)])(), "lease_ids", MAX_ITEMS_JSON),
        (
            lambda n: call(json_outcomes.decode_retry, RECORD, NOW, items=[{"id": f"k7f3q2ma.0.{i}"} for i in range(n)]),
            "items",
            MAX_ITEMS_JSON,
        ),
        (
            lambda n: call(json_outcomes.decode_settle, RECORD, items=[{"id": f"k7f3q2ma.0.{i}", "outcome": "done"} for i in range(n)]),
            "items",
            MAX_ITEMS_ARROW,
        ),
        (lambda n: extend(lease_ids=[f"k7f3q2ma.0.L{i}" for i in range(n)])(), "lease_ids", MAX_ITEMS_JSON),
        (lambda n: extend(ids=[f"k7f3q2ma.0.{i}" for i in range(n)])(), "ids", MAX_ITEMS_JSON),
    ],
)
def test_the_most_items_pass_and_one_more_is_too_many(request_of: Callable[[int], object], field: str, most: int) -> None:
    request_of(most)
    with pytest.raises(SluicewayError) as caught:
        request_of(most + 1)
    assert (caught.value.code, caught.value.field) == ("too_many_items", field)
    assert f"{most + 1:,}" in caught.value.detail
    assert f"{most:,}" in caught.value.detail


def test_defaults_are_those_of_the_documents() -> None:
    assert produce().request_timeout == 30_000
    assert produce().key is None
    taken = lease()()
    assert taken == type(taken)("c", 1)  # type: ignore[call-arg]
    assert peek()() == Peek(10)


def test_produce_key() -> None:
    assert produce(idempotency_key="k").key == ProduceKey("k")
    assert produce(idempotency_key="k", idempotency_window="90s").key == ProduceKey("k", window=90_000)
    assert produce(idempotency_key="k", idempotency_group="g", idempotency_sequence=7).key == ProduceKey("k", "g", 7)


def test_what_a_queue_allows_at_most_is_what_a_call_may_ask_for() -> None:
    keyed = {"items": [{"utf8": "x"}], "idempotency_key": "k"}
    assert call(json_items.decode_produce, SHORT, NOW, **keyed).key == ProduceKey("k", window=600_000)
    assert call(json_items.decode_produce, SHORT, NOW, **keyed, idempotency_window="10m").key == ProduceKey("k", window=600_000)
    assert call(json_items.decode_lease, SHORT, client_id="c", lease_timeout="5m").lease_timeout == 300_000
    assert call(json_items.decode_lease, SHORT, client_id="c").lease_timeout is None


def test_ids_are_grouped_by_partition_sorted_and_unique() -> None:
    ids = ["k7f3q2ma.1.5", "k7f3q2ma.0.9", "k7f3q2ma.0.2", "k7f3q2ma.0.9", "other.0.1", "k7f3q2ma.7.1"]
    request = call(json_outcomes.decode_select, RECORD, DONE, ids=ids, lease_ids=["k7f3q2ma.2.L4", "other.2.L4", "k7f3q2ma.2.L4"])
    assert {partition: len(chosen) for partition, chosen in request.selections.items()} == {0: 1, 1: 1, 2: 1, 7: 1}
    assert request.selections[0][0].offsets.tolist() == [2, 9]
    assert request.selections[0][0].offsets.dtype == np.int64
    assert request.selections[1][0].offsets.tolist() == [5]
    assert (request.selections[2][0].disposition, request.selections[2][0].lease) == (DONE, 4)
    assert request.foreign == ["other.0.1", "other.2.L4"], "which partitions there were is for the queue to say"
    assert not request.stage


@pytest.mark.parametrize(
    "ids",
    [
        ["k7f3q2ma.0.5", "k7f3q2ma.0.12", "k7f3q2ma.0.5"],
        ["k7f3q2ma.0.5"],
        ["k7f3q2ma.0.5", "k7f3q2ma.10.5"],
        ["k7f3q2ma.0.5", "xk7f3q2ma.0.5"],
        ["k7f3q2ma.0.5", "k7f3q2ma.0.5,k7f3q2ma.0.6"],
        ["k7f3q2ma.0.5,k7f3q2ma.0.6", "k7f3q2ma.0.7"],
        ["k7f3q2ma.0.5", "k7f3q2ma.0.1.2"],
        ["k7f3q2ma.0.5", "k7f3q2ma.0."],
        ["k7f3q2ma.0.5", ""],
        ["5", "6"],
        [".5", ".6"],
        ["", ""],
    ],
)
def test_ids_of_one_place_are_grouped_as_any_others(ids: list[str]) -> None:
    def grouped(dispositions: Iterable[Disposition]) -> object:
        try:
            found = group_items(ids, dispositions, RECORD, "ids[{}]".format)
        except SluicewayError as error:
            return error.code, error.field, error.detail
        return {
            number: [each.offsets.tolist() for each in chosen if each.offsets is not None] for number, chosen in found.selections.items()
        }

    assert grouped(repeat(DONE)) == grouped([DONE] * len(ids))


def test_all_that_is_named_is_released_alike_and_only_from_its_owner() -> None:
    fields = {"ids": ["k7f3q2ma.0.9", "k7f3q2ma.0.2", "other.0.1"], "lease_ids": ["k7f3q2ma.2.L4"], "client_id": "c", "strict": True}
    request = call(json_outcomes.decode_select, RECORD, RELEASE, **fields)
    assert (request.client_id, request.strict, request.stage, request.foreign) == ("c", True, False, ["other.0.1"])
    assert (request.selections[0][0].disposition, request.selections[0][0].offsets.tolist()) == (RELEASE, [2, 9])
    assert request.selections[2] == [Selection(RELEASE, lease=4)]
    assert complete(ids=["k7f3q2ma.0.1"])().client_id is None  # type: ignore[attr-defined]


def test_an_extension_names_leases_items_or_both() -> None:
    ids = ["k7f3q2ma.0.9", "k7f3q2ma.0.2", "k7f3q2ma.1.3", "k7f3q2ma.0.9", "other.0.1"]
    request = call(json_outcomes.decode_extend, RECORD, ids=ids, lease_ids=["k7f3q2ma.2.L4", "other.0.L1"], client_id="c", strict=True)
    assert {partition: offsets.tolist() for partition, offsets in request.offsets.items()} == {0: [2, 9], 1: [3]}
    assert (request.leases, request.foreign) == ([(2, 4)], ["other.0.1", "other.0.L1"])
    assert (request.client_id, request.strict, request.lease_timeout, request.request_timeout) == ("c", True, None, 30_000)


def test_retries_are_grouped_by_disposition() -> None:
    request = call(
        json_outcomes.decode_retry,
        RECORD,
        NOW,
        items=[
            {"id": "k7f3q2ma.0.1"},
            {"id": "k7f3q2ma.0.2", "retry_after": "0s"},
            {"id": "k7f3q2ma.0.3", "retry_after": "5s"},
            {"id": "k7f3q2ma.0.4", "retry_at": format_time(NOW + 1000)},
            {"id": "k7f3q2ma.0.5", "dead": True, "reason": "bad"},
        ],
    )
    assert [(chosen.disposition, chosen.offsets.tolist()) for chosen in request.selections[0]] == [
        (Disposition("retry"), [1]),
        (Disposition("retry", retry_after=0), [2]),
        (Disposition("retry", retry_after=5_000), [3]),
        (Disposition("retry", retry_at=NOW + 1000), [4]),
        (Disposition("dead", reason="bad"), [5]),
    ]


def test_peek_at_a_lease_of_another_incarnation_is_not_found() -> None:
    with pytest.raises(SluicewayError) as caught:
        peek(lease_id="other.0.L1")()
    assert (caught.value.code, caught.value.field) == ("lease_not_found", "lease_id")


texts = st.none() | st.text(max_size=20)
items = st.fixed_dictionaries(
    {"payload": st.binary(max_size=50)},
    optional={
        "kind": texts,
        "encoding": texts,
        "reference": texts,
        "key": st.none() | st.text(min_size=1, max_size=20),
        "priority": st.none() | st.integers(0, 9),
        "unique_key": st.none() | st.text(min_size=1, max_size=20),
        "headers": st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    },
)


@given(st.lists(items, min_size=1, max_size=20), st.booleans())
def test_items_come_out_as_they_went_in(sent: list[dict[str, Any]], as_text: bool) -> None:
    """Through the JSON of a produce, a batch, and the JSON of a lease."""

    def wire(fields: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in fields.items() if name != "payload"}
        if as_text:
            try:
                return {"utf8": fields["payload"].decode(), **rest}
            except UnicodeDecodeError:
                pass
        return {"bytes": base64.b64encode(fields["payload"]).decode(), **rest}

    batch = in_columns(produce(items=[wire(fields) for fields in sent]).batch)
    batch.validate(full=True)
    got = json.loads(bytes(answers.leased(RECORD, leased_of(batch), arrow=False)))
    assert [base64.b64decode(item["bytes"]) for item in got["items"]] == [fields["payload"] for fields in sent]
    for name in ("kind", "encoding", "reference", "key", "priority", "unique_key", "headers"):
        assert [item[name] for item in got["items"]] == [fields.get(name) for fields in sent]
    assert [item["id"] for item in got["items"]] == [f"k7f3q2ma.1.{70 + n}" for n in range(len(sent))]
    assert [item["origin"] for item in got["items"]] == [f"k7f3q2ma.1.{40 + n}" for n in range(len(sent))]
    assert {item["lease_id"] for item in got["items"]} == {"k7f3q2ma.1.L3"}
    assert got["leases"][0]["count"] == len(sent)


def leased_of(batch: pa.RecordBatch) -> Leased:
    rows = np.arange(batch.num_rows, dtype=np.int64)
    piece = Slice(40, rows, rows + 70, 2, NOW)
    batch = in_columns(batch)
    stored = batch.drop_columns(["enqueue_at"]) if "enqueue_at" in batch.schema.names else batch
    return Leased([LeaseInfo(1, 3, batch.num_rows, NOW + 60_000)], [served(1, 3, piece, stored)])


def test_looked_at_items_have_no_lease() -> None:
    rows = np.arange(1, dtype=np.int64)
    batch = served(1, 0, Slice(0, rows, rows, 0, NOW), in_columns(produce().batch))
    got = json.loads(bytes(answers.peeked(RECORD, [batch], arrow=False)))["items"][0]
    assert (got["lease_id"], got["lease_deadline"], got["attempts"]) == (None, None, 0)
    assert got["enqueued_at"] == format_time(NOW)


def test_problem_document() -> None:
    got = json.loads(answers.problem(SluicewayError("unavailable", "come back", "queue_name"), "r-1"))
    assert got["status"] == 503
    assert got["retryable"] is True
    assert got["detail"] == got["message"] == "come back"
    assert (got["code"], got["field"], got["request_id"]) == ("unavailable", "queue_name", "r-1")
    assert set(got) == {"type", "title", "status", "detail", "code", "retryable", "field", "request_id", "message"}


# -- bodies that are meant to do harm ---------------------------------------------------------------------------------


def test_a_long_unknown_field_is_refused_without_searching_it_through() -> None:
    name = " - at " * 200_000
    began = time.thread_time()
    with pytest.raises(SluicewayError) as caught:
        json_items.decode_lease(json.dumps({"queue_name": "q", "client_id": "c", name: 1}).encode())
    assert time.thread_time() - began < 60, "quadratic: hours"
    assert caught.value.code == "invalid_request"
    assert caught.value.detail.endswith("unknown field")


@pytest.mark.parametrize("item", ["{}", '{"headers":{}}', '{"utf8":""}'])
def test_a_body_of_millions_of_items_is_refused_before_it_is_decoded(item: str) -> None:
    body = '{"queue_name":"q","items":[' + ",".join([item] * 500_000) + "]}"
    with pytest.raises(SluicewayError) as caught:
        json_items.decode_produce(body.encode())
    assert (caught.value.code, caught.value.field) == ("too_many_items", "items")


def test_payloads_full_of_braces_are_no_items() -> None:
    payload = json.dumps([{"a": "\\", "b": '"{'}] * 40) + "\\"
    items = [{"utf8": payload, "headers": {"k": "{"}}] * MAX_ITEMS_JSON
    body = json.dumps({"queue_name": "q", "items": items}).encode()
    assert len(body) > 1 << 20
    assert len(json_items.decode_produce(body).items) == MAX_ITEMS_JSON


@pytest.mark.parametrize("tail", [b'"', b"\\", b""])
def test_an_unending_string_is_read_once(tail: bytes) -> None:
    body = b"{" * 3_000 + b'"' + b'\\"' * 1_000_000 + tail
    began = time.thread_time()
    with pytest.raises(SluicewayError):
        json_items.decode_produce(body)
    assert time.thread_time() - began < 60, "quadratic: hours"
