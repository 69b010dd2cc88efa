"""KinesisStream when the service throttles, fails, drops records, or says less than it knows."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.capture.streams.kinesis import KinesisStream, Pace
from sluiceway.capture.streams.kinesis_positions import parse_position
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import Batch, BrokenOffError, UnknownPositionError
from sluiceway.testing.change_stream_suite import Follower, family, next_batch
from sluiceway.testing.drive import driven
from tests.capture.kinesis_rig import Cut, Dropped, KinesisProxy, KinesisWorld, Message, Refused
from tests.servers.moto_server import ENVIRONMENT, REGION, MotoServer, open_shards, split

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


@pytest.fixture
def world(server: MotoServer, proxy: KinesisProxy) -> KinesisWorld:
    return KinesisWorld(server, proxy, shards=1)


def some_of(calls: set[str], which: Callable[[int], bool], error: Exception) -> Callable[[str, Message], None]:
    """Those of these calls fail for whose number that holds."""
    count = itertools.count()

    def before(call: str, asked: Message) -> None:
        if call in calls and which(next(count)):
            raise error

    return before


# ---- limits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["ProvisionedThroughputExceededException", "LimitExceededException", "KMSThrottlingException"])
@driven
async def test_what_is_too_much_for_now_is_no_error(world: KinesisWorld, proxy: KinesisProxy, code: str) -> None:
    stream, follower = await world.open(), Follower(world.names, limit=5)
    await follower.seek(stream)
    proxy.before = some_of({"GetRecords", "GetShardIterator"}, lambda number: number % 3 != 2, Refused(code))
    await follower.until(stream, world.put(20))
    assert len(proxy.calls) > 12
    await stream.close()


@driven
async def test_whoever_is_always_throttled_is_told_that_there_is_nothing_now(world: KinesisWorld, proxy: KinesisProxy) -> None:
    stream = await world.open()
    proxy.before = some_of({"GetRecords"}, lambda number: True, Refused("ProvisionedThroughputExceededException"))
    for _ in range(3):
        batch = await stream.read(FIRST, "TRIM_HORIZON")
        assert (batch.upto, batch.end, batch.at, batch.behind) == (None, None, None, None)
    # Longer apart each time.
    assert proxy.calls.count("GetRecords") < 20
    await stream.close()


@driven
async def test_the_service_is_not_asked_too_often(server: MotoServer, proxy: KinesisProxy) -> None:
    world = KinesisWorld(server, proxy, shards=1, pace=Pace(calls=100, idle=300, wait=1_000))
    written = world.put(12)
    stream, follower = await world.open(), Follower(world.names, limit=3)
    await follower.seek(stream)
    began = system.steady()
    await follower.until(stream, written)
    # Four with records; the first had one place more than the others, which may make it five.
    assert proxy.calls.count("GetRecords") <= 5
    assert proxy.calls.count("GetShardIterator") == 1
    assert system.steady() - began >= 3 * 100
    began = system.steady()
    for _ in range(2):
        await follower.step(stream, FIRST)
    assert system.steady() - began >= 300
    # Another position of the same shard is no way around it.
    began = system.steady()
    for _ in range(3):
        await stream.read(FIRST, "TRIM_HORIZON", limit=1)
    assert system.steady() - began >= 2 * 100
    await stream.close()


# ---- what breaks off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Refused("InternalFailure", 500), Cut()], ids=repr)
@driven
async def test_errors_at_random_lose_nothing(server: MotoServer, proxy: KinesisProxy, error: Exception) -> None:
    world, chance = KinesisWorld(server, proxy), random.Random(7)
    written = world.put(20)
    await world.branch()
    written += world.put(20)

    def before(call: str, asked: Message) -> None:
        if chance.random() < 0.2:
            raise error

    def after(call: str, asked: Message, answer: Message) -> Message:
        # The same, but the service has done it.
        before(call, asked)
        return answer

    proxy.before, proxy.after = before, after
    stream, follower = await world.open(), Follower(world.names, limit=4)
    broken = 0
    while not follower.parents:
        try:
            await follower.seek(stream)
        except BrokenOffError:
            broken += 1
    while len(follower.everything) < len(written) or len(follower.ended) < 3:
        for token in follower.open:
            try:
                await follower.step(stream, token)
            except BrokenOffError:
                broken += 1
    assert broken > 5
    assert sorted(follower.everything) == sorted(written)
    follower.check_order()
    await stream.close()


@driven
async def test_half_an_answer_breaks_off(world: KinesisWorld, proxy: KinesisProxy) -> None:
    stream = await world.open()
    world.put(3)

    def after(call: str, asked: Message, answer: Message) -> Message:
        if call == "GetRecords":
            del answer["Records"]
        return answer

    proxy.after = after
    with pytest.raises(BrokenOffError):
        await stream.read(FIRST, "TRIM_HORIZON")
    proxy.after = lambda call, asked, answer: answer
    assert (await stream.read(FIRST, "TRIM_HORIZON")).records.num_rows == 3
    await stream.close()


@driven
async def test_a_stream_that_was_deleted_is_said_to_be_missing(world: KinesisWorld) -> None:
    stream = await world.open()
    batch = await stream.read(FIRST, "TRIM_HORIZON")
    world.client.delete_stream(StreamName=world.stream)
    for asked in (stream.read(FIRST, batch.upto or ""), stream.read(FIRST, batch.upto or ""), stream.seeds(""), stream.seeds(FIRST)):
        with pytest.raises(SluicewayError, match="check its name and its region") as caught:
            await asked
        assert (caught.value.code, caught.value.field) == ("invalid_request", "stream")
    await stream.close()


@driven
async def test_a_stream_that_was_made_anew_is_said_to_be_another(world: KinesisWorld) -> None:
    stream = await world.open()
    with pytest.raises(SluicewayError, match="deleted and created again"):
        await stream.seeds(THIRD)
    await stream.close()


@driven
async def test_who_has_no_credentials_is_told(world: KinesisWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    stream = KinesisStream(world.stream, region=REGION, endpoint=world.proxy.endpoint)
    for asked in (stream.seeds(""), stream.read(FIRST, "TRIM_HORIZON")):
        with pytest.raises(SluicewayError, match="boto3 finds") as caught:
            await asked
        assert caught.value.code == "unauthenticated"
    await stream.close()


@driven
async def test_what_is_kept_of_a_shard_goes_when_it_is_left(world: KinesisWorld, proxy: KinesisProxy) -> None:
    stream, follower = await world.open(), Follower(world.names)
    await follower.seek(stream)
    await follower.until(stream, world.put(3))
    asked = proxy.calls.count("GetShardIterator")
    await follower.step(stream, FIRST)
    assert proxy.calls.count("GetShardIterator") == asked
    stream.left(FIRST)
    stream.left(FIRST)
    assert not stream._readers
    await follower.until(stream, [*follower.everything, *world.put(3)])
    assert proxy.calls.count("GetShardIterator") > asked
    await stream.close()


@driven
async def test_keys_that_are_not_let_in(world: KinesisWorld, proxy: KinesisProxy) -> None:
    stream = await world.open()
    proxy.before = some_of({"GetRecords", "ListShards"}, lambda number: True, Refused("AccessDeniedException"))
    for asked in (stream.seeds(""), stream.read(FIRST, "TRIM_HORIZON")):
        with pytest.raises(SluicewayError, match=r"AccessDenied.*need the permissions kinesis:ListShards") as caught:
            await asked
        assert caught.value.code == "forbidden"
    await stream.close()


@pytest.mark.parametrize("code", ["ExpiredIteratorException", "InvalidArgumentException"])
@driven
async def test_an_iterator_that_has_run_out_is_had_anew(world: KinesisWorld, proxy: KinesisProxy, code: str) -> None:
    stream, follower = await world.open(), Follower(world.names, limit=5)
    await follower.seek(stream)
    # Each one is good for one call: the way on that it gives is not.
    fresh: set[str] = set()

    def before(call: str, asked: Message) -> None:
        if call == "GetRecords" and fresh and asked["ShardIterator"] not in fresh:
            raise Refused(code)

    def after(call: str, asked: Message, answer: Message) -> Message:
        if call == "GetShardIterator":
            fresh.add(answer["ShardIterator"])
        return answer

    proxy.before, proxy.after = before, after
    written = world.put(20)
    await follower.until(stream, written)
    assert proxy.calls.count("GetShardIterator") > 2
    # One that never is good is no loop.
    proxy.before = some_of({"GetRecords"}, lambda number: True, Refused(code))
    with pytest.raises(BrokenOffError, match=code):
        await stream.read(FIRST, follower.positions[FIRST])
    await stream.close()


# ---- what is said late ---------------------------------------------------------------------------------------------------


@driven
async def test_nothing_yet_is_no_end(world: KinesisWorld, proxy: KinesisProxy) -> None:
    """GetRecords may answer with nothing although there is more, for a long stretch of a shard."""
    written = world.put(10)
    empty = 0

    def after(call: str, asked: Message, answer: Message) -> Message:
        nonlocal empty
        if call == "GetRecords" and empty < 4:
            empty += 1
            return {"Records": [], "NextShardIterator": asked["ShardIterator"], "MillisBehindLatest": 86_000_000}
        return answer

    proxy.after = after
    stream = await world.open()
    batch = await next_batch(stream, FIRST, "TRIM_HORIZON")
    assert world.names(batch.records) == written
    assert empty == 4
    # Also where a batch is read again, and where the position's own record is looked for.
    for upto in (batch.upto, None):
        empty, place = 0, "TRIM_HORIZON" if upto else batch.upto or ""
        other = await world.open()
        again = await other.read(FIRST, place, upto)
        assert world.names(again.records) == (written if upto else [])
        assert again.end is None
        await other.close()
    # As long as it lasts nothing is said of times but how far behind it is.
    proxy.after = lambda call, asked, answer: (
        answer if call != "GetRecords" else {"Records": [], "NextShardIterator": asked["ShardIterator"], "MillisBehindLatest": 5_000}
    )
    behind = await stream.read(FIRST, batch.upto or "")
    assert (behind.upto, behind.at, behind.end, behind.records.num_rows) == (None, None, None, 0)
    await stream.close()


@driven
async def test_an_end_waits_until_all_children_are_listed(world: KinesisWorld, proxy: KinesisProxy) -> None:
    written = world.put(5)
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    hidden = {SECOND, THIRD}

    def after(call: str, asked: Message, answer: Message) -> Message:
        if call == "ListShards":
            answer["Shards"] = [each for each in answer["Shards"] if each["ShardId"] not in hidden]
        return answer

    proxy.after = after
    stream = await world.open()
    batch = await stream.read(FIRST, "TRIM_HORIZON")
    # What was read comes without waiting for them.
    assert world.names(batch.records) == written
    assert batch.end is None
    for missing in ({SECOND, THIRD}, {SECOND}, {THIRD}):
        hidden.clear()
        hidden.update(missing)
        for _ in range(2):
            later = await stream.read(FIRST, batch.upto or "")
            assert (later.upto, later.end, later.records.num_rows) == (None, None, 0)
    hidden.clear()
    later = await stream.read(FIRST, batch.upto or "")
    assert later.end is not None
    assert family(later.end.children) == {(SECOND, (FIRST,)), (THIRD, (FIRST,))}
    await stream.close()


@pytest.mark.parametrize(("error", "said"), [(Cut(), BrokenOffError), (Refused("AccessDeniedException"), SluicewayError)])
@driven
async def test_a_failing_list_keeps_nobody_from_the_records(
    world: KinesisWorld, proxy: KinesisProxy, error: Exception, said: type[Exception]
) -> None:
    written = world.put(5)
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    proxy.before = some_of({"ListShards"}, lambda number: True, error)
    stream = await world.open()
    batch = await stream.read(FIRST, "TRIM_HORIZON")
    assert world.names(batch.records) == written
    assert batch.end is None
    with pytest.raises(said):
        await stream.read(FIRST, batch.upto or "")
    await world.restore()
    assert (await stream.read(FIRST, batch.upto or "")).end is not None
    await stream.close()


# ---- what was dropped ------------------------------------------------------------------------------------------------------


async def read_so_many(stream: KinesisStream, count: int) -> Batch:
    """One batch from the beginning."""
    batch = await stream.read(FIRST, "TRIM_HORIZON", limit=count)
    assert batch.records.num_rows == count
    return batch


@pytest.fixture(params=[False, True], ids=["without a word", "and says so"])
def dropped(proxy: KinesisProxy, request: pytest.FixtureRequest) -> Dropped:
    return Dropped(proxy, says=request.param)


@driven
async def test_a_position_that_was_dropped_with_more_is_unknown(world: KinesisWorld, proxy: KinesisProxy, dropped: Dropped) -> None:
    stream = await world.open()
    world.put(20)
    batch = await read_so_many(stream, 5)
    upto = batch.upto or ""
    dropped.upto[FIRST] = parse_position(upto).number + 5
    for later in (timedelta(), timedelta(hours=25)):
        # Soon after, it should be there; later, who knows what else was.
        proxy.later = later
        other = await world.open()
        for _ in range(2):
            with pytest.raises(UnknownPositionError, match="has no record"):
                await other.read(FIRST, upto)
        await other.close()
    await stream.close()


@driven
async def test_a_position_that_was_dropped_alone_is_gone_on_from(world: KinesisWorld, proxy: KinesisProxy, dropped: Dropped) -> None:
    """A shard had no records for a day. That was noted, so the next ones are known to be the next."""
    stream, follower = await world.open(), Follower(world.names)
    await follower.seek(stream)
    await follower.until(stream, world.put(5))
    first = follower.positions[FIRST]
    await follower.step(stream, FIRST)
    assert follower.positions[FIRST] == first
    # After hours the position is said anew; nothing else of it has changed.
    proxy.later = timedelta(hours=23, minutes=50)
    await follower.step(stream, FIRST)
    marked = follower.positions[FIRST]
    assert parse_position(marked)._replace(seen=None) == parse_position(first)._replace(first="")
    dropped.upto[FIRST] = parse_position(first).number
    proxy.later = timedelta(hours=25)
    await stream.close()
    for position in (marked, first):
        other = await world.open()
        if position == marked:
            batch = await next_batch_or_nothing(other, position)
            assert not batch.records.num_rows
            # A mark is a batch too: of nothing.
            assert (await other.read(FIRST, first, marked)).records.num_rows == 0
            names = world.put(5)
            assert world.names((await next_batch(other, FIRST, batch.upto or position)).records) == names
        else:
            with pytest.raises(UnknownPositionError):
                await other.read(FIRST, position)
        await other.close()


async def next_batch_or_nothing(stream: KinesisStream, position: str) -> Batch:
    """The service says three times that it has nothing before that is taken for all."""
    while True:
        batch = await stream.read(FIRST, position)
        if batch.behind is not None:
            return batch
        await asyncio.sleep(0)


@driven
async def test_whoever_reads_more_slowly_than_records_are_dropped_is_told(
    world: KinesisWorld, proxy: KinesisProxy, dropped: Dropped
) -> None:
    stream, follower = await world.open(), Follower(world.names, limit=5)
    await follower.seek(stream)
    written = world.put(30)
    await follower.step(stream, FIRST)
    # A day later nothing has been dropped yet, and all is well.
    proxy.later = timedelta(hours=25)
    await follower.step(stream, FIRST)
    assert follower.everything == written[:10]
    dropped.upto[FIRST] = parse_position(follower.positions[FIRST]).number + 5
    with pytest.raises(UnknownPositionError, match="may have expired"):
        await follower.step(stream, FIRST)
    await stream.close()


@driven
async def test_a_stream_that_keeps_its_records_longer_has_them_longer(world: KinesisWorld, proxy: KinesisProxy) -> None:
    world.client.increase_stream_retention_period(StreamName=world.stream, RetentionPeriodHours=48)
    stream, follower = await world.open(), Follower(world.names, limit=5)
    await follower.seek(stream)
    written = world.put(10)
    await follower.step(stream, FIRST)
    proxy.later = timedelta(hours=47)
    await follower.until(stream, written)
    # Nobody had to look whether the last one was still there.
    assert proxy.calls.count("GetShardIterator") == 1
    await stream.close()


@driven
async def test_a_batch_is_read_again_whole_or_not_at_all(world: KinesisWorld, proxy: KinesisProxy, dropped: Dropped) -> None:
    stream = await world.open()
    written = world.put(20)
    first = await read_so_many(stream, 5)
    second = await stream.read(FIRST, first.upto or "", limit=5)
    third = await stream.read(FIRST, second.upto or "", limit=5)
    await stream.close()
    stream = await world.open()
    # One record of the first is gone: it cannot be read again, from wherever that may begin. Nor can one whose last is gone.
    dropped.upto[FIRST] = int(first.records.column("position")[0].as_py())
    with pytest.raises(UnknownPositionError, match="not all records"):
        await stream.read(FIRST, "TRIM_HORIZON", first.upto)
    # What came before the second has nothing to do with it.
    dropped.upto[FIRST] = parse_position(first.upto or "").number
    assert world.names((await stream.read(FIRST, first.upto or "", second.upto)).records) == written[5:10]
    dropped.upto[FIRST] = parse_position(third.upto or "").number
    for position, upto in ((first.upto, second.upto), (second.upto, third.upto)):
        with pytest.raises(UnknownPositionError, match="not all records"):
            await stream.read(FIRST, position or "", upto)
    # A batch never ends before it begins, or where no record is.
    for upto in ("TRIM_HORIZON", first.upto, "GONE"):
        with pytest.raises(UnknownPositionError, match="not all records"):
            await stream.read(FIRST, third.upto or "", upto)
    await stream.close()


@driven
async def test_children_that_were_not_read_in_time_are_told(world: KinesisWorld, proxy: KinesisProxy) -> None:
    stream, follower = await world.open(), Follower(world.names)
    await follower.seek(stream)
    await follower.until(stream, world.put(5))
    split(world.client, world.stream, open_shards(world.client, world.stream)[0])
    world.put(20)
    await follower.follow(stream, lambda: FIRST in follower.ended)
    proxy.later = timedelta(hours=25)
    for born in follower.ended[FIRST].children:
        with pytest.raises(UnknownPositionError, match="may have expired"):
            await stream.read(born.token, born.start)
    await stream.close()
