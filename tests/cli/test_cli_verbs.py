"""Every command against a running server, for people and as JSON. A command without such a test fails the last test here."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest

from sluiceway.client import Client
from sluiceway.contract.problem_answers import Kind
from tests.cli.cli_shell import ARCHIVES, CAPTURES, COPIES, DEMO, JOBS, REBALANCES, REDRIVES, WITHOUT_JSON, Shell, covering, leaves
from tests.cli.test_cli_tasks import KEPT, RECORDS, write_capture
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until

COVERED: set[str] = set()
verb = covering(COVERED)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / "data"


@pytest.fixture(scope="module")
def url(data: Path) -> Iterator[str]:
    with ServerProcess(data) as server:
        yield server.url


@pytest.fixture
def shell(url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", url)
    name = str(request.node.name)[:60]
    with Client(url) as client:
        client.create_queue(f"{name}.dead")
        client.create_queue(name, requested_partitions=2, dead_queue=f"{name}.dead")
    return Shell(name, monkeypatch, capsysbinary)


@contextmanager
def child(shell: Shell, *arguments: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, with pipes. Noted as done if the block ends well."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
    shell.note(*arguments)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def interrupted(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    return process.returncode


# -- queues -----------------------------------------------------------------------------------------------------------


@verb("queue create", "queue list", "queue info", "queue update", "queue delete")
def test_queues(shell: Shell) -> None:
    assert shell.says("queue", "create", "one").startswith("Created one with 1 partition. ")
    assert shell.json("queue", "create", "two", "--partitions", "2")[0]["requested_partitions"] == 2
    assert re.search(r"(?m)^one ", shell.says("queue", "list"))
    assert {"one", "two"} <= {each["queue_name"] for each in shell.json("queue", "list")}
    assert shell.says("queue", "update", "one", "--max-attempts", "3") == "Updated one to version 2\n"
    assert shell.json("queue", "update", "one", "--max-attempts", "4")[0]["max_attempts"] == 4
    assert re.search(r"max attempts +4", shell.says("queue", "info", "one"))
    assert shell.json("queue", "info", "one")[0]["version"] == 3
    assert shell.says("queue", "delete", "one") == "Deleted one\n"
    assert shell.json("queue", "delete", "two") == [{}]


@verb("queue pause", "queue resume", "queue clear")
def test_pausing_and_clearing(shell: Shell) -> None:
    assert shell.says("queue", "pause", shell.queue).startswith(f"Paused {shell.queue}: ")
    assert shell.ends("produce", shell.queue, "x")[0] == 4
    assert shell.json("queue", "pause", shell.queue)[0]["paused"] == ["lease", "produce"]
    assert shell.says("queue", "resume", shell.queue, "--lease") == f"Resumed {shell.queue}; still paused: produce\n"
    assert shell.json("queue", "resume", shell.queue)[0]["paused"] == []
    shell.says("produce", shell.queue, "a", "b")
    assert shell.says("queue", "clear", shell.queue, "--yes") == "Dropped 2 ready\n"
    assert shell.json("queue", "clear", shell.queue, "--yes") == [{"ready": 0, "scheduled": 0}]


# -- items ------------------------------------------------------------------------------------------------------------


def test_items_whose_unique_keys_are_taken_are_counted_apart(shell: Shell) -> None:
    shell.says("queue", "create", "unique", "--unique", "until_settled", "--partitions", "2")
    stored = re.fullmatch(r"Stored 1 in partition [01]: (\S+)\n", shell.says("produce", "unique", "first", "--unique-key", "k"))
    assert stored is not None
    apart = "not stored, as there is one with the same unique key"
    assert shell.says("produce", "unique", "second", "--unique-key", "k") == f"1 item {apart}: {stored[1]}\n"
    lines = b'{"id":"a"}\n{"id":"k"}\n{"id":"a"}\n'
    said = shell.says("produce", "unique", "-", "--unique-key-field", "id", stdin=lines)
    assert re.fullmatch(rf"Stored 1 in partition [01]: \S+\n2 items {apart}\n", said)
    (found,) = shell.json("search", "unique", "--unique-key", "k")
    assert (found["id"], found["unique_key"], found["utf8"]) == (stored[1], "k", "first")
    assert re.search(r"(?m)^unique key +k *$", shell.says("explain", "unique", stored[1]))
    (answer,) = shell.json("produce", "unique", "x", "--unique-key", "k")
    assert (answer["first_id"], answer["duplicates"]) == (stored[1], [0])
    code, _, err = shell.ends("produce", shell.queue, "x", "--unique-key", "k")
    assert code != 0
    assert "keeps no items unique" in err
    assert "exclude each other" in shell.ends("produce", "unique", "{}", "--unique-key", "k", "--unique-key-field", "id")[2]


def test_what_all_items_of_a_call_are_given(shell: Shell) -> None:
    shell.says("produce", shell.queue, "x", "y", "--kind", "order", "--reference", "17", "--header", "tenant=a=b", "--encoding", "json")
    for item in shell.json("peek", shell.queue):
        assert (item["kind"], item["reference"], item["headers"], item["encoding"]) == ("order", "17", {"tenant": "a=b"}, "json")
    assert re.search(r"(?m)^id +attempt +payload +kind +reference *\n.* x +order +17 *$", shell.says("peek", shell.queue))
    lines = b'{"customer":"c-7"}\n{"customer":null}\n{}\n'
    shell.says("produce", shell.queue, "-", "--item-key-field", "customer", "--reference", "lines", stdin=lines)
    assert [item.get("key") for item in shell.json("search", shell.queue, "--reference", "lines")] == ["c-7", None, None]
    shell.says("produce", shell.queue, "keyed", "--item-key", "c-8", "--priority", "0")
    found = shell.says("search", shell.queue, "--item-key", "c-8")
    assert re.search(r"(?m)^id +attempt +payload +state +key +priority *\n.* keyed +ready +c-8 +0 *$", found)
    (keyed,) = shell.json("search", shell.queue, "--item-key", "c-8")
    assert re.search(r"(?m)^key +c-8 *$", shell.says("show", shell.queue, keyed["id"]))
    assert re.search(r"(?m)^priority +0 *$", shell.says("show", shell.queue, keyed["id"]))
    for line, refusal in ((b"no JSON", "is not a JSON object"), (b"[1]", "is not a JSON object"), (b'{"customer":7}', "is not a text")):
        assert refusal in shell.ends("produce", shell.queue, "-", "--item-key-field", "customer", stdin=line)[2]
    shell.says("queue", "clear", shell.queue, "--yes")
    shell.says("produce", shell.queue, "x", "y")
    for when in (("--after", "1h"), ("--at", f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}")):
        shell.says("produce", shell.queue, "later", *when)
    counts = [part for share in shell.json("stats", shell.queue)[0]["logical_queues"] for part in share["partitions"]]
    assert [sum(part[name] for part in counts) for name in ("ready", "scheduled")] == [2, 2]
    for wrong, said in (
        (("--at", "soon"), "'soon' is not a time such as 2026-01-31T08:00:00Z"),
        (("--priority", "10"), "'10' is not a whole number from 0 to 9"),
        (("--header", "tenant"), "'tenant' is not of the form NAME=VALUE"),
        (("--item-key", "a", "--item-key-field", "b"), "--item-key and --item-key-field exclude each other"),
        (("--after", "1h", "--at", "2999-01-31"), "--after and --at exclude each other"),
        (("--after", "1h", "--key", "k"), "pass --at with --key"),
    ):
        code, _, err = shell.ends("produce", shell.queue, "x", *wrong)
        assert code == 2
        assert said in err


def test_blank_lines_are_no_items_unless_asked_for(shell: Shell, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("a\n\n  \nb\n\n")
    code, out, err = shell.ends("produce", shell.queue, "--file", str(lines))
    assert code == 0
    assert out.startswith("Stored 2 in ")
    assert err == "Skipped 3 blank lines (--blank-lines stores them, too)\n"
    assert shell.json("produce", shell.queue, "--file", str(lines), "--blank-lines")[0]["count"] == 5


def test_counts_of_all_queues_and_the_reasons_of_dead_items(shell: Shell) -> None:
    dead = f"{shell.queue}.dead"
    shell.says("produce", shell.queue, "x")
    (item,) = shell.json("lease", shell.queue)
    shell.says("retry", shell.queue, item["id"], "--dead", "--reason", "no such customer")
    deadline = time.monotonic() + PATIENCE
    while not shell.json("peek", dead):
        assert time.monotonic() < deadline
    assert re.search(rf"x +{re.escape(shell.queue)} +no such customer *$", shell.says("peek", dead).rstrip())
    assert re.search(rf"(?m)^{re.escape(dead)} +1 +0 +0 +1 ", shell.says("stats"))
    assert {each["queue_name"] for each in shell.json("stats")} >= {shell.queue, dead}
    assert shell.ends("stats", "--watch")[0] == 2


@verb("produce", "peek", "lease", "extend", "complete")
def test_items_from_beginning_to_end(shell: Shell) -> None:
    assert shell.says("produce", shell.queue, "first").startswith("Stored 1 in partition")
    assert shell.json("produce", shell.queue, "second")[0]["count"] == 1
    assert {"first", "second"} == {each["utf8"] for each in shell.json("peek", shell.queue)}
    assert "first" in shell.says("peek", shell.queue)
    assert shell.ends("peek", shell.queue, "--partition", "0", "-n", "1")[0] == 0
    (one,) = shell.json("lease", shell.queue)
    assert "attempt" in shell.says("lease", shell.queue, "--client-id", "other")
    assert shell.json("peek", shell.queue) == []
    assert [each["id"] for each in shell.json("peek", shell.queue, "--lease", one["lease_id"])] == [one["id"]]

    (extended,) = shell.json("extend", shell.queue, "--lease", one["lease_id"], "--lease-timeout", "1h")
    assert extended["leases"][0]["lease_deadline"] > one["lease_deadline"]
    assert re.fullmatch(rf"Extended {one['lease_id']}: 1 until [\d:]+\n", shell.says("extend", shell.queue, one["id"]))

    assert shell.json("complete", shell.queue, one["id"], "--client-id", "other")[0]["ignored"][0]["reason"] == "not_yours"
    assert shell.says("complete", shell.queue, one["id"], "--client-id", "cli", "--strict") == "Completed 1\n"
    assert "No leases extended\nignored" in shell.says("extend", shell.queue, one["id"])


@verb("retry", "release", "redrive")
def test_items_that_come_back(shell: Shell) -> None:
    def leased() -> str:
        return str(shell.json("lease", shell.queue, "--wait", "1m")[0]["id"])

    shell.says("produce", shell.queue, "x")
    assert shell.says("release", shell.queue, leased()) == "Released 1\n"
    assert shell.json("release", shell.queue, leased(), "--strict") == [{"released": 1, "ignored": []}]
    assert shell.says("retry", shell.queue, leased()) == "Put back 1\n"
    item = leased()
    assert shell.json("retry", shell.queue, item, "--client-id", "other")[0]["ignored"][0]["reason"] == "not_yours"
    assert shell.json("retry", shell.queue, item, "--dead", "--reason", "bad")[0]["dead"] == 1
    dead = f"{shell.queue}.dead"
    wait_until(lambda: bool(shell.json("peek", dead)), "the burial")
    assert shell.says("redrive", dead, "--dry-run").startswith("Would send back 1\n")
    assert shell.json("redrive", dead) == [{"matched": 1, "redriven": 1, "targets": {shell.queue: 1}}]


def test_strict_is_3_and_names_what_was_ignored(shell: Shell) -> None:
    shell.says("produce", shell.queue, "x", "y")
    one, two = (each["id"] for each in shell.json("lease", shell.queue, "-n", "2"))
    shell.says("complete", shell.queue, one)
    for arguments in (("complete",), ("release",), ("retry",), ("extend",)):
        code, out, err = shell.ends(*arguments, shell.queue, one, "--strict")
        assert (code, out) == (3, "")
        assert f"ignored {one}: completed\n" in err
        assert "omit --strict" in err
    code, _, err = shell.ends("complete", shell.queue, one, two, "--strict", "--json")
    problem = json.loads(err)
    assert (code, problem["code"], problem["ignored"]) == (3, "stale_ids", [{"id": one, "reason": "completed"}])
    assert shell.json("complete", shell.queue, two)[0]["ignored"][0]["reason"] == "completed"


@verb("drop")
def test_items_that_are_deleted(shell: Shell) -> None:
    one, two = (shell.json("produce", shell.queue, each)[0]["first_id"] for each in "ab")
    assert shell.says("drop", shell.queue, one) == "Deleted 1\n"
    assert shell.json("drop", shell.queue, one, two) == [{"deleted": 1, "ignored": [{"id": one, "reason": "gone"}]}]
    assert shell.json("peek", shell.queue) == []


@verb("search", "show", "run-now", "move")
def test_items_are_found_shown_and_acted_on(shell: Shell) -> None:
    other = f"{shell.queue}.dead"
    for number in range(3):
        shell.says("produce", shell.queue, f'{{"order":{number},"note":"\u202e"}}', "--kind", "order", "--header", f"tenant=t{number}")
    shell.says("produce", shell.queue, "later", "soon", "--after", "1h", "--kind", "later")

    def texts(*wanted: str) -> list[str]:
        return sorted(item["utf8"][:10] for item in shell.json("search", shell.queue, *wanted))

    assert texts("--kind", "order") == ['{"order":0', '{"order":1', '{"order":2']
    assert texts("--header", "tenant=t1") == texts("--contains", '"order":1') == ['{"order":1']
    assert len(texts("--header", "tenant")) == 3
    assert texts("--header", "tenant", "-n", "2", "--state", "leased") == []
    assert [item["state"] for item in shell.json("peek", shell.queue, "--state", "scheduled")] == ["scheduled"] * 2
    code, out, err = shell.ends("search", shell.queue, "--kind", "later")
    assert re.search(r"(?m)^id +attempt +payload +state +due +kind *$", out)
    assert "Compared 5 items\n" in err
    assert "there may be more: pass a higher -n" in shell.ends("search", shell.queue, "--kind", "order", "-n", "1")[2]

    (item,) = shell.json("search", shell.queue, "--contains", '"order":1')
    shown = shell.says("show", shell.queue, item["id"])
    assert re.search(r"(?m)^header tenant +t1 *$", shown)
    assert shown.endswith('\n{\n  "order": 1,\n  "note": "\\u202e"\n}\n'), "indented, and nothing that a terminal obeys"
    assert shell.json("show", shell.queue, item["origin"])[0] == item
    code, out, _ = shell.ends("show", shell.queue, "aaaaaaaa.0.1")
    assert (code, out.split(":")[0]) == (3, "unknown")

    first, second = (each["id"] for each in shell.json("peek", shell.queue, "--state", "scheduled"))
    assert shell.says("run-now", shell.queue, first) == "Ready now 1\n"
    assert shell.json("run-now", shell.queue, first) == [{"ready": 0, "ignored": [{"id": first, "reason": "gone"}]}]
    assert shell.says("move", shell.queue, item["id"], "--to", other) == "Moved 1\n"
    assert shell.json("move", other, "-", stdin=shell.json("peek", other)[0]["id"].encode())[0]["ignored"][0]["reason"] == "no_source"
    assert shell.json("search", shell.queue, "--id", second)[0]["state"] == "scheduled"


def test_what_a_search_finds_is_acted_on_once_that_is_confirmed(shell: Shell) -> None:
    other = f"{shell.queue}.dead"
    shell.says("produce", shell.queue, *(f"item {number}" for number in range(5)), "--kind", "a")
    shell.says("produce", shell.queue, "later", "--after", "1h")
    drop = ("search", shell.queue, "--kind", "a", "--drop")
    code, _, err = shell.ends(*drop)
    assert (code, "pass --yes to confirm" in err) == (2, True)
    code, out, err = shell.ends(*drop, stdin=b"n\n", terminal=True)
    assert (code, out) == (0, "")
    assert "Permanently delete 5 items of" in err
    assert "Nothing was changed" in err
    assert shell.ends(*drop, "-n", "2", stdin=b"y\n", terminal=True)[1] == "Deleted 2\n"
    assert shell.json("search", shell.queue, "--kind", "a", "--move-to", other, "--yes") == [{"matched": 3, "moved": 3, "ignored": []}]
    assert shell.says("search", shell.queue, "--run-now", "--yes") == "Ready now 1\n"
    assert shell.says("search", shell.queue, "--kind", "none", "--drop", "--yes") == "Deleted 0\n"
    for wrong, said in (
        (("--drop", "--move-to", "q"), "exclude each other"),
        (("--run-now", "--state", "ready", "--yes"), "--run-now does not act on ready items"),
        (("--move-to", "q", "--state", "leased", "--yes"), "--move-to does not act on leased items"),
    ):
        code, _, err = shell.ends("search", shell.queue, *wrong)
        assert code == 2
        assert said in err
    assert shell.ends("peek", shell.queue, "--state", "leased", "--lease", "x")[0] == 2


@verb("stats", "explain", "partition list", "partition explain", "top")
def test_looking(shell: Shell) -> None:
    item = shell.json("produce", shell.queue, "x")[0]["first_id"]
    assert re.search(r"(?m)^all +1 ", shell.says("stats", shell.queue))
    assert shell.json("stats", shell.queue)[0]["queue_name"] == shell.queue
    assert re.search(r"state +ready", shell.says("explain", shell.queue, item))
    assert shell.json("explain", shell.queue, item)[0]["ahead"] == 0
    assert re.search(r"(?m)^1 +default +available +instance ", shell.says("partition", "list", shell.queue))
    assert [(each["partition"], each["backend"], each["owner"]) for each in shell.json("partition", "list", shell.queue)] == [
        (0, "default", "instance"),
        (1, "default", "instance"),
    ]
    assert re.search(r"why +single server: it owns", shell.says("partition", "explain", shell.queue, "1"))
    (why,) = shell.json("partition", "explain", shell.queue, "1")
    assert (why["partition"], why["owner"], why["state"], why["era"]) == (1, "instance", "available", 1)
    assert shell.ends("partition", "explain", shell.queue, "2")[0] == 3
    assert re.search(rf"(?m)^{re.escape(shell.queue)} +2 +1 +0 +0 ", shell.says("top", shell.queue, "--once"))
    (look,) = shell.json("top", shell.queue, "--once")
    assert [(row["queue_name"], row["ready"], row["produced_per_second"]) for row in look["queues"]] == [(shell.queue, 1, 0.0)]


@verb("queue keys")
def test_keys_that_wait(shell: Shell) -> None:
    assert shell.says("queue", "keys", shell.queue) == "No keys with waiting items\n"
    shell.says("queue", "create", "ordered", "--order", "key", "--partitions", "1")
    shell.says("produce", "ordered", "x", "y", "z", "--item-key", "acme\x1b")
    (item,) = shell.json("lease", "ordered")
    said = shell.says("queue", "keys", "ordered", "--limit", "5")
    assert said.startswith("Keys: 1 waiting, 1 of them blocked, 0 at the limit of their leased items\n\nBusiest:\n")
    assert len(re.findall(r"(?m)^acme\\x1b +2 +1 +0 +\d+\w+ +an earlier item that is leased$", said)) == 2
    (found,) = shell.json("queue", "keys", "ordered")
    assert [(each["key"], each["waiting"], each["blocked_by"]) for each in found["busiest"]] == [("acme\x1b", 2, "lease")]
    following = item["id"].rpartition(".")[0] + ".1"
    said = shell.says("explain", "ordered", following)
    assert re.search(r"(?m)^key +acme\\x1b$", said)
    assert re.search(r"(?m)^why +an earlier item of its key is leased; it waits for the item with the origin ", said)
    assert re.search(r"(?m)^part +ready +servable +leased ", shell.says("stats", "ordered"))
    assert re.search(r"(?m)^all +2 +0 +1 ", shell.says("stats", "ordered"))
    assert re.search(r"(?m)^ordered +1 +2 \(0 servable\) +1 ", shell.says("top", "ordered", "--once"))
    shell.says("complete", "ordered", item["id"])


@verb("queue history")
def test_history(shell: Shell) -> None:
    # Nobody has looked since the queue was created: a server does so once a minute.
    code, out, err = shell.ends("queue", "history", shell.queue)
    assert code == 0
    assert "No data for these minutes" in err or re.search(r"(?m)^ready ", out)
    (found,) = shell.json("queue", "history", shell.queue, "--minutes", "5")
    assert (found["queue_name"], found["every"], len(found["series"]["ready"])) == (shell.queue, "1m", 5)
    assert shell.ends("queue", "history", shell.queue, "--minutes", "1441")[0] == 2
    assert shell.ends("queue", "history", "none")[0] == 3


@verb("consumer list")
def test_consumers(shell: Shell) -> None:
    shell.json("produce", shell.queue, "x")
    shell.json("lease", shell.queue, "--client-id", "worker-7")
    assert "worker-7" in shell.says("consumer", "list", shell.queue)
    (seen,) = shell.json("consumer", "list", shell.queue)
    assert (seen["queue_name"], [(each["client_id"], each["items"]) for each in seen["consumers"]]) == (shell.queue, [("worker-7", 1)])


# -- whoever runs the server ------------------------------------------------------------------------------------------


@verb("partition pins")
def test_a_server_that_is_alone_pins_nothing(shell: Shell) -> None:
    """That of a cluster does: tests/cli/test_cli_rebalance.py."""
    code, out, err = shell.ends("partition", "pin", shell.queue, "0", "--zone", "east")
    assert (code, out) == (3, "")
    assert "this server is not part of a cluster" in err
    code, out, err = shell.ends("partition", "pins", shell.queue)
    assert (code, out, err) == (0, "", "No pinned partitions\n")
    assert shell.json("partition", "pins") == []


def test_a_server_that_is_alone_has_no_times_of_a_cluster(shell: Shell) -> None:
    """That of a cluster changes them: tests/cluster/test_cluster_times.py."""
    code, out, err = shell.ends("instance", "update", "--member-timeout", "9s")
    assert (code, out) == (3, "")
    assert "this server is not part of a cluster" in err


@verb("instance list", "instance rounds")
def test_instances(shell: Shell) -> None:
    assert re.search(r"(?m)^\* +instance +- +alive ", shell.says("instance", "list"))
    (seen,) = shell.json("instance", "list")
    assert ([each["instance"] for each in seen["items"]], seen["strategy"], seen["round"]) == (["instance"], "static", None)
    code, out, err = shell.ends("instance", "rounds")
    assert (code, out) == (0, "")
    assert err.startswith("No rounds")
    assert shell.json("instance", "rounds") == []


@verb("backend list")
def test_backends(shell: Shell) -> None:
    assert "default" in shell.says("backend", "list")
    assert len(shell.json("backend", "list")) == 1


@verb("backend accept")
def test_a_storage_is_accepted(shell: Shell, data: Path) -> None:
    told = shell.says("backend", "accept", "default", "--data", str(data), "--queue", shell.queue)
    assert told.startswith("Accepted 2 partitions of backend default.")
    (answer,) = shell.json("backend", "accept", "default", "--data", str(data), "--queue", shell.queue, "--partition", "1")
    assert answer == {"backend": "default", "accepted": [{"queue_name": shell.queue, "partition": 1}]}
    newest, before = shell.json("audit", "list", "--action", "backend.accept")[::-1][:2]
    assert (newest["actor"], newest["queue_name"], newest["detail"]) == (
        "command line",
        shell.queue,
        {"backend": "default", "partitions": 1, "partition": [1]},
    )
    assert before["detail"] == {"backend": "default", "partitions": 2}
    for arguments, said in (
        (("default", "--queue", "none"), "there is no queue 'none'"),
        (("default", "--queue", shell.queue, "--partition", "9"), "partition 9 does not lie in backend 'default'"),
        (("other",), "no partition lies in backend 'other'"),
        (("default", "--partition", "1"), "--partition needs --queue"),
    ):
        code, _, err = shell.ends("backend", "accept", *arguments, "--data", str(data))
        assert code != 0
        assert said in err
    code, _, err = shell.ends("backend", "accept", "default", "--data", str(data.parent))
    assert code != 0
    assert "there is no" in err


@verb("cluster adopt")
def test_a_directory_is_adopted(shell: Shell, tmp_path: Path) -> None:
    """One without queues; tests/storage/test_adopted_server.py has the rest."""
    data, meta = tmp_path / "data", f"sqlite:{tmp_path / 'cluster.sqlite'}"
    code, _, err = shell.ends("cluster", "adopt", str(tmp_path))
    assert code == 2
    assert "--config FILE with [cluster] meta" in err
    with ServerProcess(data) as server:
        code, _, err = shell.ends("cluster", "adopt", str(data), "--cluster-meta", meta)
        assert code == 4
        assert "stop that server first" in err
        server.interrupt()
    assert shell.says("key", "create", "reader", "--scope", "read:*", "--data", str(data))
    told = shell.says("cluster", "adopt", str(data), "--cluster-meta", meta)
    assert told == "Adopted 0 queues, 0 partitions and 1 API key; copied 0 partitions, 0.0 MB\n"
    (answer,) = shell.json("cluster", "adopt", str(data), "--cluster-meta", meta)
    assert (answer["api_keys"], answer["was_done"]) == (1, True)
    assert shell.says("cluster", "adopt", str(data), "--cluster-meta", meta) == "Adopted before: 0 queues, 0 partitions and 1 API key\n"
    code, _, err = shell.ends("key", "create", "late", "--scope", "read:*", "--data", str(data))
    assert code == 3
    assert f"are in the cluster with the meta store {meta}" in err


@verb("key create", "key list", "key revoke")
def test_keys(shell: Shell) -> None:
    code, text, note = shell.ends("key", "create", "reader", "--scope", "read:orders-*")
    assert code == 0
    assert re.fullmatch(r"slw_\w+_\S+\n", text)
    assert "it is not shown again" in note
    (made,) = shell.json("key", "create", "writer", "--scope", "produce:*", "--scope", "read:*", "--expires-after", "1d")
    assert made["key"].startswith("slw_")
    listed = shell.json("key", "list")
    assert {("reader", ("read:orders-*",)), ("writer", ("produce:*", "read:*"))} == {
        (each["name"], tuple(each["scopes"])) for each in listed
    }
    table = shell.says("key", "list")
    assert re.search(r"reader .* never +read:orders-\*", table)
    assert text.strip() not in table
    assert made["key"] not in table + json.dumps(listed)
    ids = {each["name"]: each["key_id"] for each in listed}
    assert shell.says("key", "revoke", "reader") == f"Revoked {ids['reader']}\n"
    assert shell.json("key", "revoke", ids["writer"]) == [{"key_id": ids["writer"]}]
    code, _, err = shell.ends("key", "revoke", ids["writer"])
    assert code == 3
    assert "`sluiceway key list`" in err


@verb("audit list", "audit tail")
def test_the_audit_trail(shell: Shell) -> None:
    assert re.search(rf"queues\.create {re.escape(shell.queue)} ", shell.says("audit", "list", "--queue", shell.queue))
    (entry,) = shell.json("audit", "list", "--queue", shell.queue)
    assert (entry["action"], entry["queue_name"]) == ("queues.create", shell.queue)
    assert shell.json("audit", "list", "--queue", shell.queue, "--action", "queues.delete") == []
    with child(shell, "audit", "list", "--queue", shell.queue, "--follow", "--json") as following:
        assert json.loads(line_of(following))["id"] == entry["id"]
        shell.says("queue", "pause", shell.queue)
        shell.says("queue", "resume", shell.queue)
        assert [json.loads(line_of(following))["action"] for _ in range(2)] == ["queue.pause", "queue.resume"]
        assert interrupted(following) == 130
    about = ("audit", "list", "--queue", shell.queue)
    assert [each["action"] for each in shell.json(*about, "--action", "queue.")] == ["queue.pause", "queue.resume"]
    assert len(shell.json(*about, "--since", "1h", "--actor", "anybody")) == 3
    assert shell.json(*about, "--until", "1h") == shell.json(*about, "--actor", "nobody") == []
    assert shell.json(*about, "--until", entry["at"]) == []
    assert len(shell.json(*about, "--since", entry["at"])) == 3
    code, _, err = shell.ends(*about, "--since", "yesterday")
    assert code == 2
    assert "neither a time" in err
    assert shell.ends(*about, "--until", "1h", "--follow")[0] == 2

    assert "queue.resume" in shell.says("audit", "tail", "--queue", shell.queue, "-n", "1")
    with child(shell, "audit", "tail", "-f", "-n", "1", "--queue", shell.queue, "--json") as following:
        assert json.loads(line_of(following))["action"] == "queue.resume"
        shell.says("queue", "pause", shell.queue)
        assert json.loads(line_of(following))["action"] == "queue.pause", "what was there before is not told"
        assert interrupted(following) == 130


@verb("events")
def test_events(shell: Shell) -> None:
    for more in ((), ("--json",)):
        with child(shell, "events", "--queue", shell.queue, "--type", "queue.updated", "-n", "1", *more) as listening:
            told = first_line(listening)
            numbers = itertools.count()
            # There is no telling when it listens; so something happens until it has heard of it.
            while not told:
                shell.says("queue", "update", shell.queue, "--reference", f"{more}{next(numbers)}")
            assert listening.wait(PATIENCE) == 0
        if more:
            assert json.loads(told[0])["type"] == "queue.updated"
        else:
            assert re.fullmatch(rf'\d\d:\d\d:\d\d queue\.updated queue_name={shell.queue} version=\d+ changed=\["reference"\]\n', told[0])


def first_line(process: subprocess.Popen[str]) -> list[str]:
    """Gets the process's first line once there is one."""
    found: list[str] = []
    threading.Thread(target=lambda: found.append(line_of(process)), daemon=True).start()
    return found


@verb("config show", "config check", "config schema", "config reload")
def test_configuration(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "sluiceway.toml"
    file.write_text('[server]\nlisten = "127.0.0.1:0"\nadmin_key = "env:ADMIN"\n')
    os.environ["ADMIN"] = "a-secret-that-nobody-should-ever-see-anywhere"
    try:
        text = shell.says("config", "show", "--config", str(file))
        assert tomllib.loads(text)["server"]["listen"] == "127.0.0.1:0"
        (shown,) = shell.json("config", "show", "--config", str(file), "--origin")
        assert shown["server"]["listen"]["origin"] == "sluiceway.toml:2"
        origins = shell.says("config", "show", "--config", str(file), "--origin")
        assert re.search(r'(?m)^listen = "127.0.0.1:0"  # sluiceway.toml:2; a change needs a restart$', origins)
        assert os.environ["ADMIN"] not in text + json.dumps(shown) + origins
        assert shell.says("config", "check", str(file)) == f"{file} is valid\n"
        assert shell.json("config", "check", str(file)) == [{"valid": True, "problems": []}]
    finally:
        del os.environ["ADMIN"]
    file.write_text('[server]\nlisten = "nowhere"\n')
    code, out, _ = shell.ends("config", "check", str(file), "--json")
    assert (code, json.loads(out)["valid"]) == (3, False)
    code, out, _ = shell.ends("config", "check", str(file))
    assert code == 3
    assert "listen" in out
    assert json.loads(shell.says("config", "schema"))["title"] == "sluiceway.toml"
    assert "server" in shell.json("config", "schema")[0]["properties"]
    assert re.search(r'(?m)^# no file, applied .*\n\[server\]\nlisten = "127.0.0.1:0"$', shell.says("config", "show", "--running"))
    assert shell.json("config", "show", "--running")[0]["configuration"]["server"]["listen"]["origin"] == "--listen"
    assert shell.says("config", "reload") == "No changes\n"
    assert shell.json("config", "reload") == [{"changed": []}]


@verb("doctor")
def test_a_healthy_server_is_found_healthy(shell: Shell) -> None:
    text = shell.says("doctor")
    assert re.search(r"(?m)^ok +ready +all partitions available", text)
    assert not re.search(r"(?m)^failed", text)
    (found,) = shell.json("doctor")
    assert found["healthy"]
    # What earlier tests have left in queues that nobody consumes is told, before the checks, and is not critical.
    told = [each["name"] for each in found["checks"]]
    assert set(told[: told.index("target")]) <= {"problems", *get_args(Kind)}
    assert {"target", "server", "tls", "clock", "server time", "key", "ready", "python", "libraries", "java"} == {
        *told[told.index("target") :]
    }


@verb("tasks list", "tasks show", "tasks forget")
def test_tasks(shell: Shell, tmp_path: Path) -> None:
    meta = f"sqlite:{tmp_path / 'meta'}"
    asyncio.run(write_capture(tmp_path / "meta", "feed", RECORDS, KEPT))
    assert re.search(r"(?m)^feed +kinesis +1 +one ", shell.says("tasks", "list", "--meta", meta))
    assert shell.json("tasks", "list", "--meta", meta)[0]["name"] == "feed"
    assert re.search(r"(?m)^shard-0 +owned +one ", shell.says("tasks", "show", "feed", "--meta", meta))
    assert shell.json("tasks", "show", "feed", "--meta", meta)[0]["leader"] == "one"
    assert shell.says("tasks", "forget", "feed", "--meta", meta, "--yes").startswith("Removed feed: ")
    asyncio.run(write_capture(tmp_path / "meta", "feed", RECORDS, KEPT))
    assert shell.json("tasks", "forget", "feed", "--meta", meta, "--yes")[0]["keys"] > 3


# -- on this machine --------------------------------------------------------------------------------------------------


@verb("context add", "context use", "context list", "context show", "context remove")
def test_contexts(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = os.environ["SLUICEWAY_URL"]
    monkeypatch.delenv("SLUICEWAY_URL")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for verb_of, more in (("add", ("--url", server)), ("use", ()), ("show", ()), ("remove", ()), ("add", ("--url", server))):
        assert "here" in shell.says("context", verb_of, "here", *more)
    assert "here" in shell.says("context", "list")
    for arguments in (("add", "here", "--url", server), ("use", "here"), ("show", "here"), ("list",)):
        assert shell.json("context", *arguments)[0]["url"] == server
    assert shell.queue in [each["queue_name"] for each in shell.json("queue", "list")]
    assert shell.json("context", "remove", "here") == [{"name": "here"}]


@verb("completion")
def test_completion(shell: Shell) -> None:
    for name in ("bash", "zsh", "fish"):
        assert "_SLUICEWAY_COMPLETE" in shell.says("completion", name)


@verb("serve")
def test_serve(shell: Shell, tmp_path: Path) -> None:
    for name, more in (("one", ()), ("two", ("--json",))):
        with child(shell, "serve", "--data", str(tmp_path / name), "--listen", "127.0.0.1:0", *more) as server:
            line = line_of(server)
            url = json.loads(line)["url"] if more else line.split()[-1]
            assert shell.json("queue", "list", "--url", url) == []
            assert interrupted(server) == 0


@verb("dev")
def test_dev(shell: Shell, tmp_path: Path) -> None:
    for more in ((), ("--port", "0", "--json")):
        with child(shell, "dev", "--no-demo", *more, cwd=tmp_path) as server:
            line = line_of(server)
            url = json.loads(line)["url"] if more else line.split()[-1]
            assert shell.json("queue", "list", "--url", url) == []
            assert not (more and url.endswith(":2319"))
            assert interrupted(server) == 0
    assert (tmp_path / ".sluiceway-data").is_dir()


@verb("bench")
@pytest.mark.slow
def test_bench(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    short = ("bench", "--rounds", "1", "--seconds", "0.1")
    with child(shell, *short, "--output", str(file)) as people:
        out, _ = people.communicate(timeout=PATIENCE)
    assert "items/s" in out
    with child(shell, *short, "--json") as program:
        out, _ = program.communicate(timeout=PATIENCE)
    assert json.loads(out)["cases"].keys() == json.loads(file.read_text())["cases"].keys()


@pytest.mark.spark
@verb("spark run")
@pytest.mark.slow
def test_spark_run(shell: Shell, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "rows = spark.range(5).selectExpr('cast(id as string) as value')\n"
        "rows.write.format('sluiceway').mode('append').options(url=url, queue=sys.argv[1]).save()\n"
        "print(sys.argv[1:])\n"
    )
    for more in ((), ("--json",)):
        with child(shell, "spark", "run", *more, str(program), shell.queue, "--mine") as running:
            out, err = running.communicate(timeout=PATIENCE)
        assert running.returncode == 0, err
        assert out == f"{[shell.queue, '--mine']}\n"
    assert sum(part["ready"] for part in shell.json("partition", "list", shell.queue)) == 10


# -- all of them ------------------------------------------------------------------------------------------------------


WORKERS = {"work"}
"""tests/worker/test_worker.py."""
SCHEDULES = {f"schedule {verb}" for verb in ("create", "list", "show", "update", "pause", "resume", "run", "delete", "next")}
"""tests/cli/test_cli_schedules.py."""
BUNDLES = {f"bundle {verb}" for verb in ("create", "list", "show", "close", "cancel")}
"""tests/cli/test_cli_bundles.py."""
BACKUPS = {"backup create", "backup list", "backup verify", "backup prune", "restore"}
"""tests/server/test_backup_commands.py, test_backups_in_buckets.py."""
UPGRADES = {"upgrade show", "upgrade finalize"}
"""tests/cli/test_cli_upgrade.py."""
CLUSTERS = {"instance update", "partition pin", "partition unpin"}
"""That it is refused by a server that is alone is tested above; what it does in a cluster, in tests/cluster/test_cluster_times.py."""


def test_every_command_has_a_test() -> None:
    assert (
        set(leaves())
        == COVERED
        | REBALANCES
        | CAPTURES
        | ARCHIVES
        | REDRIVES
        | COPIES
        | JOBS
        | DEMO
        | CLUSTERS
        | WORKERS
        | SCHEDULES
        | BUNDLES
        | BACKUPS
        | UPGRADES
    )


def test_every_command_speaks_json() -> None:
    silent = {name for name, command in leaves().items() if not any(option.name == "as_json" for option in command.params)}
    assert silent == WITHOUT_JSON


def test_a_call_loads_nothing_that_it_does_not_need(shell: Shell) -> None:
    program = """
import sys
from sluiceway.cli.main import main
sys.argv = ["sluiceway", "queue", "list", "--json"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
unwanted = {"pyarrow", "numpy", "rich", "uvicorn", "pyspark", "apsw", "sluiceway.instance", "sluiceway.cluster", "sluiceway.local"}
unwanted |= {"sluiceway.server", "sluiceway.server_cli.doctor"}
assert not unwanted & set(sys.modules), unwanted & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shell.queue in done.stdout


def test_a_lease_that_an_open_circuit_breaker_holds_back_says_so(shell: Shell) -> None:
    shell.says("queue", "update", shell.queue, "--circuit-breaker", "0.5:2")
    shell.says("produce", shell.queue, "a", "b", "c", "d")
    assert "Circuit" not in shell.ends("lease", shell.queue, "-n", "9")[2], "it is closed"
    shell.says("retry", shell.queue, *(each["id"] for each in shell.json("peek", shell.queue, "--state", "leased")), "--after", "0s")
    # After a second it gives up to five probes: fewer than this asks for, too.
    code, _, err = shell.ends("lease", shell.queue, "-n", "9")
    assert code == 0
    assert re.search(r"(?m)^Circuit open since .*: too many items fail; .*probes .*\. See why: sluiceway doctor$", err)
    assert shell.ends("lease", shell.queue, "-n", "9", "--json")[2] == "", "as JSON, stderr has errors alone"
