"""Kill −9 one of them again and again under load; and stop one in good order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from sluiceway.kernel.clock import parse_duration, parse_time
from tests.campaigns.kit.report import Report, most_and_median, quantile
from tests.campaigns.kit.serving import Served, longest_hole, seconds_until_served
from tests.campaigns.kit.traffic import Traffic, only

SERVED_WITHIN = 10.0
"""Seconds within which every partition must be served again, whatever was killed or has left."""

KNOWN_AIM = 1.0
"""Seconds from when a death is known until all is served again."""


class Pace(NamedTuple):
    """Seconds: how long there are kills, how far apart they are, after how long the killed one is started again, and between two drains."""

    length: float = 300.0
    every: float = 5.0
    revive_after: float = 2.0
    drain_every: float = 60.0


class Takeover(NamedTuple):
    """What followed a kill. `known`: seconds until a round began that left the killed one out; None: there was no such round."""

    name: str
    served: Served
    known: float | None


def kill_again_and_again(report: Report, traffic: Traffic, chance: random.Random, pace: Pace) -> list[float]:
    """Returns, for each kill, how long until every partition was served again."""
    times: list[float] = []
    since_known: list[float] = []
    killed = 0.0
    while killed < pace.length and not report.wrong and not traffic.tally.faults:
        length = min(pace.drain_every, pace.length - killed)
        traffic.start()
        traffic.progress(50)
        takeovers = _round(report, traffic, chance, pace, length, len(times))
        times += [each.served.seconds for each in takeovers]
        since_known += [each.served.seconds - each.known for each in takeovers if each.known is not None]
        traffic.drain(chance.randrange(traffic.fleet.homes))
        killed += length
        report.say(f"{len(times)} kills: served again after {most_and_median(times)}; {traffic.tally.summary()}")
    report.figure(f"{len(times)} kills, every partition served again after {most_and_median(times)}")
    if since_known:
        p99 = quantile(since_known, 0.99)
        report.figure(f"since the death was known: {most_and_median(since_known)}, p99 {p99:.2f} s")
        report.aim("p99 since the death was known", p99, KNOWN_AIM)
    return times


def _round(report: Report, traffic: Traffic, chance: random.Random, pace: Pace, length: float, number: int) -> list[Takeover]:
    """Kills for that long; none is begun before the one that was killed is being started again."""
    pause = threading.Event()
    watches: list[Future[Takeover]] = []
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        while time.monotonic() - begun < length and not traffic.tally.faults:
            at, wall = time.monotonic(), time.time() * 1000
            struck = traffic.fleet.strike(chance)
            home = chance.randrange(traffic.fleet.homes)
            watches.append(pool.submit(_watch, traffic, f"kill{number + len(watches)}", struck.name, home, at, wall))
            pause.wait(pace.revive_after)
            struck.revive()
            pause.wait(max(0.0, pace.every - (time.monotonic() - at)))
    takeovers = [watch.result() for watch in watches]
    for name, served, _ in takeovers:
        if served.missing:
            report.fail(f"{name} was killed, and these were never served again: {', '.join(served.missing)}")
        report.within(f"after {name} was killed, {served.last}", served.seconds, SERVED_WITHIN)
    return takeovers


def _watch(traffic: Traffic, label: str, name: str, home: int, at: float, wall: float) -> Takeover:
    """Wait until every partition is served after a kill `at`, which is `wall` in milliseconds of the clock."""
    served = seconds_until_served(traffic, label, home, at)
    rounds = traffic.try_to("rounds.list", only(traffic.fleet, home)).body or {}
    return Takeover(name, served, _known(rounds.get("items", []), wall))


def _known(rounds: Sequence[dict[str, Any]], wall: float) -> float | None:
    """Seconds from then until a round began without somebody who had been in the last one before. `rounds`: the newest first."""
    before: set[str] | None = None
    for each in reversed(rounds):
        sealed = parse_time(each["sealed_at"], "sealed_at")
        participants = set(each["participants"])
        if sealed <= wall:
            before = participants
        elif before is not None and before - participants:
            return (sealed - parse_duration(each["duration"], "duration") - wall) / 1000
    return None


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
