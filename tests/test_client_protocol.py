"""The client's calls without I/O: what is sent, how answers are read, when a call is repeated."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from sluiceway.client import CallError, Item, Retry, SluicewayError, Verdict, protocol
from sluiceway.client.protocol import LONGEST_PAUSE, Call, Repeats
from sluiceway.kernel.errors import KINDS


def sent(call: Call[Any]) -> dict[str, object]:
    body = msgspec.json.decode(call.body)
    assert isinstance(body, dict)
    return body


def test_an_item_is_sent_as_text_or_base64_with_what_was_given() -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=timezone(timedelta(hours=1)))
    items: list[Item | bytes | str] = ["é", b"\xff\x00", Item("x", kind="k", headers={"a": "b"}, enqueue_at=at), Item(b"y")]
    body = sent(protocol.produce("q", items, None, protocol.Key("key")))
    assert body == {
        "queue_name": "q",
        "items": [
            {"utf8": "é"},
            {"bytes": "/wA="},
            {"utf8": "x", "kind": "k", "headers": {"a": "b"}, "enqueue_at": "2026-01-31T09:00:00+01:00"},
            {"bytes": "eQ=="},
        ],
        "idempotency_key": "key",
    }


def test_fields_that_are_not_given_are_left_to_the_server() -> None:
    assert sent(protocol.create_queue("q", None, None, None, None, None)) == {"queue_name": "q"}
    assert sent(protocol.create_queue("q", 4, timedelta(seconds=90), 0, "d", "r")) == {
        "queue_name": "q",
        "requested_partitions": 4,
        "lease_timeout": "1m30s",
        "max_attempts": 0,
        "dead_queue": "d",
        "reference": "r",
    }
    assert sent(protocol.complete("q", [], ["q.0.L1"], None)) == {"queue_name": "q", "lease_ids": ["q.0.L1"]}
    assert sent(protocol.retry("q", ["a.0.1", Retry("a.0.2", retry_after="5s"), Retry("a.0.3", dead=True, reason="no")], None))[
        "items"
    ] == [
        {"id": "a.0.1"},
        {"id": "a.0.2", "retry_after": "5s"},
        {"id": "a.0.3", "dead": True, "reason": "no"},
    ]
    assert sent(protocol.settle("q", [Verdict("a.0.1", "retry", retry_after=timedelta(minutes=1))], None))["items"] == [
        {"id": "a.0.1", "outcome": "retry", "retry_after": "1m"}
    ]


def test_an_arrow_produce_has_its_fields_in_the_query() -> None:
    call = protocol.produce_stream("q", b"stream", "5s", protocol.Key("a/b c", "g", 3))
    assert call.path == (
        "/v1/queue.produce?queue_name=q&request_timeout=5s&idempotency_key=a%2Fb+c&idempotency_group=g&idempotency_sequence=3"
    )
    assert (call.body, call.request_timeout, call.content_type) == (b"stream", 5_000, "application/vnd.apache.arrow.stream")


@pytest.mark.parametrize(
    "build",
    [
        lambda: protocol.produce("q", "hello", None, protocol.Key()),
        lambda: protocol.complete("q", "a.0.1", [], None),
        lambda: protocol.extend("q", "a.0.L1", None, None),
        lambda: protocol.lease("q", "c", 1, "5 seconds", None, None, None),
        lambda: protocol.produce("q", [Item("x", enqueue_at=datetime(2026, 1, 31))], None, protocol.Key()),  # noqa: DTZ001
    ],
)
def test_what_would_be_misunderstood_is_refused_before_sending(build: object) -> None:
    assert callable(build)
    with pytest.raises(SluicewayError) as raised:
        build()
    assert raised.value.code == "invalid_request"
    assert raised.value.field is not None


def test_what_may_be_repeated() -> None:
    repeatable: list[Call[Any]] = [
        protocol.produce("q", ["x"], None, protocol.Key("key")),
        protocol.lease("q", "c", 1, "0s", None, None, "key"),
        protocol.complete("q", ["a.0.1"], [], None),
        protocol.retry("q", ["a.0.1"], None),
        protocol.extend("q", ["a.0.L1"], None, None),
        protocol.settle("q", [], None),
        protocol.peek("q", 10, None, None, None),
        protocol.stats("q"),
        protocol.queue_info("q"),
        protocol.list_queues(None, None),
    ]
    once: list[Call[Any]] = [
        protocol.produce("q", ["x"], None, protocol.Key()),
        protocol.lease("q", "c", 1, "0s", None, None, None),
        protocol.create_queue("q", None, None, None, None, None),
        protocol.delete_queue("q", False),
    ]
    assert all(call.repeatable for call in repeatable)
    assert not any(call.repeatable for call in once)


def test_answers_are_read_with_their_types_and_unknown_fields_are_passed_over() -> None:
    produced = protocol.produce("q", ["x"], None, protocol.Key()).read(
        b'{"queue_name":"q","partition":2,"first_id":"k7f3q2ma.2.98","count":3,"deduplicated":true,"new":1}'
    )
    assert produced.ids == ["k7f3q2ma.2.98", "k7f3q2ma.2.99", "k7f3q2ma.2.100"]
    assert produced.deduplicated
    leased = protocol.lease("q", "c", 1, "0s", None, None, None).read(
        b'{"queue_name":"q","partition":0,"leases":[{"lease_id":"k.0.L1","partition":0,"count":1,"lease_deadline":"2026-01-31T08:00:00Z"}],'
        b'"items":[{"id":"k.0.1","origin":"k.0.0","partition":0,"lease_id":"k.0.L1","lease_deadline":"2026-01-31T08:00:00Z","attempts":2,'
        b'"enqueued_at":"2026-01-31T07:00:00.250Z","kind":null,"headers":{"a":"b"},"bytes":"/wA="}]}'
    )
    (item,) = leased
    assert (item.payload, item.attempts, item.headers) == (b"\xff\x00", 2, {"a": "b"})
    assert item.enqueued_at == datetime(2026, 1, 31, 7, 0, 0, 250_000, tzinfo=UTC)
    assert (leased.ids, leased.lease_ids, leased.leases[0].lease_deadline.hour) == (["k.0.1"], ["k.0.L1"], 8)
    assert len(protocol.lease("q", "c", 1, "0s", None, None, None).read(b'{"queue_name":"q","partition":null,"leases":[],"items":[]}')) == 0


def test_a_problem_keeps_all_that_the_server_said() -> None:
    error = protocol.read_problem(
        409, b'{"status":409,"code":"brand_new","title":"T","detail":"why","retryable":true,"field":"items","request_id":"r1"}'
    )
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(each, CallError)
        assert (each.code, each.detail, each.retryable, each.field, each.request_id) == ("brand_new", "why", True, "items", "r1")
        assert (each.kind.status, each.kind.title, str(each)) == (409, "T", "why")


@pytest.mark.parametrize(
    ("status", "code"),
    [(502, "outcome_unknown"), (503, "outcome_unknown"), (504, "outcome_unknown"), (404, "not_found"), (302, "not_found")],
)
@pytest.mark.parametrize("body", [b"<html>no</html>", b"", b"[]", b"\xff"])
def test_an_error_that_is_not_the_servers_is_not_taken_for_one(status: int, code: str, body: bytes) -> None:
    assert protocol.read_problem(status, body).code == code


# -- repeating ----------------------------------------------------------------------------------------------------------

KEYED = protocol.produce("q", ["x"], None, protocol.Key("key"))
UNKEYED = protocol.produce("q", ["x"], None, protocol.Key())


def error(code: str) -> CallError:
    return CallError(code, code)


@pytest.mark.parametrize("code", sorted(KINDS))
@pytest.mark.parametrize("call", [KEYED, UNKEYED])
def test_only_what_may_help_and_cannot_harm_is_repeated(code: str, call: Call[Any]) -> None:
    repeats = Repeats(call, retry_for=10, started=100)
    surely_nothing = code in ("unavailable", "too_many_requests")
    if surely_nothing or (call.repeatable and code == "outcome_unknown"):
        assert 0 < repeats.pause(error(code), now=100, roll=0.5) < 1
    else:
        with pytest.raises(CallError) as raised:
            repeats.pause(error(code), now=100, roll=0.5)
        assert raised.value.code == code


def test_pauses_grow_are_jittered_and_capped_and_end_in_time() -> None:
    def pauses(roll: float) -> list[float]:
        repeats, taken = Repeats(KEYED, retry_for=60, started=0), list[float]()
        try:
            while True:
                taken.append(repeats.pause(error("unavailable"), sum(taken), roll))
        except CallError:
            return taken

    shortest, longest = pauses(0.0), pauses(1.0)
    assert longest == sorted(longest)
    assert longest[-1] == LONGEST_PAUSE
    assert shortest[:6] == [pause / 2 for pause in longest[:6]]
    assert 60 - 2 * LONGEST_PAUSE < sum(longest) < 60


def test_no_repetition_without_time_for_it() -> None:
    with pytest.raises(CallError, match="unavailable"):
        Repeats(KEYED, retry_for=0, started=5).pause(error("unavailable"), now=5, roll=0)


def test_a_refusal_after_an_unknown_attempt_is_not_reported_as_nothing_done() -> None:
    repeats = Repeats(KEYED, retry_for=1, started=0)
    repeats.pause(error("outcome_unknown"), now=0, roll=0)
    with pytest.raises(CallError, match="an earlier attempt") as raised:
        repeats.pause(error("unavailable"), now=2, roll=0)
    assert raised.value.code == "outcome_unknown"


def test_a_definite_answer_after_an_unknown_attempt_keeps_its_code_and_says_so() -> None:
    repeats = Repeats(KEYED, retry_for=1, started=0)
    repeats.pause(error("outcome_unknown"), now=0, roll=0)
    with pytest.raises(CallError, match="queue_not_found; an earlier attempt") as raised:
        repeats.pause(error("queue_not_found"), now=0.1, roll=0)
    assert raised.value.code == "queue_not_found"
