"""The campaign imports nothing of the product; its histories can be read again, its library strikes, its planted bugs can be planted."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.campaigns.blackbox import __main__ as campaign
from tests.campaigns.blackbox import targets, workloads
from tests.campaigns.blackbox.faulty_system import FaultySystem, Mischief
from tests.campaigns.blackbox.operation_log import Fault, Operation, RoundLog, name_of, payload_of, read_round
from tests.campaigns.blackbox.planted_bugs import BUGS, SOURCE, PlantedBug
from tests.campaigns.blackbox.waits import Wait, Waits
from tests.campaigns.blackbox.workloads import EMPTY_AT_LAST, EMPTY_WITHIN, Patience
from tests.server.server_process import line_of
from tests.servers import pids
from tests.servers.pids import CpuTime


def test_it_imports_nothing_of_the_product() -> None:
    look = "import sys; import tests.campaigns.blackbox.__main__; print([name for name in sys.modules if name.startswith('sluiceway')])"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_can_be_planted(bug: PlantedBug) -> None:
    for edit in bug.edits:
        assert (SOURCE / edit.file).read_text().count(edit.text) == 1


def test_a_history_can_be_read_again(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "round-001.jsonl")
    log.operation(Operation("c", "lease", "q", 1.0, None, "unknown", {"batch": 1}))
    log.fault(Fault("kill", "server", 1.0, 2.0))
    log.wait(Wait(1.0, 1.5))
    log.round.observed.append("seen")
    log.round.is_drained = True
    assert read_round(log.close()) == log.round
    assert [path.name for path in tmp_path.iterdir()] == ["round-001.jsonl.gz"]


def test_what_the_process_waited_that_waited_longest_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 100.0, 2: 7.0}
    monkeypatch.setattr(pids, "cpu_time", lambda pid: CpuTime(0.0, times[pid]))
    found: list[Wait] = []
    waits = Waits(lambda: times, found.append)
    waits.look(1.0)
    times.update({1: 100.5, 2: 9.0})
    waits.look(10.0)
    # One that has just begun has no time yet to compare with.
    times.update({2: 9.1, 3: 50.0})
    waits.look(11.0)
    assert found == [Wait(8.0, 10.0)]
    assert waits.total == 2.0


def test_queues_have_time_as_long_as_something_leaves_them() -> None:
    patience, left, now = Patience(0.0), 100, 0.0
    while now + EMPTY_WITHIN / 2 < EMPTY_AT_LAST:
        assert not patience.is_over(left, now)
        left, now = left - 1, now + EMPTY_WITHIN / 2
    assert patience.is_over(left, EMPTY_AT_LAST)
    patience = Patience(0.0)
    assert not patience.is_over(5, 1.0)
    assert not patience.is_over(6, EMPTY_WITHIN)
    assert patience.is_over(5, 1.0 + EMPTY_WITHIN)


def test_the_counters_of_a_round_are_those_after_its_last_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the turn of a minute a schedule fired after the last look, and the items that were completed then were missing in the books.

    At that moment an instance was away, and all that it had counted was missing.
    """
    completed, answers = 80, 0

    class LateCrew:
        def __init__(self, workers: object) -> None: ...

        def start(self) -> None: ...

        async def stop(self, patience: float) -> None:
            nonlocal completed
            completed += 4

    class Empty:
        async def counters(self) -> dict[str, dict[str, int]]:
            nonlocal answers
            answers += 1
            away = answers in (3, 4)
            counts = {"completed": 0 if away else completed, "total": 0, "transferring": 0, "unavailable": int(away)}
            return {workloads.TICKS: counts}

        async def is_rebalanced(self) -> bool:
            return True

    monkeypatch.setattr(workloads, "Crew", LateCrew)
    monkeypatch.setattr(workloads, "QUEUES", ())
    goal = cast(Any, SimpleNamespace(log=RoundLog(tmp_path / "round-001.jsonl")))
    goal.log.round.began = time.time()
    is_drained, counters = asyncio.run(workloads.drain(goal, cast(Any, Empty()), Waits(dict, lambda wait: None)))
    assert is_drained
    assert counters[workloads.TICKS]["completed"] == 84


@pytest.mark.parametrize(
    ("said", "after"),
    [
        ("queue q, partition 3: stopped: blob 7 failed its checksum", targets.STOPPED),
        ("queue q, partition 3: failed: no connection", targets.PATIENCE),
    ],
)
def test_a_server_that_has_stopped_a_partition_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, said: str, after: float) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    # At first it says something else.
    monkeypatch.setattr(targets, "problems_of", lambda port: [said] if now >= 5 else ["timed out"])
    links = SimpleNamespace(clients=SimpleNamespace(target=1))
    member = cast("targets.Member", SimpleNamespace(name="server", links=links, tail=lambda: "its log"))
    with pytest.raises(AssertionError, match="partition 3"):
        targets.Member.await_ready(member)
    assert now == pytest.approx(after + 5 * (after == targets.STOPPED), abs=2 * targets.READY_POLL)


def test_a_payload_tells_its_name_and_no_damaged_one_does() -> None:
    payload = payload_of("1p0.3.1")
    assert name_of(payload) == "1p0.3.1"
    assert name_of(payload[:-1]) is None
    assert name_of(payload.replace("1p0.3.1", "1p0.3.2")) is None


def test_a_server_is_heard_when_more_than_1024_files_are_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] <= 1_024:
        pytest.skip(f"NOTHING IS TESTED OF MORE THAN 1,024 FILES: the limit is {limits[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        with subprocess.Popen([sys.executable, "-c", "print('here')"], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            with open(fcntl.fcntl(child.stdout, fcntl.F_DUPFD_CLOEXEC, 1_024)) as output:
                assert line_of(output) == "here\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


_PROGRAM = """
import os, sys, time
sys.stdin.readline()
for path in sys.argv[1:]:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    for call in (lambda: os.pwrite(file, b"x", 0), lambda: os.fsync(file)):
        try:
            call()
            print(0)
        except OSError as error:
            print(error.errno)
print(round(time.time()))
"""


def test_a_faulty_system_strikes_what_is_written_below_its_folder_and_the_clock(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    try:
        system = FaultySystem(tmp_path, "server", data)
    except OSError as error:
        pytest.skip(f"NOTHING IS TESTED OF FAULTY SYSTEMS: {error}")
    paths = [str(data / "file"), str(tmp_path / "other")]
    environment = {**os.environ, **system.environment()}
    command, pipe = [sys.executable, "-c", _PROGRAM, *paths], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        # The process runs already: what it reads is what is changed now.
        system.befall(Mischief(clock=-1_000_000_000, write_error=errno.ENOSPC, sync_error=errno.EIO))
        output, _ = child.communicate("\n")
    *results, clock = map(int, output.split())
    assert results == [errno.ENOSPC, errno.EIO, 0, 0]
    assert clock < 1_500_000_000
    assert system.end() == 2
    assert system.end() == 0


@pytest.mark.crash
@pytest.mark.slow
def test_a_campaign_finds_nothing_wrong_and_tells_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--storage", "sqlite", "--minutes", "0.1", "--round", "12", "--faults", "kill", "--faults", "freeze"]
    code = campaign.main([*arguments, "--folder", str(tmp_path / "kept")])
    assert code == 0, capsys.readouterr().out
    folder = tmp_path / "kept" / "sqlite"
    page = (folder / "index.html").read_text()
    assert "0 anomalies" in page
    for picture in ("campaign.svg", "round-001.svg"):
        assert picture in page
        assert (folder / picture).read_text().count("<path") > 10
    assert campaign.main(["judge", str(folder)]) == 0


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("bug", ["ignored-delay", "forgotten-keys"])
def test_a_planted_bug_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], bug: str) -> None:
    code = campaign.main(["planted", bug, "--folder", str(tmp_path / "kept")])
    assert code == 0, capsys.readouterr().out
    assert (tmp_path / "kept" / bug / "round-001-item-0.svg").exists() or "after" in capsys.readouterr().out
