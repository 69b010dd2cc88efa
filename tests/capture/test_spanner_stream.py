"""SpannerStream against a fake of the API: the suite of its port in both partition modes, and what only this API has."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.capture.streams import spanner
from sluiceway.capture.streams.spanner import SETTLE, SpannerStream, format_time, parse_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import UnknownPositionError
from sluiceway.testing.change_stream_suite import (
    BranchingStreamSuite,
    BranchingWorld,
    Follower,
    HandoffStreamSuite,
    HandoffWorld,
    next_batch,
)
from sluiceway.testing.drive import driven
from tests.capture.spanner_fake import START, FakeSpanner

numbers = itertools.count()
WAIT = 0.005


def opened(fake: FakeSpanner, **options: Any) -> SpannerStream:
    return SpannerStream(fake, format_time(START), wait=WAIT, **options)


def names_of(records: pa.RecordBatch) -> list[str]:
    return [json.loads(payload)["key"]["name"] for payload in records.column("payload").to_pylist()]


class SpannerWorld:
    """A World of the conformance suite."""

    def __init__(self, mutable: bool) -> None:
        self.fake, self._mutable = FakeSpanner("AY-1", "AY-2", "AY-3", mutable=mutable), mutable
        self._born = itertools.count(10)

    async def open(self) -> SpannerStream:
        return opened(self.fake)

    async def write(self, count: int) -> list[str]:
        names = [f"n{next(numbers)}" for _ in range(count)]
        for number, name in enumerate(names):
            self.fake.commit({self.fake.open[number % len(self.fake.open)].token: [[name]]})
        self.fake.tick()
        return names

    def names(self, records: pa.RecordBatch) -> list[str]:
        return names_of(records)

    async def nowhere(self, position: str) -> str:
        return format_time(START - 3_600 * 10**9)

    async def interrupt(self) -> None:
        self.fake.cut = True

    async def restore(self) -> None:
        self.fake.cut = False

    async def branch(self) -> None:
        fake = self.fake
        first, second, third = (each.token for each in fake.open[:3])
        if self._mutable:
            for token in (first, second, third):
                fake.grow(token, f"AY-{next(self._born)}")
        else:
            left, right, both = (f"AY-{next(self._born)}" for _ in range(3))
            fake.split(first, left, right)
            fake.merge([second, third], both)
        fake.tick()

    async def hand_over(self) -> tuple[list[str], list[str]]:
        fake = self.fake
        source, target = (each.token for each in fake.open[:2])
        names = [f"n{next(numbers)}" for _ in range(8)]
        for name in names[:4]:
            fake.commit({source: [[name]]})
        at = fake.move(source, target)
        # At the very timestamp it may be in either of the two.
        fake.commit({source: [[f"{names[0]}-"]]}, at=at)
        for name in names[4:]:
            fake.commit({target: [[name]]})
        fake.tick()
        return [*names[:4], f"{names[0]}-"], names[4:]


class TestImmutableKeyRanges(BranchingStreamSuite):
    @pytest.fixture
    def world(self) -> BranchingWorld:
        return SpannerWorld(mutable=False)


class TestMutableKeyRanges(HandoffStreamSuite):
    @pytest.fixture
    def world(self) -> HandoffWorld:
        return SpannerWorld(mutable=True)


# ---- records -------------------------------------------------------------------------------------------------------------


@driven
async def test_a_change_is_a_record_and_what_has_one_timestamp_is_one_batch() -> None:
    fake = FakeSpanner("AY-1", "AY-2")
    at = fake.commit({"AY-1": [["a", "b"], ["c"]], "AY-2": [["d"]]})
    fake.commit({"AY-1": [["e"]]}, at=at)
    later = fake.commit({"AY-1": [["f"]]})
    stream = opened(fake)
    start = {born.token: born.start for born in (await stream.seeds("")).partitions}["AY-1"]
    batch = await stream.read("AY-1", start, limit=1)
    assert names_of(batch.records) == ["a", "b", "c", "e"]
    assert batch.behind is not None
    assert batch.behind > 0
    assert batch.upto == format_time(at)
    first = batch.records.slice(1, 1).to_pylist()[0]
    assert (first["kind"], first["key"], first["at"].timestamp()) == ("insert", 'Names:{"name":"b"}', START // 10**9)
    assert json.loads(first["payload"]) == {
        "table": "Names",
        "op": "insert",
        "key": {"name": "b"},
        "new": {"size": "1"},
        "old": None,
        "committed_at": format_time(at),
        "transaction": "1000000",
        "sequence": "00000000",
        "mod": 1,
    }
    # However the service orders those of one timestamp.
    for _ in range(5):
        assert (await stream.read("AY-1", start, batch.upto)).records.equals(batch.records)
    rest = await stream.read("AY-1", batch.upto)
    assert (names_of(rest.records), rest.upto, rest.behind) == (["f"], format_time(later), 0)
    await stream.close()


@driven
async def test_a_position_without_records_moves_on_before_the_service_forgets_it() -> None:
    fake = FakeSpanner("AY-1")
    stream = opened(fake)
    (born,) = (await stream.seeds("")).partitions
    assert (await stream.read("AY-1", born.start)).upto is None
    now = fake.tick(120 * 10**9)
    batch = await stream.read("AY-1", born.start)
    assert batch.upto is not None
    assert batch.at is not None
    assert now - SETTLE <= parse_time(batch.upto) < now + 60 * 10**9
    assert (batch.at, batch.records.num_rows) == (parse_time(batch.upto) // 10**6, 0)
    # What was asked once and was nothing is not asked for again.
    await stream.read("AY-1", born.start)
    assert fake.queries[-1][1] > format_time(START + 10**9)
    fake.kept_from = START + 60 * 10**9
    with pytest.raises(UnknownPositionError, match="retention"):
        await opened(fake).read("AY-1", born.start)
    assert (await opened(fake).read("AY-1", batch.upto)).end is None
    with pytest.raises(SluicewayError, match="Start another capture with a later time") as refused:
        await opened(fake).seeds("")
    assert refused.value.field == "start"


@driven
async def test_a_capture_has_one_start() -> None:
    fake = FakeSpanner("AY-1")
    seeds = await opened(fake).seeds("")
    with pytest.raises(SluicewayError, match="this capture was started at 2026-05-01T12:00:00"):
        await SpannerStream(fake, format_time(START + 1)).seeds(seeds.upto)
    for start, field in (("yesterday", "start"), ("2026-05-01", "start")):
        with pytest.raises(SluicewayError) as refused:
            SpannerStream(fake, start)
        assert refused.value.field == field
    assert parse_time("1970-01-01T00:00:01.5Z") == 1_500_000_000


@driven
async def test_what_is_not_understood_is_neither_skipped_nor_an_end() -> None:
    fake = FakeSpanner("AY-1")
    fake.commit({"AY-1": [["a"]]})
    fake.partitions["AY-1"].records[0][1]["data_change_record"].pop("mods")
    stream = opened(fake)
    (born,) = (await stream.seeds("")).partitions
    with pytest.raises(SluicewayError, match=r"cannot be decoded: KeyError: 'mods'"):
        await stream.read("AY-1", born.start)


@driven
async def test_nor_is_a_value_that_is_none() -> None:
    """Text that is no JSON, and a token that is no text: their errors were not the stream's own."""
    fake = FakeSpanner("AY-1")
    fake.commit({"AY-1": [["a"]]})
    told = fake.partitions["AY-1"].records[0][1]
    told["data_change_record"]["mods"][0]["keys"] = "{"
    stream = opened(fake)
    (born,) = (await stream.seeds("")).partitions
    with pytest.raises(SluicewayError, match=r"cannot be decoded: DecodeError"):
        await stream.read(born.token, born.start)
    child = {"token": 5, "parent_partition_tokens": ["AY-1"]}
    told["child_partitions_record"] = {"start_timestamp": told.pop("data_change_record")["commit_timestamp"], "child_partitions": [child]}
    with pytest.raises(SluicewayError, match=r"cannot be decoded: TypeError: a partition's token is not a text"):
        await stream.read(born.token, born.start)


class Early(FakeSpanner):
    """Another process, whose read began earlier."""

    until = ""

    async def now(self) -> str:
        return self.until or await super().now()


@driven
async def test_an_end_has_all_children_also_those_that_begin_after_the_read() -> None:
    fake = Early("AY-1")
    stream = opened(fake)
    (born,) = (await stream.seeds("")).partitions
    at = fake.split("AY-1", "AY-2", "AY-3", apart=1_000)
    fake.until = format_time(at)
    end = (await stream.read("AY-1", born.start)).end
    assert end is not None
    assert [(child.token, child.parents) for child in end.children] == [("AY-2", ("AY-1",)), ("AY-3", ("AY-1",))]
    assert [child.start for child in end.children] == [format_time(at - 1), format_time(at + 999)]
    assert end.ended_at == at // 10**6


@driven
async def test_an_end_that_is_told_late_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in apache/beam#40232: a query ends by its own limit before the service tells of the children, and the position passes the end."""
    fake = FakeSpanner("AY-1")
    (born,) = (await opened(fake).seeds("")).partitions
    fake.split("AY-1", "AY-2", "AY-3")
    stream, fake.withheld = opened(fake), True
    for _ in range(3):
        assert (await stream.read("AY-1", born.start)).end is None
    fake.withheld = False
    end = (await stream.read("AY-1", born.start)).end
    assert end is not None
    assert [child.token for child in end.children] == ["AY-2", "AY-3"]
    # What it would come to if what was asked once were taken for known.
    monkeypatch.setattr(spanner, "SETTLE", 0)
    stream, fake.withheld = opened(fake), True
    # The read asks twice by itself.
    with pytest.raises(UnknownPositionError, match="has nothing at"):
        await stream.read("AY-1", born.start)


# ---- mutable key ranges --------------------------------------------------------------------------------------------------


@driven
async def test_what_starts_from_a_partition_comes_after_what_was_there_before() -> None:
    fake = FakeSpanner("AY-1", mutable=True)
    stream, follower = opened(fake), Follower(names_of)
    fake.commit({"AY-1": [["a"]]})
    at = fake.grow("AY-1", "AY-2")
    # At the very timestamp of the start, and after it, on both sides.
    fake.commit({"AY-1": [["b"]], "AY-2": [["c"]]}, at=at)
    fake.commit({"AY-1": [["d"]], "AY-2": [["e"]]})
    fake.finish("AY-1")
    fake.tick()
    await follower.seek(stream)
    await follower.until(stream, ["a", "b", "c", "d", "e"])
    await follower.follow(stream, lambda: len(follower.ended) == 2)
    then = format_time(at)
    assert follower.read[f"AY-1@{format_time(START)}"] == ["a", "b"]
    assert follower.read[f"AY-1@{then}"] == ["d"]
    assert follower.read[f"AY-2@{then}"] == ["c", "e"]
    assert follower.open == [f"AY-2@{then}"]
    follower.check_order()
    # The end at the timestamp of its last record is told again, to whoever goes on there.
    first = f"AY-1@{format_time(START)}"
    again = await next_batch(opened(fake), first, follower.positions[first])
    assert again.end == follower.ended[first]
    await stream.close()


@driven
async def test_keys_that_move_between_partitions_are_a_barrier_in_both_unless_order_does_not_matter() -> None:
    fake = FakeSpanner("AY-1", "AY-2", mutable=True)
    fake.commit({"AY-1": [["a"]]})
    at = fake.move("AY-1", "AY-2")
    fake.commit({"AY-1": [["b"]], "AY-2": [["c"]]}, at=at)
    fake.commit({"AY-2": [["d"]]})
    source, target = (await opened(fake).seeds("")).partitions
    name = f"AY-1>AY-2@{format_time(at)}"
    given = await opened(fake).read(source.token, source.start)
    assert (names_of(given.records), given.upto) == (["a", "b"], f"{format_time(at)}~")
    assert given.barrier == (at, (name,), (), format_time(at))
    # What has the timestamp of the move comes before it.
    taken = await opened(fake).read(target.token, target.start)
    assert (names_of(taken.records), taken.upto) == (["c"], f"{format_time(at)}~")
    assert taken.barrier == (at, (), (name,), format_time(at))
    assert taken.upto is not None
    assert (await opened(fake).read(target.token, target.start, taken.upto)).records.equals(taken.records)
    assert (await opened(fake).read(target.token, taken.upto)).barrier == taken.barrier
    assert names_of((await opened(fake).read(target.token, format_time(at))).records) == ["d"]
    with pytest.raises(UnknownPositionError, match="no keys of partition AY-1"):
        await opened(fake).read(source.token, f"{format_time(at - 1)}~")
    batch = await opened(fake, moves="unordered").read(target.token, target.start)
    assert names_of(batch.records) == ["c", "d"]
    with pytest.raises(SluicewayError, match="expected unordered"):
        opened(fake, moves="ordered")


@driven
async def test_keys_move_out_at_the_moment_of_a_start_and_of_the_end() -> None:
    fake = FakeSpanner("AY-1", "AY-2", mutable=True)
    stream, follower = opened(fake), Follower(names_of)
    fake.commit({"AY-1": [["a"]]})
    at = fake.grow("AY-1", "AY-3")
    fake.move("AY-1", "AY-3", at=at)
    fake.move("AY-1", "AY-2", at=at)
    fake.commit({"AY-2": [["b"]], "AY-3": [["c"]]})
    end = fake.finish("AY-1")
    fake.move("AY-1", "AY-2", at=end)
    fake.commit({"AY-2": [["d"]]})
    fake.tick()
    await follower.seek(stream)
    await follower.until(stream, ["a", "b", "c", "d"])
    await follower.follow(stream, lambda: len(follower.ended) == 2)
    assert follower.arrived[0] == "a"
    assert follower.arrived.index("b") < follower.arrived.index("d")
    assert not follower.barred
    follower.check_order()
    await stream.close()


def test_the_documentation_says_that_it_was_tested_against_a_fake_only(repository: Path) -> None:
    assert "tested against a fake of its API only" in (repository / "docs" / "guides" / "capture.md").read_text()
