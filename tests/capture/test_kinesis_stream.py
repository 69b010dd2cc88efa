"""KinesisStream on a Kinesis that works: the suite of its port, trees of shards, seeds, options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.capture.streams.kinesis import Pace, from_options
from sluiceway.capture.streams.kinesis_positions import SLACK, Position, parse_position
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import BrokenOffError, UnknownPositionError
from sluiceway.testing.change_stream_suite import BranchingStreamSuite, Follower, family, next_batch
from sluiceway.testing.drive import driven
from tests.capture.kinesis_rig import KinesisProxy, KinesisWorld, Message
from tests.servers.moto_server import ENVIRONMENT, REGION, MotoServer, merge, open_shards, reshard, shards_of, split

FIRST, SECOND, THIRD = "shardId-000000000000", "shardId-000000000001", "shardId-000000000002"


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(server: MotoServer) -> Iterator[KinesisProxy]:
    with KinesisProxy(server.port) as proxy:
        yield proxy


class TestKinesisStream(BranchingStreamSuite):
    @pytest.fixture
    def world(self, server: MotoServer, proxy: KinesisProxy) -> KinesisWorld:
        return KinesisWorld(server, proxy)


# ---- trees --------------------------------------------------------------------------------------------------------------


@driven
async def test_a_tree_of_shards_is_read_once_and_in_its_order(server: MotoServer, proxy: KinesisProxy) -> None:
    """4 → 16 → 5 while records are written, and ListShards in pages."""
    world = KinesisWorld(server, proxy, shards=4, pace=Pace(calls=5, idle=50, wait=100))

    def in_pages(call: str, asked: Message) -> None:
        if call == "ListShards":
            # The service takes no name beside a token; moto's token is for the same call only.
            assert ("NextToken" in asked) != ("StreamName" in asked)
            asked |= {"MaxResults": 7, "StreamName": world.stream}

    proxy.before = in_pages
    written = world.put(50)
    over = False

    def write() -> None:
        nonlocal written, over
        for count in (16, 5):
            for _ in reshard(world.client, world.stream, count):
                written += world.put(15)
        written += world.put(50)
        over = True

    stream, follower = await world.open(), Follower(world.names, limit=20)
    await follower.seek(stream)
    writing = asyncio.create_task(asyncio.to_thread(write))
    await follower.follow(stream, lambda: over and len(follower.everything) >= len(written) and len(follower.open) == 5)
    await writing
    assert sorted(follower.everything) == sorted(written)
    follower.check_order()
    shards = shards_of(world.client, world.stream)
    assert len(follower.parents) == len(shards) == 4 + 2 * 12 + 11
    assert set(follower.open) == {shard["ShardId"] for shard in open_shards(world.client, world.stream)}
    assert any(len(parents) == 2 for parents in follower.parents.values())
    await stream.close()


@driven
async def test_moto_as_it_is_ends_its_shards_too() -> None:
    """It always gives a way on; that a closed shard is read to its last number says that it has ended."""
    with MotoServer(mended=False) as server, KinesisProxy(server.port) as proxy:
        world = KinesisWorld(server, proxy, shards=1)
        stream = await world.open()
        (seed,) = (await stream.seeds("")).partitions
        batch = await stream.read(seed.token, seed.start)
        assert batch.end is None
        split(world.client, world.stream, open_shards(world.client, world.stream)[0])
        # It does not look more often than each few seconds.
        stream._listing = None
        batch = await next_batch(stream, seed.token, batch.upto or seed.start)
        assert batch.end is not None
        assert family(batch.end.children) == {(SECOND, (FIRST,)), (THIRD, (FIRST,))}
        await stream.close()


# ---- seeds ----------------------------------------------------------------------------------------------------------------


@driven
async def test_from_the_beginning_seeds_are_the_oldest_and_their_children_come_by_them(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy)
    await world.branch()
    stream = await world.open()
    seeds = await stream.seeds("")
    assert family(seeds.partitions) == {(FIRST, ()), (SECOND, ())}
    assert seeds.upto == "shardId-000000000004"
    assert {born.start for born in seeds.partitions} == {"TRIM_HORIZON"}
    # What branches afterwards is nobody's seed either.
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    later = await stream.seeds(seeds.upto)
    assert later.upto == "shardId-000000000006"
    assert not later.partitions
    assert await stream.seeds(later.upto) == (later.upto, ())
    await stream.close()


@driven
async def test_the_latest_begins_with_what_arrives_once_it_was_asked(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy)
    world.put(20)
    await world.branch()
    world.put(20)
    # The point in time is told in whole seconds.
    await asyncio.sleep(1.1)
    stream, follower = await world.open(latest=True), Follower(world.names)
    await follower.seek(stream)
    # Those that take records; of the others nothing is wanted.
    assert set(follower.open) == {shard["ShardId"] for shard in open_shards(world.client, world.stream)}
    await stream.close()
    written = world.put(20)
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    written += world.put(20)
    other = await world.open(latest=True)
    await follower.until(other, written)
    follower.check_order()
    await other.close()


def forget(proxy: KinesisProxy, *shards: str) -> None:
    """All records of these are dropped, and they are not listed any more."""

    def after(call: str, asked: Message, answer: Message) -> Message:
        if call == "ListShards":
            answer["Shards"] = [shard for shard in answer["Shards"] if shard["ShardId"] not in shards]
        return answer

    proxy.after = after


@driven
async def test_children_of_shards_that_are_gone_are_seeds(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy, shards=1)
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    stream = await world.open()
    before = await stream.seeds("")
    forget(proxy, FIRST)
    # With the parent that they always had, so that whoever still has that one waits for it.
    assert family((await stream.seeds("")).partitions) == {(SECOND, (FIRST,)), (THIRD, (FIRST,))}
    # But what was known at a point is not told beyond it.
    assert await stream.seeds(before.upto) == (before.upto, ())
    with pytest.raises(UnknownPositionError, match="no longer has shard"):
        await reading_a_shard_that_is_gone(world)
    await stream.close()


async def reading_a_shard_that_is_gone(world: KinesisWorld) -> None:
    def before(call: str, asked: Message) -> None:
        if asked.get("ShardId") == FIRST:
            asked["ShardId"] = "shardId-000000000099"

    world.proxy.before = before
    stream = await world.open()
    try:
        await stream.read(FIRST, "TRIM_HORIZON")
    finally:
        await stream.close()


@driven
async def test_a_shard_of_whose_parents_one_is_gone_waits_for_the_other_only(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy)
    written = world.put(20)
    left, right = open_shards(world.client, world.stream)
    merge(world.client, world.stream, left, right)
    written += world.put(20)
    forget(proxy, SECOND)
    stream, follower = await world.open(), Follower(world.names)
    await follower.seek(stream)
    # Told alike with both, the one that is gone has its end at once.
    assert follower.parents == {FIRST: (), SECOND: ()}
    await follower.follow(stream, lambda: THIRD in follower.read and len(follower.read[THIRD]) == 20)
    assert follower.parents[THIRD] == (FIRST, SECOND)
    assert follower.read[SECOND] == []
    assert follower.everything == [name for name in follower.everything if name in written]
    follower.check_order()
    await stream.close()


@driven
async def test_a_stream_that_is_being_made_has_no_seeds_yet(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy)
    stream = await world.open()
    forget(proxy, SECOND)
    with pytest.raises(BrokenOffError, match="not all of its shards"):
        await stream.seeds("")
    proxy.after = lambda call, asked, answer: answer
    assert len((await stream.seeds("")).partitions) == 2
    # One of the same name that has fewer was made anew.
    with pytest.raises(SluicewayError, match="deleted and created again"):
        await stream.seeds(THIRD)
    await stream.close()


# ---- what is said besides records ------------------------------------------------------------------------------------------


@driven
async def test_records_and_times(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy, shards=1)
    stream = await world.open()
    (seed,) = (await stream.seeds("")).partitions
    batch = await stream.read(seed.token, seed.start)
    # An empty shard: it says up to when there was nothing.
    assert batch.upto is not None
    assert batch.behind == 0
    quiet = batch.at
    assert quiet is not None
    names = world.put(3)
    batch = await next_batch(stream, seed.token, batch.upto)
    (first, second, third) = batch.records.to_pylist()
    assert [each["key"] for each in (first, second, third)] == names
    assert {each["kind"] for each in (first, second, third)} == {None}
    assert batch.records.column("payload").to_pylist() == [name.encode() for name in names]
    arrived = round(first["at"].timestamp() * 1_000)
    assert seed.since <= arrived
    assert quiet <= arrived
    assert batch.at == round(third["at"].timestamp() * 1_000) - SLACK
    place = parse_position(batch.upto or "")
    assert (place.first, place.origin) == (first["position"], third["position"])
    await stream.close()


@driven
async def test_a_parent_s_end_is_no_later_than_what_its_children_have(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy, shards=1)
    stream, follower = await world.open(), Follower(world.names)
    await follower.seek(stream)
    await follower.until(stream, world.put(5))
    await follower.step(stream, FIRST)
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    world.put(20)
    await follower.follow(stream, lambda: len(follower.everything) == 25)
    end = follower.ended[FIRST]
    assert end.ended_at > 0
    for born in end.children:
        batch = await stream.read(born.token, born.start)
        at = batch.records.column("at").to_pylist()
        assert min(round(each.timestamp() * 1_000) for each in at) >= end.ended_at
        assert parse_position(born.start).since == end.ended_at
    await stream.close()


# ---- options and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "stream: expected the name of a Kinesis stream"),
        ({"stream": "a b"}, "stream: expected the name of a Kinesis stream"),
        ({"stream": "s", "from": "yesterday"}, "from: expected beginning or latest, not 'yesterday'"),
        ({"stream": "s", "endpont": "x"}, "endpont: unknown option; did you mean endpoint"),
        ({"stream": "s", "zzz": "x"}, "zzz: unknown option; expected one of stream, region, endpoint, from$"),
        ({"stream": "s", "endpoint": "localhost:1"}, "endpoint: expected a URL"),
        ({"stream": "s", "region": "no region!"}, "stream: cannot create a client"),
    ],
)
def test_options_that_are_wrong(options: dict[str, str], says: str) -> None:
    with pytest.raises(SluicewayError, match=says) as refused:
        from_options("capture", options)
    assert refused.value.code == "invalid_request"


def test_a_region_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(SluicewayError, match="name the region"):
        from_options("capture", {"stream": "s"})


@driven
async def test_options_without_regard_to_case(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy)
    stream = from_options("capture", {"STREAM": world.stream, "Region": REGION, "endpoint": server.endpoint, "FROM": "latest"})
    assert all(born.start.startswith("AT_TIMESTAMP@") for born in (await stream.seeds("")).partitions)
    await stream.close()
    with pytest.raises(BrokenOffError, match="closed"):
        await stream.seeds("")


times = st.none() | st.integers(0, 10**15)
origins = st.integers(1, 10**60).map(str) | st.just("TRIM_HORIZON")


@given(st.builds(Position, origins, times, times, st.just("") | st.integers(1, 10**60).map(str)))
def test_a_position_is_read_back_from_its_text(position: Position) -> None:
    assert parse_position(str(position)) == position
    assert len(str(position)) < 200


@pytest.mark.parametrize("text", ["", "x", "-1", "1@", "1@x", "LATEST", "AT_TIMESTAMP", "1 ", "1\n", "1~2@3", "١", "1" * 1_000])
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(UnknownPositionError):
        parse_position(text)
