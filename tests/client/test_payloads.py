"""What a program has becomes a payload: bytes and text as they are, the rest as JSON, or an error that names the field."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from sluiceway import testing
from sluiceway.client import Item
from sluiceway.client.payloads import encoded
from sluiceway.kernel.errors import SluicewayError


@dataclass
class Order:
    number: int
    at: datetime


class Model:
    """As Pydantic's models dump themselves."""

    def model_dump_json(self) -> str:
        return '{"number":7}'


class Struct(msgspec.Struct):
    number: int


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        ({"to": "ada@example.com", "tags": ["a", None]}, b'{"to":"ada@example.com","tags":["a",null]}'),
        ([1, 2.5, True], b"[1,2.5,true]"),
        (Order(7, datetime(2026, 1, 2, tzinfo=UTC)), b'{"number":7,"at":"2026-01-02T00:00:00Z"}'),
        (Struct(7), b'{"number":7}'),
        (Model(), b'{"number":7}'),
        ({"order": Model()}, b'{"order":{"number":7}}'),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (0, b"0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_sent_as_json(payload: object, data: bytes) -> None:
    assert encoded(payload, None) == (data, "application/json")
    assert encoded(payload, "orders/v2") == (data, "orders/v2")


def test_bytes_and_text_stay_as_they_are() -> None:
    assert encoded(b"\xff", None) == (b"\xff", None)
    assert encoded("é", "text/plain") == ("é", "text/plain")
    assert encoded(bytearray(b"a"), None) == (b"a", None)
    assert encoded(memoryview(b"a"), None) == (b"a", None)


@pytest.mark.parametrize(
    "payload", [None, object(), {1j: 2}, {"deep": object()}, "a".join, (x for x in "a")], ids=lambda value: type(value).__name__
)
def test_what_json_cannot_hold_is_refused(payload: object) -> None:
    with pytest.raises(SluicewayError, match=r"^payload: expected bytes, text, or a value that JSON can hold"):
        encoded(payload, None)


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SluicewayError, match="JSON"):
        encoded(endless, None)


def test_a_producer_is_told_the_item_that_has_the_unique_key() -> None:
    with testing.server() as server:
        server.client.create_queue("orders", unique="until_settled")
        with server.client.producer("orders") as producer:
            sent = [producer.send(key, unique_key=key) for key in "abab"]
            ids = [each.result() for each in sent]
            with pytest.raises(SluicewayError, match="must not be empty"):
                producer.send("x", unique_key="")
        assert ids[:2] == ids[2:] == [item.id for item in server.client.lease("orders", batch_size=10)]


def test_they_come_back_by_every_way() -> None:
    with testing.server() as server:
        client = server.client
        client.create_queue("orders")
        client.produce("orders", [{"number": 1}, "text", Item([2], kind="list")])
        with client.producer("orders") as producer:
            producer.send({"number": 3}, reference="third", key="customer-7", priority=9)
        items = {item.payload: item for item in client.lease("orders", batch_size=10)}
        assert items[b'{"number":1}'].json() == {"number": 1}
        assert items[b'{"number":1}'].encoding == "application/json"
        assert (items[b"text"].encoding, items[b"[2]"].kind) == (None, "list")
        third = items[b'{"number":3}']
        assert (third.reference, third.key, third.priority) == ("third", "customer-7", 9)
        assert items[b"text"].key is None
        with pytest.raises(ValueError, match=r"the payload of item \S+ is not JSON"):
            items[b"text"].json()
        with pytest.raises(SluicewayError, match="expected a list, not dict"):
            client.produce("orders", {"number": 1})
