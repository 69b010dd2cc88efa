"""The command line against a real server: every verb, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluiceway.client import Client
from sluiceway.demo.live_move import prepare
from tests.cli.cli_shell import Shell
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess(tmp_path_factory.mktemp("cli") / "data") as server:
        yield server.url


@pytest.fixture
def shell(url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", url)
    queue = str(request.node.name)[:60]
    with Client(url) as client:
        client.create_queue(f"{queue}.dead")
        client.create_queue(queue, requested_partitions=2, dead_queue=f"{queue}.dead")
    return Shell(queue, monkeypatch, capsysbinary)


def test_queues(shell: Shell) -> None:
    name, dead = "made", f"{shell.queue}.dead"
    options = ("--partitions", "3", "--lease-timeout", "90s", "--max-attempts", "2", "--dead-queue", dead, "--reference", "[mine]")
    chosen = f"At most 2 attempts; retries at once; dead items go to {dead}."
    assert shell.says("queue", "create", name, *options) == f"Created made with 3 partitions. {chosen}\n"
    code, out, err = shell.ends("queue", "create", name)
    assert (code, out) == (3, "")
    assert "queue_exists" in err
    code, _, err = shell.ends("queue", "create", name, "--json")
    assert (code, json.loads(err)["code"], json.loads(err)["field"]) == (3, "queue_exists", "queue_name")

    (info,) = shell.json("queue", "info", name)
    assert (info["max_attempts"], info["dead_queue"], len(info["partitions"])) == (2, dead, 3)
    text = shell.says("queue", "info", name)
    assert re.search(r"lease timeout +1m30s *\n", text)
    assert re.search(r"reference +\[mine\]", text)
    assert len(re.findall(r"partition \d +available, on default", text)) == 3

    shell.says("produce", name, "one", "two")
    assert re.search(rf"(?m)^made +3 +2 +0 +0 +2 +{dead} +- *$", shell.says("queue", "list"))
    assert name in [each["queue_name"] for each in shell.json("queue", "list")]
    shell.says("queue", "clear", name, "--yes")
    assert shell.says("queue", "delete", name) == "Deleted made\n"
    code, _, err = shell.ends("queue", "info", name)
    assert code == 3
    assert "sluiceway queue list" in err


def test_items_in_and_out(shell: Shell) -> None:
    text = shell.says("produce", shell.queue, "hello", "\x1b[31mred")
    assert re.fullmatch(r"Stored 2 in partition \d: \w+\.\d\.0 to \w+\.\d\.1\n", text)
    code, out, err = shell.ends("lease", shell.queue, "-n", "5", "--lease-timeout", "5m")
    assert code == 0
    assert re.search(r"(?m)^\w+\.\d\.0 +1 +hello *$", out)
    assert "\\x1b[31mred" in out
    assert "\x1b[31m" not in out
    found = re.search(r"--lease (\S+)", err)
    assert found is not None
    assert shell.says("complete", shell.queue, "--lease", found[1]) == "Completed 2\n"
    assert shell.ends("lease", shell.queue, "--wait", "10ms") == (0, "", "No items\n")
    assert shell.json("lease", shell.queue) == []


def test_lines_from_stdin_and_files(shell: Shell, tmp_path: Path) -> None:
    assert shell.says("produce", shell.queue, stdin=b"".join(b"%d\n" % n for n in range(2_500))) == "Stored 2,500 in 3 calls\n"
    file = tmp_path / "lines"
    file.write_bytes(b"\xff\x00\r\nlast")
    (produced,) = shell.json("produce", shell.queue, "--file", str(file))
    assert produced["count"] == 2
    assert shell.ends("produce", shell.queue, "-") == (0, "", "Nothing to store\n")
    items = [each for _ in range(6) for each in shell.json("lease", shell.queue, "-n", "1000")]
    assert {each["utf8"] for each in items if "utf8" in each} == {str(n) for n in range(2_500)} | {"last"}
    assert [each["bytes"] for each in items if "bytes" in each] == ["/wA="]


def test_a_key_makes_a_whole_input_repeatable(shell: Shell) -> None:
    lines = b"".join(b"%d\n" % n for n in range(1_500))
    command = ("produce", shell.queue, "-", "--key", "load-1")
    assert shell.says(*command, stdin=lines) == "Stored 1,500 in 2 calls\n"
    assert shell.says(*command, stdin=lines) == "Stored 1,500 in 2 calls (1,500 stored earlier)\n"
    code, _, err = shell.ends(*command, stdin=lines + b"more\n")
    assert code == 3
    assert "key_conflict" in err
    assert "1,000 items were stored before this" in err
    assert sum(part["total"] for part in partitions(shell)) == 1_500


def partitions(shell: Shell, queue: str = "") -> list[dict[str, Any]]:
    (stats,) = shell.json("stats", queue or shell.queue)
    return [part for logical in stats["logical_queues"] for part in logical["partitions"]]


def test_complete_and_retry_by_id(shell: Shell) -> None:
    shell.says("produce", shell.queue, *"abcdef")
    ids = [each["id"] for each in shell.json("lease", shell.queue, "-n", "6")]
    assert shell.says("complete", shell.queue, ids[0]) == "Completed 1\n"
    assert (
        shell.says("complete", shell.queue, "-", stdin=f"{ids[0]}\n\n{ids[1]}\n".encode()) == f"Completed 1\nignored {ids[0]}: completed\n"
    )
    assert shell.json("complete", shell.queue, ids[0]) == [{"completed": 0, "ignored": [{"id": ids[0], "reason": "completed"}]}]
    assert shell.says("retry", shell.queue, ids[2]) == "Put back 1\n"
    assert shell.says("retry", shell.queue, "-", "--after", "1h", stdin=ids[3].encode()) == "Put back 1\n"
    assert shell.says("retry", shell.queue, ids[4], "--dead", "--reason", "no good") == "Put back 0, dead 1\n"
    assert shell.json("retry", shell.queue, ids[4], "--dead")[0]["ignored"] == [{"id": ids[4], "reason": "dead"}]
    (again,) = shell.json("lease", shell.queue, "-n", "5", "--client-id", "other", "--wait", "2m")
    assert (again["utf8"], again["attempts"]) == ("c", 2)
    (dead,) = shell.json("lease", f"{shell.queue}.dead", "--wait", "2m")
    assert (dead["utf8"], dead["headers"]["sluiceway-reason"]) == ("e", "no good")
    code, out, err = shell.ends("complete", shell.queue, ids[5], "nonsense")
    assert (code, out) == (3, "")
    assert "'nonsense' is not an item id" in err


def test_stats(shell: Shell) -> None:
    shell.says("produce", shell.queue, "a", "b", "c")
    shell.says("lease", shell.queue)
    text = shell.says("stats", shell.queue)
    assert re.search(r"(?m)^part +ready +leased +scheduled +produced", text)
    assert re.search(r"(?m)^all +2 +1 +0 +3 ", text)
    assert sum(part["ready"] for part in partitions(shell)) == 2


def test_stats_count_dead_items_by_reason(shell: Shell) -> None:
    dead = f"{shell.queue}-of-reasons"
    shell.says("queue", "create", dead)
    shell.says("produce", dead, "a", "b", "--header", "sluiceway-reason=KeyError: 'x'", "--header", "sluiceway-queue=orders")
    shell.says("produce", dead, "c", "--header", "sluiceway-reason=too late")
    shell.says("produce", dead, "d")
    lines = [line.split() for line in shell.says("stats", dead, "--reasons").splitlines()[-3:]]
    assert lines == [["2", "KeyError", "orders"], ["1", "too", "late"], ["1", "no", "known", "reason"]]
    (answer,) = shell.json("stats", dead, "--reasons")
    assert answer["items"] == 4
    assert answer["reasons"][0] == {"reason": "KeyError", "source": "orders", "items": 2}
    code, _, err = shell.ends("stats", "--reasons")
    assert code == 2
    assert "--reasons needs a queue" in err


def child(url: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"SLUICEWAY_URL": url, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_ctrl_c_while_waiting_is_130(shell: Shell, url: str) -> None:
    with child(url, "lease", shell.queue, "--wait", "15m") as waiting, Client(url) as client:
        wait_until(lambda: client.stats(shell.queue).logical_queues[0].lease_waiting == 1, "the wait")
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


def test_watching_goes_on_until_ctrl_c(shell: Shell, url: str) -> None:
    with child(url, "stats", shell.queue, "--watch", "--json") as watching:
        assert watching.stdout is not None
        looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=PATIENCE)
    assert [look["queue_name"] for look in looks] == [shell.queue] * 2
    assert watching.returncode == 130


def test_a_server_stops_well_and_keeps_what_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "url"
    with subprocess.Popen(
        [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--url-file", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line == f"sluiceway listening on {file.read_text().strip()}\n"
        with Client(line.split()[-1]) as client:
            client.create_queue("q")
            client.produce("q", ["kept"])
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0
    assert "Traceback" not in err
    with ServerProcess(tmp_path / "data") as again, Client(again.url) as client:
        assert [item.payload for item in client.lease("q")] == [b"kept"]
        assert again.interrupt() == 0


def test_dev_says_what_to_try_and_takes_another_port_if_need_be(tmp_path: Path) -> None:
    def told(server: subprocess.Popen[str]) -> str:
        assert server.stdout is not None
        text = "".join(server.stdout.readline() for _ in range(8))
        url = text.split()[3]
        option = "" if url == "http://127.0.0.1:2319" else f" --url {url}"
        assert f"    sluiceway produce tasks hello world{option}\n" in text
        with Client(url) as client:
            assert client.list_queues().items == []
            backends.append([each["backend"] for each in client.list_backends()])
        return url

    servers: list[subprocess.Popen[str]] = []
    backends: list[list[object]] = []
    # A demo ran there once.
    prepare(tmp_path / "two")
    try:
        urls = []
        # The first takes port 2319, unless something on this machine has it; the second cannot.
        for data in ("one", "two"):
            command = [*COMMAND, "dev", "--no-demo", "--data", str(tmp_path / data)]
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
            urls.append(told(servers[-1]))
        assert urls[0] != urls[1]
        assert backends == [["default"], ["default", "second"]]
    finally:
        for server in servers:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=PATIENCE)
    assert [server.returncode for server in servers] == [0, 0]
