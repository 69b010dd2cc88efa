"""Replacing the instances of a fleet by those of another release, one by one under load."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.kit.fleet import Fleet, Instance
from tests.campaigns.kit.report import Report, most_and_median
from tests.campaigns.kit.serving import longest_hole
from tests.campaigns.kit.traffic import Traffic
from tests.campaigns.upgrade.releases import Release

SERVED_WITHIN = 15.0
"""Seconds within which every partition must be served again, whatever was killed."""
PAUSE_AIM = 2.0
"""Seconds that a partition is not served at most while an instance is replaced in good order."""
_STARTING = 1.5
"""Seconds within which an instance that starts is killed."""


class Rolling:
    """Upgrades and downgrades of one fleet. Each round ends with all instances at one release."""

    def __init__(self, report: Report, traffic: Traffic, chance: random.Random) -> None:
        self._report, self._traffic, self._chance = report, traffic, chance
        self._fleet: Fleet = traffic.fleet
        self._labels = itertools.count()
        self._planned: list[float] = []
        self._killed: list[float] = []

    def round(self, release: Release, *, kill: bool) -> None:
        """Replace all instances, in a random order; with `kill`, one of the steps goes wrong."""
        order = self._chance.sample(self._fleet.instances, len(self._fleet.instances))
        ill = self._chance.choice(order) if kill else None
        for instance in order:
            self._replace(instance, release, kill=instance is ill)
            self._traffic.progress(20)
        self._check_releases(release)

    def _replace(self, instance: Instance, release: Release, *, kill: bool) -> None:
        way = (
            self._chance.choice([self._killed_while_it_runs, self._killed_while_it_starts, self._other_killed]) if kill else self._in_order
        )
        label = f"upgrade{next(self._labels)}"
        instance.command = release.command
        home = (self._fleet.instances.index(instance) + 1) % self._fleet.homes
        with ThreadPoolExecutor(1) as pool:
            replacing = pool.submit(way, instance)
            hole = longest_hole(self._traffic, label, home, replacing.done)
        what = f"{instance.name} to {release.version} ({way.__name__.strip('_')})"
        self._report.say(f"{what}: {hole.last} was not served for {hole.seconds:.2f} s")
        (self._killed if kill else self._planned).append(hole.seconds)
        replacing.result()
        if hole.missing:
            self._report.fail(f"{what}: these were never served again: {', '.join(hole.missing)}")
        self._report.within(f"{what}, {hole.last}", hole.seconds, SERVED_WITHIN)

    def _in_order(self, instance: Instance) -> None:
        if code := instance.stop():
            self._report.fail(f"{instance.name} was stopped, and its exit code is {code}")
        self._fleet.restart(instance)

    def _killed_while_it_runs(self, instance: Instance) -> None:
        instance.kill()
        self._fleet.restart(instance)

    def _killed_while_it_starts(self, instance: Instance) -> None:
        instance.stop()
        instance.launch()
        threading.Event().wait(self._chance.uniform(0.1, _STARTING))
        instance.kill()
        self._fleet.restart(instance)

    def _other_killed(self, instance: Instance) -> None:
        others = [each for each in self._fleet.instances if each is not instance]
        if not others:
            self._killed_while_it_runs(instance)
            return
        other = self._chance.choice(others)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(instance.stop)
            threading.Event().wait(self._chance.uniform(0.0, 0.5))
            other.kill()
            stopping.result()
        self._fleet.restart(instance)
        self._fleet.restart(other)

    def _check_releases(self, release: Release) -> None:
        found = self._traffic.ask("instances.list", 0)["items"]
        releases = {each["release"] for each in found if each["state"] == "alive"}
        if releases != {release.version}:
            self._report.fail(f"all instances have {release.version}, and these are shown: {sorted(map(str, releases))}")

    def finalize(self, release: Release) -> None:
        """Finalize the upgrade to that release by way of any instance."""
        home = self._chance.randrange(self._fleet.homes)
        level = self._traffic.ask("upgrades.finalize", home)["level"]
        if level != release.newest:
            self._report.fail(f"finalized at level {level}, not {release.newest}")

    def check_refused(self, instance: Instance, release: Release, again: Release) -> None:
        """An instance of a release that does not understand the level does not start, and says why."""
        instance.stop()
        instance.command = release.command
        instance.launch()
        code = instance.wait()
        if code == 0 or "install a later release" not in instance.tail():
            self._report.fail(f"{instance.name} of {release.version} ended with {code}: {instance.tail()[-300:]}")
        instance.command = again.command
        self._fleet.restart(instance)

    def tell(self) -> None:
        """Note the figures."""
        self._report.figure(f"{len(self._planned)} replaced in good order: a partition was not served for {most_and_median(self._planned)}")
        if self._killed:
            self._report.figure(f"{len(self._killed)} with a kill: {most_and_median(self._killed)}")
        self._report.aim("seconds that a partition is not served while an instance is replaced", max(self._planned), PAUSE_AIM)


def roll(report: Report, traffic: Traffic, chance: random.Random, before: Release, after: Release, rounds: int) -> None:
    """Upgrade and go back `rounds` times in all, the last time upwards; finalize; see that there is no way back."""
    rolling = Rolling(report, traffic, chance)
    traffic.start()
    traffic.progress(50)
    for number in range(rounds):
        left = rounds - number
        release = after if left % 2 else before
        rolling.round(release, kill=bool(number % 2))
    rolling.finalize(after)
    traffic.progress(50)
    rolling.check_refused(traffic.fleet.instances[0], before, after)
    traffic.progress(50)
    traffic.drain(chance.randrange(traffic.fleet.homes))
    rolling.tell()
