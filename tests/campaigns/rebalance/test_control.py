"""Small rounds of the campaign on honest servers, and on some that are not, which must be found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaigns.kit import sabotaged_server
from tests.campaigns.kit.fleet import started
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import loaded
from tests.campaigns.rebalance.mixed_fleet import SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.order import move_in_order
from tests.campaigns.rebalance.rebalance_judging import Moves
from tests.server.server_process import COMMAND
from tests.servers.postgres_server import PostgresServer

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def move_under_load(folder: Path, postgres: PostgresServer, command: list[str]) -> Report:
    report = Report("control")
    fleet = MixedFleet(folder, postgres, 1, command=command)
    moves = Moves(report, fleet)
    with loaded(MovingTraffic(fleet, {"orders": 2, "single": 1}, by_client=True)) as traffic:
        try:
            traffic.start()
            traffic.progress(200)
            moves.do("orders", traffic.tally, requested_partitions=4)
            fleet.settle_on(SHARED)
            moves.do("orders", traffic.tally, requested_partitions=3)
            traffic.progress(300)
            traffic.drain(0)
            moves.judge_audit()
        except AssertionError as error:
            # The ledger may have stopped it all, and then says more.
            if not traffic.tally.faults:
                report.fail(str(error))
        traffic.judge(report)
    return report


def move_the_line(folder: Path, postgres: PostgresServer, command: list[str]) -> Report:
    report = Report("control")
    fleet = MixedFleet(folder, postgres, 1, command=command)
    with started(fleet):
        move_in_order(report, fleet, 1_000)
    return report


@pytest.mark.parametrize("judge", [move_under_load, move_the_line])
def test_an_honest_server_is_judged_clean(
    tmp_path: Path, postgres: PostgresServer, judge: Callable[[Path, PostgresServer, list[str]], Report]
) -> None:
    assert judge(tmp_path, postgres, COMMAND).wrong == []


@pytest.mark.parametrize(
    ("what", "judge", "word"),
    [("seals", move_under_load, "lost"), ("keys", move_under_load, "doubled"), ("order", move_the_line, "was served where")],
)
def test_a_server_that_does_not_do_what_it_must_is_found_out(
    tmp_path: Path, postgres: PostgresServer, what: str, judge: Callable[[Path, PostgresServer, list[str]], Report], word: str
) -> None:
    report = judge(tmp_path, postgres, sabotaged_server.command(what))
    assert any(word in line for line in report.wrong), report.wrong
