"""`sluiceway top`: what it makes of the counts, and how it behaves in a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cli.common import wide_console
from sluiceway.cli.consumers import ConsumerRow
from sluiceway.cli.top import BackendRow, QueueRow, ServerSnapshot, frame, summarise
from sluiceway.client import Client, PartitionStats, QueueStats
from sluiceway.client._sync.channel import Channel
from sluiceway.client.answers import LogicalQueueStats
from tests.cli.cli_shell import Shell
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until


def stats(name: str, *partitions: PartitionStats) -> QueueStats:
    return QueueStats(queue_name=name, logical_queues=[LogicalQueueStats(partitions=list(partitions))])


def test_counts_are_added_up_and_rates_are_what_came_in_between() -> None:
    before = stats("q", PartitionStats(partition=0, produced=10, completed=1), PartitionStats(partition=1, produced=5))
    now = stats(
        "q",
        PartitionStats(partition=0, produced=30, completed=4, ready=3, servable=3, total_leased=2, scheduled=1, dead=7, commit_time_ms=2.0),
        PartitionStats(partition=1, produced=5, ready=1, backend="other", state="unavailable", commit_time_ms=4.0),
        PartitionStats(partition=2, produced=5, backend="other", state="draining", degraded=True, commit_time_ms=6.0),
    )
    look = summarise([now], {"q": before}, 4.0, ["a problem"], more=True)
    assert look.queues == [QueueRow("q", 3, 4, 2, 1, 7, 6.25, 0.75, servable=3)]
    assert look.backends == [BackendRow("default", 1, 1, 0, 2.0), BackendRow("other", 2, 1, 1, 5.0)]
    assert (look.problems, look.more) == (["a problem"], True)


def test_instances_are_counted_once_and_nobody_is_none() -> None:
    logical = [LogicalQueueStats(instance=name, partitions=[PartitionStats(partition=n)]) for n, name in enumerate(("a", "b", None))]
    queues = [QueueStats(queue_name=name, logical_queues=logical) for name in ("q", "r")]
    assert summarise(queues, {}, 0.0, [], more=False).instances == 2


def test_of_several_instances_the_one_that_was_told_most_says_the_half_and_the_slowest_the_rest() -> None:
    told = [(5, 10, 900), (50, 20, 300), (0, None, None)]
    shares = [LogicalQueueStats(handled=items, handler_p50_ms=p50, handler_p99_ms=p99) for items, p50, p99 in told]
    (row,) = summarise([QueueStats(queue_name="q", logical_queues=shares)], {}, 0.0, [], more=False).queues
    assert (row.handler_p50_ms, row.handler_p99_ms) == (20, 900)
    (row,) = summarise([QueueStats(queue_name="q", logical_queues=shares[2:])], {}, 0.0, [], more=False).queues
    assert (row.handler_p50_ms, row.handler_p99_ms) == (None, None)


def test_the_first_look_has_no_rates_and_a_queue_made_anew_no_negative_ones() -> None:
    now = stats("q", PartitionStats(partition=0, produced=1))
    assert summarise([now], {}, 0.0, [], more=False).queues[0].produced_per_second is None
    before = stats("q", PartitionStats(partition=0, produced=100))
    assert summarise([now], {"q": before}, 1.0, [], more=False).queues[0].produced_per_second == 0


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    row = QueueRow("q", 2, 1_234, 5, 6, 7, 12.3, 0.25, handler_p50_ms=15, handler_p99_ms=1_500, servable=1_234)
    ordered = QueueRow("ordered", 1, 1_234, 5, 6, 7, servable=12)
    wide_console().print(
        frame(
            ServerSnapshot([row, ordered], [BackendRow("default", 2, 1, 1, 3.25)], ["critical: backend_down: db: \x1b[31mdown"], True, 3),
            "http://x",
            "NOT UP TO DATE",
        )
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["http://x", "3", "instances", "NOT", "UP", "TO", "DATE"] in lines
    assert ["q", "2", "1,234", "5", "6", "7", "12", "0.2", "15ms", "1s500ms"] in lines
    assert ["ordered", "1", "1,234", "(12", "servable)", "5", "6", "7", "-", "-", "-", "-"] in lines
    assert ["default", "2", "1", "1", "3.2"] in lines
    told = ["critical:", "backend_down:", "db:", "\\x1b[31mdown"]
    assert told in lines
    assert lines.index(told) < next(place for place, line in enumerate(lines) if line[:1] == ["queue"]), "what is wrong comes first"
    assert any(line[:3] == ["…", "and", "more"] for line in lines)
    wide_console().print(frame(ServerSnapshot([], [], [], False, 1), "http://x"))
    out = capsys.readouterr().out
    assert "instances" not in out
    assert "No queues" in out
    assert "critical" not in out


def test_a_look_takes_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        for n in range(5):
            client.create_queue(f"q{n}")
        monkeypatch.setenv("SLUICEWAY_URL", server.url)
        shell = Shell("", monkeypatch, capsysbinary)
        asked: list[str] = []
        attempt = Channel.attempt

        def noted(self: Channel, call: Any) -> Any:
            asked.append(call.path)
            return attempt(self, call)

        monkeypatch.setattr(Channel, "attempt", noted)
        (look,) = shell.json("top", "--once", "-n", "3")
        assert ([row["queue_name"] for row in look["queues"]], look["more"]) == (["q0", "q1", "q2"], True)
        assert asked == ["/v1/queues.list", *["/v1/queue.stats"] * 3] * 2 + ["/v1/problems.list", "/v1/consumers.list"], (
            "twice, for the rates"
        )
        asked.clear()
        # Without a terminal there is nothing to watch.
        assert "q4" in shell.says("top", "q4")
        assert asked == ["/v1/queue.stats", "/v1/queues.info", "/v1/queue.stats", "/v1/problems.list", "/v1/consumers.list"]
        code, _, err = shell.ends("top", "q5")
        assert code == 3
        assert "queue_not_found" in err
        assert shell.ends("top", *(f"q{n}" for n in range(51)))[0] == 2


def test_as_json_it_goes_on_with_rates_until_ctrl_c(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        client.create_queue("q")
        command = [*COMMAND, "top", "--json", "--interval", "10ms", "--url", server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            looks = [json.loads(watching.stdout.readline())["queues"][0] for _ in range(2)]
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=PATIENCE)
    assert [look["produced_per_second"] for look in looks] == [None, 0]
    assert watching.returncode == 130


def test_a_terminal_is_left_clean_by_ctrl_c_and_a_lost_server_is_told(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        client.create_queue("watched")
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        command = [*COMMAND, "top", "--interval", "10ms", "--url", server.url]
        screen = bytearray()

        def read() -> None:
            try:
                while part := os.read(ours, 65_536):
                    screen.extend(part)
            except OSError:
                pass  # the other end is closed

        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as watching:
            os.close(theirs)
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            wait_until(lambda: b"watched" in screen, "the first look")
            server.kill()
            wait_until(lambda: b"NOT UP TO DATE" in screen, "the notice")
            assert watching.poll() is None
            watching.send_signal(signal.SIGINT)
            assert watching.wait(PATIENCE) == 130
        reader.join(PATIENCE)
        os.close(ours)
    text = bytes(screen)
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert on in text
        assert text.rindex(on) < text.rindex(off), "the screen and the cursor are given back"
    assert text.endswith(b"interrupted\r\n")
    assert b"Traceback" not in text


def test_consumers_are_shown_with_their_queries_first(capsys: pytest.CaptureFixture[str]) -> None:
    polling = [ConsumerRow("q", f"c{n}", "", "", None, 1, n, None, 7, None) for n in range(12)]
    look = ServerSnapshot(
        [QueueRow("q", 2, 7, 5, 6, 7, servable=7)],
        [],
        [],
        False,
        1,
        [*polling, ConsumerRow("q", "s", "bill", "running", 3, 4, 5, 8_112.4, 7, "12:00:01")],
    )
    wide_console().print(frame(look, "http://x"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["q", "s", "bill", "running", "3", "4", "5", "8,112", "7", "12:00:01"] in lines
    assert ["q", "c1", "-", "-", "-", "1", "1", "-", "7", "-"] in lines
    assert not any(line[:2] == ["q", "c0"] for line in lines)
    assert any(line[:4] == ["…", "and", "1", "more"] for line in lines)


def test_who_consumes_is_listed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with ServerProcess(tmp_path / "data") as server, Client(server.url, client_id="billing") as client:
        for name in ("orders", "returns"):
            client.create_queue(name)
            client.produce(name, ["x"] * 3)
        client.lease("orders", batch_size=2)
        monkeypatch.setenv("SLUICEWAY_URL", server.url)
        shell = Shell("", monkeypatch, capsysbinary)
        assert [line.split()[:7] for line in shell.says("consumer", "list").splitlines()[1:]] == [
            ["orders", "billing", "-", "-", "-", "1", "2"]
        ]
        (found,) = shell.json("consumer", "list", "orders")
        assert (found["ready"], found["consumers"][0]["client_id"]) == (1, "billing")
        assert "No consumers" in shell.ends("consumer", "list", "returns")[2]
        (look,) = shell.json("top", "--once")
        assert [(row["queue_name"], row["client_id"], row["items"], row["lag"]) for row in look["consumers"]] == [
            ("orders", "billing", 2, 1)
        ]
