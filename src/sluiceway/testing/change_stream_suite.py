"""Conformance suite of ChangeStream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Protocol

import pyarrow as pa
import pytest

from sluiceway.ports.change_stream import (
    CHANGES,
    AnnouncedPartition,
    Barrier,
    Batch,
    BrokenOffError,
    ChangeStream,
    End,
    UnknownPositionError,
)
from sluiceway.testing.drive import driven

PAUSE = 0.02
"""Seconds between two reads of a partition without new records."""


class World(Protocol):
    """A source with a change stream, made for one test. It begins with at least one partition and no records."""

    async def open(self) -> ChangeStream:
        """Open the same stream once more, as another process would."""
        ...

    async def write(self, count: int) -> list[str]:
        """Write `count` new records, one by one, spread over the partitions; returns when they are durable. Returns their names, never used
        before."""
        ...

    def names(self, records: pa.RecordBatch) -> list[str]:
        """Return the names of records, in order."""
        ...

    async def nowhere(self, position: str) -> str:
        """Return a position in the stream's notation that the partition of `position` never had, or has lost."""
        ...

    async def interrupt(self) -> None:
        """Make the stream unreachable."""
        ...

    async def restore(self) -> None:
        """Make it reachable again."""
        ...


class BranchingWorld(World, Protocol):
    """A world whose stream has partitions with children."""

    async def branch(self) -> None:
        """Give some partitions children, one of them with two parents if the stream supports that."""
        ...


class HandoffWorld(BranchingWorld, Protocol):
    """A world whose stream lets key ranges pass between partitions that go on."""

    async def hand_over(self) -> tuple[list[str], list[str]]:
        """Write some records, let their keys pass to another partition, and write to the same keys again; nothing ends.

        Returns the names before and after, when all are durable.
        """
        ...


class Follower:
    """Reads a stream through the port alone, and as tasks do: children after all of their parents, and past a barrier after its sources.

    By partition: `positions`: where each is read to; `parents`: its parents; `ended`: its end, once it has ended; `read`: names of its
    records in the order of arrival; `barred`: the barrier that it waits at. A violation of the port's rules fails the test.
    """

    def __init__(self, names: Callable[[pa.RecordBatch], list[str]], limit: int = 10_000) -> None:
        self.names, self.limit = names, limit
        self.positions: dict[str, str] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        self.read: dict[str, list[str]] = {}
        self.ended: dict[str, End] = {}
        self.order: list[str] = []
        """Partitions in the order in which they began and, with a leading `-`, ended."""
        self.arrived: list[str] = []
        """Names of records in the order of arrival."""
        self.barred: dict[str, Barrier] = {}
        self._given: set[str] = set()
        self._marks: dict[str, int] = {}
        self._waiting: dict[str, AnnouncedPartition] = {}
        self._point = ""

    async def seek(self, stream: ChangeStream) -> None:
        """Read the seeds after those already known."""
        seeds = await stream.seeds(self._point)
        assert seeds.upto or not seeds.partitions
        self._point = seeds.upto
        known = self.parents.keys() | {born.token for born in seeds.partitions}
        for born in seeds.partitions:
            self._bear(born, [parent for parent in born.parents if parent in known])

    def _bear(self, born: AnnouncedPartition, waits: Sequence[str]) -> None:
        assert len(born.token.encode()) <= 1_000
        assert len(born.start.encode()) <= 1_000
        if born.token in self.parents:
            assert set(self.parents[born.token]) == set(born.parents), f"{born.token} is told with other parents"
            return
        self.parents[born.token] = born.parents
        if all(parent in self.ended for parent in waits):
            self._begin(born)
        else:
            self._waiting[born.token] = born

    def _begin(self, born: AnnouncedPartition) -> None:
        self.order.append(born.token)
        self.positions[born.token], self.read[born.token] = born.start, []

    @property
    def open(self) -> list[str]:
        """Partitions that are being read."""
        return [token for token in self.positions if token not in self.ended and token not in self.barred]

    @property
    def everything(self) -> list[str]:
        return [name for names in self.read.values() for name in names]

    async def step(self, stream: ChangeStream, token: str, keep: bool = True) -> Batch:
        """Read one partition's next batch. `keep`: report it as safe."""
        batch = await stream.read(token, self.positions[token], limit=self.limit)
        check_batch(batch, self.limit)
        self.read[token] += self.names(batch.records)
        self.arrived += self.names(batch.records)
        if batch.upto is not None:
            self.positions[token] = batch.upto
            if keep:
                await stream.kept(token, batch.upto)
        if batch.end is not None:
            self._end(token, batch.end)
        if batch.barrier is not None:
            self._bar(token, batch.barrier)
        return batch

    def _bar(self, token: str, barrier: Barrier) -> None:
        """Let partitions go on of whose barriers all handoffs are given."""
        assert self._marks.get(token, 0) < barrier.mark, f"{token} has a barrier at {barrier.mark} after one at {self._marks[token]}"
        assert not self._given.intersection(barrier.gives), f"{token} hands over a second time: {barrier.gives}"
        self._marks[token], self.barred[token] = barrier.mark, barrier
        self._given.update(barrier.gives)
        for each, held in list(self.barred.items()):
            if self._given.issuperset(held.takes):
                self.positions[each] = held.after
                del self.barred[each]

    def _end(self, token: str, end: End) -> None:
        self.ended[token] = end
        self.order.append(f"-{token}")
        for born in end.children:
            assert token in born.parents, f"{born.token} is named by {token}, which is not among its parents"
            self._bear(born, born.parents)
        for born in list(self._waiting.values()):
            if token in born.parents and all(parent in self.ended for parent in born.parents):
                self._begin(self._waiting.pop(born.token))

    async def follow(self, stream: ChangeStream, done: Callable[[], bool], keep: bool = True) -> None:
        """Read all partitions concurrently until `done`."""
        reading: dict[str, asyncio.Task[None]] = {}

        async def read(token: str) -> None:
            while not done() and token not in self.ended:
                if token in self.barred:
                    await asyncio.sleep(PAUSE)
                    continue
                batch = await self.step(stream, token, keep)
                if not batch.records.num_rows and batch.end is None:
                    await asyncio.sleep(PAUSE)

        try:
            while not done():
                for token in self.open:
                    if token not in reading:
                        reading[token] = asyncio.create_task(read(token))
                going = [task for task in reading.values() if not task.done()]
                for task in reading.values():
                    if task.done():
                        task.result()
                if not going:
                    assert done(), f"nothing is left to be read; waiting: {sorted(self._waiting)}"
                    break
                await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED, timeout=1)
        finally:
            for task in reading.values():
                if done():
                    # It stops by itself; a cancellation would lose its last batch.
                    await task
                task.cancel()

    async def until(self, stream: ChangeStream, written: Sequence[str]) -> None:
        """Read until all of these have arrived, and check that no others did."""
        await self.follow(stream, lambda: len(self.everything) >= len(written))
        assert sorted(self.everything) == sorted(written)

    def check_order(self) -> None:
        """Check that no partition began before all of its parents, as far as they were read, had ended."""
        at = {event: number for number, event in enumerate(self.order)}
        for token, parents in self.parents.items():
            for parent in parents:
                if token in at and parent in at:
                    assert at[f"-{parent}"] < at[token], f"{token} was begun before {parent} had ended"


def check_batch(batch: Batch, limit: int | None = None) -> None:
    """Check a batch against the port's rules."""
    assert batch.records.schema.equals(CHANGES)
    assert limit is None or batch.records.num_rows <= limit
    assert batch.upto is not None or not batch.records.num_rows, "records, and no position to go on from"
    assert batch.upto is None or len(batch.upto.encode()) <= 1_000
    assert batch.barrier is None or batch.end is None, "an end before a barrier"


def family(partitions: Sequence[AnnouncedPartition]) -> set[tuple[str, tuple[str, ...]]]:
    """The parts of partitions that must be the same in each announcement. The notation of their start may differ."""
    return {(born.token, tuple(sorted(born.parents))) for born in partitions}


async def settled(read: Callable[[], Awaitable[Batch]], wanted: Callable[[Batch], bool]) -> Batch:
    """Read until a batch is the wanted one; batches before it must be empty."""
    while True:
        batch = await read()
        check_batch(batch)
        if wanted(batch):
            return batch
        assert not batch.records.num_rows
        await asyncio.sleep(PAUSE)


async def next_batch(stream: ChangeStream, token: str, position: str, limit: int = 10_000) -> Batch:
    """Read until a batch has records, the end, or a barrier."""
    here = position

    async def read() -> Batch:
        nonlocal here
        batch = await stream.read(token, here, limit=limit)
        here = batch.upto or here
        return batch

    return await settled(read, lambda batch: bool(batch.records.num_rows) or batch.end is not None or batch.barrier is not None)


class ChangeStreamSuite:
    """Conformance suite. Needs a fixture `world` that makes a World for one test.

    It is made outside of an event loop and used in one; each test closes what it has opened.
    """

    # Seeds

    @driven
    async def test_seeds_are_the_same_whoever_asks(self, world: World) -> None:
        one, two = await world.open(), await world.open()
        first, second = await asyncio.gather(one.seeds(""), two.seeds(""))
        assert first.partitions
        assert len({born.token for born in first.partitions}) == len(first.partitions)
        assert family(first.partitions) == family(second.partitions)
        assert first.upto == second.upto != ""
        assert len(first.upto.encode()) <= 1_000
        await two.close()
        assert family((await one.seeds("")).partitions) == family(first.partitions)
        await one.close()

    @driven
    async def test_there_are_no_seeds_beyond_the_last(self, world: World) -> None:
        stream = await world.open()
        upto = (await stream.seeds("")).upto
        await world.write(10)
        for _ in range(2):
            assert await stream.seeds(upto) == (upto, ())
        await stream.close()

    # Reading

    @driven
    async def test_each_record_is_read_once(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        written = await world.write(20)
        await follower.until(stream, written)
        written += await world.write(5)
        await follower.until(stream, written)
        assert not follower.ended
        await stream.close()

    @driven
    async def test_the_limit_is_kept(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=3)
        await follower.seek(stream)
        await follower.until(stream, await world.write(25))
        await stream.close()

    @driven
    async def test_at_its_end_a_stream_says_that_there_is_nothing_and_no_end(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        await follower.until(stream, await world.write(10))
        for token in follower.open:
            for _ in range(3):
                batch = await follower.step(stream, token)
                assert not batch.records.num_rows
                assert batch.end is None
        await stream.close()

    @driven
    async def test_how_far_a_batch_is_behind_is_never_too_little(self, world: World) -> None:
        """A reader that reads up to now relies on it: no durable record may be left behind a batch that claims to be up to date."""
        stream, follower = await world.open(), Follower(world.names, limit=3)
        await follower.seek(stream)
        written = await world.write(40)
        durable_at = monotonic()
        done: set[str] = set()
        told: dict[str, int] = {}
        while len(done) < len(follower.positions):
            for token in set(follower.open) - done:
                began = monotonic()
                batch = await follower.step(stream, token)
                left = (began - durable_at) * 1_000
                if batch.behind is not None and batch.behind < left:
                    # All of its records had been read by then.
                    told.setdefault(token, len(follower.read[token]))
                if batch.behind == 0 and not batch.records.num_rows:
                    done.add(token)
        assert sorted(follower.everything) == sorted(written)
        assert told == {token: len(names) for token, names in follower.read.items()}
        await stream.close()

    @driven
    async def test_another_one_goes_on_where_one_stopped(self, world: World) -> None:
        follower = Follower(world.names, limit=4)
        written = await world.write(40)
        for wanted in (10, 20, 40):
            stream = await world.open()
            await follower.seek(stream)
            await follower.follow(stream, lambda wanted=wanted: len(follower.everything) >= wanted)  # type: ignore[misc]
            await stream.close()
        assert sorted(follower.everything) == sorted(written)

    @driven
    async def test_partitions_are_read_at_once_and_with_others(self, world: World) -> None:
        """An opening's reads of one partition do not affect those of other partitions by others."""
        one, two = await world.open(), await world.open()
        first, second = Follower(world.names), Follower(world.names)
        await first.seek(one)
        await second.seek(two)
        for number, token in enumerate(sorted(first.open)):
            del (first if number % 2 else second).positions[token]
        written = await world.write(30)
        done = lambda: len(first.everything) + len(second.everything) >= len(written)  # noqa: E731
        await asyncio.gather(*(each.follow(stream, done) for each, stream in ((first, one), (second, two)) if each.open))
        assert sorted(first.everything + second.everything) == sorted(written)
        await one.close()
        await two.close()

    # Again

    @driven
    async def test_a_batch_is_read_again_exactly(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=7)
        await follower.seek(stream)
        written = await world.write(30)
        batches: list[tuple[str, str, Batch]] = []
        while len(follower.everything) < len(written):
            for token in follower.open:
                position = follower.positions[token]
                batch = await follower.step(stream, token, keep=False)
                if batch.upto is not None:
                    batches.append((token, position, batch))
        more = await world.write(10)
        assert len(batches) >= 2
        # In the same opening, in a fresh one, and after the first was closed. With a planned end, the limit does not matter.
        other = await world.open()
        for opened in (stream, other):
            for token, position, batch in batches:
                for limit in (10_000, 1):
                    again = await opened.read(token, position, batch.upto, limit)
                    check_batch(again)
                    assert again.records.equals(batch.records)
                    assert again.upto == batch.upto
            await opened.close()
        # Reading continues after that.
        last = await world.open()
        for token, position, batch in batches:
            assert (await last.read(token, position, batch.upto)).records.equals(batch.records)
        await follower.until(last, written + more)
        await last.close()

    @driven
    async def test_what_was_not_kept_is_read_again_from_the_same_position(self, world: World) -> None:
        written = await world.write(10)
        for _ in range(2):
            # Nothing was reported as safe, so the next opening reads all of it.
            stream, follower = await world.open(), Follower(world.names)
            await follower.seek(stream)
            await follower.follow(stream, lambda: len(follower.everything) >= len(written), keep=False)  # noqa: B023
            assert sorted(follower.everything) == sorted(written)
            await stream.close()

    @driven
    async def test_kept_is_a_hint_that_may_come_late_twice_or_never(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=5)
        await follower.seek(stream)
        written = await world.write(30)
        history: dict[str, list[tuple[str, str, Batch]]] = {token: [] for token in follower.open}
        while len(follower.everything) < len(written):
            for token in follower.open:
                position = follower.positions[token]
                batch = await follower.step(stream, token, keep=False)
                if batch.records.num_rows:
                    assert batch.upto is not None
                    history[token].append((position, batch.upto, batch))
        for token, batches in history.items():
            for number, (position, upto, batch) in enumerate(batches):
                await stream.kept(token, position)
                await stream.kept(token, position)
                if number:
                    # A late, outdated report.
                    await stream.kept(token, batches[number - 1][0])
                assert (await stream.read(token, position, upto)).records.equals(batch.records)
        await follower.until(stream, written + await world.write(5))
        await stream.close()

    @driven
    async def test_a_reading_that_was_given_up_does_no_harm(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=4)
        await follower.seek(stream)
        written = await world.write(30)
        for turn in range(20):
            for token in follower.open:
                task = asyncio.create_task(stream.read(token, follower.positions[token], limit=4))
                # Cancelled at a different moment each time: before it begins, halfway, and once it has its answer.
                await asyncio.wait([task], timeout=0.001 * turn)
                task.cancel()
                await asyncio.wait([task])
        await follower.until(stream, written)
        await stream.close()

    # What goes wrong

    @driven
    async def test_an_unknown_position_is_never_the_beginning(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        await follower.until(stream, await world.write(20))
        token = next(token for token, names in follower.read.items() if names)
        nowhere = await world.nowhere(follower.positions[token])
        other = await world.open()
        for opened in (stream, other):
            for _ in range(2):
                with pytest.raises(UnknownPositionError):
                    await opened.read(token, nowhere)
            with pytest.raises(UnknownPositionError):
                await opened.read(token, nowhere, follower.positions[token])
        # Known positions can still be read from.
        assert (await other.read(token, follower.positions[token])).end is None
        await stream.close()
        await other.close()

    @driven
    async def test_what_breaks_off_is_no_end(self, world: World) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=5)
        await follower.seek(stream)
        written = await world.write(20)
        await follower.follow(stream, lambda: len(follower.everything) >= 5)
        await world.interrupt()
        for token in follower.open:
            with pytest.raises(BrokenOffError):
                await self._read_on(stream, follower, token)
        with pytest.raises(BrokenOffError):
            await stream.seeds("")
        await world.restore()
        assert not follower.ended
        await self._until_it_goes_on(stream, follower, written)
        await stream.close()

    async def _read_on(self, stream: ChangeStream, follower: Follower, token: str) -> None:
        """Read until the stream breaks off; batches that it has buffered may come first."""
        for _ in range(20):
            await follower.step(stream, token, keep=False)

    async def _until_it_goes_on(self, stream: ChangeStream, follower: Follower, written: Sequence[str]) -> None:
        while True:
            try:
                await follower.until(stream, written)
                return
            except BrokenOffError:
                await asyncio.sleep(PAUSE)


class BranchingStreamSuite(ChangeStreamSuite):
    """Suite for a stream whose partitions have children: `world` is a BranchingWorld."""

    @driven
    async def test_children_come_after_their_parents_and_nothing_is_lost(self, world: BranchingWorld) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        seeds = set(follower.open)
        written = await world.write(30)
        await world.branch()
        written += await world.write(30)
        await follower.follow(stream, lambda: len(follower.everything) >= len(written) and bool(follower.ended.keys() & seeds))
        assert sorted(follower.everything) == sorted(written)
        follower.check_order()
        # Children are not seeds after those already known.
        known = set(follower.parents)
        await follower.seek(stream)
        assert set(follower.parents) == known
        await stream.close()

    @driven
    async def test_an_end_is_told_again_with_the_same_children(self, world: BranchingWorld) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        before = dict(follower.positions)
        written = await world.write(20)
        await follower.until(stream, written)
        await world.branch()
        # A reader that committed the end, but did not learn of the children, is told again.
        await follower.follow(stream, lambda: bool(follower.ended.keys() & before.keys()))
        ended = dict(follower.ended)
        other = await world.open()
        for token, end in ended.items():
            for opened in (stream, other):
                batch = await next_batch(opened, token, follower.positions[token])
                assert batch.end is not None
                assert family(batch.end.children) == family(end.children)
        await stream.close()
        await other.close()

    @driven
    async def test_parents_name_a_child_alike(self, world: BranchingWorld) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        await world.branch()
        seeds = set(follower.open)
        await follower.follow(stream, lambda: bool(follower.ended.keys() & seeds) and not follower._waiting)
        told: dict[str, tuple[str, ...]] = {}
        for token, end in follower.ended.items():
            assert end.children, f"{token} ended without children"
            for born in end.children:
                assert told.setdefault(born.token, born.parents) == born.parents
        await stream.close()


class HandoffStreamSuite(BranchingStreamSuite):
    """Suite for a stream whose key ranges pass between partitions that go on: `world` is a HandoffWorld."""

    @driven
    async def test_keys_that_pass_to_another_partition_keep_their_order(self, world: HandoffWorld) -> None:
        stream, follower = await world.open(), Follower(world.names, limit=3)
        await follower.seek(stream)
        written: list[str] = []
        for _ in range(3):
            before, after = await world.hand_over()
            written += before + after
            await follower.until(stream, written)
            arrived = {name: at for at, name in enumerate(follower.arrived)}
            assert max(arrived[name] for name in before) < min(arrived[name] for name in after)
        await follower.follow(stream, lambda: not follower.barred)
        await stream.close()

    @driven
    async def test_a_barrier_is_found_again_until_it_is_crossed(self, world: HandoffWorld) -> None:
        stream, follower = await world.open(), Follower(world.names)
        await follower.seek(stream)
        await world.hand_over()
        found = 0
        for token, start in list(follower.positions.items()):
            barrier, upto = await self._next_barrier(stream, token, start)
            if barrier is None:
                continue
            found += 1
            other = await world.open()
            for opened in (stream, other):
                assert (await opened.read(token, upto)).barrier == barrier
                beyond = await opened.read(token, barrier.after)
                assert beyond.barrier is None or beyond.barrier.mark > barrier.mark
            await other.close()
        assert found >= 2, "both ends have one"
        await stream.close()

    async def _next_barrier(self, stream: ChangeStream, token: str, position: str) -> tuple[Barrier | None, str]:
        """The partition's next barrier, and the position before it; None: there is none for a while."""
        for _ in range(20):
            batch = await stream.read(token, position)
            check_batch(batch)
            position = batch.upto or position
            if batch.barrier is not None:
                return batch.barrier, position
        return None, position
