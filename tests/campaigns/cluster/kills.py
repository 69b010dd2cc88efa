"""Kill −9 one of them again and again under load; and stop one in good order."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from sluiceway.kernel.clock import parse_duration
from tests.campaigns.kit.report import Report, most_and_median, quantile
from tests.campaigns.kit.serving import Served, longest_hole, seconds_until_served
from tests.campaigns.kit.traffic import Traffic, only

SERVED_WITHIN = 10.0
"""Seconds within which every partition must be served again, whatever was killed or has left."""

NOTICED = 1.5
"""Seconds after which one that was killed can be told from the others by its silence."""
KNOWN_AIM = 1.0
"""Seconds from when a death is known until all is served again."""


class Pace(NamedTuple):
    """Seconds: how long there are kills, how far apart they are, after how long the killed one is started again, and between two drains."""

    length: float = 300.0
    every: float = 5.0
    revive_after: float = 2.0
    drain_every: float = 60.0


class Takeover(NamedTuple):
    """What followed a kill. `known`: seconds until the others took the killed one for dead; None: nobody could be asked."""

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
    watches: list[tuple[str, float | None, Future[Served]]] = []
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        while time.monotonic() - begun < length and not traffic.tally.faults:
            at = time.monotonic()
            struck = traffic.fleet.strike(chance)
            home = chance.randrange(traffic.fleet.homes)
            watch = pool.submit(seconds_until_served, traffic, f"kill{number + len(watches)}", home, at)
            pause.wait(min(NOTICED, pace.revive_after))
            watches.append((struck.name, _known(traffic, at), watch))
            pause.wait(max(0.0, pace.revive_after - (time.monotonic() - at)))
            struck.revive()
            pause.wait(max(0.0, pace.every - (time.monotonic() - at)))
    takeovers = [Takeover(name, watch.result(), known) for name, known, watch in watches]
    for name, served, _ in takeovers:
        if served.missing:
            report.fail(f"{name} was killed, and these were never served again: {', '.join(served.missing)}")
        report.within(f"after {name} was killed, {served.last}", served.seconds, SERVED_WITHIN)
    return takeovers


def _known(traffic: Traffic, at: float) -> float | None:
    """Seconds from a kill `at`, which was NOTICED ago, until one of the others takes the killed one for dead: `member_timeout` after the
    last heartbeat that it saw."""
    for home in range(traffic.fleet.homes):
        answer = traffic.try_to("instances.list", only(traffic.fleet, home))
        asked = time.monotonic() - at
        if answer.outcome == "done" and (times := answer.body.get("parameters")):
            silent = [parse_duration(each["silent_for"], "silent_for") / 1000 for each in answer.body["items"]]
            # The living beat twice a second; one that was killed before this one has been silent for longer.
            if found := [each for each in silent if NOTICED - 0.5 <= each <= 2 * NOTICED]:
                return asked - found[0] + parse_duration(times["member_timeout"], "member_timeout") / 1000
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
