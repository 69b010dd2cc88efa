"""The commands on settings, pausing, clearing, release, redrive and explain, against a scripted service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest

from sluiceway.cli import redrive
from sluiceway.cli.stats import binding_limits, open_circuits
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, CircuitBreaker, RetryBackoff
from sluiceway.contract.queue_stats import CircuitStats, LogicalQueueStats, PartitionStats, QueueStats
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import (
    RELEASE,
    Clear,
    Cleared,
    Explanation,
    QueuePatch,
    QueueSpec,
    Redrive,
    Redriven,
    Selection,
    Settled,
)
from tests.cli.cli_shell import Shell
from tests.server.fake_service import NOW, RECORD, FakeService, serving

ITEM, LEASE = "k7f3q2ma.0.7", "k7f3q2ma.2.L4"
SETTINGS = (
    *("--lease-timeout", "90s", "--max-lease-timeout", "1h", "--max-attempts", "2", "--dead-queue", "d", "--expire-timeout", "1d"),
    *("--retry-backoff", "1s", "10m", "--idempotency-window", "1h", "--write-timeout", "2s", "--reference", "mine"),
    *("--logical-queues", "3", "--circuit-breaker", "0.25:7"),
)
MEANT = {
    "lease_timeout": 90_000,
    "max_lease_timeout": 3_600_000,
    "max_attempts": 2,
    "dead_queue": "d",
    "expire_timeout": 86_400_000,
    "retry_backoff": RetryBackoff(1_000, 600_000),
    "circuit_breaker": CircuitBreaker(0.25, 7),
    "idempotency_window": 3_600_000,
    "write_timeout": 2_000,
    "logical_queues": 3,
    "reference": "mine",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(shared: tuple[FakeService, str]) -> FakeService:
    service = shared[0]
    service.record, service.asked, service.script = RECORD, [], []
    return service


@pytest.fixture
def shell(shared: tuple[FakeService, str], monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", shared[1])
    return Shell("q", monkeypatch, capsysbinary)


# -- settings -------------------------------------------------------------------------------------------------------------


def test_every_setting_can_be_created_and_updated(service: FakeService, shell: Shell) -> None:
    service.script = [RECORD, msgspec.structs.replace(RECORD, version=5)]
    assert shell.says("queue", "create", "q", "--partitions", "3", *SETTINGS) == (
        "Created q with 3 partitions. No limit of attempts; retries at once; dead items are dropped.\n"
    )
    assert shell.says("queue", "update", "q", *SETTINGS, "--if-version", "4") == "Updated q to version 5\n"
    assert service.asked == [QueueSpec("q", 3, **MEANT), QueuePatch(MEANT, 4)]  # type: ignore[arg-type]


def test_an_update_says_only_what_was_typed(service: FakeService, shell: Shell) -> None:
    service.script = [RECORD, RECORD]
    shell.says("queue", "update", "q", "--no-dead-queue", "--no-retry-backoff", "--no-write-timeout", "--no-logical-queues")
    (shown,) = shell.json("queue", "update", "q", "--max-attempts", "0")
    assert service.asked == [
        QueuePatch({"dead_queue": None, "retry_backoff": None, "write_timeout": None, "logical_queues": None}),
        QueuePatch({"max_attempts": 0}),
    ]
    assert (shown["queue_name"], shown["version"]) == ("q", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("queue", "update", "q"), "at least one setting"),
        (("queue", "update", "q", "--if-version", "3"), "at least one setting"),
        (("queue", "update", "q", "--dead-queue", "d", "--no-dead-queue"), "--dead-queue and --no-dead-queue exclude each other"),
        (("queue", "update", "q", "--retry-backoff", "1s", "5s", "--no-retry-backoff"), "exclude each other"),
        (("queue", "update", "q", "--retry-backoff", "1s", "long"), "'long' is not a duration"),
        (("queue", "update", "q", "--retry-backoff", "1s"), "requires 2 arguments"),
        (("queue", "update", "q", "--circuit-breaker", "50%"), "'50%' is not a circuit breaker"),
        (("queue", "update", "q", "--write-timeout", "2"), "'2' is not a duration"),
        (("queue", "update", "q", "--logical-queues", "0"), "'0' is neither a number of at least 1 nor auto"),
        (("queue", "create", "q", "--logical-queues", "many"), "'many' is neither a number"),
        (("queue", "update", "q", "--logical-queues", "2", "--no-logical-queues"), "exclude each other"),
        (("queue", "clear", "q"), "pass --yes to confirm"),
        (("redrive", "q", "--all", "--limit", "3"), "exclude each other"),
        (("redrive", "q", "--rate", "fast"), "'fast' is not a number of items per second"),
        (("redrive", "q", "--rate", "0/s"), "'0/s' is not a number of items per second"),
        (("redrive", "q", "--limit", "0"), "'--limit': '0' is not a whole number of at least 1"),
        (("queue", "create", "q", "--partitions", "-1"), "'--partitions': '-1' is not a whole number of at least 1"),
        (("queue", "create", "q", "--partitions", "many"), "'--partitions': 'many' is not a whole number of at least 1"),
        (("rebalance", "list", "-n", "101"), "'101' is not a whole number from 1 to 100"),
        (("release", "q"), "pass item ids"),
        (("explain", "q"), "Missing argument 'ID'"),
    ],
)
def test_wrong_usage_is_2_and_asks_nothing(service: FakeService, shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = shell.ends(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert service.asked == []


def test_a_version_that_has_passed_is_3_and_says_what_to_do(service: FakeService, shell: Shell) -> None:
    service.script = [SluicewayError("version_conflict", "it has version 2", "version")]
    code, out, err = shell.ends("queue", "update", "q", "--reference", "", "--if-version", "1")
    assert (code, out) == (3, "")
    assert "it has version 2 (version_conflict)" in err
    assert "sluiceway queue info NAME" in err


def test_info_shows_every_setting(service: FakeService, shell: Shell) -> None:
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in shell.says("queue", "info", "q").splitlines())
    assert (lines["lease timeout"], lines["longest lease"], lines["expiry"]) == ("1m", "30d", "never")
    assert (lines["write timeout"], lines["paused"]) == ("the backend's", "no")
    assert lines["logical queues"] == "one on each instance"
    service.record = msgspec.structs.replace(RECORD, version=7, paused=("produce", "lease"), **MEANT | {"reference": "\x1b[31mmine"})
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in shell.says("queue", "info", "q").splitlines())
    meant = {
        "version": "7",
        "lease timeout": "1m30s",
        "longest lease": "1h",
        "max attempts": "2",
        "dead queue": "d",
        "expiry": "1d",
        "retry back-off": "1s to 10m",
        "circuit breaker": "0.25:7",
        "idempotency window": "1h",
        "write timeout": "2s",
        "logical queues": "3",
        "reference": "\\x1b[31mmine",
    }
    assert {name: lines[name] for name in meant} == meant
    assert {each.label.lower() for each in QUEUE_SETTINGS.values()} <= set(lines)
    assert lines["paused"] == "produce and lease"
    (shown,) = shell.json("queue", "info", "q")
    assert (shown["retry_backoff"], shown["paused"]) == ({"first": "1s", "most": "10m"}, ["produce", "lease"])


# -- pause, clear ---------------------------------------------------------------------------------------------------------


def test_pause_and_resume(service: FakeService, shell: Shell) -> None:
    assert shell.says("queue", "pause", "q", "--lease") == "Paused q: lease\n"
    assert shell.says("queue", "pause", "q") == "Paused q: produce and lease\n"
    assert shell.json("queue", "resume", "q", "--lease")[0]["paused"] == ["produce"]
    assert shell.says("queue", "resume", "q", "--produce", "--lease") == "Resumed q\n"
    service.script = [SluicewayError("queue_paused", "q is paused for produce")]
    code, _, err = shell.ends("produce", "q", "x")
    assert code == 4
    assert "sluiceway queue resume NAME" in err


def test_clear_says_what_it_dropped(service: FakeService, shell: Shell) -> None:
    service.script = [Cleared(1_234), Cleared(1, 2), Cleared(3, 4)]
    assert shell.says("queue", "clear", "q", "--yes") == "Dropped 1,234 ready\n"
    assert shell.says("queue", "clear", "q", "--yes", "--scheduled") == "Dropped 1 ready and 2 scheduled\n"
    assert shell.json("queue", "clear", "q", "--yes", "--scheduled") == [{"ready": 3, "scheduled": 4}]
    assert service.asked == [Clear(30_000), Clear(30_000, scheduled=True), Clear(30_000, scheduled=True)]


def test_clear_asks_on_a_terminal(service: FakeService, shell: Shell) -> None:
    service.script = [Cleared(5)]
    code, out, err = shell.ends("queue", "clear", "q", stdin=b"n\n", terminal=True)
    assert (code, out, service.asked) == (0, "", [])
    assert "Permanently drop all waiting items of q?" in err
    assert "Nothing dropped" in err
    code, out, _ = shell.ends("queue", "clear", "q", stdin=b"y\n", terminal=True)
    assert (code, out) == (0, "Dropped 5 ready\n")
    assert shell.ends("queue", "clear", "q", stdin=b"", terminal=True)[0] == 130


# -- release, explain -----------------------------------------------------------------------------------------------------


def test_release(service: FakeService, shell: Shell) -> None:
    service.script = [Settled(released=2), Settled(released=1, ignored=[(ITEM, "completed")]), Settled(released=1)]
    text = shell.says("release", "q", "-", "--lease", LEASE, stdin=f"{ITEM}\nk7f3q2ma.0.9\n".encode())
    assert text == f"Released 3\nignored {ITEM}: completed\n"
    assert shell.json("release", "q", ITEM) == [{"released": 1, "ignored": []}]
    whole, items, _ = (asked.selections for asked in service.asked)  # type: ignore[attr-defined]
    assert whole == {2: [Selection(RELEASE, lease=4)]}
    assert (items[0][0].disposition, items[0][0].offsets.tolist()) == (RELEASE, [7, 9])


def test_a_release_that_fails_half_way_says_how_far_it_came(service: FakeService, shell: Shell) -> None:
    service.script = [Settled(released=2), SluicewayError("unavailable", "partition 0 is not open")]
    code, out, err = shell.ends("release", "q", ITEM, "--lease", LEASE)
    assert (code, out) == (4, "")
    assert "2 items were released before this error; repeating the command is safe" in err


def test_explain(service: FakeService, shell: Shell) -> None:
    told = Explanation("leased", "\x1b[31mc has it", attempts=2, lease=4, client_id="c", lease_deadline=NOW)
    service.script = [told, told, Explanation("ready", "next", ahead=0)]
    text = shell.says("explain", "q", ITEM)
    lines = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())
    assert lines == {
        "item": ITEM,
        "state": "leased",
        "why": "\\x1b[31mc has it",
        "attempts": "2",
        "lease": "k7f3q2ma.0.L4",
        "leased by": "c",
        "leased until": "2023-11-14 22:13:20 UTC",
    }
    (shown,) = shell.json("explain", "q", ITEM)
    assert (shown["id"], shown["lease_id"], "due_at" in shown) == (ITEM, "k7f3q2ma.0.L4", False)
    assert re.search(r"(?m)^ready items ahead +0 *$", shell.says("explain", "q", ITEM))
    code, _, err = shell.ends("explain", "q", "nonsense")
    assert code == 3
    assert "'nonsense' is not an item id" in err


# -- redrive --------------------------------------------------------------------------------------------------------------


def test_redrive_passes_on_what_was_typed(service: FakeService, shell: Shell) -> None:
    service.script = [Redriven(3, 0, {"a": 2, "b": 1})]
    options = ("--to", "t", "--reason", "bad", "--source", "s", "--limit", "70000", "--dry-run")
    assert shell.says("redrive", "q", *options) == "Would send back 3\n2 to a\n1 to b\n"
    assert service.asked == [Redrive(30_000, 10_000, "t", "bad", "s", dry_run=True)]


def test_redrive_goes_on_until_its_limit(service: FakeService, shell: Shell) -> None:
    service.script = [
        Redriven(1_000, 999, {"a": 999}),
        Redriven(300, 300, {"b": 300}),
        Redriven(1_000, 1_000, {"a": 1_000}),
        Redriven(200, 200),
    ]
    assert shell.says("redrive", "q", "--limit", "2500") == "Sent back 2,499; 1 still in transit\n1,999 to a\n300 to b\n"
    assert [asked.limit for asked in service.asked] == [1_000, 1_000, 1_000, 200]  # type: ignore[attr-defined]


def test_redrive_ends_when_nothing_is_left(service: FakeService, shell: Shell) -> None:
    service.script = [Redriven(4, 4, {"a": 4}), Redriven()]
    assert shell.json("redrive", "q") == [{"matched": 4, "redriven": 4, "targets": {"a": 4}}]
    assert [asked.limit for asked in service.asked] == [1_000, 996]  # type: ignore[attr-defined]


def test_redrive_all_is_what_is_ready_at_its_beginning(service: FakeService, shell: Shell) -> None:
    """An item that dies again at once must not go round for ever."""
    ready = LogicalQueueStats(partitions=[PartitionStats(partition=0, ready=700), PartitionStats(partition=1, ready=800, total_leased=9)])
    service.script = [ready, Redriven(1_000, 1_000), Redriven(500, 500), LogicalQueueStats(partitions=[])]
    assert shell.says("redrive", "q", "--all") == "Sent back 1,500\n"
    assert [asked.limit for asked in service.asked[1:]] == [1_000, 500]  # type: ignore[attr-defined]
    assert shell.says("redrive", "q", "--all") == "Sent back 0\n"


def test_redrive_keeps_its_rate(service: FakeService, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(redrive, "monotonic", lambda: 0.0)
    monkeypatch.setattr(redrive, "sleep", pauses.append)
    service.script = [Redriven(20, 20), Redriven(10, 10), Redriven(5, 5)]
    assert shell.says("redrive", "q", "--limit", "35", "--rate", "20/s") == "Sent back 35\n"
    assert [asked.limit for asked in service.asked] == [20, 15, 5]  # type: ignore[attr-defined]
    assert pauses == [1.0, 0.5]


def test_a_redrive_that_fails_half_way_says_how_far_it_came(service: FakeService, shell: Shell) -> None:
    service.script = [Redriven(1_000, 1_000, {"a": 1_000}), SluicewayError("outcome_unknown", "nobody knows")] * 2
    code, out, err = shell.ends("redrive", "q", "--limit", "5000")
    assert (code, out) == (5, "")
    assert "1,000 items were sent back before this" in err
    code, out, err = shell.ends("redrive", "q", "--limit", "5000", "--json")
    assert (json.loads(err)["code"], json.loads(err)["done"][:5]) == ("outcome_unknown", "1,000")


# -- circuit breaker ------------------------------------------------------------------------------------------------------


def test_stats_say_which_circuit_breakers_are_open_and_until_when() -> None:
    since, until = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 7, tzinfo=UTC)
    circuits = [
        CircuitStats(state="open", since=since, until=until),
        CircuitStats(state="half_open", since=since),
        CircuitStats(state="closed"),
    ]
    shares = [LogicalQueueStats(instance=name, circuit=each) for name, each in zip("abc", circuits, strict=True)]
    assert open_circuits(QueueStats(queue_name="q", logical_queues=shares)) == [
        "Circuit open on a since 2026-01-02 03:04:05 UTC: too many items fail; next probes at 2026-01-02 03:04:07 UTC",
        "Circuit open on b since 2026-01-02 03:04:05 UTC: too many items fail; probes are under way",
    ]
    (line,) = open_circuits(QueueStats(queue_name="q", logical_queues=shares[:1]))
    assert line.startswith("Circuit open since")


def test_stats_say_where_consumers_wait_for_a_limit_of_the_queue() -> None:
    alone = LogicalQueueStats(instance="a", limited_by="rate", lease_waiting=3)
    assert binding_limits(QueueStats(queue_name="q", logical_queues=[alone])) == ["At the queue's rate: 3 waiting consumers"]
    both = QueueStats(queue_name="q", logical_queues=[alone, LogicalQueueStats(instance="b")])
    assert binding_limits(both) == ["At the queue's rate on a: 3 waiting consumers"]
