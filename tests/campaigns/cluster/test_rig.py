"""The campaign's own parts, on one server: what it does to a cluster must be no fault of its own, and what is wrong must be found."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.campaigns.cluster.freezing import freeze_an_owner
from tests.campaigns.cluster.kills import Pace, kill_again_and_again
from tests.campaigns.kit import sabotaged_server
from tests.campaigns.kit.fleet import PostgresFleet, postgres_url
from tests.campaigns.kit.history import faults
from tests.campaigns.kit.lines import Switchboard
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.serving import seconds_until_served
from tests.campaigns.kit.traffic import Traffic, loaded
from tests.server.server_process import COMMAND
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.postgres_server import PostgresServer

QUEUES = {"wide": 3, "single": 1}


def test_a_connection_string_becomes_a_url_of_the_same_meaning(postgres: PostgresServer) -> None:
    parts = {name: str(value) for name, value in conninfo_to_dict(postgres.dsn()).items()}
    parts |= {"password": "p@ss:w/ord?", "application_name": "i0.1"}
    assert conninfo_to_dict(postgres_url(parts)) == parts


@pytest.mark.crash
@pytest.mark.slow
def test_killing_a_server_on_postgres_is_judged_clean(tmp_path: Path, postgres: PostgresServer) -> None:
    fleet = PostgresFleet(tmp_path, postgres, 1)
    with loaded(Traffic(fleet, QUEUES)) as traffic:
        history = fleet.history()
        times = kill_again_and_again(Report("one"), traffic, random.Random(1), Pace(2, 1, 0, 2))
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
        with loaded(Traffic(fleet, QUEUES)) as traffic:
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
        assert traffic.tally.faults == 0, traffic.tally.examples


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["", "holds-on", "unfenced"])
@pytest.mark.parametrize("bucket", [False, True], ids=["postgres", "bucket"])
def test_a_frozen_owner_that_goes_on_writing_is_found_out(tmp_path: Path, postgres: PostgresServer, flaw: str, bucket: bool) -> None:
    """One that only holds on goes on in vain: the storage refuses its writes."""
    command = sabotaged_server.command(flaw) if flaw else COMMAND
    with faulty_bucket() if bucket else contextlib.nullcontext() as where:
        fleet = PostgresFleet(tmp_path, postgres, 2, command=command, bucket=where)
        with loaded(Traffic(fleet, QUEUES)) as traffic:
            history = fleet.history()
            # With two owners everything may go wrong, also what is needed to go on.
            with contextlib.suppress(AssertionError) if flaw else contextlib.nullcontext():
                freeze_an_owner(Report("frozen"), traffic, history, random.Random(1), 15)
        found = faults(history.writes())
    assert bool(found) == (flaw == "unfenced"), found[:3]
    assert flaw or traffic.tally.faults == 0, traffic.tally.examples
