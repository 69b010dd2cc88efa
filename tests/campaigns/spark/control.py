"""Sources and sinks that do not do what they must, and have to be found guilty of it."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns.kit.report import Report
from tests.campaigns.spark.driver_kills import POINTS, History
from tests.campaigns.spark.rig import BATCH, Rig
from tests.spark.spark_world import server

WHERE = {"lost": "folder", "doubled": "queue", "left": "latest-end", "other rows": "plain"}
"""The point at which each must be killed to be found out."""


def run_control(report: Report, folder: Path) -> None:
    """One short history each."""
    for guilt, name in WHERE.items():
        place = folder / guilt.replace(" ", "-")
        place.mkdir()
        point = next(point for point in POINTS if point.name == name)
        with server(place) as world:
            told = History(Rig(place, world, 3 * BATCH), [(point, 2)], guilt, patience=3).run()
        if guilt in told.faults.kinds:
            report.say(f"found guilty of {guilt!r}: {told.faults.lines[0][:120]}")
        else:
            report.fail(f"not found guilty of {guilt!r}, killed at {name}: {told.faults.lines}; see {place}")
    report.figure(f"{len(WHERE)} control groups")
