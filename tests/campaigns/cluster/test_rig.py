"""The campaign's own parts, on one server: what it does to a cluster must be no fault of its own, and what is wrong must be found."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.campaigns.cluster import unfenced
from tests.campaigns.cluster.campaign import SCENARIOS, arguments
from tests.campaigns.cluster.cutting import Switchboard
from tests.campaigns.cluster.fleet import Fleet, Instance, PostgresFleet, postgres_url, started
from tests.campaigns.cluster.freezing import freeze_an_owner
from tests.campaigns.cluster.history import faults
from tests.campaigns.cluster.kills import Pace, kill_again_and_again
from tests.campaigns.cluster.report import Report, most_and_median, quantile
from tests.campaigns.cluster.serving import Awake, seconds_until_served
from tests.campaigns.cluster.traffic import AWAY, Door, Traffic
from tests.campaigns.crash.ledger import Tally
from tests.server.server_process import COMMAND
from tests.servers.postgres_server import PostgresServer, server_or_skip

QUEUES = {"wide": 3, "single": 1}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Three instances that were never started."""
    instances = [Instance(tmp_path, f"i{n}", lambda _: "") for n in range(3)]
    for number, instance in enumerate(instances):
        instance.url = f"http://{number}"
    return Fleet(instances)


def test_a_client_whose_call_was_not_done_goes_elsewhere_and_comes_home_later(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tests.campaigns.cluster.traffic.time", SimpleNamespace(monotonic=lambda: now))
    door = Door(fleet, 2)
    assert door.get() == "http://2"
    door.failed("http://2")
    assert door.get() == "http://0"
    # Another thread was told of the same failure.
    door.failed("http://2")
    assert door.get() == "http://0"
    door.failed("http://0")
    assert door.get() == "http://1"
    now += AWAY + 1
    assert door.get() == "http://2"


def test_only_who_is_frozen_need_not_answer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.instances[1], "is_frozen", True)
    door = Door(fleet, 1)
    assert [door.may_hang(f"http://{n}") for n in range(3)] == [False, True, False]
    assert door.get() == "http://1"
    assert Awake(fleet, 1).get() == "http://2"


def test_a_connection_string_becomes_a_url_of_the_same_meaning(postgres: PostgresServer) -> None:
    parts = {name: str(value) for name, value in conninfo_to_dict(postgres.dsn()).items()}
    parts |= {"password": "p@ss:w/ord?", "application_name": "i0.1"}
    assert conninfo_to_dict(postgres_url(parts)) == parts


def test_every_scenario_can_be_named_and_others_cannot() -> None:
    assert arguments().parse_args([*SCENARIOS]).scenarios == [*SCENARIOS]
    assert arguments().parse_args([]).scenarios == []
    with pytest.raises(SystemExit):
        arguments().parse_args(["nonsense"])


def test_a_report_tells_wrong_from_missed(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("name")
    report.within("this", 9.9, 10)
    report.aim("that", 0.05, 0.05)
    assert (report.wrong, report.missed) == ([], [])
    report.within("this", 10.1, 10)
    report.aim("that", 0.051, 0.05)
    assert report.wrong == ["this took 10.1 s, more than 10 s"]
    assert report.missed == ["that 0.051, aim 0.05"]
    assert "WRONG: this took" in capsys.readouterr().out


def test_figures() -> None:
    assert most_and_median([3.0, 1.0, 2.0]) == "3.0 s at most, 2.0 s in the median"
    assert [quantile(range(100), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


@pytest.mark.crash
@pytest.mark.slow
def test_killing_a_server_on_postgres_is_judged_clean(tmp_path: Path, postgres: PostgresServer) -> None:
    fleet = PostgresFleet(tmp_path, postgres, 1)
    traffic = Traffic(fleet, Tally(), QUEUES)
    with started(fleet):
        try:
            traffic.create_queues()
            history = fleet.history()
            times = kill_again_and_again(Report("one"), traffic, random.Random(1), Pace(2, 1, 0, 2))
        finally:
            traffic.end()
    assert times
    assert traffic.tally.faults == 0, traffic.tally.examples
    assert traffic.tally.counts["completed"] > 0
    writes = history.writes()
    assert not faults(writes)
    assert {write.writer for write in writes} == {f"i0.{start}" for start in range(1, len(times) + 2)}


@pytest.mark.crash
@pytest.mark.slow
def test_a_partition_that_is_not_served_is_found_and_so_is_when_it_is_again(tmp_path: Path, postgres: PostgresServer) -> None:
    with Switchboard() as switchboard:
        fleet = PostgresFleet(tmp_path, postgres, 1, switchboard)
        traffic = Traffic(fleet, Tally(), QUEUES)
        with started(fleet):
            try:
                traffic.create_queues()
                line = fleet.lines[0].storage
                assert line.connections > 0
                assert seconds_until_served(traffic, "whole", 0).missing == []
                line.cut()
                assert seconds_until_served(traffic, "cut", 0, give_up=0.5).missing == ["wide/0", "wide/1", "wide/2", "single/0"]
                mending = threading.Timer(1.0, line.mend)
                mending.start()
                served = seconds_until_served(traffic, "mended", 0)
                mending.join()
                assert served.missing == []
                assert served.last in ("wide/0", "wide/1", "wide/2", "single/0")
                # The line was whole before the last of them was served, and not after.
                assert served.seconds >= 1.0
                traffic.drain(0)
            finally:
                traffic.end()
        assert traffic.tally.faults == 0, traffic.tally.examples


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("command", [COMMAND, unfenced.COMMAND], ids=["honest", "unfenced"])
def test_a_frozen_owner_that_goes_on_writing_is_found_out(tmp_path: Path, postgres: PostgresServer, command: list[str]) -> None:
    fleet = PostgresFleet(tmp_path, postgres, 2, command=command)
    traffic = Traffic(fleet, Tally(), QUEUES)
    guilty = command is unfenced.COMMAND
    with started(fleet):
        try:
            traffic.create_queues()
            history = fleet.history()
            # With two owners everything may go wrong, also what is needed to go on.
            with contextlib.suppress(AssertionError) if guilty else contextlib.nullcontext():
                freeze_an_owner(Report("frozen"), traffic, history, random.Random(1), 15)
        finally:
            traffic.end()
    assert bool(faults(history.writes())) == guilty
    assert guilty or traffic.tally.faults == 0, traffic.tally.examples
