"""Members with real parts, in virtual time: whatever befalls them, every record is handed on once, children after their parents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from simulation.meta import SimMetaStore
from simulation.network_link import Roads
from simulation.promises import InjectedMistakeError
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.partition_reader import Habits
from sluiceway.kernel.errors import SluicewayError
from tests.capture.tasks_rig import BASE, Part, Script
from tests.capture.tasks_world import LOG, NAME, PREFIX, TIMING, Member, World

BAD = Roads(slow=20, refused=0.03, lost=0.03, late=0.03, unheard=0.05, latest=8_000)


def test_three_members_read_it_all_and_rest() -> None:
    async def story(world: World) -> None:
        world.script.points = 2
        for _ in range(3):
            world.start()
        await world.until(lambda: world.done)
        end = world.states[0].seq
        await asyncio.sleep(20)
        # At rest nothing is said.
        assert world.states[0].seq == end
        assert [member.runner.alarms for member in world.members] == [{}, {}, {}]

    World(1).live(story)


async def _troubles(world: World) -> None:
    """Kills, freezes, departures and arrivals, over bad ways."""
    random = world.random
    for _ in range(random.choice([3, 6, 12])):
        await asyncio.sleep(random.choice([0.2, 1.0, 4.0, 8.0]))
        world.script.points = max(world.script.points, random.choice([1, 2]))
        member = random.choice(world.members) if world.members else None
        what = random.choice(["start", "kill", "freeze", "stop", "cut", "leader"])
        if what == "start" or member is None:
            world.start()
        elif what == "kill":
            world.kill(member)
        elif what == "leader":
            leader = world.leader()
            if leader is not None:
                world.kill(leader)
        elif what == "stop":
            world.stop(member)
            world.members.remove(member)
        elif what == "freeze" and not member.process.frozen:
            member.process.frozen = True
            world.loop.after(random.choice([500, 3_000, 15_000]), lambda member=member: setattr(member.process, "frozen", False))  # type: ignore[misc]
        elif what == "cut":
            link = random.choice(member.links)
            link.cut = {"there", "back"} if random.random() < 0.6 else {random.choice(["there", "back"])}
            world.loop.after(random.choice([500, 6_000]), lambda link=link: link.free("there", "back"))  # type: ignore[misc]


async def _healed(world: World) -> None:
    world.roads.calm()
    world.script.points, world.script.held = 2, False
    await asyncio.sleep(16)
    for _ in range(max(0, 2 - len(world.members))):
        world.start()
    await world.until(lambda: world.done)
    assert sorted(world.ledger.payloads) == sorted(world.script.payloads)
    assert not any(member.runner.alarms for member in world.members)


def whatever_befalls(seed: int, script: Script | None = None) -> World:
    random = Random(seed)
    roads = Roads(**vars(BAD)) if random.random() < 0.8 else Roads()
    preset = "finisher-hint" if random.random() < 0.5 else "log-leader"
    world = World(seed, script, roads=roads, preset=preset)  # type: ignore[arg-type]

    async def story(world: World) -> None:
        world.script.held = world.random.random() < 0.5
        for _ in range(world.random.choice([1, 2, 3, 5])):
            world.start()
        await _troubles(world)
        await _healed(world)

    world.live(story)
    return world


@pytest.mark.parametrize("seed", range(12))
def test_every_record_once_whatever_befalls(seed: int) -> None:
    whatever_befalls(seed)


@pytest.mark.parametrize("seed", range(8))
def test_keys_that_pass_between_partitions_keep_their_order_whatever_befalls(seed: int) -> None:
    whatever_befalls(seed, Script.crossing(Random(seed)))


def test_a_reader_at_a_barrier_hands_over_and_the_next_one_waits_there() -> None:
    async def story(world: World) -> None:
        source, target = world.script.parts["p0"], world.script.parts["p1"]
        source.gives[10], target.takes[10], source.records = {"p1"}, {"p0"}, 5
        world.start(), world.start()
        await world.until(lambda: world.ledger.counts == {"p0": 5, "p1": 10} and len(world.states[1].members) == 2)
        world.kill(owner_of(world, "p1"))
        await asyncio.sleep(20)
        assert world.ledger.counts == {"p0": 5, "p1": 10}
        assert world.states[0].awaits("p1") == ("p0>p1@10",)
        source.records = 400
        world.script.held = False
        await world.until(lambda: world.done)

    World(5, long(2)).live(story)


def test_what_nobody_needs_is_dropped() -> None:
    """Positions of partitions that are removed, and what a snapshot covers of the log."""

    async def story(world: World) -> None:
        world.script.points = 2
        world.start(), world.start()
        await world.until(lambda: world.done)
        await world.until(lambda: not world.shared.view.prefix(PREFIX))
        log = MetaSyncLog(SimMetaStore(world.shared, world.members[0].links[0]), NAME)
        assert (await log.read(0)).first > 25
        # It has never seen what was trimmed.
        world.start()
        await world.until(lambda: all(state.members == ("m1", "m2", "m3") for state in world.states))
        assert world.states[2] == world.states[0]

    World(3, Script.random(Random(3), steps=20)).live(story)


def test_one_commit_a_batch() -> None:
    async def story(world: World) -> None:
        world.start()
        await world.until(lambda: world.done)
        # One to plan each batch, and one more when nothing comes after it.
        assert 100 <= world.commits <= 100 + 10

    World(4, Script([Part("only", (), 1_000, 1)]), sizes=(10,)).live(story)


def test_at_rest_little_is_committed() -> None:
    """How far the time has come, of a stream whose records have not: twice a minute, and what changes otherwise at once."""

    async def story(world: World) -> None:
        read, moved = world.script.read, 0

        def later(*given: Any) -> Any:
            nonlocal moved
            moved += 1
            batch = read(*given)
            return replace(batch, at=BASE + 1_000 + moved)

        world.script.read = later  # type: ignore[method-assign, assignment]
        member = world.start()
        await world.until(lambda: world.ledger.whole)
        await asyncio.sleep(10)
        before = world.commits
        await asyncio.sleep(600)
        assert 15 <= world.commits - before <= 25
        assert moved > 1_000
        assert member.runner.claims

    script = Script([Part("p0", (), 10, 1)])
    script.held = True
    World(11, script).live(story)


# ---- by name ------------------------------------------------------------------------------------------------------------


def long(count: int = 1, records: int = 400) -> Script:
    """Partitions that take a while."""
    script = Script([Part(f"p{number}", (), records, 1) for number in range(count)])
    script.held = True
    return script


def owner_of(world: World, token: str) -> Member:
    """Whoever reads it, as the one who knows most says."""
    newest = max(world.states, key=lambda state: state.seq)
    return next(member for member in world.members if member.process.name == newest.partitions[token].owner)


def test_who_leaves_hands_over_at_once() -> None:
    async def story(world: World) -> None:
        first, second = world.start(), world.start()
        await world.until(lambda: first.runner.claims and second.runner.claims)
        world.stop(first)
        left_at = world.loop.seconds
        await world.until(lambda: len(second.runner.claims) == 4)
        # Nobody had to be taken for dead.
        assert world.loop.seconds - left_at < 2
        await world.until(first.task.done)
        assert first.task.exception() is None
        assert "m1" not in second.runner.state.joined
        world.members.remove(first)
        world.script.held = False
        await world.until(lambda: world.done)
        assert not world.ledger.deduplicated

    World(1, long(4)).live(story)


def test_who_cannot_reach_the_log_goes_after_a_while() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: member.runner.claims)
        member.links[0].cut = {"there", "back"}
        asked_at = world.loop.seconds
        world.stop(member)
        await world.until(member.task.done)
        assert TIMING.leave / 1000 - 1 < world.loop.seconds - asked_at < TIMING.leave / 1000 + 25
        assert any("stopped without leaving" in line for line in world.lines)
        world.kill(member)
        world.start()
        world.script.held = False
        await world.until(lambda: world.done)

    World(2, long(2)).live(story)


def test_a_member_that_stood_still_writes_nothing_new() -> None:
    """Whatever it was about to write is there already, or refused, at each of many moments."""
    seen = {"deduplicated": 0, "stale": 0}
    for seed in range(12):

        async def story(world: World) -> None:
            first, _ = world.start(), world.start()
            await world.until(lambda: first.runner.claims)
            await asyncio.sleep(world.random.random() * 0.4)
            first.process.frozen = True
            world.script.held = False
            await world.until(lambda: world.ledger.whole)
            first.process.frozen = False
            await world.until(lambda: world.done)
            seen["deduplicated"] += world.ledger.deduplicated
            seen["stale"] += world.ledger.stale

        World(seed, long(2, 200), roads=Roads(slow=20)).live(story)
    assert seen["deduplicated"]
    assert seen["stale"]


def test_an_opening_of_its_own_grant_that_came_later_is_no_reason_to_give_up() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: member.runner.claims)
        grant = member.runner.state.partitions["p0"].grant
        positions = MetaPositions(SimMetaStore(world.shared, member.links[0]), NAME)
        await positions.open("p0", grant)
        world.script.held = False
        await world.until(lambda: world.done)

    World(3, long()).live(story)


def test_an_unknown_position_is_an_alarm_and_never_the_beginning() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: world.ledger.counts.get("p0"))
        world.script.parts["p0"].safe = 300
        await world.until(lambda: member.runner.alarms)
        await asyncio.sleep(30)
        assert "everything up to 300 is safe" in member.runner.alarms["p0"]
        assert world.ledger.counts["p0"] < 300
        assert not member.runner.claims
        # Who takes over finds the same.
        world.kill(member)
        other = world.start()
        await world.until(lambda: other.runner.alarms)
        assert world.ledger.counts["p0"] < 300

    World(4, long()).live(story)


def test_what_is_refused_for_good_is_an_alarm_and_goes_on_when_it_is_mended() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: world.ledger.counts.get("p0"))
        asked = []

        async def refuse(*_: object) -> None:
            asked.append(world.loop.seconds)
            raise SluicewayError("forbidden", "the key has no scope for this")

        world.ledger.land = refuse  # type: ignore[method-assign, assignment]
        await world.until(lambda: len(asked) > 6)
        # It asks less and less often.
        assert asked[-1] - asked[-2] > 2 * (asked[2] - asked[1])
        assert member.runner.alarms == {"p0": "the key has no scope for this"}
        del world.ledger.land
        world.script.held = False
        await world.until(lambda: world.done)
        assert not member.runner.alarms

    World(5, long()).live(story)


def test_a_batch_that_is_always_too_old_is_an_alarm() -> None:
    """Nobody else reads the partition, and yet a later batch is there: that does not mend itself."""

    async def story(world: World) -> None:
        world.ledger.stand("p0", 1_000)
        member = world.start()
        await world.until(lambda: member.runner.alarms)
        assert "after 1000; check whether positions were restored" in member.runner.alarms["p0"]
        assert not world.ledger.payloads

    World(6, long()).live(story)


def test_a_log_that_cannot_be_understood_ends_the_member() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: member.runner.claims)
        log = MetaSyncLog(SimMetaStore(world.shared, member.links[0]), NAME)
        world.understood = False
        await log.append([b'["brand-new",1]'])
        await world.until(member.task.done)
        error = member.task.exception()
        assert isinstance(error, SluicewayError)
        assert "records that this version does not know" in error.detail
        assert not world.reading

    World(7, long()).live(story)


def test_a_log_that_lost_records_ends_the_member() -> None:
    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: member.runner.claims)
        await world.shared.commit({}, {}, {}, [key for key in world.shared.view.entries if key.startswith(LOG[:-1])])
        await world.until(member.task.done)
        assert "has lost records" in str(member.task.exception())

    World(8, long()).live(story)


def test_the_next_batch_is_read_while_one_is_written() -> None:
    async def story(world: World) -> None:
        member = world.start()
        world.script.held = False
        await world.until(lambda: world.ledger.counts.get("p0"))
        member.links[1].roads = Roads(slow=100)
        member.links[2].roads = Roads(slow=100)
        began, had = world.loop.seconds, world.ledger.counts["p0"]
        await world.until(lambda: world.done)
        batches = (400 - had) / 4
        # A read takes 200 ms on the average, and so does a write.
        assert world.loop.seconds - began < batches * 0.4

    World(9, long(), sizes=(4,), habits=Habits(hint=60_000)).live(story)


def test_a_stream_that_fails_is_asked_again() -> None:
    """Whatever it raises: it is logged as a mistake, and is no end."""

    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: world.ledger.counts.get("p0"))
        read = world.script.read
        failed: list[Any] = []

        def fail(*given: Any) -> Any:
            if len(failed) < 3:
                failed.append(given)
                raise InjectedMistakeError("of the stream")
            return read(*given)

        world.script.read = fail  # type: ignore[method-assign, assignment]
        world.script.held = False
        await world.until(lambda: world.done)
        assert len(failed) == 3
        assert sum("p0 failed" in line for line in world.lines) == 3
        assert not member.runner.alarms

    World(10, long()).live(story)
