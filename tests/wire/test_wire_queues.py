"""Calls on queues as a whole, and the answers to them: what is taken, what is refused by name, what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, CircuitBreaker, RetryBackoff
from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats, QueueStats
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import format_duration, format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId
from sluiceway.kernel.limits import KEY_WINDOW, MAX_LEASE_TIMEOUT, MAX_REQUEST_TIMEOUT, MAX_SCHEDULE, MAX_TEXT_BYTES, MIN_KEY_WINDOW
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Explanation,
    Extended,
    LeaseInfo,
    QueuePatch,
    QueueSpec,
    Redrive,
    Redriven,
    Settled,
)
from sluiceway.wire import answers, json_items, json_queues

NOW = 1_700_000_000_000
RECORD = QueueRecord("q", "k7f3q2ma", NOW, NOW, tuple(PartitionRecord(n) for n in range(3)))
LONG = "x" * (MAX_TEXT_BYTES + 1)
SECOND = {"first": "1s", "most": "10m"}


def decode(decoder: Callable[[bytes], Any], **fields: object) -> Any:
    return decoder(msgspec.json.encode({"queue_name": "q", **fields}))


def create(**fields: object) -> Callable[[], QueueSpec]:
    return lambda: decode(json_queues.decode_create, **fields).spec()


def update(**fields: object) -> Callable[[], QueuePatch]:
    return lambda: decode(json_queues.decode_update, **fields).patch()


def clear(**fields: object) -> Callable[[], Clear]:
    return lambda: decode(json_queues.decode_clear, **fields).request()


def redrive(**fields: object) -> Callable[[], Redrive]:
    return lambda: decode(json_queues.decode_redrive, **fields).request()


def pause(**fields: object) -> Callable[[], Any]:
    return lambda: decode(json_queues.decode_pause, **fields).wanted()


def explain(**fields: object) -> Callable[[], ItemId]:
    return lambda: decode(json_items.decode_explain, **fields).item()


SETTINGS_REFUSED: list[tuple[dict[str, object], str]] = [
    ({"lease_timeout": "0s"}, "lease_timeout"),
    ({"lease_timeout": 60}, "lease_timeout"),
    ({"lease_timeout": "31d"}, "lease_timeout"),
    ({"max_lease_timeout": "0s"}, "max_lease_timeout"),
    ({"max_lease_timeout": "31d"}, "max_lease_timeout"),
    ({"max_attempts": -1}, "max_attempts"),
    ({"max_attempts": 10**12}, "max_attempts"),
    ({"max_attempts": "3"}, "max_attempts"),
    ({"dead_queue": ""}, "dead_queue"),
    ({"dead_queue": "a/b"}, "dead_queue"),
    ({"expire_timeout": "-1s"}, "expire_timeout"),
    ({"expire_timeout": "367d"}, "expire_timeout"),
    ({"retry_backoff": "1s"}, "retry_backoff"),
    ({"retry_backoff": {"first": "1s"}}, "retry_backoff.most"),
    ({"retry_backoff": {"first": "1s", "most": "2s", "factor": 3}}, "retry_backoff.factor"),
    ({"retry_backoff": {"first": 1, "most": "2s"}}, "retry_backoff.first"),
    ({"retry_backoff": {"first": "0s", "most": "2s"}}, "retry_backoff.first"),
    ({"retry_backoff": {"first": "1s", "most": "367d"}}, "retry_backoff.most"),
    ({"retry_backoff": {"first": "1s", "most": "999ms"}}, "retry_backoff.first"),
    ({"circuit_breaker": 0.5}, "circuit_breaker"),
    ({"circuit_breaker": {"failures": 5}}, "circuit_breaker.failure_rate"),
    ({"circuit_breaker": {"failure_rate": 1.0}}, "circuit_breaker.failure_rate"),
    ({"circuit_breaker": {"failure_rate": 0.5, "failures": 0}}, "circuit_breaker.failures"),
    ({"circuit_breaker": {"failure_rate": 0.5, "minimum": 5}}, "circuit_breaker.minimum"),
    ({"idempotency_window": "9m"}, "idempotency_window"),
    ({"idempotency_window": "24h1ms"}, "idempotency_window"),
    ({"write_timeout": "0s"}, "write_timeout"),
    ({"write_timeout": "16m"}, "write_timeout"),
    ({"logical_queues": 0}, "logical_queues"),
    ({"logical_queues": 1_001}, "logical_queues"),
    ({"logical_queues": 1.5}, "logical_queues"),
    ({"logical_queues": True}, "logical_queues"),
    ({"logical_queues": "many"}, "logical_queues"),
    ({"reference": LONG}, "reference"),
    ({"colour": "red"}, "colour"),
]

REFUSED: list[tuple[Callable[[], object], str]] = [
    *((call(**fields), field) for fields, field in SETTINGS_REFUSED for call in (create, update)),
    (create(queue_name="a/b"), "queue_name"),
    (create(requested_partitions=0), "requested_partitions"),
    (create(requested_partitions=1_001), "requested_partitions"),
    (create(version=1), "version"),
    (create(lease_timeout="61s", max_lease_timeout="1m"), "lease_timeout"),
    (create(max_lease_timeout="59s"), "max_lease_timeout"),
    (update(queue_name="a/b", reference=""), "queue_name"),
    (update(reference="", version=-1), "version"),
    (update(reference="", version="1"), "version"),
    *((update(reference="", **{name: 1}), name) for name in json_queues._FIXED),
    (lambda: json_queues.decode_update(b'{"reference":""}'), "queue_name"),
    (pause(verbs=[]), "verbs"),
    (pause(verbs=["eat"]), "verbs[0]"),
    (pause(verbs="produce"), "verbs"),
    (clear(ready=False), "ready"),
    (clear(ready=1), "ready"),
    (clear(request_timeout="16m"), "request_timeout"),
    (redrive(limit=0), "limit"),
    (redrive(limit=10_001), "limit"),
    (redrive(target="a/b"), "target"),
    (redrive(target="q"), "target"),
    (redrive(source=""), "source"),
    (redrive(reason=""), "reason"),
    (redrive(reason=LONG), "reason"),
    (redrive(dry_run="no"), "dry_run"),
    (redrive(request_timeout="16m"), "request_timeout"),
    (explain(), "id"),
    (explain(id="nonsense"), "id"),
    (explain(id="k7f3q2ma.0.L1"), "id"),
    (lambda: json_queues.decode_list(b'{"limit":0}'), "limit"),
]


@pytest.mark.parametrize(("request_of", "field"), REFUSED, ids=[f"{n}-{field}" for n, (_, field) in enumerate(REFUSED)])
def test_refusal_names_its_field(request_of: Callable[[], object], field: str) -> None:
    with pytest.raises(SluicewayError) as caught:
        request_of()
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    assert field in caught.value.detail


def test_what_cannot_be_changed_is_not_called_misspelt() -> None:
    with pytest.raises(SluicewayError, match="cannot be changed"):
        update(partitions=[])()
    with pytest.raises(SluicewayError, match="unknown field"):
        update(requested_partition=4)()


@pytest.mark.parametrize("fields", [{}, {"version": 3}])
def test_an_update_of_nothing_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SluicewayError, match="nothing to change") as caught:
        update(**fields)()
    assert caught.value.code == "invalid_request"


def test_defaults_are_those_of_the_documents() -> None:
    assert create()() == QueueSpec("q")
    assert clear()() == Clear(30_000, ready=True, scheduled=False)
    assert redrive()() == Redrive(30_000, 1_000)
    assert pause()() == ("produce", "lease")
    assert pause(verbs=["lease", "lease"])() == ("lease",)
    assert redrive(target="t", limit=10_000, reason="r", source="s", dry_run=True, request_timeout="1s")() == Redrive(
        1_000, 10_000, "t", "r", "s", True
    )
    assert explain(id="k7f3q2ma.2.7")() == ItemId("k7f3q2ma", 2, 7)


def test_an_update_says_what_was_named_and_null_is_the_default() -> None:
    assert update(version=4, max_attempts=3, write_timeout="2s")() == QueuePatch({"max_attempts": 3, "write_timeout": 2_000}, 4)
    names = QUEUE_SETTINGS
    assert update(**dict.fromkeys(names))().settings == {name: getattr(QueueSpec("q"), name) for name in names}
    assert update(dead_queue=None)() == QueuePatch({"dead_queue": None})


durations = st.integers(1, MAX_SCHEDULE)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "lease_timeout": st.integers(1, MAX_LEASE_TIMEOUT),
            "max_attempts": st.integers(0, 1_000_000_000),
            "dead_queue": st.none() | st.from_regex(r"[a-z0-9_]{1,9}", fullmatch=True),
            "expire_timeout": st.integers(0, MAX_SCHEDULE),
            "retry_backoff": st.none() | st.tuples(durations, durations).map(lambda pair: RetryBackoff(min(pair), max(pair))),
            "circuit_breaker": st.none() | st.builds(CircuitBreaker, st.floats(0.01, 0.99), st.integers(1, 1_000_000)),
            "idempotency_window": st.integers(MIN_KEY_WINDOW, KEY_WINDOW),
            "write_timeout": st.none() | st.integers(1, MAX_REQUEST_TIMEOUT),
            "logical_queues": st.none() | st.integers(1, 1_000) | st.just("auto"),
            "reference": st.text(max_size=20),
        },
    )
)
def test_settings_come_back_as_they_are_shown(settings: dict[str, Any]) -> None:
    """What `queues.info` shows makes the same queue, created or updated."""
    record = msgspec.structs.replace(RECORD, **settings)
    shown = json.loads(answers.encode(answers.queue_info(record, lambda record, partition: None)))
    fields = {name: shown[name] for name in QUEUE_SETTINGS}
    spec = create(**fields)()
    assert spec == msgspec.structs.replace(QueueSpec("q"), **settings)
    assert msgspec.structs.replace(RECORD, **update(**fields)().settings) == record


@given(st.dictionaries(st.sampled_from([*QUEUE_SETTINGS, "version"]), st.none() | st.integers() | st.text(max_size=5) | st.booleans()))
def test_settings_of_any_kind_are_taken_or_refused_by_name(fields: dict[str, object]) -> None:
    try:
        patch = update(**fields)()
    except SluicewayError as error:
        assert error.code == "invalid_request"
        assert error.field in (None, *fields)
    else:
        assert set(patch.settings) == set(fields) - {"version"} != set()


# -- answers ----------------------------------------------------------------------------------------------------------


def test_queue_info_shows_every_setting() -> None:
    record = msgspec.structs.replace(RECORD, retry_backoff=RetryBackoff(1_000, 600_000), write_timeout=2_500, paused=("lease",), version=7)
    owners = {0: Peer("i-1", "http://i-1"), 1: Peer("alone", "")}
    shown = json.loads(answers.encode(answers.queue_info(record, lambda record, partition: owners.get(partition))))
    assert shown == {
        "queue_name": "q",
        "incarnation": "k7f3q2ma",
        "created_at": format_time(NOW),
        "updated_at": format_time(NOW),
        "version": 7,
        **{name: each.text(each.default) for name, each in QUEUE_SETTINGS.items()},
        "retry_backoff": SECOND,
        "write_timeout": "2s500ms",
        "paused": ["lease"],
        "requested_partitions": 3,
        "partitions": [
            {"partition": n, "backend": "default", "state": "available", "parents": [], "owner": owner, "address": address}
            for n, (owner, address) in enumerate([("i-1", "http://i-1"), ("alone", None), (None, None)])
        ],
        "rebalance": None,
    }
    assert format_duration(MAX_LEASE_TIMEOUT) == "30d"


def test_an_explanation_leaves_out_what_does_not_apply() -> None:
    item = ItemId("k7f3q2ma", 1, 5)
    plain = json.loads(answers.explained(item, Explanation("ready", "soon", ahead=0, attempts=0)))
    assert plain == {"id": "k7f3q2ma.1.5", "state": "ready", "reason": "soon", "ahead": 0, "attempts": 0}
    leased = Explanation("leased", "held", attempts=2, due_at=NOW, expires_at=NOW, lease=3, client_id="c", lease_deadline=NOW + 1)
    assert json.loads(answers.explained(item, leased)) == {
        "id": "k7f3q2ma.1.5",
        "state": "leased",
        "reason": "held",
        "attempts": 2,
        "due_at": format_time(NOW),
        "expires_at": format_time(NOW),
        "lease_id": "k7f3q2ma.1.L3",
        "client_id": "c",
        "lease_deadline": format_time(NOW + 1),
    }


def test_counts() -> None:
    assert json.loads(answers.cleared(Cleared(3, 4))) == {"ready": 3, "scheduled": 4}
    assert json.loads(answers.redriven(Redriven(5, 4, {"a": 4}))) == {"matched": 5, "redriven": 4, "targets": {"a": 4}}
    part = PartitionStats(partition=2, backend="b", commit_time_ms=1.235, degraded=True, released=1, cleared=2, redriven=3)
    shares = [
        LogicalQueueStats(instance="i-1", produce_waiting=1, lease_waiting=2, complete_waiting=3, in_flight=4, partitions=[part]),
        LogicalQueueStats(partitions=[PartitionStats(partition=0, state="unavailable")]),
    ]
    (first, nobodys) = json.loads(answers.encode(QueueStats(queue_name="q", logical_queues=shares)))["logical_queues"]
    waiting = ("instance", "produce_waiting", "lease_waiting", "complete_waiting", "in_flight")
    assert [first[name] for name in waiting] == ["i-1", 1, 2, 3, 4]
    assert (nobodys["instance"], [each["state"] for each in nobodys["partitions"]]) == (None, ["unavailable"])
    (shown,) = first["partitions"]
    assert {name: shown[name] for name in ("backend", "commit_time_ms", "degraded", "released", "cleared", "redriven")} == {
        "backend": "b",
        "commit_time_ms": 1.235,
        "degraded": True,
        "released": 1,
        "cleared": 2,
        "redriven": 3,
    }


IGNORED: list[tuple[str, IgnoredReason]] = [(f"k7f3q2ma.0.{n}", "expired") for n in range(2_000)]


@pytest.mark.parametrize(
    "render",
    [
        lambda ignored, strict: answers.completed(Settled(completed=1, ignored=ignored), strict),
        lambda ignored, strict: answers.retried(Settled(retried=1, ignored=ignored), strict),
        lambda ignored, strict: answers.released(Settled(released=1, ignored=ignored), strict),
        lambda ignored, strict: answers.extended(RECORD, Extended([LeaseInfo(0, 1, 1, NOW)], ignored), strict),
    ],
    ids=["complete", "retry", "release", "extend"],
)
def test_strict_makes_an_error_of_what_was_ignored(render: Callable[[list[tuple[str, IgnoredReason]], bool], bytes]) -> None:
    assert json.loads(render([], True))["ignored"] == []
    assert json.loads(render(IGNORED[:1], False))["ignored"] == [{"id": "k7f3q2ma.0.0", "reason": "expired"}]
    with pytest.raises(SluicewayError) as caught:
        render(IGNORED, True)
    shown = json.loads(answers.problem(caught.value, "r-1"))
    assert (shown["status"], shown["code"], shown["retryable"]) == (409, "stale_ids", False)
    assert "2,000 ignored: k7f3q2ma.0.0 (expired), k7f3q2ma.0.1 (expired), k7f3q2ma.0.2 (expired), …" in shown["detail"]
    assert shown["ignored"] == [{"id": text, "reason": reason} for text, reason in IGNORED[:1_000]]
    with pytest.raises(SluicewayError, match=r"1 ignored: k7f3q2ma\.0\.0 \(expired\); the call took effect for the others"):
        render(IGNORED[:1], True)
