"""C31–C33: the key of an item."""

from __future__ import annotations

import httpx
import pyarrow as pa

from conformance.api import Api, Queue, ids, until

ARROW = "application/vnd.apache.arrow.stream"
PROTOBUF = "application/protobuf"
KEYS = ["customer-7", None, "é" * 128]
"""Keys of three items: any text, none, and the longest."""


def test_C31_a_key_comes_back_as_it_was_given_in_every_form(api: Api) -> None:
    """Produced as JSON, Arrow or protobuf, it is read as each of them, leased, browsed, listed, peeked at and searched for. (API)"""
    for produce in (as_json, as_arrow, as_protobuf):
        queue = api.queue()
        response = produce(queue, KEYS)
        assert response.status_code == 200, response.text
        for call in ("queue.peek", "queue.browse", "storage/items.list", "queue.search"):
            where = {"partition": 0} if call in ("queue.browse", "storage/items.list") else {}
            assert [item["key"] for item in queue.ask(call, **where)["items"]] == KEYS, call
        assert [item["key"] for item in queue.ask("queue.search", key="customer-7")["items"]] == ["customer-7"]
        fields = {"queue_name": queue.name, "client_id": "c", "batch_size": 3}
        leased = queue.lease(3)
        assert [item["key"] for item in leased["items"]] == KEYS
        queue.ask("queue.release", ids=ids(leased))
        table = pa.ipc.open_stream(api.http.post("/v1/queue.lease", json=fields, headers={"accept": ARROW}).content).read_all()
        assert table["key"].to_pylist() == KEYS
        queue.ask("queue.release", lease_ids=[f"{ids(leased)[0].rpartition('.')[0]}.L{table['lease'][0]}"])
        message = text(1, queue.name) + b"\x10\x03" + text(3, "c")
        answer = api.http.post("/v1/queue.lease", content=message, headers={"content-type": PROTOBUF})
        assert answer.status_code == 200, answer.content
        assert [text(100, key) in answer.content for key in KEYS if key] == [True, True]


def test_C32_a_key_that_is_empty_or_too_long_is_refused_by_name(api: Api) -> None:
    """In each form, with the item's place; and nothing of the request is stored. In protobuf, an empty key is none. (API)"""
    queue = api.queue()
    for produce, bad in (
        *((produce, "é" * 128 + "x") for produce in (as_json, as_arrow, as_protobuf)),
        *((produce, "") for produce in (as_json, as_arrow)),
    ):
        response = produce(queue, ["good", bad])
        assert response.status_code == 400, bad
        assert b"items[1].key" in response.content, bad
    assert queue.total("produced") == 0


def test_C33_a_key_stays_with_an_item_that_dies_and_is_redriven(api: Api) -> None:
    """It is there after a retry, in the dead queue, and in the queue to which the item goes back. (API)"""
    dead = api.queue()
    queue = api.queue(dead_queue=dead.name)
    as_json(queue, ["customer-7"])
    queue.retry(queue.one()["id"])
    again = queue.one()
    assert (again["key"], again["attempts"]) == ("customer-7", 2)
    queue.retry(again["id"], dead=True, reason="bad")
    until(lambda: dead.total("ready") == 1, "the item's arrival in the dead queue")
    (item,) = dead.ask("queue.peek")["items"]
    assert (item["key"], item["headers"]["sluiceway-reason"]) == ("customer-7", "bad")
    assert dead.ask("queue.redrive")["matched"] == 1
    assert queue.one()["key"] == "customer-7"


def as_json(queue: Queue, keys: list[str | None]) -> httpx.Response:
    return queue.api.post("queue.produce", queue_name=queue.name, items=[{"utf8": "x", "key": key} for key in keys])


def as_arrow(queue: Queue, keys: list[str | None]) -> httpx.Response:
    return as_arrow_of(queue, "key", keys)


def as_arrow_of(queue: Queue, name: str, texts: list[str | None]) -> httpx.Response:
    """Produce items with that column."""
    rows = pa.record_batch({"payload": pa.array([b"x"] * len(texts)), name: pa.array(texts, pa.utf8())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return queue.api.http.post(
        "/v1/queue.produce", params={"queue_name": queue.name}, content=sink.getvalue().to_pybytes(), headers={"content-type": ARROW}
    )


def as_protobuf(queue: Queue, keys: list[str | None]) -> httpx.Response:
    items = b"".join(field(3, text(6, "x") + (b"" if key is None else text(100, key))) for key in keys)
    message = text(1, queue.name) + items
    return queue.api.http.post("/v1/queue.produce", content=message, headers={"content-type": PROTOBUF})


def text(number: int, value: str) -> bytes:
    return field(number, value.encode())


def field(number: int, value: bytes) -> bytes:
    """A field of protobuf with a length."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])
