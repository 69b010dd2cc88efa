"""The client's calls without I/O: what is sent, how answers are read, when a call is repeated."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from sluiceway.client import (
    Backoff,
    CallError,
    Ignored,
    Item,
    Retry,
    SluicewayError,
    Verdict,
    admin_calls,
    item_calls,
    protocol,
    queue_calls,
    rebalance_calls,
)
from sluiceway.client.item_calls import Check
from sluiceway.client.protocol import LONGEST_PAUSE, Call, Repeats
from sluiceway.kernel.errors import KINDS


def sent(call: Call[Any]) -> dict[str, object]:
    body = msgspec.json.decode(call.body)
    assert isinstance(body, dict)
    return body


def test_an_item_is_sent_as_text_or_base64_with_what_was_given() -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=timezone(timedelta(hours=1)))
    items: list[Item | bytes | str] = ["é", b"\xff\x00", Item("x", kind="k", headers={"a": "b"}, enqueue_at=at), Item(b"y")]
    body = sent(item_calls.produce("q", items, None, item_calls.Key("key")))
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
    assert sent(queue_calls.create_queue("q", None, {})) == {"queue_name": "q"}
    assert sent(queue_calls.redrive("q", None, None, None, None, False, None)) == {"queue_name": "q"}
    assert sent(queue_calls.pause("q", None, True)) == {"queue_name": "q"}
    assert sent(item_calls.complete("q", [], ["q.0.L1"], None, Check())) == {"queue_name": "q", "lease_ids": ["q.0.L1"]}
    assert sent(item_calls.retry("q", ["a.0.1", Retry("a.0.2", retry_after="5s"), Retry("a.0.3", dead=True, reason="no")], None, Check()))[
        "items"
    ] == [
        {"id": "a.0.1"},
        {"id": "a.0.2", "retry_after": "5s"},
        {"id": "a.0.3", "dead": True, "reason": "no"},
    ]
    assert sent(item_calls.settle("q", [Verdict("a.0.1", "retry", retry_after=timedelta(minutes=1))], None))["items"] == [
        {"id": "a.0.1", "outcome": "retry", "retry_after": "1m"}
    ]


def test_a_setting_that_is_none_is_sent_as_null_and_one_that_is_not_given_is_not_sent() -> None:
    settings: queue_calls.Settings = {
        "lease_timeout": timedelta(seconds=90),
        "max_attempts": 0,
        "dead_queue": None,
        "retry_backoff": Backoff("1s", "10m"),
        "write_timeout": None,
        "reference": "r",
    }
    written = {
        "lease_timeout": "1m30s",
        "max_attempts": 0,
        "dead_queue": None,
        "retry_backoff": {"first": "1s", "most": "10m"},
        "write_timeout": None,
        "reference": "r",
    }
    assert sent(queue_calls.create_queue("q", 4, settings)) == {"queue_name": "q", "requested_partitions": 4, **written}
    assert sent(queue_calls.update_queue("q", 7, settings)) == {"queue_name": "q", "version": 7, **written}
    assert sent(queue_calls.update_queue("q", None, {"dead_queue": None})) == {"queue_name": "q", "dead_queue": None}


def test_what_a_call_on_leased_items_insists_on_is_sent_with_it() -> None:
    calls: list[tuple[Call[Any], dict[str, object]]] = [
        (item_calls.complete("q", ["a.0.1"], [], None, Check("c", True)), {"ids": ["a.0.1"]}),
        (item_calls.release("q", [], ["a.0.L1"], None, Check("c", True)), {"lease_ids": ["a.0.L1"]}),
        (item_calls.retry("q", ["a.0.1"], None, Check("c", True)), {"items": [{"id": "a.0.1"}]}),
        (
            item_calls.extend("q", ["a.0.L1"], ["a.0.1"], "5s", None, Check("c", True)),
            {"lease_ids": ["a.0.L1"], "ids": ["a.0.1"], "lease_timeout": "5s"},
        ),
    ]
    for call, fields in calls:
        assert sent(call) == {"queue_name": "q", "client_id": "c", "strict": True, **fields}


def test_calls_on_queues_are_written_as_the_api_says() -> None:
    calls: list[tuple[Call[Any], str, dict[str, object]]] = [
        (queue_calls.pause("q", ["lease"], True), "pause", {"verbs": ["lease"]}),
        (queue_calls.pause("q", ["produce"], False), "resume", {"verbs": ["produce"]}),
        (queue_calls.clear("q", True, True, "5s"), "clear", {"ready": True, "scheduled": True, "request_timeout": "5s"}),
        (
            queue_calls.redrive("q", "t", 5, "r", "s", True, timedelta(seconds=1)),
            "redrive",
            {"target": "t", "limit": 5, "reason": "r", "source": "s", "dry_run": True, "request_timeout": "1s"},
        ),
        (item_calls.explain("q", "a.0.1"), "explain", {"id": "a.0.1"}),
    ]
    for call, name, fields in calls:
        assert (call.path, sent(call)) == (f"/v1/queue.{name}", {"queue_name": "q", **fields})


def test_an_arrow_produce_has_its_fields_in_the_query() -> None:
    call = item_calls.produce_stream("q", b"stream", "5s", item_calls.Key("a/b c", "g", 3))
    assert call.path == (
        "/v1/queue.produce?queue_name=q&request_timeout=5s&idempotency_key=a%2Fb+c&idempotency_group=g&idempotency_sequence=3"
    )
    assert (call.body, call.request_timeout, call.content_type) == (b"stream", 5_000, "application/vnd.apache.arrow.stream")


@pytest.mark.parametrize(
    "build",
    [
        lambda: item_calls.produce("q", "hello", None, item_calls.Key()),
        lambda: item_calls.complete("q", "a.0.1", [], None, Check()),
        lambda: item_calls.release("q", [], "a.0.L1", None, Check()),
        lambda: item_calls.extend("q", "a.0.L1", [], None, None, Check()),
        lambda: item_calls.extend("q", [], "a.0.1", None, None, Check()),
        lambda: queue_calls.pause("q", "lease", True),  # type: ignore[arg-type]
        lambda: queue_calls.clear("q", True, False, "5 seconds"),
        lambda: item_calls.lease("q", "c", 1, "5 seconds", None, None, None),
        lambda: item_calls.produce("q", [Item("x", enqueue_at=datetime(2026, 1, 31))], None, item_calls.Key()),  # noqa: DTZ001
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
        item_calls.produce("q", ["x"], None, item_calls.Key("key")),
        item_calls.lease("q", "c", 1, "0s", None, None, "key"),
        item_calls.complete("q", ["a.0.1"], [], None, Check()),
        item_calls.release("q", ["a.0.1"], [], None, Check("c", strict=True)),
        item_calls.retry("q", ["a.0.1"], None, Check()),
        item_calls.extend("q", ["a.0.L1"], [], None, None, Check()),
        item_calls.settle("q", [], None),
        item_calls.delete_items("q", ["a.0.1"], None),
        item_calls.run_now("q", ["a.0.1"], None),
        item_calls.move_items("q", ["a.0.1"], "other", None),
        item_calls.search("q", {"kind": "k"}, ["ready"], None, 5, False, None),
        item_calls.peek("q", 10, None, None, None),
        item_calls.browse("q", 0, ["ready"], None, 5, False),
        item_calls.explain("q", "a.0.1"),
        queue_calls.stats("q"),
        queue_calls.history("q", None),
        queue_calls.update_queue("q", None, {"reference": ""}),
        queue_calls.pause("q", None, True),
        queue_calls.pause("q", None, False),
        queue_calls.clear("q", True, False, None),
        queue_calls.redrive("q", None, None, None, None, True, None),
        queue_calls.queue_info("q"),
        admin_calls.list_instances(),
        admin_calls.update_instances({"lease_timeout": "5s", "beat_interval": None}, None, None),
        admin_calls.list_rounds(None),
        admin_calls.list_tasks(),
        admin_calls.get_tasks("c"),
        item_calls.explain_partition("q", 0),
        queue_calls.list_queues(None, None),
        queue_calls.list_consumers(None, None, None),
        rebalance_calls.plan_rebalance("q", None),
        rebalance_calls.get_rebalance("7-a"),
        rebalance_calls.list_rebalances(None, False, None, None),
        rebalance_calls.set_partition("q", 0, True),
        rebalance_calls.set_partition("q", 0, False),
        rebalance_calls.pin_partition("q", 0, None, "z"),
        rebalance_calls.unpin_partition("q", 0),
    ]
    once: list[Call[Any]] = [
        item_calls.produce("q", ["x"], None, item_calls.Key()),
        item_calls.lease("q", "c", 1, "0s", None, None, None),
        queue_calls.create_queue("q", None, {}),
        queue_calls.update_queue("q", 7, {"reference": ""}),
        queue_calls.redrive("q", None, None, None, None, False, None),
        queue_calls.delete_queue("q", False),
        rebalance_calls.rebalance("q", 2, "natural", None, "p-1"),
        rebalance_calls.rebalance_many("*", 2, "natural", None),
        rebalance_calls.cancel_rebalance("7-a"),
    ]
    assert all(call.repeatable for call in repeatable)
    assert not any(call.repeatable for call in once)


def test_answers_are_read_with_their_types_and_unknown_fields_are_passed_over() -> None:
    produced = item_calls.produce("q", ["x"], None, item_calls.Key()).read(
        b'{"queue_name":"q","partition":2,"first_id":"k7f3q2ma.2.98","count":3,"deduplicated":true,"new":1}'
    )
    assert produced.ids == ["k7f3q2ma.2.98", "k7f3q2ma.2.99", "k7f3q2ma.2.100"]
    assert produced.deduplicated
    leased = item_calls.lease("q", "c", 1, "0s", None, None, None).read(
        b'{"queue_name":"q","partition":0,"leases":[{"lease_id":"k.0.L1","partition":0,"count":1,"lease_deadline":"2026-01-31T08:00:00Z"}],'
        b'"items":[{"id":"k.0.1","origin":"k.0.0","partition":0,"lease_id":"k.0.L1","lease_deadline":"2026-01-31T08:00:00Z","attempts":2,'
        b'"enqueued_at":"2026-01-31T07:00:00.250Z","kind":null,"headers":{"a":"b"},"bytes":"/wA="}]}'
    )
    (item,) = leased
    assert (item.payload, item.attempts, item.headers) == (b"\xff\x00", 2, {"a": "b"})
    assert item.enqueued_at == datetime(2026, 1, 31, 7, 0, 0, 250_000, tzinfo=UTC)
    assert (leased.ids, leased.lease_ids, leased.leases[0].lease_deadline.hour) == (["k.0.1"], ["k.0.L1"], 8)
    info = queue_calls.queue_info("q").read(
        b'{"queue_name":"q","incarnation":"k","created_at":"2026-01-31T08:00:00Z","updated_at":"2026-01-31T08:00:00Z","version":3,'
        b'"lease_timeout":"1m","max_attempts":0,"requested_partitions":1,"partitions":[{"partition":0,"backend":"b","state":"s"}],'
        b'"retry_backoff":{"first":"1s","most":"10m"},"write_timeout":null,"paused":["lease"]}'
    )
    assert (info.version, info.retry_backoff, info.write_timeout, info.paused) == (3, Backoff("1s", "10m"), None, ["lease"])
    explained = item_calls.explain("q", "k.0.1").read(b'{"id":"k.0.1","state":"scheduled","reason":"why","due_at":"2026-01-31T08:00:00Z"}')
    assert (explained.due_at, explained.lease_id) == (datetime(2026, 1, 31, 8, tzinfo=UTC), None)
    assert (
        len(item_calls.lease("q", "c", 1, "0s", None, None, None).read(b'{"queue_name":"q","partition":null,"leases":[],"items":[]}')) == 0
    )


def test_a_problem_keeps_all_that_the_server_said() -> None:
    error = protocol.read_problem(
        409, b'{"status":409,"code":"brand_new","title":"T","detail":"why","retryable":true,"field":"items","request_id":"r1"}'
    )
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(each, CallError)
        assert (each.code, each.detail, each.retryable, each.field, each.request_id) == ("brand_new", "why", True, "items", "r1")
        assert (each.kind.status, each.kind.title, str(each)) == (409, "T", "why")


def test_stale_ids_come_with_the_error_even_after_an_attempt_in_doubt() -> None:
    stale = protocol.read_problem(
        409, b'{"status":409,"code":"stale_ids","detail":"1 ignored","ignored":[{"id":"a.0.1","reason":"expired"}]}'
    )
    repeats = Repeats(KEYED, retry_for=1, started=0)
    repeats.pause(error("outcome_unknown"), now=0, roll=0)
    with pytest.raises(CallError, match="an earlier attempt") as raised:
        repeats.pause(stale, now=0.1, roll=0)
    for each in (stale, raised.value, pickle.loads(pickle.dumps(stale))):
        assert (each.code, list(each.ignored)) == ("stale_ids", [Ignored(id="a.0.1", reason="expired")])


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "too_many_requests"),
        (408, "outcome_unknown"),
        (500, "outcome_unknown"),
        (502, "outcome_unknown"),
        (503, "outcome_unknown"),
        (504, "outcome_unknown"),
        (524, "outcome_unknown"),
        (404, "not_found"),
        (302, "not_found"),
    ],
)
@pytest.mark.parametrize("body", [b"<html>no</html>", b"", b"[]", b"\xff"])
def test_an_error_that_is_not_the_servers_is_not_taken_for_one(status: int, code: str, body: bytes) -> None:
    error = protocol.read_problem(status, body)
    assert (error.code, error.retryable) == (code, code != "not_found"), "a proxy that is short of something stops no consumer"


# -- repeating ----------------------------------------------------------------------------------------------------------

KEYED = item_calls.produce("q", ["x"], None, item_calls.Key("key"))
UNKEYED = item_calls.produce("q", ["x"], None, item_calls.Key())


def error(code: str) -> CallError:
    return CallError(code, code)


@pytest.mark.parametrize("code", sorted(KINDS))
@pytest.mark.parametrize("call", [KEYED, UNKEYED])
def test_only_what_may_help_and_cannot_harm_is_repeated(code: str, call: Call[Any]) -> None:
    repeats = Repeats(call, retry_for=10, started=100)
    surely_nothing = code in ("unavailable", "storage_full", "queue_paused", "too_many_requests", "rate_limited", "not_here")
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
