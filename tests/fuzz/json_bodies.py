"""Damaged JSON bodies for every call."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from sluiceway.model.requests import DONE, RELEASE
from sluiceway.wire import browse_call, json_audit, json_inspection, json_items, json_keys, json_outcomes, json_queues
from tests.fuzz.arrow_bodies import NOW, RECORD

Put = Callable[[bytes], object]
ITEM: Final = "k7f3q2ma.0.7"
LEASE: Final = "k7f3q2ma.2.L4"

CALLS: Final[list[tuple[Put, dict[str, Any]]]] = [
    (
        lambda body: json_items.decode_produce(body).request(RECORD, NOW),
        {
            "queue_name": "q",
            "items": [{"utf8": "a", "kind": "k", "headers": {"h": "v"}}, {"bytes": "YQ==", "enqueue_at": "2026-01-31T08:00:00Z"}],
            "request_timeout": "30s",
            "idempotency_key": "k",
            "idempotency_window": "1h",
            "idempotency_group": "g",
            "idempotency_sequence": 4,
        },
    ),
    (
        lambda body: json_items.decode_lease(body).request(RECORD),
        {
            "queue_name": "q",
            "client_id": "c",
            "batch_size": 5,
            "lease_timeout": "1m",
            "max_partitions": 2,
            "lease_key": "k",
            "payload": True,
        },
    ),
    (
        lambda body: json_items.decode_lease(body).request(RECORD),
        {"queue_name": "q", "client_id": "c", "partition": 2, "after_lease": LEASE},
    ),
    (
        lambda body: json_items.decode_peek(body).request(RECORD),
        {"queue_name": "q", "limit": 5, "lease_id": LEASE, "start": 1, "partition": 2},
    ),
    (lambda body: json_items.decode_explain(body).item(), {"queue_name": "q", "id": ITEM}),
    (
        lambda body: json_outcomes.decode_select(body).request(RECORD, DONE),
        {"queue_name": "q", "ids": [ITEM, "k7f3q2ma.1.8"], "lease_ids": [LEASE], "partition": 0, "client_id": "c", "strict": True},
    ),
    (lambda body: json_outcomes.decode_select(body).request(RECORD, RELEASE), {"queue_name": "q", "ids": [ITEM] * 40}),
    (
        lambda body: json_outcomes.decode_retry(body).request(RECORD, NOW),
        {
            "queue_name": "q",
            "items": [
                {"id": ITEM, "retry_after": "1s", "reason": "r"},
                {"id": ITEM, "dead": True},
                {"id": ITEM, "retry_at": "2026-01-31T08:00:00Z"},
            ],
        },
    ),
    (
        lambda body: json_outcomes.decode_settle(body).request(RECORD),
        {
            "queue_name": "q",
            "items": [{"id": ITEM, "outcome": "retry", "retry_after": "1s", "reason": "r"}, {"id": ITEM, "outcome": "done"}],
        },
    ),
    (
        lambda body: json_outcomes.decode_extend(body).request(RECORD),
        {"queue_name": "q", "lease_ids": [LEASE], "ids": [ITEM], "lease_timeout": "5m"},
    ),
    (
        lambda body: json_queues.decode_create(body).spec(),
        {
            "queue_name": "q",
            "requested_partitions": 3,
            "lease_timeout": "1m",
            "max_attempts": 4,
            "dead_queue": "d",
            "retry_backoff": {"first": "1s", "most": "10m"},
            "circuit_breaker": {"failure_rate": 0.5, "failures": 20},
            "idempotency_window": "1h",
            "write_timeout": None,
        },
    ),
    (lambda body: json_queues.decode_update(body).patch(), {"queue_name": "q", "version": 3, "reference": "r", "expire_timeout": "0s"}),
    (json_queues.decode_list, {"pivot": "q", "limit": 10}),
    (json_queues.decode_queue_call, {"queue_name": "q"}),
    (json_queues.decode_delete, {"queue_name": "q", "force": True}),
    (lambda body: json_queues.decode_pause(body).wanted(), {"queue_name": "q", "verbs": ["produce", "lease"]}),
    (lambda body: json_queues.decode_clear(body).request(), {"queue_name": "q", "ready": True, "scheduled": True, "request_timeout": "1s"}),
    (
        lambda body: json_queues.decode_redrive(body).request(),
        {"queue_name": "q", "target": "t", "limit": 5, "reason": "r", "source": "s", "dry_run": True},
    ),
    (lambda body: json_audit.decode_audit_list(body).checked(), {"pivot": "p", "limit": 5, "queue_name": "q", "action": "queues.create"}),
    (
        lambda body: json_keys.decode_create_key(body).spec(NOW),
        {"name": "n", "scopes": ["produce:orders-*", "admin"], "expires_after": "1d", "requests_per_second": 5, "bytes_per_second": 6},
    ),
    (lambda body: json_keys.decode_list_keys(body).checked(), {"pivot": "p", "limit": 5}),
    (json_keys.decode_revoke_key, {"key_id": "abcdefgh"}),
    (
        lambda body: browse_call.decode_browse(body).request(RECORD),
        {"queue_name": "q", "partition": 0, "states": ["ready", "scheduled"], "limit": 5, "payload": False},
    ),
    (lambda body: browse_call.decode_browse(body).request(RECORD), {"queue_name": "q", "partition": 0, "cursor": f"{'0a' * 24}.77"}),
    (
        lambda body: json_inspection.decode_list_items(body).request(RECORD, False),
        {"queue_name": "q", "partition": 0, "limit": 5},
    ),
]
TOKENS: Final = (
    *(b"null", b"true", b"0", b"-1", b"1e400", b"-0.0", b"9223372036854775808", b"9" * 400, b"1.5", b"NaN", b"Infinity"),
    *(
        b'""',
        b"[]",
        b"{}",
        b"[[[[[[]]]]]]",
        b'"\\ud800"',
        b'"\\u0000"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"' + b"x" * 2_000 + b'"',
        b'"\\',
        b'"\r\n"',
    ),
    *(
        b'"9999999999d"',
        b'"1e9s"',
        b'"-1s"',
        b'"0.5ms"',
        b'"' + b"1s" * 40 + b'"',
        b'"9999-12-31T23:59:60Z"',
        b'"0000-01-01T00:00:00Z"',
        b'"2026-01-31"',
    ),
    *(b'"2026-01-31T08:00:00+99:99"', b'"-292277-01-01T00:00:00Z"', b'"0001-01-01T00:00:00+23:59"', b'"9999-12-31T23:59:59-23:59"'),
    *(
        b'"k7f3q2ma.0.99999999999999999999"',
        b'"k7f3q2ma.999999999.1"',
        b'"k7f3q2ma.0.-1"',
        b'"k7f3q2ma.00.1"',
        b'"..."',
        '"k7f3q2ma.0.١"'.encode(),
    ),
    *(
        b'"=="',
        b'"YQ"',
        b'"Y\\nQ=="',
        '"é"'.encode(),
        b'"transfer/x"',
        b'"sluiceway-x"',
        b'{"first": "1s"}',
        b'[{"id": 5}]',
        b'"*"',
        b'"admin:*"',
    ),
)


def attempt(chance: Random) -> Callable[[], None]:
    """One body, and the decoder that it is for, or another one."""
    put, fields = chance.choice(CALLS)
    if chance.random() < 0.1:
        put, _ = chance.choice(CALLS)
    body = _changed(chance, fields)
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        body = chance.choice(_DAMAGES)(chance, body)
    return lambda: _ignore(put(body))


def _ignore(_: object) -> None: ...


def _changed(chance: Random, fields: dict[str, Any]) -> bytes:
    """The call as JSON, with some fields left out, and some values that are others."""
    kept = {name: value for name, value in fields.items() if chance.random() < 0.85}
    marks: list[bytes] = []

    def value(found: Any) -> Any:
        if chance.random() < 0.12:
            marks.append(chance.choice(TOKENS))
            return f"@{len(marks) - 1}@"
        if isinstance(found, dict):
            return {name: value(each) for name, each in found.items() if chance.random() < 0.95}
        if isinstance(found, list):
            return [value(each) for each in found]
        return found

    body = json.dumps({name: value(each) for name, each in kept.items()}).encode()
    for number, token in enumerate(marks):
        body = body.replace(b'"@%d@"' % number, token)
    return body


def _bytes(chance: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        if changed:
            changed[chance.randrange(len(changed))] = chance.choice((chance.randrange(256), *b'{}[]",:\\0-'))
    return bytes(changed)


def _cut(chance: Random, body: bytes) -> bytes:
    return body[: chance.randint(0, len(body))]


def _splice(chance: Random, body: bytes) -> bytes:
    at = chance.randint(0, len(body))
    return body[:at] + chance.choice(TOKENS) + body[at + chance.randint(0, 9) :]


def _twice(chance: Random, body: bytes) -> bytes:
    return body[:-1] + b", " + body[1:] if len(body) > 2 else body * 2


def _deep(chance: Random, body: bytes) -> bytes:
    depth = chance.choice((10, 200, 5_000))
    return b'{"queue_name": "q", "items": ' + chance.choice((b"[", b'{"a":')) * depth + body


def _noise(chance: Random, body: bytes) -> bytes:
    return chance.randbytes(chance.randint(0, 60))


_DAMAGES: Final = (_bytes, _bytes, _cut, _splice, _splice, _twice, _deep, _noise)
