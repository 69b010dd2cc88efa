"""Members of a capture in virtual time, each in a simulated process of its own, over one meta store, one stream and one ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import msgspec

from simulation.logs import listening
from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network_link import Link, Roads
from simulation.promises import check
from sluiceway.capture.alarms import AlarmBoard
from sluiceway.capture.group_election import MetaElection
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.partition_reader import Claim, Habits, PartitionReader
from sluiceway.capture.task_driver import TaskRunner, Timing
from sluiceway.core.group.task_member import Preset
from sluiceway.core.group.task_state import Finish, Join, Leave, Record, Release, State, decode
from sluiceway.model.meta import View
from sluiceway.ports.change_stream import End
from tests.capture.tasks_rig import Ledger, LedgerSink, Script, ScriptedStream

NAME = "orders"
PREFIX = f"tasks/{NAME}/positions/"
LOG = f"tasks/{NAME}/log/"
HABITS = Habits(heartbeat=1_000, hint=200)
TIMING = Timing(snapshot=25, chores=1_000, forget=10_000, keep=60_000, seeds=1_000)


def _index(position: str) -> int:
    return int(position.rpartition(":")[2].removesuffix("+"))


@dataclass(eq=False)
class Member:
    process: Process
    runner: TaskRunner
    task: asyncio.Task[None]
    links: tuple[Link, ...]


class World:
    """`live` runs a story in it. Whatever must not be ends the story: see `Ledger`, and `_look` for the positions."""

    def __init__(
        self,
        seed: int,
        script: Script | None = None,
        *,
        roads: Roads | None = None,
        preset: Preset = "log-leader",
        sizes: tuple[int, ...] = (1, 3, 10),
        habits: Habits = HABITS,
    ) -> None:
        self.random = Random(seed)
        self.loop = Loop(self.random)
        self.shared = SharedMeta()
        self.shared.followers.append(self._look)
        self.script = script or Script.random(self.random)
        self.ledger = Ledger(self.script)
        self.roads = roads or Roads()
        self.preset = preset
        self.sizes = sizes
        """Of batches."""
        self.members: list[Member] = []
        self.lines: list[str] = []
        self.commits = 0
        """Of positions, by members."""
        self.habits = habits
        self.understood = True
        """The log has nothing but records."""
        self._numbers = count(1)
        self._began: dict[str, tuple[TaskRunner, int]] = {}
        """Each member that ever was, and where the log ended when it began."""
        self.reading: set[tuple[str, str, int]] = set()

    def live(self, story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        with ExitStack() as stack:
            stack.enter_context(simulated(self.loop))
            stack.enter_context(listening(self._note, self.loop.fail))
            stack.callback(self.loop.close)
            self.loop.run_until_complete(story(self))

    def _note(self, line: str) -> None:
        self.lines.append(f"{self.loop.now / 1000:8.3f} {self.loop.process.name}: {line}")

    def _look(self, before: View, after: View) -> None:
        """Positions never go back, and nothing is committed before it was handed on. Who says that it has stopped has stopped."""
        for key in after.prefix(LOG).keys() - before.entries.keys() if self.understood else ():
            self._check_said(decode(after.entries[key].value), after)
        was = before.prefix(PREFIX)
        for key, entry in after.prefix(PREFIX).items():
            old = was.get(key)
            if old is not None and old.stamp == entry.stamp:
                continue
            now = msgspec.json.decode(entry.value)
            token, position = now["token"], now["kept"].get("position")
            index = 0 if position is None else _index(position)
            handed_on = self.ledger.counts.get(token, 0)
            check(index <= handed_on, f"{token} is committed up to {index}, and handed on are {handed_on}")
            if old is not None:
                then = msgspec.json.decode(old.value)
                check(then["grant"] <= now["grant"], f"{token} goes back from grant {then['grant']} to {now['grant']}")
                position = then["kept"].get("position")
                check(position is None or _index(position) <= index, f"{token} goes back from {position} to {index}")
                self.commits += then["number"] == now["number"]

    def _check_said(self, record: Record, after: View) -> None:
        match record:
            case Join():
                runner, end = self._began[record.member]
                check(runner.state.seq >= end, f"{record.member} joins at {runner.state.seq}, and began when the log had {end}")
                return
            case Finish():
                kept = [
                    each for entry in after.prefix(PREFIX).values() if (each := msgspec.json.decode(entry.value))["token"] == record.token
                ]
                positions = [each["kept"].get("position") for each in kept]
                whole = self.script.parts[record.token].records
                kept_to = [None if position is None else _index(position) for position in positions]
                check(not whole or kept_to == [whole], f"{record.token} finishes when {positions} is committed")
        match record:
            case Release() | Finish():
                going = [each for each in self.reading if each[1:] == (record.token, record.grant)]
            case Leave():
                going = [each for each in self.reading if each[0] == record.member]
            case _:
                going = []
        check(not going, f"{record} is said, and {going} goes on")

    async def _read(self, name: str, reader: PartitionReader, claim: Claim) -> End | None:
        what = name, claim.token, claim.grant
        check(what not in self.reading, f"{what} is read twice at once")
        self.reading.add(what)
        try:
            return await reader.read(claim)
        finally:
            self.reading.discard(what)

    # ---- members ------------------------------------------------------------------------------------------------------

    def start(self) -> Member:
        name = f"m{next(self._numbers)}"
        process = self.loop.add(Process(name, rate=self.random.uniform(0.99, 1.01), origin=self.random.randrange(10**6)))
        links = tuple(Link(self.loop, process, self.roads) for _ in range(3))
        return process.context.run(self._start, name, process, links)

    def _start(self, name: str, process: Process, links: tuple[Link, ...]) -> Member:
        store = SimMetaStore(self.shared, links[0])
        stream = ScriptedStream(self.script, links[1], self.random, self.sizes)
        positions = MetaPositions(store, NAME)
        reader = PartitionReader(stream, positions, LedgerSink(self.ledger, links[2]), self.habits)
        runner = TaskRunner(
            name,
            log=MetaSyncLog(store, NAME),
            election=MetaElection(store, NAME),
            positions=positions,
            stream=stream,
            handler=lambda claim: self._read(name, reader, claim),
            preset=self.preset,
            timing=TIMING,
            board=AlarmBoard(store, NAME),
        )
        ends = [int(key.removeprefix(LOG)) for key in self.shared.view.prefix(LOG)]
        self._began[name] = runner, max(ends, default=0)
        member = Member(process, runner, self.loop.begin(process, runner.run()), links)
        self.members.append(member)
        return member

    def kill(self, member: Member) -> None:
        self.members.remove(member)
        self.loop.kill(member.process)
        self.reading = {each for each in self.reading if each[0] != member.process.name}
        for link in member.links:
            link.break_off()

    def stop(self, member: Member) -> None:
        member.process.context.run(member.runner.stop)

    @asynccontextmanager
    async def frozen(self, member: Member) -> AsyncIterator[None]:
        member.process.frozen = True
        yield
        member.process.frozen = False

    @property
    def states(self) -> list[State]:
        return [member.runner.state for member in self.members]

    @property
    def done(self) -> bool:
        """All is handed on, and everybody knows that everything is finished and removed."""
        return self.ledger.whole and all(state.sown == str(self.script.points) and not state.partitions for state in self.states)

    def leader(self) -> Member | None:
        return next((member for member in self.members if member.runner.leads and not member.process.frozen), None)

    async def until(self, holds: Callable[[], object], seconds: float = 120) -> None:
        """Wait for that, in virtual time."""
        end = self.loop.seconds + seconds
        while not holds():
            if self.loop.seconds > end:
                tail = "\n".join(self.lines[-40:])
                raise AssertionError(f"not within {seconds} s: {self.states}; handed on {self.ledger.counts}\n{tail}")
            await asyncio.sleep(0.05)
