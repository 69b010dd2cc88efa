"""Who leads a group of tasks, by a group of our own: in simulated processes whose stores are away and whose clocks run apart, and in real
ones that are killed and frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from simulation.loop import Process, simulated
from simulation.meta import SimMetaStore
from simulation.network_link import DIRECTIONS, Link, Roads
from simulation.promises import BrokenPromiseError
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.capture.group_election import MetaElection
from sluiceway.core.group.group_records import Keys, Parameters
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import Group
from sluiceway.testing.drive import driven
from tests.capture.test_sync_log_histories import World
from tests.server.server_process import PATIENCE
from tests.servers.pids import freeze

SOON = 8.0
"""Seconds within which a leader that has gone is replaced, with the group's defaults."""


class Task:
    """A simulated process that takes part under a name; what it was told."""

    def __init__(self, world: ElectionWorld, name: str, rate: float = 1.0) -> None:
        self.name = name
        self.world = world
        self.process = world.loop.add(Process(name, rate, world.random.randrange(10_000_000)))
        self.link = Link(world.loop, self.process, world.roads)
        self.told: list[Group] = []
        self.left = False

        async def begin() -> None:
            self.election = MetaElection(SimMetaStore(world.shared, self.link), "orders")
            await self.election.join(name, self.hear)

        world.loop.begin(self.process, begin())

    def hear(self, group: Group) -> None:
        before = self.now
        self._check(not self.left, f"{self.name} has left and is told {group}")
        self._check(group != before and group.generation >= before.generation, f"{self.name} is told {group} after {before}")
        self.told.append(group)
        if group.leader:
            said = self.world.said.setdefault(group.generation, group)
            self._check(said == group, f"{self.name} is told {group}, and others {said}")
        if group.leader == self.name:
            self._check(self.name in group.members, f"{self.name} leads others only")
            rivals = [each.name for each in self.world.there() if each is not self and not each.process.frozen and each.leads]
            self._check(not rivals, f"{self.name} is told that it leads, and {rivals} believe it of themselves")

    def _check(self, holds: bool, promise: str) -> None:
        """Fails the run, whoever hears of it."""
        if not holds:
            self.world.loop.fail(BrokenPromiseError(promise))

    @property
    def now(self) -> Group:
        return self.told[-1] if self.told else Group(0, "", ())

    @property
    def leads(self) -> bool:
        return self.now.leader == self.name

    async def leave(self) -> None:
        self.left = True
        await self.world.loop.begin(self.process, self.election.leave())

    def kill(self) -> None:
        self.world.loop.kill(self.process)

    def cut(self) -> None:
        self.link.cut.update(DIRECTIONS)

    def free(self) -> None:
        self.link.free(*DIRECTIONS)


class ElectionWorld(World):
    def __init__(self, seed: int, roads: Roads | None = None) -> None:
        super().__init__(seed, roads)
        self.tasks: list[Task] = []
        self.said: dict[int, Group] = {}
        """Of each generation what everybody is told of it who is told of a leader."""

    def start(self, rate: float = 1.0) -> Task:
        self.tasks.append(Task(self, f"task-{len(self.tasks) + 1}", rate))
        return self.tasks[-1]

    def there(self) -> list[Task]:
        return [task for task in self.tasks if not task.process.dead and not task.left]

    def agreed(self) -> str | None:
        """Whom all take for the leader of all who are there."""
        names = tuple(sorted(task.name for task in self.there()))
        said = {task.now for task in self.there()}
        if len(said) != 1:
            return None
        (group,) = said
        return group.leader if group.leader in names and group.members == names else None

    async def until(self, holds: Callable[[], bool], most: float) -> None:
        """In virtual time: `most` seconds."""
        async with asyncio.timeout(most):
            while not holds():  # noqa: ASYNC110 - it is looked at in its own time
                await asyncio.sleep(0.01)

    async def agree(self) -> tuple[Task, list[Task]]:
        """The leader and the others, when all know them."""
        await self.until(lambda: self.agreed() is not None, SOON)
        leader = next(task for task in self.tasks if task.name == self.agreed())
        return leader, [task for task in self.there() if task is not leader]


Story = Callable[[ElectionWorld], Awaitable[None]]


@pytest.fixture
def live() -> Callable[[Story], None]:
    """Lives a story of three tasks, once they have agreed."""

    def live(story: Story) -> None:
        world = ElectionWorld(3, Roads(slow=2))

        async def whole() -> None:
            for _ in range(3):
                world.start()
            await world.agree()
            await story(world)

        with simulated(world.loop):
            try:
                world.loop.run_until_complete(whole())
            finally:
                world.loop.close()

    return live


def test_one_of_three_leads_and_all_know_whom(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        assert leader.now.members == ("task-1", "task-2", "task-3")
        assert not any(task.leads for task in others)
        # At rest nobody is told anything.
        told = [len(task.told) for task in world.tasks]
        await asyncio.sleep(60)
        assert [len(task.told) for task in world.tasks] == told

    live(story)


def test_who_comes_later_is_one_of_the_members_and_does_not_depose_the_leader(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, _ = await world.agree()
        before = leader.now.generation
        world.start()
        assert (await world.agree())[0] is leader
        assert leader.now.members == ("task-1", "task-2", "task-3", "task-4")
        assert leader.now.generation > before

    live(story)


@pytest.mark.parametrize("leading", [True, False])
def test_one_that_leaves_is_soon_no_member_any_more(live: Callable[[Story], None], *, leading: bool) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        before = leader.now.generation
        going = leader if leading else others[0]
        begun = world.loop.seconds
        await going.leave()
        assert world.loop.seconds - begun < 3
        after, _ = await world.agree()
        assert (after is leader) != leading
        assert after.now.generation > before

    live(story)


def test_the_last_one_can_leave(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        for task in world.tasks:
            await task.leave()

    live(story)


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_leader_that_has_gone_is_replaced(live: Callable[[Story], None], how: str) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        before = leader.now.generation
        if how == "kill":
            leader.kill()
        else:
            leader.cut()
            await world.until(lambda: not leader.leads, 2.5)
            assert leader.now == Group(before, "", ())
        await world.until(lambda: any(task.leads for task in others), SOON)
        new = next(task for task in others if task.leads)
        assert new.now.members == tuple(sorted(task.name for task in others))
        assert new.now.generation > before
        if how == "cut":
            assert leader.now.leader == ""
            leader.free()
            await world.agree()
            # Only what was so.
            assert [group.leader for group in leader.told[-2:]] == ["", new.name]

    live(story)


def test_a_member_that_cannot_reach_the_store_is_told_that_nobody_leads(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        others[0].cut()
        await world.until(lambda: not others[0].now.leader, 2.5)
        assert others[0].now.members == ()
        others[0].free()
        assert (await world.agree())[0] is leader

    live(story)


def test_a_leader_that_stood_still_learns_at_once_that_it_leads_no_more(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        leader.process.frozen = True
        await world.until(lambda: any(task.leads for task in others), SOON)
        assert leader.leads
        # What it then hears first is about itself, also while nothing else reaches it.
        leader.cut()
        leader.process.frozen = False
        await world.until(lambda: not leader.leads, 0.15)
        leader.free()
        assert (await world.agree())[0] in others

    live(story)


def test_nobody_leads_before_one_that_leaves_has_surely_stopped(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, others = await world.agree()
        plan, before = Keys("tasks.orders").plan, world.shared.view.entries
        leaving = asyncio.create_task(leader.leave())
        await world.until(lambda: world.shared.view.entries[plan] != before[plan], SOON)
        # The plan gives it to another; that the old one has stopped is not recorded.
        leader.cut()
        begun = world.loop.seconds
        await world.until(lambda: any(task.leads for task in others), SOON)
        assert world.loop.seconds - begun > 2
        await leaving

    live(story)


def test_leaving_does_not_wait_for_a_store_that_is_away(live: Callable[[Story], None]) -> None:
    async def story(world: ElectionWorld) -> None:
        leader, _ = await world.agree()
        leader.cut()
        begun = world.loop.seconds
        await leader.leave()
        assert world.loop.seconds - begun < 6
        await world.agree()

    live(story)


def test_a_store_that_is_away_at_the_beginning_is_asked_again() -> None:
    world = ElectionWorld(5, Roads(refused=1.0))

    async def story() -> None:
        world.start()
        await asyncio.sleep(5)
        assert world.tasks[0].told == []
        world.roads.calm()
        await world.agree()
        gone = world.start()
        gone.cut()
        await asyncio.sleep(1)
        await gone.leave()

    with simulated(world.loop):
        try:
            world.loop.run_until_complete(story())
        finally:
            world.loop.close()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_two_never_lead_and_in_the_end_all_agree(seed: int) -> None:
    world = ElectionWorld(seed)
    random = world.random

    def some() -> list[Task]:
        return [random.choice(world.there())] if world.there() else []

    async def thaw(task: Task, delay: float) -> None:
        await asyncio.sleep(delay)
        task.process.frozen = False
        task.free()

    async def trouble() -> None:
        for task in some():
            match random.choice(["kill", "freeze", "cut", "leave", "start", "start"]):
                case "kill":
                    task.kill()
                case "freeze":
                    task.process.frozen = True
                    world.loop.begin(world.loop.outside, thaw(task, random.choice([0.5, 1.9, 2.5, 4.0, 8.0])))
                case "cut":
                    task.cut()
                    world.loop.begin(world.loop.outside, thaw(task, random.choice([0.5, 1.9, 2.5, 4.0, 8.0])))
                case "leave" if not task.process.frozen:
                    world.loop.begin(world.loop.outside, task.leave())
                case "start" if len(world.tasks) < 8:
                    world.start(random.uniform(0.9, 1.1))

    async def story() -> None:
        for _ in range(random.randrange(2, 5)):
            world.start(random.uniform(0.9, 1.1))
        for _ in range(10):
            await asyncio.sleep(random.random() * 3)
            await trouble()
        world.roads.calm()
        # The last of what is late, and of those who stand still.
        await asyncio.sleep(20)
        # The last may just have begun to leave before.
        if not world.there():
            world.start()
        await world.agree()

    with simulated(world.loop):
        try:
            world.loop.run_until_complete(story())
        finally:
            world.loop.close()


@driven
async def test_one_leaves_that_never_took_part() -> None:
    await MetaElection(MemoryMetaStore(), "orders").leave()


@driven
async def test_a_group_that_cannot_be_read_at_the_beginning_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    store, told = MemoryMetaStore(), asyncio.Event()
    resource = Keys("tasks.orders").resource
    await store.commit(puts={resource: b'{"items": ["leader"], "parameters": {"of_a_later_release": 1}}'})
    election = MetaElection(store, "orders")

    def hear(group: Group) -> None:
        if group.leader:
            told.set()

    await election.join("one", hear)
    async with asyncio.timeout(PATIENCE):
        while "cannot be joined" not in caplog.text:  # noqa: ASYNC110 - a line of the log has no event to await
            await asyncio.sleep(0.01)
        await store.commit(deletes=[resource])
        await told.wait()
    await election.leave()


@driven
async def test_a_lease_that_runs_out_on_a_busy_machine_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "sluiceway.cluster.group_member")
    election = MetaElection(MemoryMetaStore(), "orders", Parameters(settle_timeout=10, round_interval=10, beat_interval=200))
    leads = asyncio.Event()
    await election.join("one", lambda group: leads.set() if group.leader == "one" else None)
    async with asyncio.timeout(PATIENCE):
        await leads.wait()
        assert election._member is not None
        # As its timer does when the loop stood still for so long.
        election._member._lapsed()
        leads.clear()
        await leads.wait()
    assert [each.levelname for each in caplog.records if "ran out" in each.message] == ["DEBUG"]
    await election.leave()


def test_a_bad_name_is_refused() -> None:
    MetaElection(MemoryMetaStore(), "x" * 122)
    for bad in ("", "a/b", "x" * 123):
        with pytest.raises(SluicewayError, match="name"):
            MetaElection(MemoryMetaStore(), bad)


# ---- processes --------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, json, sys
from sluiceway.core.group.group_records import Parameters
from sluiceway.group import open_meta_store
from sluiceway.capture.group_election import MetaElection

async def main():
    quick = Parameters(settle_timeout=20, round_interval=50, beat_interval=50, lease_timeout=2_000, member_timeout=2_500)
    election = MetaElection(open_meta_store(sys.argv[1]), "orders", quick)
    await election.join(sys.argv[2], lambda group: print(json.dumps(group), flush=True))
    await asyncio.Event().wait()

asyncio.run(main())
"""


class RealTask:
    """A task in a process of its own; what it says that it was told."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.told: list[Group] = []
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM, url, name], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._partial = b""

    def read(self) -> Group:
        with contextlib.suppress(BlockingIOError):
            self._partial += os.read(self._output, 1 << 16)
        *lines, self._partial = self._partial.split(b"\n")
        for line in lines:
            generation, leader, members = json.loads(line)
            self.told.append(Group(generation, leader, tuple(members)))
        return self.told[-1] if self.told else Group(0, "", ())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self, store: Path) -> None:
        freeze(self._process.pid, store)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.slow
def test_leaders_that_are_killed_and_frozen(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'meta.sqlite'}"

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():  # noqa: ASYNC110 - what processes print has no event
                await asyncio.sleep(0.01)

    def agreed(*tasks: RealTask) -> bool:
        said = {task.read() for task in tasks}
        group = next(iter(said))
        return len(said) == 1 and group.members == tuple(sorted(task.name for task in tasks)) and group.leader in group.members

    async def story() -> None:
        tasks = [RealTask(url, f"task-{number}") for number in range(4)]
        try:
            await until(lambda: agreed(*tasks))
            first = next(task for task in tasks if task.name == task.told[-1].leader)
            first.signal(signal.SIGKILL)
            left = [task for task in tasks if task is not first]
            await until(lambda: agreed(*left))
            second = next(task for task in left if task.name == task.told[-1].leader)
            assert second.told[-1].generation > first.told[-1].generation
            frozen_at = second.told[-1]
            second.freeze(tmp_path / "meta.sqlite")
            rest = [task for task in left if task is not second]
            await until(lambda: agreed(*rest))
            assert second.read() == frozen_at
            third = rest[0].told[-1]
            assert third.generation > frozen_at.generation
            said = len(second.told)
            second.signal(signal.SIGCONT)
            await until(lambda: agreed(*left))
            # The first that it hears is that it leads no more; then who does.
            assert second.told[said] == Group(frozen_at.generation, "", ())
            assert second.told[-1].leader == third.leader
        finally:
            for task in tasks:
                task.end()

    asyncio.run(story())
