"""What a change costs many tasks with many partitions: real members, log, election and position store, in virtual time.

The meta store is simulated: it holds what the memory store holds, and each call takes some milliseconds. Nothing is read from partitions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from random import Random
from typing import NamedTuple

import pyarrow as pa

from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network_link import Link, Roads
from simulation.tasks_cost import Document, Fleet
from sluiceway.capture.group_election import MetaElection
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.partition_reader import Claim
from sluiceway.capture.task_driver import TaskRunner
from sluiceway.core.group.task_fold import fold
from sluiceway.core.group.task_member import Preset
from sluiceway.core.group.task_state import Entry, Snapshot, State, decode, encode
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import CHANGES, AnnouncedPartition
from sluiceway.ports.change_stream import Batch, End, SeedsUpto
from tests.campaigns.kit.report import Report

NAME = "cost"
WAY: Millis = 2
"""A call to the meta store and its answer take this each on average: a store nearby."""
PATIENCE: Millis = 300_000
"""Virtual."""
STEP = 0.05
"""Virtual seconds between two looks whether all is balanced."""
MAX_STEPS = 10**12


class Still:
    """A stream in which nothing happens but what the campaign wants."""

    def __init__(self, partitions: int) -> None:
        self._born = tuple(AnnouncedPartition(f"shardId-{number:012}", (), f"{number:056}") for number in range(partitions))

    async def seeds(self, after: str) -> SeedsUpto:
        return SeedsUpto("all", () if after else self._born)

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        return Batch(pa.RecordBatch.from_pylist([], CHANGES), None)

    async def kept(self, partition: str, position: str) -> None: ...

    def left(self, partition: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class Task:
    process: Process
    runner: TaskRunner


class Change(NamedTuple):
    """`seconds` are virtual, until all is balanced and read again; `term` and `given` until the log says who leads, and who reads what."""

    what: str
    seconds: float
    term: float | None
    given: float
    records: int
    bytes: int
    cpu: float


@dataclass
class Group:
    """Tasks over one meta store."""

    members: int
    partitions: int
    preset: Preset
    loop: Loop = field(default_factory=lambda: Loop(Random(0), shuffle=False, most_steps=MAX_STEPS))
    tasks: list[Task] = field(default_factory=list)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    state: State = field(default_factory=State)
    records: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        self.shared = SharedMeta()
        self.stream = Still(self.partitions)
        self.started = 0
        self._followed: set[str] = set()
        self.shared.followers.append(lambda _, view: self._follow({key: entry.value for key, entry in view.entries.items()}))

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        process = self.loop.add(Process(f"task{self.started}"))
        name = f"task-{self.started:04}-{self.started * 2_654_435_761 % 2**32:08x}"
        self.started += 1
        store = SimMetaStore(self.shared, Link(self.loop, process, Roads(slow=WAY)))

        async def live() -> None:
            runner = TaskRunner(
                name,
                log=MetaSyncLog(store, NAME),
                election=MetaElection(store, NAME),
                positions=MetaPositions(store, NAME),
                stream=self.stream,
                handler=self._hold,
                preset=self.preset,
            )
            self.tasks.append(Task(process, runner))
            await runner.run()

        self.loop.begin(process, live())

    async def _hold(self, claim: Claim) -> End | None:
        """Until it is to stop, or the partition is to end."""
        ended = self.ends.setdefault(claim.token, asyncio.Event())
        waits = [asyncio.ensure_future(each.wait()) for each in (claim.stopping, ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if claim.stopping.is_set():
            return None
        number = int(claim.token.rpartition("-")[2])
        children = tuple(AnnouncedPartition(f"shardId-{2 * number + side + 10**6:012}", (claim.token,), f"{side:056}") for side in (0, 1))
        return End(children, 1_700_000_000_000)

    def kill(self, leader: bool) -> None:
        victim = next(task for task in self.tasks if (task.runner.name == self.state.leader) == leader)
        self.tasks.remove(victim)
        self.loop.kill(victim.process)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def _follow(self, values: dict[str, bytes]) -> None:
        """The log as it is written, so that each state it goes through is seen."""
        prefix = f"tasks/{NAME}/log/"
        new = sorted(key for key in values.keys() - self._followed if key.startswith(prefix))
        for key in new:
            entry: Entry = int(key.removeprefix(prefix)), decode(values[key])
            self.state = fold(self.state, *entry)
            self._followed.add(key)
            if not isinstance(entry[1], Snapshot):
                self.records += 1
                self.size += len(values[key])

    def given(self) -> bool:
        """Everything has an owner that lives, and all of them have equally many to within one."""
        names = {task.runner.name for task in self.tasks}
        if set(self.state.members) != names or self.state.leader not in names or not self.state.partitions:
            return False
        loads = dict.fromkeys(names, 0)
        for each in self.state.partitions.values():
            if each.owner not in names or each.to:
                return False
            loads[each.owner] += 1
        return max(loads.values()) - min(loads.values()) <= 1

    def balanced(self) -> bool:
        return self.given() and sum(len(task.runner.claims) for task in self.tasks) == len(self.state.partitions)

    async def measure(self, what: str, act: Callable[[], None], done: Callable[[], bool] | None = None) -> Change:
        """Until all is balanced again. `done`: what else must be so."""
        records, size, term = self.records, self.size, self.state.term
        begun, cpu = self.loop.seconds, time.process_time()
        act()
        term_at: float | None = None
        given_at: float | None = None
        while True:
            await asyncio.sleep(STEP)
            now = self.loop.seconds - begun
            if term_at is None and self.state.term > term:
                term_at = now
            is_done = done is None or done()
            if given_at is None and is_done and self.given():
                given_at = now
            if is_done and self.balanced():
                break
            if now * 1_000 > PATIENCE:
                raise TimeoutError(f"{what}: not balanced after {now:.0f} virtual seconds")
        seconds = self.loop.seconds - begun
        # What is still said of it; a member says a thing again after a second.
        await asyncio.sleep(1.2)
        return Change(what, seconds, term_at, given_at or seconds, self.records - records, self.size - size, time.process_time() - cpu)


def measured(members: int, partitions: int, preset: Preset) -> list[Change]:
    group = Group(members, partitions, preset)

    def begin_all() -> None:
        for _ in range(members):
            group.begin()

    def finish_one() -> None:
        token = next(token for token, each in group.state.partitions.items() if each.owner != group.state.leader)
        group.ends[token].set()

    async def history() -> list[Change]:
        before = partitions + 1
        return [
            await group.measure("all begin", begin_all, lambda: len(group.state.partitions) == partitions),
            await group.measure("a partition finishes, with two children", finish_one, lambda: len(group.state.partitions) == before),
            await group.measure("a member is lost", partial(group.kill, leader=False)),
            await group.measure("the leader dies", partial(group.kill, leader=True)),
            await group.measure("a member comes", group.begin),
        ]

    with simulated(group.loop):
        try:
            return group.loop.run_until_complete(history())
        finally:
            group.loop.close()


def run_cost(report: Report, members: int, partitions: int) -> None:
    """Prints a table beside the document's messages, and a figure for the time without a leader."""
    document = Document(members, partitions)
    theirs = {
        "a partition finishes, with two children": document.finish_one,
        "a member is lost": document.lose_one,
        "the leader dies": document.lose_one,
    }
    print(f"{members} members, {partitions:,} partitions, {2 * WAY} ms to the meta store and back; seconds are virtual")
    print("| change | preset | term after | given after | balanced after | ours | own states | full states |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    presets: tuple[Preset, ...] = ("log-leader", "finisher-hint")
    with ProcessPoolExecutor(len(presets), get_context("spawn")) as pool:
        runs = list(pool.map(measured, repeat(members), repeat(partitions), presets))
    for preset, changes in zip(presets, runs, strict=True):
        for change in changes:
            other = [theirs[change.what](each) for each in (document.own, document.all)] if change.what in theirs else []
            cells = [f"{count}, {size:,} B" for count, size in other] or ["", ""]
            term = "" if change.term is None else f"{change.term:.2f} s"
            ours = f"{change.records}, {change.bytes:,} B"
            print("| " + " | ".join([change.what, preset, term, f"{change.given:.2f} s", f"{change.seconds:.2f} s", ours, *cells]) + " |")
            if change.what == "the leader dies":
                report.figure(
                    f"{preset}: balanced {change.seconds:.1f} virtual s after the leader's death ({ours}), {change.cpu:.0f} s of CPU"
                )
            report.within(f"{change.what} ({preset})", change.seconds, 120)
    snapshot = len(encode(Snapshot(Fleet(members, partitions).state)))
    report.say(f"a snapshot: {snapshot:,} B")
