"""A queue as a change stream, on a real server: what every stream must do, and what is its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from simulation.loop import Loop
from sluiceway.capture import lineage
from sluiceway.capture.lineage import MAX_OPEN, QueueLineage, from_options
from sluiceway.client import CallError
from sluiceway.client.answers import Extended, Ignored
from sluiceway.client.async_connections import AsyncConnections
from sluiceway.client.http_messages import Answer, Request
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import CHANGES, BrokenOffError, ChangeStream, UnknownPositionError
from sluiceway.testing.change_stream_suite import BranchingStreamSuite, BranchingWorld, next_batch
from sluiceway.testing.drive import driven
from tests.capture.lineage_rig import Place, aside, names, two_sided
from tests.server.server_running import Running, eventually, running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with two_sided(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def one(served: Running) -> Place:
    """A queue with one partition."""
    return Place(served, 1)


class QueueWorld:
    """`World` over a queue with four partitions."""

    def __init__(self, served: Running) -> None:
        self.place = Place(served, 4)

    async def open(self) -> ChangeStream:
        return self.place.open()

    async def write(self, count: int) -> list[str]:
        found: list[str] = await aside(self.place.produce, count)
        return found

    def names(self, records: pa.RecordBatch) -> list[str]:
        return names(records)

    async def branch(self) -> None:
        await aside(self.place.rebalance, 2, other_side=True)

    async def nowhere(self, position: str) -> str:
        return "999999x1"

    async def interrupt(self) -> None:
        for each in self.place.transports:
            each.is_cut = True

    async def restore(self) -> None:
        for each in self.place.transports:
            each.is_cut = False


class TestQueue(BranchingStreamSuite):
    @pytest.fixture
    def world(self, served: Running) -> BranchingWorld:
        return QueueWorld(served)


# ---- records -------------------------------------------------------------------------------------------------------------


@driven
async def test_a_record_is_an_item(one: Place) -> None:
    before = datetime.now(UTC)
    items: list[dict[str, Any]] = [{"utf8": "plain"}, {"utf8": "rich", "kind": "letter", "reference": "r-1", "headers": {"h": "v"}}]
    produced = await aside(one.served.ask, "queue.produce", queue_name=one.queue, items=items)
    stream = one.open()
    (born,) = (await stream.seeds("")).partitions
    batch = await stream.read(born.token, born.start)
    assert batch.records.schema.equals(CHANGES)
    first, second = batch.records.to_pylist()
    incarnation = one.info()["incarnation"]
    assert first["position"] == produced["first_id"] == f"{incarnation}.0.{first['position'].rpartition('.')[2]}"
    assert (first["kind"], first["key"], first["payload"]) == (None, None, b"plain")
    assert (second["kind"], second["key"], second["payload"]) == ("letter", "r-1", b"rich")
    assert first["at"] >= before.replace(microsecond=0)
    assert batch.behind is not None
    assert batch.behind >= 0
    # In the batch there is no item with a kind: the column is there all the same.
    again = await stream.read(born.token, born.start, batch.upto)
    assert again.records.equals(batch.records)
    await stream.close()


# ---- leases --------------------------------------------------------------------------------------------------------------


async def first_batch(stream: QueueLineage, limit: int = 10_000) -> tuple[str, str, pa.RecordBatch]:
    """Of a queue with one partition: that, the end of its first batch, and the records."""
    (born,) = (await stream.seeds("")).partitions
    batch = await next_batch(stream, born.token, born.start, limit)
    assert batch.upto is not None
    return born.token, batch.upto, batch.records


@driven
async def test_what_is_kept_is_gone_and_what_is_not_stays(one: Place) -> None:
    await aside(one.produce, 6)
    stream = one.open()
    token, upto, _ = await first_batch(stream, 4)
    second = await next_batch(stream, token, upto)
    assert second.upto is not None
    assert (one.count("leases"), one.count("total")) == (2, 6)
    await stream.kept(token, upto)
    assert (one.count("leases"), one.count("completed")) == (1, 4)
    await stream.close()
    assert one.count("leases") == 1
    # Who has not read any of it keeps it all by the last position.
    other = one.open()
    await other.kept(token, second.upto)
    assert (one.count("leases"), one.count("completed"), one.count("total")) == (0, 6, 0)
    await other.close()


@driven
async def test_a_position_keeps_all_that_came_before_it(one: Place) -> None:
    await aside(one.produce, 9)
    stream = one.open()
    token, upto, _ = await first_batch(stream, 3)
    for _ in range(2):
        batch = await next_batch(stream, token, upto, 3)
        assert batch.upto is not None
        upto = batch.upto
    await stream.close()
    assert one.count("leases") == 3
    other = one.open()
    await other.kept(token, upto)
    assert (one.count("leases"), one.count("completed")) == (0, 9)
    await other.close()


@driven
async def test_what_could_not_be_said_is_said_with_the_next_reading(one: Place) -> None:
    await aside(one.produce, 3)
    stream = one.open()
    token, upto, _ = await first_batch(stream)
    one.transports[-1].is_cut = True
    with pytest.raises(BrokenOffError):
        await stream.kept(token, upto)
    one.transports[-1].is_cut = False
    assert one.count("leases") == 1
    assert not (await stream.read(token, upto)).records.num_rows
    assert (one.count("leases"), one.count("completed")) == (0, 3)
    await stream.close()


@driven
async def test_an_answer_that_was_lost_costs_nothing(one: Place) -> None:
    made = await aside(one.produce, 3)
    stream = one.open()
    one.transports[-1].lose.append("/v1/queue.lease")
    token, upto, records = await first_batch(stream)
    assert not one.transports[-1].lose
    assert names(records) == made
    assert one.count("leases") == 1
    one.transports[-1].lose.append("/v1/queue.complete")
    await stream.kept(token, upto)
    assert one.count("completed") == 3
    await stream.close()


@driven
async def test_whoever_was_left_behind_takes_nothing(one: Place) -> None:
    """A reader stands still before its first item, another one reads on; then the first one wakes up and asks again where it was."""
    slow, fast = one.open(), one.open()
    (born,) = (await slow.seeds("")).partitions
    assert not (await slow.read(born.token, born.start)).records.num_rows
    made = await aside(one.produce, 4)
    token, upto, records = await first_batch(fast)
    assert names(records) == made
    # What is not kept is found again by whoever reads from there, and by nobody else.
    assert names((await slow.read(token, born.start)).records) == made
    await fast.kept(token, upto)
    more = await aside(one.produce, 2)
    with pytest.raises(UnknownPositionError, match="already read and completed"):
        await slow.read(token, born.start)
    assert (one.count("leases"), one.count("ready")) == (0, 2)
    assert names((await next_batch(fast, token, upto)).records) == more
    await slow.close()
    await fast.close()


@driven
async def test_a_lease_that_ran_out_is_told_by_all_who_go_on(one: Place) -> None:
    made = await aside(one.produce, 2)
    stream = one.open(hold_for=1_000)
    token, upto, _ = await first_batch(stream)
    # So the process is gone: nobody extends its leases.
    await stream.close()
    await aside(eventually, lambda: one.count("ready") == 2)
    with pytest.raises(UnknownPositionError, match="cannot be read again"):
        await (other := one.open()).read(token, "0", upto)
    # What was handed on would come again.
    with pytest.raises(UnknownPositionError, match="expired"):
        await other.read(token, upto)
    await other.close()
    third = one.open()
    await third.kept(token, upto)
    with pytest.raises(UnknownPositionError, match="expired"):
        await third.read(token, upto)
    await third.close()
    # Where nothing was handed on yet, nothing is lost. What ran out together comes back in smaller leases.
    fourth = one.open()
    assert names((await next_batch(fourth, token, "0")).records) == made[:1]
    await fourth.close()


@driven
async def test_leases_are_extended_while_they_are_held(one: Place) -> None:
    await aside(one.produce, 2)
    stream = one.open(hold_for=9_000)
    token, upto, _ = await first_batch(stream)
    at_first = await aside(deadlines, one)
    await aside(eventually, lambda: deadlines(one) != at_first)
    assert "/v1/queue.extend" in one.transports[-1].calls
    assert min(await aside(deadlines, one)) > max(at_first)
    await stream.kept(token, upto)
    await stream.close()


class Away:
    """A client in virtual time whose server is away from 19 to 51 s. Calls on `never` always fail."""

    client_id = "capture/test"

    def __init__(self, loop: Loop, never: str, error: Exception) -> None:
        self._loop, self._never, self._error = loop, never, error
        self.deadlines = dict.fromkeys(("aaaaaaaa.0.L1", "aaaaaaaa.1.L1"), 60_000)

    async def extend(self, queue_name: str, lease_ids: list[str], **options: object) -> Extended:
        if 19_000 <= self._loop.now < 51_000 or self._never in lease_ids:
            await asyncio.sleep(3)
            raise self._error
        over = [each for each in lease_ids if self._loop.now >= self.deadlines[each]]
        self.deadlines |= {each: self._loop.now + 60_000 for each in lease_ids if each not in over}
        return Extended(ignored=[Ignored(id=each, reason="expired") for each in over])

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("error", [CallError("unavailable", "away"), ValueError("that nobody expects")])
@pytest.mark.parametrize("never", ["", "aaaaaaaa.0.L1"])
def test_leases_outlive_an_outage_that_is_shorter_than_they_last(never: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost ones would end the capture for good. Nor does one call that fails cost the leases of others."""
    monkeypatch.setattr(lineage, "MAX_EXTENDED", 1)
    loop = Loop(Random(0))
    client = Away(loop, never, error)
    kept = [each for each in client.deadlines if each != never]

    async def hold() -> None:
        stream = QueueLineage(client, "q", hold_for=60_000)  # type: ignore[arg-type]
        stream._hold(client.deadlines)
        await asyncio.sleep(600)
        await stream.close()

    loop.run_until_complete(hold())
    loop.close()
    assert all(client.deadlines[each] > 600_000 for each in kept)


def deadlines(place: Place) -> set[str]:
    items = place.served.ask("storage/items.list", queue_name=place.queue, partition=0)["items"]
    return {each["lease_deadline"] for each in items}


@driven
async def test_leases_of_a_partition_that_was_left_run_out(one: Place) -> None:
    """Else one that nobody else knows of, as of a reader that was fenced, would hold its items back for as long as the process lives."""
    made = await aside(one.produce, 2)
    stream = one.open(hold_for=1_000)
    token, _, _ = await first_batch(stream)
    stream.left(token)
    stream.left(token)
    await aside(eventually, lambda: one.count("ready") == 2)
    # Whoever has left may come back.
    assert names((await next_batch(stream, token, "0")).records) == made[:1]
    await stream.close()


@driven
async def test_a_partition_that_was_left_is_gone_on_with_by_others_or_the_same(one: Place) -> None:
    await aside(one.produce, 3)
    stream = one.open(hold_for=9_000)
    token, upto, records = await first_batch(stream)
    stream.left(token)
    at_first = await aside(deadlines, one)
    assert (await stream.read(token, "0", upto)).records.equals(records)
    # It is extended again.
    await aside(eventually, lambda: min(deadlines(one)) > max(at_first))
    stream.left(token)
    await stream.kept(token, upto)
    assert (one.count("leases"), one.count("completed")) == (0, 3)
    await stream.close()


@driven
async def test_a_queue_that_is_paused_is_not_at_its_end(one: Place, caplog: pytest.LogCaptureFixture) -> None:
    stream = one.open()
    (born,) = (await stream.seeds("")).partitions
    assert (await stream.read(born.token, born.start)).behind == 0
    await aside(one.served.ask, "queue.pause", queue_name=one.queue, verbs=["lease"])
    made = await aside(one.produce, 2)
    while "is paused" not in caplog.text:
        # What is known of the queue may be a second old. It is not taken for news.
        batch = await stream.read(born.token, born.start)
        assert (batch.records.num_rows, batch.behind) == (0, None)
    await aside(one.served.ask, "queue.resume", queue_name=one.queue, verbs=["lease"])
    batch = await next_batch(stream, born.token, born.start)
    assert names(batch.records) == made
    await stream.kept(born.token, batch.upto or "")
    while (await stream.read(born.token, batch.upto or "")).behind is None:
        pass
    await stream.close()


@driven
async def test_a_partition_that_is_damaged_is_not_at_its_end(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        place = Place(served, 1)
        served.produce(place.queue, "to be damaged" * 100)
        incarnation = place.info()["incarnation"]
    for suffix in ("", "-wal"):
        path = tmp_path / "partitions" / f"{incarnation}-0.sqlite{suffix}"
        if path.exists():
            path.write_bytes(path.read_bytes().replace(b"to be damaged", b"it is DAMAGED"))
    with running(tmp_path) as served:
        place.served = served
        stream = place.open()
        for _ in range(3):
            with pytest.raises(SluicewayError) as caught:
                await stream.read(f"{incarnation}.0", "0")
            assert caught.value.code == "partition_damaged"
        await stream.close()


@driven
async def test_reading_waits_for_what_was_read_to_be_kept(one: Place) -> None:
    made = await aside(one.produce, MAX_OPEN + 5)
    stream = one.open()
    token, upto, records = await first_batch(stream, 1)
    found, positions = names(records), [upto]
    while len(found) < MAX_OPEN:
        batch = await stream.read(token, positions[-1], limit=1)
        assert batch.upto is not None
        assert len(batch.upto) <= 1_000
        found += names(batch.records)
        positions.append(batch.upto)
    for _ in range(2):
        batch = await stream.read(token, positions[-1], limit=1)
        # There is more.
        assert (batch.upto, batch.behind) == (None, None)
    await stream.kept(token, positions[-2])
    found += names((await next_batch(stream, token, positions[-1])).records)
    assert found == made
    await stream.close()


@driven
async def test_a_batch_of_which_somebody_has_settled_a_part_is_not_that_batch(one: Place) -> None:
    await aside(one.produce, 3)
    stream = one.open()
    token, upto, records = await first_batch(stream)
    await aside(one.served.ask, "queue.complete", queue_name=one.queue, ids=[records.column("position")[1].as_py()])
    with pytest.raises(UnknownPositionError, match="another consumer"):
        await stream.read(token, "0", upto)
    await stream.close()


@driven
async def test_two_captures_divide_the_items_and_know_nothing_of_each_other(one: Place) -> None:
    made = await aside(one.produce, 4)
    mine, theirs = one.open("capture/mine"), one.open("capture/theirs")
    token, upto, records = await first_batch(mine, 3)
    _, other, rest = await first_batch(theirs)
    assert names(records) + names(rest) == made
    await theirs.kept(token, other)
    made = await aside(one.produce, 1)
    assert names((await next_batch(mine, token, upto)).records) == made
    # What is theirs is none of mine.
    await (third := one.open("capture/third")).kept(token, upto)
    assert one.count("completed") == 1
    for each in (mine, theirs, third):
        await each.close()


@driven
async def test_a_queue_that_was_made_anew_is_another(one: Place) -> None:
    await aside(one.produce, 2)
    stream = one.open()
    seeds = await stream.seeds("")
    token, upto, _ = await first_batch(stream, 1)
    await aside(one.served.ask, "queues.delete", queue_name=one.queue, force=True)
    # Waiting does not bring it back, so somebody is to hear of it.
    for asked in (stream.seeds(seeds.upto), stream.read(token, upto), stream.read(token, "0", upto)):
        with pytest.raises(SluicewayError, match="no queue") as caught:
            await asked
        assert caught.value.code == "queue_not_found"
    with pytest.raises(BrokenOffError):
        await stream.kept(token, upto)
    await aside(one.served.ask, "queues.create", queue_name=one.queue)
    made = await aside(one.produce, 2)
    for position in (upto, "0"):
        with pytest.raises(UnknownPositionError):
            await stream.read(token, position)
    with pytest.raises(UnknownPositionError):
        await stream.read(token, "0", upto)
    assert (one.count("leases"), one.count("ready")) == (0, 2)
    (born,) = (await stream.seeds(seeds.upto)).partitions
    assert born.token != token
    assert names((await next_batch(stream, born.token, born.start)).records) == made
    await stream.close()


@pytest.mark.parametrize("position", ["", "x", "-1x1", "1x", "1x0", "01x1", "1x1+", "1x1+0", "1x1+1,", "0x1"])
@driven
async def test_what_is_no_position_is_not_taken_for_one(one: Place, position: str) -> None:
    stream = one.open()
    (born,) = (await stream.seeds("")).partitions
    with pytest.raises(UnknownPositionError):
        await stream.read(born.token, position)
    for token in ("", "0", f"{born.token}.1", "a:b.0"):
        with pytest.raises(UnknownPositionError):
            await stream.read(token, "0")
    await stream.close()


# ---- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"queue": "q"}, "url", "required"),
        ({"url": "http://x"}, "queue", "required"),
        ({"url": "http://x", "queue": "q", "holdfro": "1d"}, "holdfro", "did you mean holdFor"),
        ({"url": "http://x", "queue": "q", "zzz": "1"}, "zzz", "expected one of url"),
        ({"url": "http://x", "queue": "q", "holdFor": "10ms"}, "holdFor", "from 1s to"),
        ({"url": "http://x", "queue": "q", "holdFor": "soon"}, "holdFor", "soon"),
        ({"url": "http://x", "queue": "q", "apiKey": "slw_secret"}, "apiKey", "env:NAME or file:PATH"),
        ({"url": "nonsense", "queue": "q"}, "url", "not a URL"),
        ({"url": "http://x", "queue": "-"}, "queue", "not a queue name"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], field: str, says: str) -> None:
    with pytest.raises(SluicewayError, match=says) as caught:
        from_options("capture", options)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    assert "slw_secret" not in str(caught.value)


@driven
async def test_options_are_found_in_any_case(one: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = await aside(one.produce, 1)
    (tmp_path / "key").write_text("some-key\n")
    options = {"URL": one.served.url, "queue": one.queue, "holdfor": "1h", "apikey": f"file:{tmp_path / 'key'}", "CONSUMER": "me"}
    sent: list[bytes] = []
    exchange = AsyncConnections.exchange

    async def noted(self: AsyncConnections, request: Request) -> Answer:
        sent.extend(re.findall(rb"Authorization: (.*?)\r\n", request.head))
        return await exchange(self, request)

    monkeypatch.setattr(AsyncConnections, "exchange", noted)
    stream = from_options("test", options)
    _, _, records = await first_batch(stream)
    assert names(records) == made
    assert set(sent) == {b"Bearer some-key"}
    await stream.close()
