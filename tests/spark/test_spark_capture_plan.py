"""The planner of micro-batches, and a driver in virtual time that dies at every point: every record in one batch, children after parents.

Spark is stood in for by what it promises: an offset log, a commit log, and a start from them. Everything else is real.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from simulation.loop import Process
from simulation.meta import SimMetaStore
from simulation.network_link import Link, Roads
from simulation.promises import check
from sluiceway.adapters import system
from sluiceway.capture.group_election import MetaElection
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.task_driver import TaskRunner
from sluiceway.core.group.task_state import Partition, State
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import PositionRecord
from sluiceway.ports.change_stream import CHANGES, Batch, BrokenOffError, StaleBatchError
from sluiceway.spark.capture_plan import Done, EndFacts, Offset, Slice, choose, is_over, judge, recorded
from sluiceway.spark.capture_planning import Planning
from tests.capture.tasks_rig import Part, Script, ScriptedStream
from tests.capture.tasks_world import LOG, NAME, TIMING, Member, World

BAD = Roads(slow=20, refused=0.03, lost=0.03, late=0.03, unheard=0.05, latest=8_000)

# ---- the pure planner --------------------------------------------------------------------------------------------------

ONE = Slice("a", "a:0", "a:5", 1, 7, 5)
TWO = Slice("b", "b:0", "b:3", 4, 8, 3)


def test_an_offset_survives_the_log_and_equal_ones_are_equal_text() -> None:
    offset = Offset(3, (ONE, TWO), (Done("c", "c:9", 2, 9),))
    again = Offset.parse(json.loads(json.dumps(offset.to_dict())))
    assert again == offset
    shuffled = Offset(2).following([TWO, ONE], [Done("c", "c:9", 2, 9)])
    assert json.dumps(shuffled.to_dict()) == json.dumps(offset.to_dict())
    assert list(offset.to_dict()) == sorted(offset.to_dict())


def test_what_is_done_is_the_last_of_each_partition() -> None:
    offset = Offset(3, (ONE,), (Done("a", "a:0", 0, 2), TWO.done))
    assert set(offset.committed()) == {ONE.done, TWO.done}


@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        (PositionRecord(position="a:0", plan="a:5", batch=1), "settle"),
        (PositionRecord(position="a:5", plan=None, batch=1), "settled"),
        # It has moved on over nothing.
        (PositionRecord(position="a:6", plan=None, batch=1), "settled"),
        (PositionRecord(position="a:5", plan="a:9", batch=2), "settled"),
    ],
)
def test_what_is_to_be_recorded_of_a_batch_that_is_done(kept: PositionRecord, verdict: str) -> None:
    assert judge(kept, ONE.done) == verdict


@pytest.mark.parametrize(
    "kept", [PositionRecord(), PositionRecord(position="a:0", plan="a:4", batch=1), PositionRecord(position="a:5", plan=None, batch=0)]
)
def test_a_position_store_that_knows_less_than_the_checkpoint_stops_the_query(kept: PositionRecord) -> None:
    with pytest.raises(SluicewayError, match="restored from a backup"):
        judge(kept, ONE.done)


def test_a_batch_has_all_plans_that_were_found_and_offers_until_it_is_full() -> None:
    offered = {"a": 5, "b": 5, "c": 5, "d": 0}
    assert choose(offered, 1) == ["a"]
    assert choose(offered, 6) == ["a", "b"]
    assert choose(offered, 10, first=["d", "gone"]) == ["d", "a", "b"]
    assert choose(offered, 1, first=["b", "c"]) == ["b", "c"]
    assert choose({}, 10) == []


def _state(*partitions: Partition, members: tuple[str, ...] = ("me", "other"), sown: str = "1") -> State:
    return State(members=members, partitions={each.token: each for each in partitions}, sown=sown)


def test_what_others_have_recorded_is_not_carried_on() -> None:
    state = _state(Partition("a", phase="owned", owner="other"))
    assert recorded(Done("gone", "x", 1, 1), state, None)
    assert not recorded(ONE.done, state, None)
    assert not recorded(ONE.done, state, PositionRecord(position="a:0", plan="a:5", batch=1))
    assert recorded(ONE.done, state, PositionRecord(position="a:5", batch=1))
    # Read before that batch was planned: it says nothing of it.
    assert not recorded(ONE.done, state, PositionRecord(position="a:0", batch=0))


MINE = Partition("a", phase="owned", owner="me")
THEIRS = Partition("b", phase="owned", owner="other")


@pytest.mark.parametrize(
    ("state", "reached", "steady", "over"),
    [
        (_state(MINE), {"a"}, False, True),
        (_state(MINE), set(), True, False),
        (_state(MINE, THEIRS), {"a"}, True, True),
        # Its owner may have died.
        (_state(MINE, THEIRS), {"a"}, False, False),
        (_state(MINE, Partition("c", phase="ready")), {"a"}, True, False),
        # Its parent has not ended, and that has been read.
        (_state(MINE, Partition("c", ("a",), phase="created", waits=("a",))), {"a"}, False, True),
        (_state(Partition("d", phase="finished")), set(), False, True),
        (_state(members=("other",)), set(), True, False),
        (_state(sown=""), set(), False, False),
        (_state(sown=""), set(), True, True),
    ],
)
def test_when_an_available_now_run_is_over(state: State, reached: set[str], steady: bool, over: bool) -> None:
    assert is_over(EndFacts(state, "me", frozenset(reached), steady)) is over


# ---- a driver that dies ------------------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """What Spark keeps of a query, and what its sink has, by batch id."""

    offsets: list[str] = field(default_factory=list)
    """`offsets[n]` is where batch n ends; it is the first that is logged, for batch 0 begins at an offset that nobody keeps."""
    committed: int = 0
    """How many batches are."""
    out: dict[int, dict[str, list[bytes]]] = field(default_factory=dict)
    """Rows of each batch by partition. A batch that is written again replaces what there was."""


class TimelyStream(ScriptedStream):
    """Says how far behind a batch is: long, unless it is the last one."""

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        batch = await super().read(partition, position, upto, limit)
        last = batch.upto is None or batch.upto == f"{partition}:{self._script.parts[partition].records}"
        return replace(batch, behind=0 if last else 10**9)


class AgedStream(ScriptedStream):
    """Says how far behind a batch is as most streams can: by the age of its last record. All were there before the stream was opened."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._opened_at = system.steady()

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        age = system.steady() - self._opened_at
        batch = await super().read(partition, position, upto, limit)
        return replace(batch, behind=age + 1 if batch.records.num_rows else 0)


class SilentStream(TimelyStream):
    """Has nothing at first, and does not know how far behind that is."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._silent: dict[str, int] = {}

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        self._silent[partition] = self._silent.get(partition, 0) + 1
        if self._silent[partition] <= 10:
            await asyncio.sleep(0.1)
            return Batch(pa.RecordBatch.from_pylist([], CHANGES), None)
        return await super().read(partition, position, upto, limit)


class RefusingStream(ScriptedStream):
    """The first batches that are to be read again are refused."""

    refused = 0

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        if upto is not None and RefusingStream.refused < 2:
            RefusingStream.refused += 1
            raise SluicewayError("forbidden", "not for you")
        return await super().read(partition, position, upto, limit)


POINTS = ("planned", "logged", "half", "ran", "committed")


class Queries(World):
    """Drivers of micro-batch queries, as processes that die. `dies` says at which point of which batch."""

    def query(self, checkpoint: Checkpoint, dies: tuple[str, int] | None = None, most: int = 12, now: str = "") -> Member:
        # Never used again: a process that was killed is not among the loop's any more.
        self.begun += 1
        name = f"q{self.begun}"
        process = self.loop.add(Process(name, origin=self.random.randrange(10**6)))
        links = tuple(Link(self.loop, process, self.roads) for _ in range(2))
        return process.context.run(self._query, name, process, links, checkpoint, dies, most, now)

    def _query(
        self, name: str, process: Process, links: tuple[Link, ...], checkpoint: Checkpoint, dies: Any, most: int, now: str
    ) -> Member:
        store = SimMetaStore(self.shared, links[0])
        stream = (self.timely if now else self.stream)(self.script, links[1], None if now else self.random, self.sizes)
        positions = MetaPositions(store, NAME)
        planning = Planning(limit=10)
        if now == "before":
            planning.read_up_to_now()
        handler = planning.begin(stream, positions)
        if now == "between":
            planning.read_up_to_now()
        runner = TaskRunner(
            name,
            log=MetaSyncLog(store, NAME),
            election=MetaElection(store, NAME),
            positions=positions,
            stream=stream,
            handler=handler,
            timing=TIMING,
        )
        planning.watch(runner)
        self._began[name] = runner, max((int(key.removeprefix(LOG)) for key in self.shared.view.prefix(LOG)), default=0)
        member = Member(process, runner, self.loop.begin(process, runner.run()), links)
        self.members.append(member)
        driver = self.loop.begin(process, self._drive(member, planning, checkpoint, dies, most, now))
        self.drivers[name] = driver
        return member

    @property
    def drivers(self) -> dict[str, asyncio.Task[None]]:
        return self.__dict__.setdefault("_drivers", {})  # type: ignore[no-any-return]

    async def _drive(self, member: Member, planning: Planning, checkpoint: Checkpoint, dies: Any, most: int, now: str) -> None:
        async def point(name: str) -> None:
            if dies == (name, checkpoint.committed - (name == "committed")):
                self.kill(member)
                await asyncio.Event().wait()

        if now == "after":
            planning.read_up_to_now()
        start = Offset()
        if checkpoint.committed:
            start = Offset.parse(json.loads(checkpoint.offsets[checkpoint.committed - 1]))
        while True:
            if len(checkpoint.offsets) > checkpoint.committed:
                end = Offset.parse(json.loads(checkpoint.offsets[checkpoint.committed]))
            else:
                end = await planning.following(start, most)
                if end is start:
                    if now:
                        return
                    await asyncio.sleep(0.01)
                    continue
                await point("planned")
                checkpoint.offsets.append(json.dumps(end.to_dict()))
                await point("logged")
            await self._run(end, checkpoint, point)
            await point("ran")
            checkpoint.committed += 1
            await point("committed")
            start = end

    async def _run(self, end: Offset, checkpoint: Checkpoint, point: Any) -> None:
        out: dict[str, list[bytes]] = {}
        await asyncio.sleep(self.takes)
        before = checkpoint.out.get(checkpoint.committed)
        for number, part in enumerate(end.slices):
            rows = await self._task(part)
            out[part.token] = rows
            if number == len(end.slices) // 2:
                await point("half")
        check(before is None or before == out, f"batch {checkpoint.committed} is replayed with other rows")
        checkpoint.out[checkpoint.committed] = out
        for part in end.slices:
            try:
                await self.ledger.land(part.token, part.batch, 0, tuple(out[part.token]))
            except StaleBatchError:
                # Another query has handed it on, and gone on from there.
                check(len(self.checkpoints) > 1, "a batch of the only query is stale")

    timely: type[ScriptedStream] = TimelyStream
    stream: type[ScriptedStream] = ScriptedStream
    checkpoints: tuple[Checkpoint, ...] = ()
    begun = 0
    takes = 0.0
    """Seconds of a batch, before it writes anything."""

    async def _task(self, part: Slice) -> list[bytes]:
        """A task, in a process of its own."""
        stream = ScriptedStream(self.script, None)
        while True:
            try:
                batch = await stream.read(part.token, part.after, part.upto)
            except BrokenOffError:
                await asyncio.sleep(0.1)
                continue
            rows: list[bytes] = batch.records.column("payload").to_pylist()
            check(batch.upto == part.upto and len(rows) == part.rows, f"{part} has {len(rows)} rows")
            return rows


def _script() -> Script:
    """Two that are read, split, and merge."""
    return Script([Part("a", (), 14, 1), Part("b", (), 9, 1), Part("c", ("a",), 11), Part("d", ("a", "b"), 8), Part("e", ("c", "d"), 5)])


def _check(world: Queries, checkpoint: Checkpoint) -> None:
    """Each record is in one batch, in order; no child is in the batch of a parent's record, or in one before."""
    at: dict[str, list[int]] = {}
    rows: dict[str, list[bytes]] = {}
    for number, out in sorted(checkpoint.out.items()):
        for token, payloads in out.items():
            at.setdefault(token, []).append(number)
            rows.setdefault(token, []).extend(payloads)
    parts = world.script.parts
    assert rows == {token: [part.payload(index) for index in range(part.records)] for token, part in parts.items() if part.records}
    for token, numbers in at.items():
        assert all(max(at[above]) < min(numbers) for above in world.script.ancestors(token) if above in at), (token, at)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_driver_that_dies_at_any_point_goes_on_exactly(point: str, batch: int) -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        checkpoint = Checkpoint()
        member = world.query(checkpoint, (point, batch))
        await world.until(lambda: member.process.dead)
        assert not world.ledger.whole
        world.query(checkpoint)
        await world.until(lambda: world.done)
        _check(world, checkpoint)
        # Each plan was given a number, and none was given two.
        assert world.ledger.stale == 0

    Queries(3, _script()).live(story)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_befalls_a_query_each_record_is_in_one_batch(seed: int) -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        checkpoint = Checkpoint()
        world.script.points = 2
        for _ in range(world.random.choice([2, 4])):
            dies = (world.random.choice(POINTS), checkpoint.committed + world.random.choice([0, 1, 2, 5]))
            member = world.query(checkpoint, dies, world.random.choice([1, 8, 40]))
            await _sleep_until_dead(world, member)
            if not member.process.dead:
                world.kill(member)
        world.roads.__dict__.update(Roads().__dict__)
        world.query(checkpoint)
        await world.until(lambda: world.done, 300)
        _check(world, checkpoint)

    Queries(seed, roads=Roads(**BAD.__dict__)).live(story)


@pytest.mark.parametrize("seed", range(6))
def test_keys_that_pass_between_partitions_keep_their_order_in_batches(seed: int) -> None:
    """A slice beyond a barrier is in a later batch than what its sources had before theirs, whichever drivers die."""

    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        checkpoint = Checkpoint()
        for _ in range(2):
            dies = (world.random.choice(POINTS), checkpoint.committed + world.random.choice([0, 1, 5]))
            member = world.query(checkpoint, dies, world.random.choice([8, 40]))
            await _sleep_until_dead(world, member)
            if not member.process.dead:
                world.kill(member)
        world.query(checkpoint)
        await world.until(lambda: world.done, 300)
        _check(world, checkpoint)

    Queries(seed, Script.crossing(Random(seed))).live(story)


async def _sleep_until_dead(world: World, member: Member) -> None:
    end = world.loop.seconds + world.random.choice([1.0, 10.0, 30.0])
    await world.until(lambda: member.process.dead or world.loop.seconds >= end)


@pytest.mark.parametrize("seed", range(8))
def test_two_queries_share_and_what_both_hand_on_has_one_number(seed: int) -> None:
    """The ledger knows a batch by its partition and number, and refuses whatever else comes twice, or in the wrong order."""

    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.points = 2
        world.checkpoints = one, two = Checkpoint(), Checkpoint()
        world.query(two)
        for _ in range(3):
            member = world.query(one, (world.random.choice(POINTS), one.committed + world.random.choice([0, 1, 3])))
            await _sleep_until_dead(world, member)
            if not member.process.dead:
                world.kill(member)
        world.query(one)
        await world.until(lambda: world.done, 300)
        assert one.out or two.out

    Queries(seed).live(story)


def test_a_move_waits_for_the_batch_and_then_goes_without_its_records_twice() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        world.takes = 3.0
        world.checkpoints = one, two = Checkpoint(), Checkpoint()
        world.query(one, most=100)
        await world.until(lambda: world.ledger.counts.get("a", 0) > 0)
        world.query(two)
        await world.until(lambda: world.ledger.whole)
        assert world.ledger.deduplicated == world.ledger.stale == 0
        assert one.out
        assert two.out

    Queries(5, Script([Part("a", (), 200, 1), Part("b", (), 200, 1)]), sizes=(10,)).live(story)


@pytest.mark.parametrize("now", ["before", "between", "after"])
def test_available_now_reads_what_there_is_with_children_and_ends_though_nothing_ends(now: str) -> None:
    """Whenever it is said: the member begins in a thread of its own."""

    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        checkpoint = Checkpoint()
        member = world.query(checkpoint, now=now)
        await world.until(lambda: world.drivers[member.runner.name].done())
        # The last child does not end, and there is nothing left in it.
        assert world.ledger.whole
        _check(world, checkpoint)

    Queries(2, _script()).live(story)


class HeldStream(TimelyStream):
    """Knows that there may be something beyond a barrier."""

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        batch = await super().read(partition, position, upto, limit)
        return replace(batch, behind=1) if batch.barrier is not None else batch


def test_available_now_ends_at_a_barrier_whose_source_has_not_come_to_it() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.timely = HeldStream
        world.script.parts["a"].gives[20] = {"b"}
        world.script.parts["b"].takes[20] = {"a"}
        world.script.held = True
        checkpoint = Checkpoint()
        member = world.query(checkpoint, now="before")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert world.ledger.counts == {"a": 10, "b": 20}

    Queries(2, Script([Part("a", (), 10, 1), Part("b", (), 40, 1)])).live(story)


def test_available_now_does_not_take_silence_for_an_end() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        world.timely = SilentStream
        checkpoint = Checkpoint()
        member = world.query(checkpoint, now="before")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert world.ledger.whole
        _check(world, checkpoint)

    Queries(2, _script()).live(story)


def test_available_now_holds_how_far_a_read_was_behind_against_when_it_began() -> None:
    """Batches take longer than the stream is old: a batch that is handed on late is no nearer to the end for that."""

    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        world.takes = 3.0
        world.timely = AgedStream
        checkpoint = Checkpoint()
        member = world.query(checkpoint, now="before")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert world.ledger.whole
        _check(world, checkpoint)

    Queries(2, Script([Part("a", (), 65, 1), Part("b", (), 5, 1)])).live(story)


class GrowingStream(ScriptedStream):
    """There is always more, and it is all newer than the stream: a batch is never behind by more than what a batch takes."""

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        self._script.parts[partition].records += 10
        return replace(await super().read(partition, position, upto, limit), behind=1_000)


def test_available_now_ends_though_records_keep_coming() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        world.takes = 1.0
        world.timely = GrowingStream
        checkpoint = Checkpoint()
        member = world.query(checkpoint, now="before")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert checkpoint.out

    Queries(2, Script([Part("a", (), 20, 1)])).live(story)


def test_a_plan_that_may_not_be_read_is_asked_for_again_and_the_others_go_on() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        checkpoint = Checkpoint()
        first = world.query(checkpoint, ("planned", 1))
        await world.until(lambda: first.process.dead)
        RefusingStream.refused = 0
        world.stream = RefusingStream
        member = world.query(checkpoint)
        await world.until(lambda: world.done)
        assert RefusingStream.refused == 2
        assert not world.drivers[member.runner.name].done()
        _check(world, checkpoint)

    Queries(2, _script()).live(story)


def test_who_does_not_read_a_partition_any_more_tells_the_stream() -> None:
    async def story(world: World) -> None:
        world.script.held = True
        world.start()
        await world.until(lambda: world.ledger.whole)
        (first,) = world.members
        assert not world.script.left
        world.start()
        await world.until(lambda: len(first.runner.state.owned(first.runner.name)) == 1)
        await world.until(lambda: world.script.left)
        assert world.script.left == [token for token in ("a", "b") if token not in first.runner.state.owned(first.runner.name)]
        world.script.held = False
        await world.until(lambda: world.done)
        assert set(world.script.left) == {"a", "b"}

    World(3, Script([Part("a", (), 20, 1), Part("b", (), 20, 1)])).live(story)


def test_available_now_after_a_crash_waits_until_the_former_driver_is_taken_for_dead() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        checkpoint = Checkpoint()
        first = world.query(checkpoint, ("committed", 1))
        await world.until(lambda: first.process.dead)
        member = world.query(checkpoint, now="after")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert world.ledger.whole
        _check(world, checkpoint)

    Queries(2, _script()).live(story)


def test_available_now_does_not_leave_out_what_a_dead_query_has_while_another_leads() -> None:
    async def story(world: World) -> None:
        assert isinstance(world, Queries)
        world.script.held = True
        world.checkpoints = one, two = Checkpoint(), Checkpoint()
        leader = world.query(two)
        await world.until(lambda: leader.runner.leads)
        dead = world.query(one)
        await world.until(lambda: leader.runner.state.owned(dead.runner.name))
        world.kill(dead)
        member = world.query(one, now="after")
        await world.until(lambda: world.drivers[member.runner.name].done())
        assert not member.runner.state.owned(dead.runner.name)

    Queries(2, Script([Part("a", (), 20, 1), Part("b", (), 20, 1)])).live(story)
