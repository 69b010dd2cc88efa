"""One instance is cut off from the meta store, from storage, or the others from it: by resets, in silence, one way, or slowly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.campaigns.kit.fleet import PostgresFleet
from tests.campaigns.kit.lines import Line
from tests.campaigns.kit.report import Report, most_and_median
from tests.campaigns.kit.serving import longest_hole, seconds_until_served
from tests.campaigns.kit.traffic import Traffic

RECOVERED_WITHIN = 30.0
"""Seconds within which every partition must be served once all lines are whole: a commit whose answer never came is waited for a while."""
SLOW = 0.2

WAYS: dict[str, Callable[[Line], None]] = {
    "reset": lambda line: line.cut(),
    "silent": lambda line: line.silence("up", "down"),
    "unanswered": lambda line: line.silence("down"),
    "slow": lambda line: line.delay(SLOW),
}


def cut_every_line(report: Report, traffic: Traffic, fleet: PostgresFleet, chance: random.Random, seconds: float) -> None:
    times: dict[str, list[float]] = {}
    for link in fleet.lines[0]._fields:
        for way, cut in WAYS.items():
            home = chance.randrange(fleet.homes)
            label = f"{link}-{way}"
            traffic.start()
            traffic.progress(50)
            line: Line = getattr(fleet.lines[home], link)
            if not line.connections:
                report.fail(f"nobody has used the line of {link} to or from {fleet.instances[home].name}: nothing is cut")
            meanwhile, after = _cut(traffic, line, cut, label, home, seconds)
            times.setdefault(link, []).append(after)
            report.within(f"{link} {way}: recovery", after, RECOVERED_WITHIN)
            traffic.drain(home)
            report.say(f"{link} {way} at {fleet.instances[home].name}: {meanwhile}; all served {after:.1f} s after it was mended")
            if traffic.tally.faults:
                report.fail(f"{link} {way} at {fleet.instances[home].name}: see below")
                return
    for link, each in times.items():
        report.figure(f"cut from {link}, all served after it was mended {most_and_median(each)}")


def _cut(traffic: Traffic, line: Line, cut: Callable[[Line], None], label: str, home: int, seconds: float) -> tuple[str, float]:
    """What was served meanwhile, and how long it then took until everything was again."""
    begun = time.monotonic()
    cut(line)
    try:
        # What only the one that is cut off could serve is not served until the line is whole again.
        hole = longest_hole(traffic, label, (home + 1) % traffic.fleet.homes, lambda: time.monotonic() - begun > seconds, seconds)
    finally:
        line.mend()
    mended = time.monotonic()
    again = seconds_until_served(traffic, f"{label}-mended", home, mended)
    if again.missing:
        return f"never served again: {', '.join(again.missing)}", float("inf")
    if hole.missing:
        return f"{len(hole.missing)} partitions not served", again.seconds
    return f"a partition not served for {hole.seconds:.1f} s", again.seconds
