"""The meter of processor time: what a family of processes has used, whichever of them have ended by then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluiceway.bench.servers import FamilyMeter, family_cpu
from tests.spark.spark_world import until

USED = 0.3
"""Seconds that each worker uses."""

WORKER = f"""
import pathlib, sys, time
while time.process_time() < {USED}:
    pass
here = pathlib.Path(sys.argv[1])
(here / f"done-{{sys.argv[2]}}").touch()
while not (here / "end").exists():
    time.sleep(0.01)
"""
DAEMON = """
import os, pathlib, subprocess, sys, time
here, worker, waits = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "waits"
workers = [subprocess.Popen([sys.executable, "-c", worker, sys.argv[1], str(number)]) for number in range(2)]
if waits:
    [each.wait() for each in workers]
while not (here / "daemon-ends").exists():
    time.sleep(0.01)
os._exit(0)
"""
ROOT = """
import pathlib, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[2:3], *sys.argv[1:2], *sys.argv[3:]])
(pathlib.Path(sys.argv[1]) / "daemon-ended").touch()
sys.stdin.read()
"""


class Family:
    """A root, a daemon and two workers, each of which ends when it is told to."""

    def __init__(self, folder: Path, waits: str) -> None:
        self.folder = folder
        command = [sys.executable, "-c", ROOT, str(folder), DAEMON, WORKER, waits]
        self.root = subprocess.Popen(command, stdin=subprocess.PIPE)

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def until(self, *names: str) -> None:
        until(", ".join(names), lambda: all((self.folder / name).exists() for name in names))


@pytest.fixture
def make_family(tmp_path: Path) -> Iterator[Callable[[str], Family]]:
    made = list[Family]()

    def make(waits: str) -> Family:
        made.append(Family(tmp_path, waits))
        return made[-1]

    yield make
    for each in made:
        each.tell("end")
        each.tell("daemon-ends")
        each.root.communicate()


def _workers(folder: Path) -> list[int]:
    """The workers that still run, by what stands in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if WORKER.encode() in command[2:3] and str(folder).encode() in command:
            found.append(int(path.parent.name))
    return found


def test_what_was_used_by_workers_that_outlive_their_daemon_is_kept(make_family: Callable[[str], Family], tmp_path: Path) -> None:
    family = make_family("leaves")
    meter = FamilyMeter(family.root.pid)
    family.until("done-0", "done-1")
    used = meter.seconds()
    assert used >= 2 * USED - 0.05
    family.tell("daemon-ends")
    family.until("daemon-ended")
    # Their parent is another now, and they belong to the family all the same.
    orphaned = meter.seconds()
    assert orphaned >= used
    family.tell("end")
    until("the workers have ended", lambda: not _workers(tmp_path))
    assert meter.seconds() >= orphaned
    # Asked for the first time now, it cannot know: this is what went back.
    assert family_cpu(family.root.pid) < used


def test_what_was_waited_for_counts_once(make_family: Callable[[str], Family], tmp_path: Path) -> None:
    family = make_family("waits")
    meter = FamilyMeter(family.root.pid)
    family.until("done-0", "done-1")
    seen = [meter.seconds()]
    family.tell("end")
    until("the workers have ended", lambda: not _workers(tmp_path))
    seen.append(meter.seconds())
    family.tell("daemon-ends")
    family.until("daemon-ended")
    seen.append(meter.seconds())
    assert seen == sorted(seen)
    # Each process has some of its own for its start and its end.
    assert seen[-1] == pytest.approx(family_cpu(family.root.pid), abs=0.05)


def test_it_looks_by_itself(make_family: Callable[[str], Family], tmp_path: Path) -> None:
    family = make_family("leaves")
    with FamilyMeter(family.root.pid, interval=0.01) as meter:
        family.until("done-0", "done-1")
        until("it has seen what they used", lambda: sum(each.own for each in meter._family.values()) >= 2 * USED * 90)
        family.tell("daemon-ends")
        family.tell("end")
        until("the workers have ended", lambda: not _workers(tmp_path))
        assert meter.seconds() >= 2 * USED - 0.1
