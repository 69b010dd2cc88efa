"""A queue's last day as instances keep it: across restarts and instances, with a meta store that fails, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.adapters import system
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.cli.history import BLOCKS, WIDTH, figures, lines, spark
from sluiceway.client import Client, QueueHistory
from sluiceway.core.queue.queue_history import KEPT_PAGES, PER_PAGE, PREFIX
from sluiceway.instance import history_recorder as node_history
from sluiceway.instance.history_recorder import SETTLED
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import MAX_COMMIT_KEYS
from sluiceway.model.queue import QueueRecord
from sluiceway.model.queue_minutes import COUNTS, LEVELS, MAX_MINUTES, MINUTE, OLDEST, Minute, Tally
from sluiceway.ports.meta_store import MetaUnknownError, Stamp
from sluiceway.testing.drive import driven
from tests.client.client_faces import Blocking
from tests.cluster.cluster_rig import cluster, put, shares
from tests.instance.instance_rig import eventually, lease, produce, service_on, serving, settle, spec
from tests.server.server_guarded import Guarded, guarded

DATA = Path(__file__).parents[1] / "data"


def this_minute() -> Minute:
    return system.now() // MINUTE


def later_minute() -> Minute:
    """One that every queue of the test was created before. Its time is told, not waited for."""
    return this_minute() + 5


async def end_of(minute: Minute, *histories: node_history.QueueHistory) -> None:
    """All of them note that minute."""
    for each in histories:
        await each.sample((minute + 1) * MINUTE + 50)


async def read(history: node_history.QueueHistory, first: Minute, minutes: int, queue: str = "q") -> Mapping[str, Any]:
    found = await history.read(queue, minutes, (first + minutes) * MINUTE + SETTLED)
    assert found.first == first
    return found.series


async def keys(service: Service) -> list[str]:
    return sorted((await service.meta.read(prefixes=[PREFIX])).entries)


@driven
async def test_minutes_outlive_their_server(tmp_path: Path) -> None:
    start = later_minute()
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        await service.create_queue(spec("idle"))
        history = node_history.QueueHistory(service)
        await produce(service, "q", *"abcde")
        await end_of(start, history)
        taken = await lease(service, "q", 3)
        await end_of(start + 1, history)
        await settle(service, "q", taken)
        await end_of(start + 2, history)
    async with serving(tmp_path) as (service, _):
        later = node_history.QueueHistory(service)
        await produce(service, "q", "f")
        await end_of(start + 4, later)
        series = await read(later, start - 1, 7)
        assert series["ready"] == [None, 5, 2, 2, None, 3, None]
        assert series["total_leased"] == [None, 0, 3, 0, None, 0, None]
        assert series["produced"] == [None, 5, 0, 0, None, 1, None]
        assert series["leased"] == [None, 0, 3, 0, None, 0, None]
        assert series["completed"] == [None, 0, 0, 3, None, 0, None]
        assert series["failures"] == [None, 0, 0, 0, None, 0, None]
        assert [each is None for each in series[OLDEST]] == [True, False, False, False, True, False, True]
        # Of what was always empty there is no key, and yet it is known that it was.
        assert (await read(later, start, 3, "idle"))["ready"] == [0, 0, 0]
        assert service.queue("idle").incarnation not in {key.split("/")[2] for key in await keys(service)}


@driven
async def test_what_happened_in_the_minute_in_which_a_server_stops_is_noted(tmp_path: Path) -> None:
    start = this_minute()
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        history = node_history.QueueHistory(service)
        history.start()
        await produce(service, "q", *"abc")
        await history.stop()
        await history.stop()
        series = await read(history, start, this_minute() - start + 1)
        assert sum(each or 0 for each in series["produced"]) == 3
        # Nobody can say what there was at the end of that minute.
        assert series["ready"][-1] is None


@driven
async def test_by_itself_it_looks_when_a_minute_has_ended(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        history = node_history.QueueHistory(service)
        # For this thread a minute is about to end.
        ahead = MINUTE - 100 - system.now() % MINUTE
        system.move_ahead(ahead)
        try:
            minute = this_minute()
            history.start()
            while not await keys(service):  # noqa: ASYNC110 - what is waited for has no event to await
                await asyncio.sleep(0.01)
            await history.stop()
        finally:
            system.move_ahead(-ahead)
        # On a slow machine the next one is about to end.
        series = await read(history, minute, 2)
        assert next(each for each in series["ready"] if each is not None) == 1
        assert sum(each or 0 for each in series["produced"]) == 1


@driven
async def test_a_queue_has_the_sum_over_the_instances_wherever_its_partitions_go(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 4))
        await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
        histories = [node_history.QueueHistory(each) for each in (a, b)]
        start = later_minute()
        for number in range(4):
            await put(a, "q", number, *"xy")
        await end_of(start, *histories)
        await put(b, "q", 0, "x")
        await end_of(start + 1, *histories)
        # What is written to a partition counts where it is written, also in the minute in which it moves.
        for number in range(4):
            await put(a, "q", number, "z")
        await b.hand_over()
        await histories[1].finish((start + 2) * MINUTE + 10_000)
        await made.leave("b")
        await eventually(lambda: len(shares(a, "q")) == 4)
        await put(a, "q", 0, "w")
        await end_of(start + 2, histories[0])
        await end_of(start + 3, histories[0])
        series = await read(histories[0], start, 4)
        assert series["ready"] == [8, 9, 14, 14]
        assert series["produced"] == [8, 1, 5, 0]
        assert all(each >= 0 for column in series.values() for each in column if each is not None)


@driven
async def test_what_the_meta_store_does_not_take_it_takes_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(tmp_path, "a") as (made, (a,)):
        await a.create_queue(spec("q"))
        await eventually(lambda: shares(a, "q") == [0])
        start = later_minute()
        history = node_history.QueueHistory(a)
        away = True

        async def refuse(puts: Mapping[str, bytes]) -> None:
            if away and any(key.startswith(PREFIX) for key in puts):
                raise MetaUnknownError("the meta store cannot be reached")

        made.metas["a"].on_commit = refuse
        caplog.set_level(logging.INFO, node_history.__name__)
        for minute in range(3):
            await produce(a, "q", "x")
            await end_of(start + minute, history)
        assert not await keys(a)
        away = False
        await end_of(start + 3, history)
        await end_of(start + 4, history)
        assert (await read(history, start, 5))["produced"] == [1, 1, 1, 0, 0]
        assert (await read(history, start, 5))["ready"] == [1, 2, 3, 3, 3]
        told = [record.getMessage() for record in caplog.records if record.name == node_history.__name__]
        assert told == [
            "the queues' history was not stored, will retry: the meta store cannot be reached",
            "the queues' history is stored again",
        ]
        made.metas["a"].cut()
        with pytest.raises(SluicewayError) as refusal:
            await read(history, start, 5)
        assert refusal.value.code == "unavailable"
        made.metas["a"].heal()


@driven
async def test_a_new_queue_of_the_same_name_has_no_history(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        history = node_history.QueueHistory(service)
        await service.create_queue(spec("q"))
        await produce(service, "q", "x")
        await end_of(this_minute(), history)
        await service.delete_queue("q", True)
        with pytest.raises(SluicewayError) as refusal:
            await read(history, this_minute(), 1)
        assert refusal.value.code == "queue_not_found"
        await end_of(this_minute(), history)
        await service.create_queue(spec("q"))
        created = service.queue("q").created_at // MINUTE
        await end_of(created + 1, history)
        series = await read(history, created - 3, 5)
        assert (series["ready"][:3], series["ready"][4]) == ([None] * 3, 0)
        assert sum(each or 0 for each in series["produced"]) == 0


@driven
async def test_what_is_older_than_a_day_goes_whoever_wrote_it(tmp_path: Path) -> None:
    start = (later_minute() // PER_PAGE + 1) * PER_PAGE
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "x")
        await end_of(start, node_history.QueueHistory(service))
        first = await keys(service)
        later = node_history.QueueHistory(service)
        # As long as somebody may ask for it.
        now = (start + MAX_MINUTES + PER_PAGE) * MINUTE - 1
        await later.sample(now)
        assert (await later.read("q", MAX_MINUTES, now)).series["ready"][0] is None
        assert (await later.read("q", MAX_MINUTES, (start + MAX_MINUTES) * MINUTE + SETTLED)).series["ready"][0] == 1
        assert set(first) < set(await keys(service))
        await end_of(start + (KEPT_PAGES + 1) * PER_PAGE, later)
        assert not set(first) & set(await keys(service))
        assert len(await keys(service)) == 4


@driven
async def test_what_an_older_version_wrote_has_no_history_until_now(tmp_path: Path) -> None:
    archive = max(path for path in DATA.glob("layout-*-sqlite.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    service = service_on(tmp_path, SqlitePartitionStore(tmp_path / "partitions"))
    await service.start()
    try:
        history = node_history.QueueHistory(service)
        start = later_minute()
        series = await read(history, start - MAX_MINUTES, MAX_MINUTES)
        assert all(each is None for column in series.values() for each in column)
        await end_of(start + 1, history)
        series = await read(history, start, 2)
        # What it counted before is not something that happened in this minute.
        assert series["ready"][0] is None
        assert series["ready"][1] == sum(each.ready for each in service.stats("q").partitions) > 0
        assert (series["produced"], series["leased"]) == ([None, 0], [None, 0])
    finally:
        await service.stop()


class Many:
    """More queues than a commit has keys, and a meta store of which the commits are counted."""

    def __init__(self, queues: int) -> None:
        self.meta = Counting()
        self._queues = [QueueRecord(f"q{n}", f"i{n:07}", 0, 0, ()) for n in range(queues)]

    def queues(self) -> list[QueueRecord]:
        return self._queues

    def tally(self, queue_name: str) -> Tally:
        if queue_name == "q7":
            raise SluicewayError("queue_not_found", "it was deleted in between")
        return Tally((1, 2, 3), 5, tuple(range(len(COUNTS))))

    async def look_up(self, queue_name: str) -> QueueRecord:
        return next(each for each in self._queues if each.queue_name == queue_name)


class Counting(MemoryMetaStore):
    def __init__(self) -> None:
        super().__init__()
        self.commits: list[int] = []

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        self.commits.append(len(puts or ()))
        return await super().commit(checks, unchanged, puts, deletes, hint=hint)


@driven
async def test_many_queues_share_a_few_commits() -> None:
    many = Many(MAX_COMMIT_KEYS + 200)
    history = node_history.QueueHistory(many)
    await end_of(29_000_000, history)
    await end_of(29_000_001, history)
    assert many.meta.commits == [MAX_COMMIT_KEYS, 200, 1]
    assert (await read(history, 29_000_000, 2, "q1199"))["ready"] == [1, 1]
    assert (await read(history, 29_000_000, 2, "q7"))["ready"] == [0, 0]


# ---- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        yield served


def test_the_call_answers_with_a_number_for_each_minute(server: Guarded) -> None:
    caller = server.client("manage:*", "read:orders-*")
    for name in ("orders-1", "secret"):
        assert caller.post("/v1/queues.create", json={"queue_name": name}).status_code == 200
    before = datetime.now(UTC)
    answer = caller.post("/v1/queue.history", json={"queue_name": "orders-1"}).json()
    assert (answer["queue_name"], answer["every"]) == ("orders-1", "1m")
    begin = datetime.fromisoformat(answer["from"])
    assert (begin.second, begin.microsecond) == (0, 0)
    assert timedelta(minutes=60) <= before - begin <= timedelta(minutes=62)
    assert set(answer["series"]) == {*LEVELS, OLDEST, *COUNTS}
    assert answer["series"]["ready"][:-1] == [None] * 59
    for minutes, status in ((1, 200), (1_440, 200), (0, 400), (1_441, 400), ("60", 400)):
        found = caller.post("/v1/queue.history", json={"queue_name": "orders-1", "minutes": minutes})
        assert found.status_code == status, found.text
        if status == 200:
            assert {len(column) for column in found.json()["series"].values()} == {minutes}
        else:
            assert found.json()["field"] == "minutes", found.text
    assert caller.post("/v1/queue.history", json={"queue_name": "secret"}).json()["code"] == "forbidden"
    assert caller.post("/v1/queue.history", json={"queue_name": "orders-2"}).json()["code"] == "queue_not_found"


@pytest.mark.parametrize("face", [Client, Blocking])
def test_clients_read_it(server: Guarded, face: Any) -> None:
    text = server.key("manage:*", "read:*")
    with face(server.url, api_key=text) as client:
        client.create_queue(face.__name__)
        found = client.history(face.__name__, minutes=5)
        assert isinstance(found, QueueHistory)
        assert (found.queue_name, found.every, len(found.series["ready"])) == (face.__name__, "1m", 5)
        assert found.first_at.tzinfo is not None
        assert len(client.history(face.__name__).series["completed"]) == 60


# ---- as the command shows it ----------------------------------------------------------------------------------------


def test_a_line_has_gaps_where_nothing_is_known() -> None:
    assert spark([0, 1, None, 4, 7], summed=True) == "▁▂ ▅█"
    assert spark([None, None], summed=False) == "  "
    assert spark([0, 0, 0], summed=True) == "▁▁▁"
    assert spark([], summed=True) == ""


def test_a_long_line_has_several_minutes_in_a_block() -> None:
    minutes = [*[1] * 60, *[2] * 60]
    assert spark(minutes, summed=True) == "▄" * 30 + "█" * 30
    assert spark([0, 7, *[0] * 118], summed=False) == "█" + "▁" * 59
    for length in range(1, MAX_MINUTES):
        assert len(spark([1] * length, summed=False)) <= WIDTH
    # The newest block is whole, and as high as the others.
    assert spark([3] * 121, summed=True)[1:] == BLOCKS[-1] * 40


def test_tables_show_what_there_was() -> None:
    series = {name: [0] * 12 for name in (*LEVELS, OLDEST, *COUNTS)} | {"ready": [None, *range(1_000, 1_011)], OLDEST: [None, *[90] * 11]}
    text = json.dumps({"queue_name": "q", "every": "1m", "from": "2026-01-31T08:50:00.000Z", "series": series})
    found = msgspec.json.decode(text, type=QueueHistory)
    assert list(lines(found).columns) == ["", "08:50 to 09:02 UTC", "last", "most"]
    assert list(lines(found).rows) == [
        ("ready", " " + spark(range(1_000, 1_011), summed=False), "1,010", "1,010"),
        ("oldest", " " + BLOCKS[-1] * 11, "1m30s", "1m30s"),
        ("produced", BLOCKS[0] * 12, "0", "0"),
        ("completed", BLOCKS[0] * 12, "0", "0"),
    ]
    assert list(figures(found).columns) == ["minute", "ready", "oldest", "produced", "completed"]
    shown = list(figures(found).rows)
    assert (len(shown), shown[0], shown[-1]) == (10, ("09:01", "1,010", "1m30s", "0", "0"), ("08:52", "1,001", "1m30s", "0", "0"))
