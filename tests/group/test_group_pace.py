"""How often members of large groups look: not at each beat of each other member. In virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network_link import Link, Roads
from sluiceway.adapters.meta.watches import Watches
from sluiceway.cluster.group_member import GroupMember, define
from sluiceway.core.group.group_records import GroupView, MemberRecord, Parameters, Resource
from sluiceway.core.group.heartbeats import FEW
from sluiceway.core.group.member import MANY, hint_pace
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import Stamp, View

BEAT = 500
PARAMETERS = Parameters(settle_timeout=100, round_interval=200, beat_interval=BEAT, lease_timeout=3_000, member_timeout=4_000)
ITEMS = [f"part-{n}" for n in range(20)]


def look(members: int) -> GroupView:
    records = {f"m{number}": MemberRecord(beat=1, lease_timeout=1) for number in range(members)}
    return GroupView(View(1, {}), 0, Resource(items=(), parameters=PARAMETERS), None, None, records, frozenset(), {})


@pytest.mark.parametrize(
    ("members", "pace"),
    [(1, 0), (FEW, 0), (55, BEAT // 2), (MANY, BEAT), (200, BEAT)],
)
def test_the_pace_grows_with_the_group(members: int, pace: Millis) -> None:
    assert hint_pace(look(members)) == pace


class CountedMeta(SimMetaStore):
    reads = 0

    async def refresh(self, view: View, prefix: str) -> View:
        CountedMeta.reads += 1
        return await super().refresh(view, prefix)


def _items(member: GroupMember) -> list[str]:
    return list(member.items)


class Crowd:
    """Many members in virtual time."""

    def __init__(self, size: int) -> None:
        self.loop = Loop(Random(size))
        self.shared = SharedMeta()
        self.size = size
        self.members: list[tuple[Process, GroupMember]] = []

    def run(self) -> None:
        with simulated(self.loop):
            try:
                self.loop.run_until_complete(self.story())
            finally:
                self.loop.close()

    async def story(self) -> None:
        operator = SimMetaStore(self.shared, Link(self.loop, self.loop.outside, Roads()))
        await define(operator, "g", ITEMS, parameters=PARAMETERS)
        for _ in range(self.size):
            self.join()
        await self.settled(3_000)
        CountedMeta.reads = 0
        await asyncio.sleep(5)
        self.looks_a_second = CountedMeta.reads / self.size / 5
        self.join()
        self.joined_after = await self.settled(3_000)
        process, _ = self.members.pop(0)
        self.loop.kill(process)
        self.died_after = await self.settled(PARAMETERS.member_timeout + 4_000) - PARAMETERS.member_timeout

    def join(self) -> None:
        process = self.loop.add(Process(f"m{len(self.loop.processes)}"))
        member = GroupMember(CountedMeta(self.shared, Link(self.loop, process, Roads())), "g", lambda _: None, name="m")
        self.members.append((process, member))
        self.loop.begin(process, member.join())

    async def settled(self, patience: Millis) -> Millis:
        """How long it takes until the members that are there, and no others, have all items between them."""
        began = self.loop.now
        while not self._is_settled():
            assert self.loop.now - began < patience, "the group has not settled"
            await asyncio.sleep(0.02)
        return self.loop.now - began

    def _is_settled(self) -> bool:
        names = {member.name for _, member in self.members}
        held = [item for process, member in self.members for item in process.context.run(_items, member)]
        return sorted(held) == sorted(ITEMS) and all(
            member.look is not None
            and member.look.round is not None
            and member.look.round.sealed
            and set(member.look.round.participants) == names
            for _, member in self.members
        )


def test_looks_do_not_grow_with_the_square_of_the_members() -> None:
    crowd = Crowd(80)
    crowd.run()
    # One for each of its own two beats a second: not for the 160 beats of the others, nor to see that its own is recorded.
    assert crowd.looks_a_second < 2.5
    assert crowd.joined_after < 3_000
    assert crowd.died_after < 3_000


def test_a_small_group_looks_at_each_change() -> None:
    crowd = Crowd(4)
    crowd.run()
    assert crowd.looks_a_second > 6
    assert crowd.joined_after < 1_000
    assert crowd.died_after < 1_000


def test_a_change_wakes_only_the_watches_that_it_concerns() -> None:
    async def story() -> None:
        asked: list[str] = []

        async def changed_since(prefix: str, since: Stamp) -> tuple[bool, Stamp]:
            asked.append(prefix)
            return False, since

        watches = Watches(changed_since, None)

        async def wait(prefix: str) -> None:
            async for _ in watches.watch(prefix, 0):
                raise AssertionError("nothing has changed")

        waiting = [asyncio.create_task(wait(prefix)) for prefix in ("queue/", "group/a/", "group/b/")]

        async def woken(*changed: str) -> list[str]:
            asked.clear()
            watches.wake(*([changed] if changed else []))
            for _ in range(5):
                await asyncio.sleep(0)
            return sorted(asked)

        await woken()
        assert await woken("queue/orders") == ["queue/"]
        assert await woken("group/a", "audit/1") == ["group/a/"]
        assert await woken("group/a/member/x", "group/b/plan") == ["group/a/", "group/b/"]
        assert await woken("group") == ["group/a/", "group/b/"]
        assert await woken("audit/2") == []
        assert await woken() == ["group/a/", "group/b/", "queue/"]
        watches.close()
        await asyncio.gather(*waiting)

    asyncio.run(story())
