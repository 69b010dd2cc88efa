"""A queue that is read as a change stream while it is rebalanced, on a real server: each item once, children after their parents."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluiceway.capture import CaptureConfig, look, run_member
from sluiceway.capture.lineage import QueueLineage
from sluiceway.ports.change_stream import Batch, BrokenOffError, SeedsUpto, UnknownPositionError
from sluiceway.testing.change_stream_suite import Follower
from sluiceway.testing.drive import driven
from tests.capture.lineage_rig import Place, aside, names, two_sided
from tests.server.server_running import Running, eventually


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with two_sided(tmp_path_factory.mktemp("server")) as found:
        yield found


class Several:
    """Several openings of one stream, of which each call goes to another one; now and then one of them is opened anew."""

    def __init__(self, place: Place, chance: random.Random, count: int = 2) -> None:
        self._place, self._chance = place, chance
        self._streams = [place.open() for _ in range(count)]
        self._calls = 0
        self._old: list[QueueLineage] = []
        self._owed: dict[str, str] = {}

    def _one(self) -> QueueLineage:
        self._calls += 1
        at = self._chance.randrange(len(self._streams))
        if self._calls % 40 == 0:
            # Others may be in the middle of a call of the old one.
            self._old.append(self._streams[at])
            self._streams[at] = self._place.open()
        return self._streams[at]

    async def seeds(self, after: str) -> SeedsUpto:
        return await self._one().seeds(after)

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        if partition in self._owed:
            # As whoever opens a partition says where it goes on.
            await self._one().kept(partition, self._owed.pop(partition))
        batch = await self._one().read(partition, position, upto, limit)
        if batch.upto is not None and self._chance.random() < 0.2:
            again = await self._one().read(partition, position, batch.upto, limit)
            assert again.records.equals(batch.records)
        return batch

    async def kept(self, partition: str, position: str) -> None:
        if self._chance.random() < 0.7:
            await self._one().kept(partition, position)
        else:
            self._owed[partition] = position

    def left(self, partition: str) -> None:
        for each in self._streams:
            each.left(partition)

    async def close(self) -> None:
        for each in (*self._streams, *self._old):
            await each.close()


class Reading:
    """Reads a queue by the port, looks for seeds now and then, and goes on until the queue has nothing more."""

    def __init__(self, place: Place, stream: Any, limit: int = 50) -> None:
        self.place, self.stream = place, stream
        self.follower = Follower(names, limit)
        self.enough = False

    async def run(self) -> None:
        await self.follower.seek(self.stream)
        following = asyncio.create_task(self.follower.follow(self.stream, lambda: self.enough))
        try:
            while not following.done():
                await self.follower.seek(self.stream)
                await asyncio.wait((following,), timeout=0.05)
        finally:
            following.cancel()
        await following

    async def until(self, condition: Callable[[], object], ended: int) -> None:
        """Read until that holds of the server, so many partitions have ended, and nothing is left of what was made."""
        running = asyncio.create_task(self.run())
        done = lambda: condition() and len(self.follower.ended) >= ended and not self.place.count("total")  # noqa: E731
        waiting = asyncio.create_task(aside(eventually, done))
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        self.enough = True
        if running.done():
            running.result()
        await waiting
        await running

    def check(self, made: list[str]) -> None:
        assert sorted(self.follower.everything) == sorted(made), set(made) ^ set(self.follower.everything)
        self.follower.check_order()


class Load:
    """Produces all the time, from a thread of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.made: list[str] = []
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stop.is_set():
            self.made += await aside(self.place.produce, 5)

    async def stop(self) -> list[str]:
        self._stop.set()
        await self._task
        return self.made


async def rebalanced(place: Place, load: Load, partitions: int, drain: str = "natural", *, other_side: bool = False) -> None:
    """To its end, while items come."""
    id = await aside(place.rebalance, partitions, drain, other_side=other_side)
    before = len(load.made)
    await aside(eventually, lambda: place.ended(id) and len(load.made) > before)
    assert place.rebalanced(id)["state"] == "done"


@pytest.mark.parametrize("seed", range(2))
@driven
async def test_each_item_is_read_once_whatever_is_rebalanced(served: Running, seed: int) -> None:
    """2 → 4 → 3 on the other side → 1, naturally and by copy, under load; two processes read, and are replaced, and forget hints."""
    place = Place(served, 2)
    chance = random.Random(seed)
    reading = Reading(place, Several(place, chance))
    load = Load(place)

    async def change() -> list[str]:
        await rebalanced(place, load, 4)
        await rebalanced(place, load, 3, "natural" if seed else "copy", other_side=True)
        await rebalanced(place, load, 5, "natural", other_side=True)
        await rebalanced(place, load, 1, "copy" if seed else "natural")
        return await load.stop()

    changing = asyncio.create_task(change())
    try:
        await reading.until(changing.done, 0)
    finally:
        changing.cancel()
    reading.check(await changing)
    assert len(reading.follower.ended) >= 7
    parents = {token: those for token, those in reading.follower.parents.items() if those}
    assert len(parents) >= 5
    assert len(place.info()["partitions"]) == 1
    await reading.stream.close()


@driven
async def test_a_queue_with_one_partition_is_read_in_order(served: Running) -> None:
    place = Place(served, 1)
    reading = Reading(place, Several(place, random.Random(7)), limit=7)
    load = Load(place)

    async def change() -> list[str]:
        for _ in range(3):
            await rebalanced(place, load, 1, other_side=True)
        return await load.stop()

    changing = asyncio.create_task(change())
    await reading.until(changing.done, 3)
    made = await changing
    reading.check(made)
    assert reading.follower.everything == made
    assert len(reading.follower.ended) == 3
    await reading.stream.close()


@driven
async def test_what_a_cancelled_rebalance_had_made_is_read_too(served: Running) -> None:
    """Its new partitions have taken items, and their parents go on: they come after nothing, or they would wait for ever."""
    place = Place(served, 2)
    stream = place.open()
    reading = Reading(place, stream)
    await reading.follower.seek(stream)
    made = await aside(place.produce, 10)
    id = await aside(place.rebalance, 2, other_side=True)
    made += await aside(place.produce, 10)
    # Nobody is told of the new ones: what they come after is not certain.
    await reading.follower.seek(stream)
    assert len(reading.follower.parents) == 2
    await aside(served.ask, "rebalances.cancel", id=id)
    made += await aside(place.produce, 10)
    await reading.until(lambda: place.ended(id), 2)
    assert place.rebalanced(id)["state"] == "cancelled"
    reading.check(made)
    assert len(reading.follower.parents) == 4
    assert not any(reading.follower.parents.values())
    assert len(reading.follower.ended) == 2
    await stream.close()


@driven
async def test_generations_that_came_and_went_while_nobody_looked_are_found(served: Running) -> None:
    """Several rebalances between two looks, with partitions that were made by them and are gone already."""
    place = Place(served, 2)
    stream = place.open()
    reading = Reading(place, stream)
    await reading.follower.seek(stream)
    first = reading.follower._point
    made = await aside(place.produce, 10)
    for partitions, other_side in ((4, False), (3, True), (3, True), (2, True)):
        id = await aside(place.rebalance, partitions, "copy", other_side=other_side)
        made += await aside(place.produce, 10)
        await aside(eventually, lambda id=id: place.ended(id))
    seeds = await stream.seeds(first)
    # Added ones, which are gone by now, and have children all the same.
    assert [each.token.partition(".")[2] for each in seeds.partitions] == ["2", "3"]
    assert await stream.seeds(first) == seeds
    await reading.until(lambda: True, 8)
    reading.check(made)
    given = {each["partition"] for each in place.info()["partitions"]}
    assert set(reading.follower.parents) == {f"{place.info()['incarnation']}.{number}" for number in range(max(given) + 1)}
    assert len(reading.follower.open) == 2
    await stream.close()


@driven
async def test_who_looks_first_in_the_middle_of_a_rebalance_knows_all_that_is_waited_for(served: Running) -> None:
    """Of a new partition's two parents one is gone, and one is held up by a lease."""
    place = Place(served, 2)
    made = await aside(place.produce, 4)
    held = await aside(served.lease, place.queue, 1, lease_timeout="10m")
    id = await aside(place.rebalance, 1, "copy", other_side=True)
    await aside(eventually, lambda: len(place.info()["partitions"]) == 2)
    stream = place.open()
    reading = Reading(place, stream)
    await reading.follower.seek(stream)
    # The new one is not told of but by its parents.
    assert len(reading.follower.parents) == 2
    assert not any(reading.follower.parents.values())
    running = asyncio.create_task(reading.until(lambda: place.ended(id), 2))
    await aside(eventually, lambda: len(reading.follower.ended) == 1)
    (child,) = [token for token, parents in reading.follower.parents.items() if parents]
    assert len(reading.follower.parents[child]) == 2
    assert child not in reading.follower.positions
    await aside(served.ask, "queue.complete", queue_name=place.queue, lease_ids=[held["leases"][0]["lease_id"]])
    await running
    made.remove(base64.b64decode(held["items"][0]["bytes"]).decode())
    reading.check(made)
    assert child in reading.follower.positions
    await stream.close()


@driven
async def test_children_are_told_before_the_end_once_they_are_certain(served: Running) -> None:
    place = Place(served, 2)
    await aside(place.produce, 4)
    stream = place.open()
    (one, two) = (await stream.seeds("")).partitions
    batches = {born.token: await stream.read(born.token, born.start) for born in (one, two)}
    id = await aside(place.rebalance, 1, other_side=True)
    ends = {token: batch.upto or "" for token, batch in batches.items()}
    # It may still be cancelled.
    assert not (await stream.read(one.token, ends[one.token])).children
    await stream.kept(two.token, ends[two.token])

    async def told() -> Batch:
        while not (batch := await stream.read(one.token, ends[one.token])).children:
            assert batch.end is None
        return batch

    early = await asyncio.wait_for(told(), 60)
    await stream.kept(one.token, ends[one.token])
    await aside(eventually, lambda: place.ended(id))
    for born in (one, two):
        end = (await stream.read(born.token, ends[born.token])).end
        assert end is not None
        assert end.children == early.children
    await stream.close()


@driven
async def test_a_descent_that_is_forgotten_is_no_end(served: Running) -> None:
    place = Place(served, 1)
    stream = place.open()
    (born,) = (await stream.seeds("")).partitions
    seeds = await stream.seeds("")
    await aside(place.produce, 2)
    id = await aside(place.rebalance, 2, "copy", other_side=True)
    await aside(eventually, lambda: place.ended(id))
    assert (await stream.read(born.token, born.start)).end is not None
    await aside(forget, served, place.queue)
    with pytest.raises(UnknownPositionError, match="record no longer exists"):
        await stream.read(born.token, born.start)
    with pytest.raises(BrokenOffError, match="the record of the rebalance"):
        await stream.seeds(seeds.upto)
    # Who looks for the first time begins with what is there.
    assert len((await stream.seeds("")).partitions) == 2
    await stream.close()


def forget(served: Running, queue: str) -> None:
    """As many later rebalances of other queues would have it."""
    meta = served.service._meta
    assert meta is not None
    ids = [each["id"] for each in served.ask("rebalances.list", queue_name=queue)["items"]]

    async def delete() -> None:
        await meta.commit(deletes=[f"rebalance/ended/{id}" for id in ids])

    loop = next(iter(served.service._tasks)).get_loop()
    asyncio.run_coroutine_threadsafe(delete(), loop).result(60)


@driven
async def test_a_capture_hands_on_each_item_of_a_queue_that_is_rebalanced(served: Running, tmp_path: Path) -> None:
    """The whole of it: two members, their meta store, and another queue to which the items go."""
    place, target = Place(served, 2), served.queue(requested_partitions=2)
    options = {"url": served.url, "queue": place.queue}
    meta = f"sqlite:{tmp_path / 'meta.sqlite'}"
    config = CaptureConfig(name="all", meta=meta, stream="queue", options=options, url=served.url, queue=target)
    stops = [asyncio.Event() for _ in range(2)]
    members = [asyncio.create_task(run_member(config, stop=stop, name_hint=f"m{number}")) for number, stop in enumerate(stops)]
    made = await aside(place.produce, 20)
    id = await aside(place.rebalance, 3, other_side=True)
    made += await aside(place.produce, 20)
    await aside(eventually, lambda: place.ended(id) and not place.count("total"))
    for stop in stops:
        stop.set()
    await asyncio.gather(*members)
    found = await aside(served.lease, target, max_partitions=2)
    assert sorted(base64.b64decode(each["bytes"]).decode() for each in found["items"]) == sorted(made)
    numbers = [each["partition"] for each in place.info()["partitions"]]
    state = (await look("all", meta)).state
    assert set(state.partitions) >= {f"{place.info()['incarnation']}.{number}" for number in numbers}
