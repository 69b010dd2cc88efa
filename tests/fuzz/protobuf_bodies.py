"""Random and damaged protobuf bodies for every call that takes them: each must be decoded, or refused with a 400."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from sluiceway.kernel.errors import SluicewayError
from sluiceway.wire import json_inspection, json_items, json_outcomes, json_queues
from sluiceway.wire.protobuf import CALLS, message_class

TEXTS = ["", "q", "orders", "k7f3q2ma.0.1", "k7f3q2ma.0.0", "1m0s", "30s", "x" * 200, "é\u0000", "-", "z" * 128, "9" * 40]
NUMBERS = [0, 1, 2, 1_000, (1 << 31) - 1, -1, -(1 << 31)]
SECONDS = [0, 1, -1, 1_769_846_400, -62_135_596_800, 253_402_300_799, (1 << 63) - 1, -(1 << 63)]
NANOS = [0, 1, -1, 999_999_999, 1_000_000_000, (1 << 31) - 1, -(1 << 31)]
DECODERS: dict[str, Callable[[bytes], object]] = {
    "/v1/queue.produce": json_items.decode_produce,
    "/v1/queue.lease": json_items.decode_lease,
    "/v1/queue.complete": json_outcomes.decode_select,
    "/v1/queue.retry": json_outcomes.decode_retry,
    "/v1/queue.clear": json_queues.decode_clear,
    "/v1/queue.stats": json_queues.decode_queue_call,
    "/v1/queue.reload": json_inspection.decode_reload,
    "/v1/queues.create": json_queues.decode_create,
    "/v1/queues.update": json_queues.decode_update,
    "/v1/queues.info": json_queues.decode_queue_call,
    "/v1/queues.list": json_queues.decode_list,
    "/v1/queues.delete": json_queues.decode_delete,
    "/v1/storage/items.list": json_inspection.decode_list_items,
    "/v1/storage/scheduled.list": json_inspection.decode_list_items,
    "/v1/storage/items.import": json_inspection.decode_import,
    "/v1/storage/items.delete": json_inspection.decode_delete_items,
}
_SCALARS: dict[int, list[Any]] = {5: NUMBERS, 8: [False, True], 9: TEXTS, 12: [b"", b"\x00\xff", b"x" * 300]}


def attempt(chance: Random) -> Callable[[], None]:
    """A body for one of the calls, and what puts it through the translation and the call's decoder."""
    path = chance.choice(list(CALLS))
    body = _body(chance, path)
    return lambda: _decode(path, body)


def _decode(path: str, body: bytes) -> None:
    try:
        _, fields = CALLS[path].read(body)
        # What it becomes is JSON, of the fields that the call has or refuses by name.
        msgspec.json.decode(fields)
        DECODERS[path](fields)
    except SluicewayError as error:
        assert error.kind.status == 400, error.code
        assert error.code != "invalid_body" or "querator.proto" in error.detail, f"a body of ours is no JSON call: {error.detail}"
        raise


def _body(chance: Random, path: str) -> bytes:
    sound = _message(chance, message_class(CALLS[path].request)).SerializeToString()
    return chance.choice([_whole, _whole, _flipped, _cut, _spliced, _noise, _nested])(chance, sound)


def _message(chance: Random, kind: type[Any]) -> Any:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < 0.4:
            continue
        value = getattr(message, field.name)
        if field.message_type is None and isinstance(value, int | str | bytes):
            setattr(message, field.name, chance.choice(_SCALARS[field.type]))
        elif field.message_type is None:
            value.extend(chance.choices(_SCALARS[field.type], k=chance.randint(0, 4)))
        elif field.message_type.name == "Timestamp":
            value.seconds, value.nanos = chance.choice(SECONDS), chance.choice(NANOS)
        else:
            for _ in range(chance.choice([0, 1, 3])):
                value.append(_message(chance, message_class(field.message_type.name)))
    return message


def _whole(chance: Random, body: bytes) -> bytes:
    return body


def _flipped(chance: Random, body: bytes) -> bytes:
    flipped = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        if flipped:
            flipped[chance.randrange(len(flipped))] = chance.randrange(256)
    return bytes(flipped)


def _cut(chance: Random, body: bytes) -> bytes:
    return body[: chance.randint(0, len(body))]


def _spliced(chance: Random, body: bytes) -> bytes:
    at, more = chance.randint(0, len(body)), chance.randbytes(chance.randint(1, 12))
    return body[:at] + more + body[at + chance.randint(0, 3) :]


def _noise(chance: Random, body: bytes) -> bytes:
    return chance.randbytes(chance.randint(0, 64))


def _nested(chance: Random, body: bytes) -> bytes:
    for _ in range(chance.randint(1, 40)):
        if len(body) > 127:
            break
        body = bytes([chance.choice([0x0A, 0x12, 0x1A, 0x22, 0x2A])]) + bytes([len(body)]) + body
    return body + b"\x0b" * chance.choice([0, 200])
