"""The log and the positions in a meta store, by many simulated processes whose calls are lost, late, or done without an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random

import msgspec
import pytest

from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network_link import Link, Roads
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.model.meta import View
from sluiceway.ports.position_store import FencedError, PositionRecord, PositionUnknownError
from sluiceway.ports.sync_log import LogPage, LogUnavailableError
from sluiceway.testing.sync_log_suite import Entries, check_order


class World:
    """Processes that share a meta store, each over a way of its own; all ways are equally bad."""

    def __init__(self, seed: int, roads: Roads | None = None) -> None:
        self.random = Random(seed)
        self.loop = Loop(self.random)
        self.roads = roads or self._roads()
        self.shared = SharedMeta()
        self.processes = 0

    def _roads(self) -> Roads:
        pick = self.random.choice
        return Roads(
            slow=pick([1, 5, 50]),
            refused=pick([0, 0.05]),
            lost=pick([0, 0.1]),
            late=pick([0, 0.1]),
            unheard=pick([0, 0.1, 0.3]),
            latest=pick([500, 3_000, 8_000]),
        )

    def process(self) -> tuple[Process, SimMetaStore]:
        self.processes += 1
        process = self.loop.add(Process(f"p{self.processes}", self.random.uniform(0.9, 1.1), self.random.randrange(10_000_000)))
        return process, SimMetaStore(self.shared, Link(self.loop, process, self.roads))

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        with simulated(self.loop):
            try:
                self.loop.run_until_complete(story())
            finally:
                self.loop.close()


def stable_log(world: World) -> MetaSyncLog:
    return MetaSyncLog(SimMetaStore(world.shared, Link(world.loop, world.loop.outside, Roads())), "orders")


async def all_of(log: MetaSyncLog) -> Entries:
    found: Entries = []
    page = LogPage(1, (), 1)
    while not found or found[-1][0] < page.end:
        page = await log.read(found[-1][0] if found else 0, 50)
        found += page.entries
        if not page.entries:
            break
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_was_appended_is_there_once_and_what_is_unknown_at_most_once(seed: int) -> None:
    world = World(seed)
    known: list[bytes] = []
    unknown: set[bytes] = set()
    seen: list[Entries] = []

    async def write(log: MetaSyncLog, name: str) -> None:
        for number in range(12):
            records = [b"%s.%d.%d" % (name.encode(), number, each) for each in range(world.random.randrange(1, 4))]
            try:
                await log.append(records)
                known.extend(records)
            except LogUnavailableError:
                unknown.update(records)
            await asyncio.sleep(world.random.random() * 0.2)

    async def read(log: MetaSyncLog) -> None:
        mine: Entries = []
        seen.append(mine)
        while True:
            after = mine[-1][0] if mine else 0
            await log.wait(after, 1_000)
            before = len(known)
            with contextlib.suppress(LogUnavailableError):
                page = await log.read(after, world.random.choice([1, 3, 1_000]))
                assert page.entries or page.end <= after
                assert [number for number, _ in page.entries] == list(range(after + 1, after + 1 + len(page.entries)))
                mine.extend(page.entries)
                if mine and mine[-1][0] == page.end:
                    # What had been appended before it asked.
                    assert {record for _, record in mine} >= set(known[:before])

    async def story() -> None:
        writers = world.random.randrange(2, 6)
        writing = []
        for number in range(writers):
            process, store = world.process()
            log = MetaSyncLog(store, "orders")
            writing.append(world.loop.begin(process, write(log, f"w{number}")))
            world.loop.begin(process, read(log))
        await asyncio.gather(*writing)
        world.roads.calm()
        # What was late has come by then.
        await asyncio.sleep(15)
        entries = await all_of(stable_log(world))
        check_order(entries)
        there = [record for _, record in entries]
        assert len(there) == len(set(there)), "a record is there twice"
        assert set(known) <= set(there) <= set(known) | unknown
        for name in range(writers):
            mine = [record for record in there if record.startswith(b"w%d." % name) and record not in unknown]
            assert mine == [record for record in known if record.startswith(b"w%d." % name)]
        for each in seen:
            assert each == entries

    world.run(story)


def test_200_that_append_at_once_all_come_through_without_a_storm() -> None:
    world = World(1, Roads(slow=5))
    commits: list[float] = []
    commit = world.shared.commit

    async def counted(*what: object) -> int:
        commits.append(world.loop.seconds)
        return await commit(*what)  # type: ignore[arg-type]

    world.shared.commit = counted  # type: ignore[method-assign, assignment]

    async def story() -> None:
        tasks = []
        for number in range(200):
            process, store = world.process()
            tasks.append(world.loop.begin(process, MetaSyncLog(store, "orders").append([b"%d" % number])))
        await asyncio.gather(*tasks)
        assert sorted(int(record) for _, record in await all_of(stable_log(world))) == list(range(200))
        # A call takes 10 ms there and back, so one after the other they would take 4 s with their reads.
        assert world.loop.seconds < 12
        assert len(commits) < 200 * 10

    world.run(story)


@pytest.mark.parametrize("seed", range(5))
def test_one_that_appends_all_the_time_does_not_keep_others_from_it(seed: int) -> None:
    world = World(seed, Roads(slow=5))

    async def story() -> None:
        going = True

        async def flood(log: MetaSyncLog) -> None:
            number = 0
            while going:
                number += 1
                await log.append([b"flood %d" % number])

        process, store = world.process()
        flooding = world.loop.begin(process, flood(MetaSyncLog(store, "orders")))
        await asyncio.sleep(1)
        appending = []
        for number in range(6):
            process, store = world.process()
            appending.append(
                world.loop.begin(process, MetaSyncLog(store, "orders").append([b"drop %d %d" % (number, each) for each in range(3)]))
            )
        begun = world.loop.seconds
        await asyncio.gather(*appending)
        # A call takes 10 ms there and back.
        assert world.loop.seconds - begun < 0.5
        going = False
        await flooding
        entries = await all_of(stable_log(world))
        check_order(entries)
        floods = [int(record.split()[1]) for _, record in entries if record.startswith(b"flood")]
        assert floods == list(range(1, len(floods) + 1))
        for number in range(6):
            drops = [record for _, record in entries if record.startswith(b"drop %d " % number)]
            assert drops == [b"drop %d %d" % (number, each) for each in range(3)]

    world.run(story)


def test_what_somebody_left_in_the_inbox_who_died_comes_with_the_next_append_in_its_order() -> None:
    world = World(2, Roads(slow=5))

    async def story() -> None:
        log = stable_log(world)
        await log.append([b"first"])
        process, store = world.process()
        dying = MetaSyncLog(store, "orders")
        # More than one commit can carry.
        task = world.loop.begin(process, dying._post([b"%d" % number for number in range(700)]))
        await task
        world.loop.kill(process)
        await log.append([b"second"])
        await log.append([b"third"])
        there = [record for _, record in await all_of(log)]
        assert there == [b"first", *(b"%d" % number for number in range(700)), b"second", b"third"]
        assert not (await world.shared.store.read(prefixes=["tasks/orders/log-inbox/"])).entries

    world.run(story)


class Record(msgspec.Struct):
    """What lies in the store of a partition."""

    token: str
    grant: int
    number: int
    written_at: int
    kept: PositionRecord = PositionRecord()


@pytest.mark.parametrize("seed", range(40))
def test_nothing_lands_under_an_opening_that_was_ended(seed: int) -> None:
    world = World(seed)
    tokens = [f"shard-{number}" for number in range(world.random.randrange(1, 4))]
    granted = dict.fromkeys(tokens, 1)
    opened: dict[str, int] = {}
    """The newest opening that somebody was told of."""
    committed = dict.fromkeys(tokens, 0)
    """What somebody was told is committed."""
    landed: dict[str, Record] = {}

    def follow(before: View, after: View) -> None:
        for key, entry in after.entries.items():
            if before.entries.get(key) == entry:
                continue
            record = msgspec.json.decode(entry.value, type=Record)
            last = landed.get(record.token)
            landed[record.token] = record
            if last is None:
                continue
            fence, old = (record.grant, record.number), (last.grant, last.number)
            try:
                assert fence >= old, "an opening that was ended has written"
                assert record.number >= opened.get(record.token, 0), "somebody was told of a later opening"
                assert position(record.kept) - position(last.kept) in (0, 1), "a position goes back, or leaves something out"
                assert fence == old or record.kept == last.kept, "an opening changes what is kept"
            except AssertionError as error:
                world.loop.fail(error)

    world.shared.followers.append(follow)

    async def read_partition(store: MetaPositions, token: str) -> None:
        granted[token] += world.random.randrange(2)
        opening, kept = await store.open(token, granted[token] - world.random.randrange(2))
        opened[token] = max(opened.get(token, 0), opening.number)
        assert position(kept) >= committed[token], "what was committed is lost"
        at = position(kept)
        for _ in range(world.random.randrange(8)):
            await store.commit(opening, PositionRecord(position=str(at + 1)))
            at += 1
            committed[token] = max(committed[token], at)
            await asyncio.sleep(world.random.random() * 0.1)

    async def live(store: MetaPositions) -> None:
        for _ in range(15):
            with contextlib.suppress(FencedError, PositionUnknownError):
                await read_partition(store, world.random.choice(tokens))

    async def story() -> None:
        lives = []
        for _ in range(world.random.randrange(2, 5)):
            process, store = world.process()
            lives.append(world.loop.begin(process, live(MetaPositions(store, "orders"))))
        await asyncio.gather(*lives)
        kept = {token: position(record.kept) for token, record in landed.items()}
        assert all(kept.get(token, 0) >= at for token, at in committed.items())
        assert sum(committed.values()) > 0

    world.run(story)


def position(kept: PositionRecord) -> int:
    return int(kept.position or 0)
