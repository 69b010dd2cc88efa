"""What a campaign's command line takes, and what it says."""

from __future__ import annotations

import importlib

import pytest

from tests.campaigns.kit.command import Campaign, summed_up
from tests.campaigns.kit.report import Report, most_and_median, quantile


@pytest.mark.parametrize("name", ["bucket", "cluster", "rebalance", "spark", "tasks"])
def test_every_scenario_can_be_named_and_others_cannot(name: str) -> None:
    campaign: type[Campaign] = importlib.import_module(f"tests.campaigns.{name}.__main__").Campaign
    parser, scenarios = campaign.parser(), [*campaign.scenarios()]
    assert scenarios
    assert all(scenario.__doc__ for scenario in campaign.scenarios().values())
    assert parser.parse_args(scenarios).scenarios == scenarios
    assert parser.parse_args([]).scenarios == []
    with pytest.raises(SystemExit):
        parser.parse_args(["nonsense"])


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


def test_the_last_line_says_ok_only_if_nothing_was_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Report("good"), Report("bad")
    good.figure("1 item/s")
    good.aim("p99", 4.0, 3.0)
    assert summed_up([good], 1) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok: 0 wrong in 1 scenarios, 1 s | good: 1 item/s | aims missed: good: p99 4, aim 3"
    bad.fail("lost")
    assert summed_up([good, bad], 1) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED: 1 wrong in 2 scenarios")
