"""What does not go on is said, where others can see it, and no longer than it is so; in virtual time, with real parts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from simulation.meta import SimMetaStore
from simulation.promises import InjectedMistakeError
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.timing import FAILURES
from sluiceway.core.group.task_state import Snapshot, encode
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import BrokenOffError, UnknownPositionError
from tests.capture.tasks_rig import Part, Script
from tests.capture.tasks_world import NAME, TIMING, Member, World

BOARD = f"tasks/{NAME}/alarms/"


def held(count: int = 1) -> Script:
    """Partitions that are read to their ends, and do not end."""
    script = Script([Part(f"p{number}", (), 40, 1) for number in range(count)])
    script.held = True
    return script


def board(world: World) -> dict[str, dict[str, str]]:
    return {key.removeprefix(BOARD): msgspec.json.decode(entry.value) for key, entry in world.shared.view.prefix(BOARD).items()}


def test_a_fence_that_the_log_knows_nothing_of_is_an_alarm() -> None:
    """As when the log was lost, or is another one, and the positions are those of before."""

    async def story(world: World) -> None:
        member = world.start()
        positions = MetaPositions(SimMetaStore(world.shared, member.links[0]), NAME)
        await positions.open("p0", 10_000)
        await world.until(lambda: member.runner.alarms)
        assert "under grant 10000, which the log does not have" in member.runner.alarms["p0"]
        await world.until(lambda: board(world))
        assert board(world) == {"m1": member.runner.alarms}
        # Who takes over finds the same.
        world.kill(member)
        other = world.start()
        await world.until(lambda: other.runner.alarms)
        assert not world.ledger.payloads
        # What the dead one has left goes, too.
        await world.until(lambda: list(board(world)) == ["m2"])

    World(1, held()).live(story)


def test_a_fence_that_the_log_will_tell_of_is_none() -> None:
    """Another one has the partition by now, which this member cannot hear yet, for long."""

    async def story(world: World) -> None:
        first, second = world.start(), world.start()
        await world.until(lambda: first.runner.claims and second.runner.claims)
        alarms: list[object] = []
        # It reaches the stream and the sink, but not the log.
        first.links[0].cut = {"there", "back"}
        await world.until(lambda: len(second.runner.claims) == 2)
        token, partition = next(iter(first.runner.state.owned("m1").items()))
        higher = second.runner.state.partitions[token].grant
        first.process.context.run(first.runner._alarms.fenced, token, partition.grant, higher)
        for _ in range(400):
            await asyncio.sleep(0.1)
            alarms += first.runner.alarms
        first.links[0].free("there", "back")
        await world.until(lambda: first.runner.state == second.runner.state)
        assert not alarms
        world.script.held = False
        await world.until(lambda: world.done)

    World(2, held(2)).live(story)


def test_a_reader_in_which_something_is_cancelled_is_begun_again() -> None:
    async def story(world: World) -> None:
        member = world.start()
        reads, calls = member.runner._runs._handler, []

        async def handler(claim: Any) -> Any:
            calls.append(claim)
            if len(calls) == 1:
                promise = asyncio.get_running_loop().create_future()
                promise.cancel()
                await promise
            return await reads(claim)

        member.runner._runs._handler = handler
        world.script.held = False
        await world.until(lambda: world.done)
        assert len(calls) > 1

    World(3, held()).live(story)


def test_a_member_does_not_outlive_a_part_of_it() -> None:
    """Otherwise it would be taken for alive, and neither hear nor say anything."""

    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: member.runner.claims)

        async def cancelled(*_: object) -> None:
            raise asyncio.CancelledError

        member.runner._log.read = cancelled  # type: ignore[method-assign, assignment]
        await world.until(member.task.done)
        assert "was cancelled" in str(member.task.exception())

    World(4, held()).live(story)


def _break_stream(world: World, member: Member, broken: list[bool]) -> None:
    seeds = member.runner._stream.seeds

    async def refuse(after: str) -> Any:
        if broken:
            raise SluicewayError("invalid_request", "wal_level is not logical")
        return await seeds(after)

    member.runner._stream.seeds = refuse  # type: ignore[method-assign]


def test_who_does_not_lead_any_more_has_no_alarm_of_the_stream() -> None:
    async def story(world: World) -> None:
        members = [world.start(), world.start()]
        broken = [True]
        for member in members:
            _break_stream(world, member, broken)
        await world.until(lambda: any(member.runner.alarms for member in members))
        leader = world.leader()
        assert leader is not None
        assert leader.runner.alarms == {"": "wal_level is not logical"}
        # It is taken for dead for a while.
        for link in leader.links:
            link.cut = {"there", "back"}
        other = members[members[0] is leader]
        await world.until(lambda: other.runner.leads)
        for link in leader.links:
            link.free("there", "back")
        await world.until(lambda: not leader.runner.leads and leader.runner.state == other.runner.state)
        broken.clear()
        await world.until(lambda: not leader.runner.alarms and not other.runner.alarms)
        await world.until(lambda: not board(world))

    World(5, held(2)).live(story)


def test_a_record_that_cannot_be_appended_is_an_alarm_whatever_the_stream_says() -> None:
    async def story(world: World) -> None:
        member = world.start()
        append, refused = MetaSyncLog.append, [True]

        async def refuse(records: list[bytes]) -> None:
            if refused and any(b'"snapshot"' in record for record in records):
                raise ValueError("a record of 1000001 bytes; the log takes 1000000")
            await append(member.runner._log, records)  # type: ignore[arg-type]

        member.runner._log.append = refuse  # type: ignore[method-assign, assignment]
        member.runner._say(_snapshot(member))
        await world.until(lambda: member.runner.alarms)
        seen = []
        for _ in range(20):
            # As long as it is tried again, also while the stream answers.
            member.runner._say(_snapshot(member))
            await asyncio.sleep(TIMING.seeds / 2000)
            seen.append(member.runner.alarms)
        assert all("cannot be appended" in each.get("", "") for each in seen)
        refused.clear()
        await world.until(lambda: not member.runner.alarms)

    World(6, held()).live(story)


def _snapshot(member: Member) -> bytes:
    return encode(Snapshot(member.runner.state))


def _refuse_all(world: World) -> None:
    async def refuse(*_: object) -> None:
        # So that there is time in which it is not known yet.
        await asyncio.sleep(1)
        raise SluicewayError("forbidden", "the key has no scope for this")

    world.ledger.land = refuse  # type: ignore[method-assign, assignment]


def test_an_alarm_of_the_target_stays_while_the_stream_is_read_again_and_again() -> None:
    async def story(world: World) -> None:
        member = world.start()
        _refuse_all(world)
        await world.until(lambda: member.runner.alarms)
        for _ in range(1_000):
            assert member.runner.alarms == {"p0": "the key has no scope for this"}
            await asyncio.sleep(0.1)

    World(10, held()).live(story)


@pytest.mark.parametrize("unknown", [False, True])
def test_a_partition_that_breaks_off_until_it_moves_is_let_go_of(unknown: bool) -> None:
    """Otherwise what the stream holds for it here would be held for as long as the process lives."""

    def gone(*_: Any) -> Any:
        raise UnknownPositionError("the stream has no such position")

    async def story(world: World) -> None:
        if unknown:
            world.script.read = gone  # type: ignore[method-assign, assignment]
        else:
            _refuse_all(world)
        first = world.start()
        await world.until(lambda: len(first.runner.alarms) == 4)
        second = world.start()
        await world.until(lambda: len(first.runner.state.owned("m2")) == 2)
        # By the first one: who has it now cannot hand it on either, and keeps it.
        await world.until(lambda: set(world.script.left) == set(first.runner.state.owned("m2")), seconds=10)
        assert len(second.runner.state.owned("m2")) == 2

    World(11, held(4)).live(story)


def test_who_leaves_takes_its_alarms_along() -> None:
    async def story(world: World) -> None:
        member = world.start()
        _refuse_all(world)
        await world.until(lambda: board(world))
        assert board(world) == {"m1": {"p0": "the key has no scope for this"}}
        del world.ledger.land
        world.stop(member)
        await world.until(member.task.done)
        assert not board(world)
        world.members.remove(member)

    World(7, held()).live(story)


def test_what_breaks_off_for_long_is_an_alarm_until_it_is_read_again() -> None:
    """Also of a partition in which nothing comes, so that nothing is committed."""

    async def story(world: World) -> None:
        member = world.start()
        await world.until(lambda: world.ledger.whole)
        await asyncio.sleep(60)
        read, failed = world.script.read, 0

        def fail(*_: Any) -> Any:
            nonlocal failed
            failed += 1
            raise BrokenOffError("the server does not take the password")

        world.script.read = fail  # type: ignore[method-assign, assignment]
        await world.until(lambda: member.runner.alarms)
        assert failed >= FAILURES
        assert member.runner.alarms == {"p0": "the server does not take the password; it is retried"}
        world.script.read = read  # type: ignore[method-assign]
        commits = world.commits
        await world.until(lambda: not member.runner.alarms)
        assert member.runner.claims
        assert world.commits == commits

    World(8, held()).live(story)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BrokenOffError("the server is away"), "the server is away; it is retried"),
        (InjectedMistakeError("ShardId"), "InjectedMistakeError: ShardId; it is retried"),
    ],
)
def test_a_stream_that_does_not_answer_for_long_is_an_alarm(error: Exception, told: str) -> None:
    async def story(world: World) -> None:
        member = world.start()
        seeds, asked = world.script.seeds, []

        def fail(after: str) -> Any:
            asked.append(after)
            raise error

        world.script.seeds = fail  # type: ignore[method-assign]
        await world.until(lambda: member.runner.alarms)
        assert len(asked) >= FAILURES
        assert member.runner.alarms == {"": told}
        world.script.seeds = seeds  # type: ignore[method-assign]
        await world.until(lambda: not member.runner.alarms)

    World(9, held()).live(story)
