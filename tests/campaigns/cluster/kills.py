"""Kill −9 one of them again and again under load; and stop one in good order."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tests.campaigns.kit.report import Report, most_and_median
from tests.campaigns.kit.serving import Served, longest_hole, seconds_until_served
from tests.campaigns.kit.traffic import Traffic

SERVED_WITHIN = 10.0
"""Seconds within which every partition must be served again, whatever was killed or has left."""


class Pace(NamedTuple):
    """Seconds: how long there are kills, how far apart they are, after how long the killed one is started again, and between two drains."""

    length: float = 300.0
    every: float = 5.0
    revive_after: float = 2.0
    drain_every: float = 60.0


def kill_again_and_again(report: Report, traffic: Traffic, chance: random.Random, pace: Pace) -> list[float]:
    """Returns, for each kill, how long until every partition was served again."""
    times: list[float] = []
    killed = 0.0
    while killed < pace.length and not report.wrong and not traffic.tally.faults:
        length = min(pace.drain_every, pace.length - killed)
        traffic.start()
        traffic.progress(50)
        round_times = _round(report, traffic, chance, pace, length, len(times))
        times += round_times
        traffic.drain(chance.randrange(traffic.fleet.homes))
        killed += length
        report.say(f"{len(times)} kills: served again after {most_and_median(times)}; {traffic.tally.summary()}")
    report.figure(f"{len(times)} kills, every partition served again after {most_and_median(times)}")
    return times


def _round(report: Report, traffic: Traffic, chance: random.Random, pace: Pace, length: float, number: int) -> list[float]:
    """Kills for that long; none is begun before the one that was killed is being started again."""
    pause = threading.Event()
    watches: list[tuple[str, Future[Served]]] = []
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        while time.monotonic() - begun < length and not traffic.tally.faults:
            at = time.monotonic()
            struck = traffic.fleet.strike(chance)
            watch = pool.submit(seconds_until_served, traffic, f"kill{number + len(watches)}", chance.randrange(traffic.fleet.homes), at)
            watches.append((struck.name, watch))
            pause.wait(pace.revive_after)
            struck.revive()
            pause.wait(max(0.0, pace.every - (time.monotonic() - at)))
    for name, watch in watches:
        served = watch.result()
        if served.missing:
            report.fail(f"{name} was killed, and these were never served again: {', '.join(served.missing)}")
        report.within(f"after {name} was killed, {served.last}", served.seconds, SERVED_WITHIN)
    return [watch.result().seconds for _, watch in watches]


def stop_one_after_the_other(report: Report, traffic: Traffic, chance: random.Random) -> None:
    """Each instance is stopped in good order under load, hands over, and comes back."""
    fleet = traffic.fleet
    traffic.start()
    traffic.progress(50)
    holes, exits = [], []
    before = traffic.tally.counts["no answer"]
    for number, instance in enumerate(fleet.instances):
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(instance.stop)
            stopping.add_done_callback(lambda _, begun=begun: exits.append(time.monotonic() - begun))  # type: ignore[misc]
            hole = longest_hole(traffic, f"stop{number}", (number + 1) % fleet.homes, stopping.done)
        if hole.missing:
            report.fail(f"after {instance.name} was stopped, these were never served again: {', '.join(hole.missing)}")
        report.within(f"while {instance.name} was stopped, {hole.last}", hole.seconds, SERVED_WITHIN)
        holes.append(hole.seconds)
        if code := stopping.result():
            report.fail(f"{instance.name} was stopped, and its exit code is {code}")
        fleet.restart(instance)
        traffic.progress(50)
    cut_off = traffic.tally.counts["no answer"] - before
    traffic.drain(chance.randrange(fleet.homes))
    report.figure(
        f"stopped one after the other: a partition was not served for {most_and_median(holes)}, "
        f"a process gone after {most_and_median(exits)}, {cut_off} calls without an answer"
    )
