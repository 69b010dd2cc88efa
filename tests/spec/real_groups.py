"""Command `python -m tests.spec.real_groups N`: whether histories of N real groups are accepted by the specifications of groups.

A group is of processes over one SQLite meta store: they join, leave, are killed with -9, and frozen for longer than their leases.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.cluster.group_member import define
from sluiceway.core.group.group_records import (
    Decision,
    GroupReader,
    Keys,
    Parameters,
    Resource,
    Strategy,
    Token,
    Writes,
    decode_member,
    decode_record,
)
from sluiceway.model.meta import Entry, View
from spec.group_histories import LandedCommit, LeaseOver, Look, Noted, Redefined, histories_of, lease_of
from spec.group_trace import GroupHistory, check_claims, check_rounds
from tests.spec.recorded_member import GROUP, Line

SECONDS = 14.0
"""How long a group lives. Leases are a second, and a silent member is given up after 1.25 s."""
TIMES = Parameters(round_interval=100, beat_interval=250, lease_timeout=1_000, member_timeout=1_250)
ITEMS = tuple(f"i{number}" for number in range(6))
MEMBERS = 4


class Group:
    """The processes of one group."""

    def __init__(self, folder: Path, random: Random) -> None:
        self._folder, self._random = folder, random
        self._names = count(1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.lines = folder / "history.jsonl"

    def start(self) -> None:
        arguments = [str(self.lines), str(self._folder / "meta.sqlite"), f"m{next(self._names)}"]
        self._processes.append(subprocess.Popen([sys.executable, "-m", "tests.spec.recorded_member", *arguments]))

    def trouble(self) -> None:
        """Something befalls one of them, and another one comes for those that go."""
        process = self._random.choice(self._processes)
        what = self._random.choice(["kill", "kill", "freeze", "freeze", "leave"])
        if what == "freeze":
            process.send_signal(signal.SIGSTOP)
            time.sleep(self._random.uniform(0.5, 2.5))
            process.send_signal(signal.SIGCONT)
            return
        self._processes.remove(process)
        process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
        process.wait(60)
        self.start()

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def play(folder: Path, seed: int, strategy: Strategy = "rounds", seconds: float = SECONDS) -> dict[str, GroupHistory]:
    """Let a group live, and return its history; by claims, those of some items."""
    random, group = Random(seed), Group(folder, Random(seed))
    asyncio.run(_define(folder / "meta.sqlite", strategy, ITEMS))
    try:
        for _ in range(MEMBERS):
            group.start()
        end = time.monotonic() + seconds
        time.sleep(min(4.0, seconds / 2))
        while time.monotonic() < end:
            group.trouble()
            if random.random() < 0.3:
                some = random.sample(ITEMS, random.randint(2, len(ITEMS)))
                asyncio.run(_define(folder / "meta.sqlite", strategy, sorted(some)))
            time.sleep(random.uniform(0.2, 1.5))
    finally:
        group.end()
    return histories_of(list(noted(_lines(group.lines))))


async def _define(path: Path, strategy: Strategy, items: Sequence[str]) -> None:
    store = SqliteMetaStore(path)
    await define(store, GROUP, items, strategy=strategy, parameters=TIMES)
    await store.close()


def _lines(path: Path) -> list[Line]:
    """The lines in the order of their times."""
    lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
    return sorted(lines, key=lambda line: line.at)


def noted(lines: Sequence[Line]) -> Iterator[Noted]:
    """What the processes noted, in the order in which it happened: a commit lands before it is seen, and before its member hears of it.

    A commit of which nobody heard, since its member was killed, is that of the missing record that others see.
    """
    keys, landed = Keys(GROUP), _landed(lines)
    readers: dict[str, GroupReader] = {}
    leases: list[tuple[int, LeaseOver]] = []
    for line in lines:
        for until, over in sorted(each for each in leases if each[0] <= line.at):
            leases.remove((until, over))
            yield over
        while landed and landed[0].stamp <= line.stamp:
            yield landed.pop(0)
        if line.view is None:
            continue
        view = View(line.stamp, {key: Entry(value.encode(), stamp) for key, (value, stamp) in line.view.items()})
        puts = None if line.puts is None else {key: value.encode() for key, value in line.puts.items()}
        writes = None if puts is None else Writes(puts=puts, deletes=line.deletes)
        owned = {item: Token(*token) for item, token in line.owned.items()}
        look = readers.setdefault(line.name, GroupReader(keys)).read(view, line.at)
        looked = Look(line.name, look, Decision(owned, 0, writes, 0))
        yield looked
        if (lease := lease_of(looked)) is not None:
            leases.append((lease.until, LeaseOver(line.name, lease.beat)))


def _landed(lines: Sequence[Line]) -> list[LandedCommit | Redefined]:
    """The commits that landed, by their stamps: those of which their members heard, and those whose records others saw."""
    found: dict[int, LandedCommit | Redefined] = {
        line.stamp: LandedCommit(line.name, None if line.beat < 0 else line.beat, line.stamp, None) for line in lines if line.view is None
    }
    keys = Keys(GROUP)
    for line in lines:
        for key, (value, stamp) in (line.view or {}).items():
            if key == keys.resource:
                found[stamp] = Redefined(stamp, decode_record(value.encode(), Resource))
            elif key.startswith(keys.members) and stamp not in found:
                found[stamp] = LandedCommit(key.removeprefix(keys.members), decode_member(value.encode(), None).beat, stamp, None)
    return [found[stamp] for stamp in sorted(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a history is not accepted."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec.real_groups", description=__doc__)
    parser.add_argument("groups", type=int)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    options = parser.parse_args(arguments)
    number = events = rejected = 0
    for seed in range(options.first, options.first + options.groups):
        with tempfile.TemporaryDirectory(prefix="sluiceway-") as folder:
            for name, history in play(Path(folder), seed, "rounds" if seed % 3 else "claims").items():
                number, events = number + 1, events + len(history.events)
                if (reason := check_rounds(history) if name == "rounds" else check_claims(history)) is not None:
                    rejected += 1
                    print(f"seed {seed}, {name}: {reason}")
        print(f"{number} histories, {events:,} events, {rejected} rejected", flush=True)
    return int(rejected > 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main())
