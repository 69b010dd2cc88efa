"""Kill −9 one of them again and again under load; and stop one in good order."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import NamedTuple

from sluiceway.kernel.clock import parse_duration
from tests.campaigns.cluster.takeover_phases import Phase, SealedRound, openings
from tests.campaigns.kit.report import Report, most_and_median, quantile
from tests.campaigns.kit.serving import Served, longest_hole, seconds_until_served
from tests.campaigns.kit.traffic import Traffic, only
from tests.servers import pids
from tests.servers.pids import CpuTime

SERVED_WITHIN = 10.0
"""Seconds within which every partition must be served again, whatever was killed or has left."""

TRY_TIMEOUT = 3_000
"""Milliseconds that a call has: one that began before the takeover should not end in the midst of its write."""
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


WORST = 3
"""Slowest takeovers whose phases are told once more at the end."""


class Takeover(NamedTuple):
    """What followed a kill. `known`: seconds until the others took the killed one for dead; None: nobody could be asked. `cpu`: what the
    event loop of each of the others took from then on; `phases`: of the partition that was served last."""

    name: str
    served: Served
    known: float | None
    cpu: Sequence[CpuTime]
    phases: str

    @property
    def since_known(self) -> float:
        return self.served.seconds - (self.known or 0.0)

    def __str__(self) -> str:
        known = "nobody could be asked when that was known" if self.known is None else f"known {self.known:.2f} s later"
        loops = ", ".join(f"{each.computing:.2f} and {each.waiting:.2f} s" for each in self.cpu)
        served = f"{self.served.last} served last {self.since_known:+.2f}"
        return f"{self.name} was killed; {known}, {served}; event loops computed and waited for a CPU: {loops}; {self.phases}"


class Loops:
    """The event loops of some processes, from `begin` until `end`."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._begun = self._ended = [CpuTime()] * len(processes)

    def begin(self) -> None:
        self._begun = self._ended = self._now()

    def end(self) -> None:
        self._ended = self._now()

    def _now(self) -> list[CpuTime]:
        return [pids.cpu_time(process) for process in self._processes]

    @property
    def took(self) -> list[CpuTime]:
        pairs = zip(self._begun, self._ended, strict=True)
        return [CpuTime(end.computing - begin.computing, end.waiting - begin.waiting) for begin, end in pairs]


def kill_again_and_again(report: Report, traffic: Traffic, chance: random.Random, pace: Pace) -> list[float]:
    """Returns, for each kill, how long until every partition was served again."""
    times: list[float] = []
    known: list[Takeover] = []
    killed = 0.0
    while killed < pace.length and not report.wrong and not traffic.tally.faults:
        length = min(pace.drain_every, pace.length - killed)
        traffic.start()
        traffic.progress(50)
        takeovers = _round(report, traffic, chance, pace, length, len(times))
        times += [each.served.seconds for each in takeovers]
        known += [each for each in takeovers if each.known is not None]
        traffic.drain(chance.randrange(traffic.fleet.homes))
        killed += length
        report.say(f"{len(times)} kills: served again after {most_and_median(times)}; {traffic.tally.summary()}")
    report.figure(f"{len(times)} kills, every partition served again after {most_and_median(times)}")
    if known:
        since_known = [each.since_known for each in known]
        p99 = quantile(since_known, 0.99)
        for each in sorted(known, key=lambda each: each.since_known)[-WORST:]:
            report.say(f"one of the slowest: {each}")
        report.figure(f"since the death was known: {most_and_median(since_known)}, p99 {p99:.2f} s")
        report.aim("p99 since the death was known", p99, KNOWN_AIM)
        loops = [(loop, each.since_known) for each in known for loop in each.cpu]
        computing, waiting = (statistics.median(loop[kind] / seconds for loop, seconds in loops) for kind in (0, 1))
        report.figure(f"of that time an event loop computed {computing:.0%}, and waited for a CPU {waiting:.0%}, in the median")
    return times


def _round(report: Report, traffic: Traffic, chance: random.Random, pace: Pace, length: float, number: int) -> list[Takeover]:
    """Kills for that long; none is begun before the one that was killed is being started again."""
    pause = threading.Event()
    watches: list[tuple[str, float, float | None, Loops, Future[Served]]] = []
    begun = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        while time.monotonic() - begun < length and not traffic.tally.faults:
            at = time.monotonic()
            struck = traffic.fleet.strike(chance)
            home = chance.randrange(traffic.fleet.homes)
            label = f"kill{number + len(watches)}"
            watch = pool.submit(seconds_until_served, traffic, label, home, at, try_timeout=TRY_TIMEOUT)
            loops = Loops([instance.pid for instance in traffic.fleet.instances if instance.runs])
            pause.wait(min(NOTICED, pace.revive_after))
            known = _known(traffic, at)
            watches.append((struck.name, at, known, loops, watch))
            threading.Timer(at + (known or 0.0) - time.monotonic(), loops.begin).start()
            watch.add_done_callback(lambda _, loops=loops: loops.end())  # type: ignore[misc]
            pause.wait(max(0.0, pace.revive_after - (time.monotonic() - at)))
            struck.revive()
            pause.wait(max(0.0, pace.every - (time.monotonic() - at)))
    takeovers = []
    for name, at, known, loops, watch in watches:
        served = watch.result()
        if served.missing:
            report.fail(f"{name} was killed, and these were never served again: {', '.join(served.missing)}")
        report.within(f"after {name} was killed, {served.last}", served.seconds, SERVED_WITHIN)
        takeovers.append(Takeover(name, served, known, loops.took, _phases(traffic, served, at, known or 0.0)))
        report.say(str(takeovers[-1]))
    return takeovers


def _phases(traffic: Traffic, served: Served, at: float, known: float) -> str:
    """What happened to the partition that was served last, in seconds since it was known that its owner had been killed `at`."""
    queue, _, number = served.last.partition("/")
    until = at + served.seconds
    phases = [each.phase for each in _rounds(traffic, queue, int(number)) if at + NOTICED <= each.sealed_at <= until]
    phases += [Phase(at + each.began, at + each.ended, f"call: {each.outcome}") for each in served.tries if each.ended >= known]
    if traffic.fleet.faulty_bucket is not None:
        requests = [each for each in traffic.fleet.faulty_bucket.requests(at + NOTICED) if each.began <= until]
        incarnation = traffic.ask("queues.info", 0, queue_name=queue)["incarnation"]
        folder = f"{traffic.fleet.prefix}/partitions/{incarnation}-{number}"
        entries = {name for name, head, *_ in traffic.fleet.faulty_bucket.cycles(0) if head == f"{folder}/head"}
        phases += openings(requests, folder, entries)
    return ", ".join(each.told(at + known) for each in sorted(phases))


def _rounds(traffic: Traffic, queue: str, partition: int) -> Iterator[SealedRound]:
    """The last rounds that gave the partition to another instance."""
    monotonic = time.monotonic() - time.time()
    for each in traffic.ask("rounds.list", 0, limit=50)["items"]:
        sealed_at = monotonic + datetime.fromisoformat(each["sealed_at"]).timestamp()
        opened_at = sealed_at - parse_duration(each["duration"], "duration") / 1000
        for move in each["moves"]:
            if (move["queue_name"], move["partition"]) == (queue, partition):
                yield SealedRound(opened_at, sealed_at, each["trigger"], move["owner"])


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
