"""The instance on several backends: where partitions lie, what a hung or absent backend holds up, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import backend as backends_module
from sluiceway.local.backend import NOT_CONFIGURED
from sluiceway.model.backends import MemoryBackend, SqliteBackend
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Lease, Peek, Produce, QueueSpec
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import (
    PATIENCE,
    Store,
    down,
    eventually,
    fine,
    forget_rows,
    lease,
    payloads,
    produce,
    rows,
    serving,
    serving_on,
    settle,
    spec,
    total,
)
from tests.storage.test_sqlite_faults import Disk

QUICK = SqliteBackend(write_timeout=2_000)
PATIENT = SqliteBackend(write_timeout=600_000)


class Hung:
    """A hook that does not answer until it is told to."""

    def __init__(self) -> None:
        self.calls = 0
        self.under_way = 0
        self.most = 0
        self.answers = asyncio.Event()

    async def __call__(self, _: PartitionRef) -> None:
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.answers.wait()
        self.under_way -= 1


@contextlib.contextmanager
def hanging(store: Store) -> Iterator[Hung]:
    """Everything hangs until the block ends, and an opening is soon given up on."""
    hung = Hung()
    store.on_open = store.on_apply = store.on_read = hung
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends_module, "OPEN_TIMEOUT", 20)
            yield hung
    finally:
        store.on_open = store.on_apply = store.on_read = fine
        hung.answers.set()


async def code(work: asyncio.Future[Any]) -> str:
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(SluicewayError) as refused:
            await work
    return refused.value.code


# ---- placement ------------------------------------------------------------------------------------------------


@driven
async def test_partitions_lie_where_affinity_says_and_stay_there(tmp_path: Path) -> None:
    a, b = SqliteBackend(), SqliteBackend(partition_affinity=0.5)
    async with serving_on(tmp_path, a=a, b=b) as (service, _):
        record = await service.create_queue(spec("q", 6))
        places = [each.backend for each in record.partitions]
        assert places == ["a", "b", "a", "a", "b", "a"]
        assert [each.backend for each in service.stats("q").partitions] == places
        for _ in range(6):
            await produce(service, "q", "x")
        for name, count in (("a", 4), ("b", 2)):
            assert len([*(tmp_path / name).glob(f"{record.incarnation}-*.sqlite")]) == count
    async with serving_on(tmp_path, a=SqliteBackend(partition_affinity=0), b=b) as (service, _):
        assert total(service, "q") == 6, "a change of affinity moves nothing"
        assert {each.backend for each in (await service.create_queue(spec("new", 3))).partitions} == {"b"}


def test_backends_that_cannot_stand_together_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(SluicewayError, match="above 0"):
        Service(tmp_path / "data", {"a": SqliteBackend(partition_affinity=0)})
    with pytest.raises(SluicewayError, match="memory"):
        Service(tmp_path / "data", {"a": SqliteBackend(), "m": MemoryBackend()})
    assert not (tmp_path / "data").exists()


@driven
async def test_with_a_memory_backend_nothing_outlives_the_process(tmp_path: Path) -> None:
    for _ in range(2):
        service = Service(tmp_path, {"m": MemoryBackend()})
        await service.start()
        await service.create_queue(spec("q", 2))
        await produce(service, "q", "a")
        assert payloads((await lease(service, "q")).batches) == ["a"]
        await service.stop()


@driven
async def test_a_backend_that_is_not_configured_is_named_and_holds_up_nothing_else(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=SqliteBackend(), b=SqliteBackend()) as (service, _):
        await service.create_queue(spec("both", 2))
        record = await service.create_queue(spec("doomed", 2))
        await produce(service, "both", "on a")
        await produce(service, "both", "on b")
        await produce(service, "doomed", "x")
        await produce(service, "doomed", "x")
    left = [*(tmp_path / "b").glob(f"{record.incarnation}-*.sqlite")]
    async with serving_on(tmp_path, a=SqliteBackend()) as (service, _):
        assert service.problems() == [f"backend b, which holds 2 partitions, is not served: {NOT_CONFIGURED}"]
        assert payloads((await lease(service, "both", 10, most=2)).batches) == ["on a"]
        assert {(await produce(service, "both", "more")).partition for _ in range(3)} == {0}
        await service.delete_queue("doomed", True)
        assert service.problems() == [f"backend b, which holds 1 partitions, is not served: {NOT_CONFIGURED}"]
        assert left[0].exists()
    async with serving_on(tmp_path, a=SqliteBackend(), b=SqliteBackend()) as (service, _):
        assert service.problems() == []
        assert not left[0].exists(), "what was deleted while its backend was away goes at the next start"
        assert "on b" in payloads((await lease(service, "both", 10, most=2)).batches)


@driven
async def test_a_deletion_that_an_earlier_version_left_half_done_is_finished(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        record = await service.create_queue(spec("q", 2))
        store.on_drop = down
        await service.delete_queue("q", False)
        await service.meta.commit(puts={f"dropping/{record.incarnation}": b"2"})
    async with serving(tmp_path) as (service, _):
        assert [*(tmp_path / "partitions").glob(f"{record.incarnation}-*")] == []
        assert not (await service.meta.read(prefixes=["dropping/"])).entries


@driven
async def test_an_empty_directory_is_not_taken_for_the_one_that_held_the_partitions(tmp_path: Path) -> None:
    """As of a disk that is not mounted: its items would be lost, and their ids given to others."""
    disk, gone = tmp_path / "disk", tmp_path / "gone"

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Service]:
        service = Service(tmp_path / "data", {"default": SqliteBackend(path=str(disk))})
        await service.start()
        yield service
        await service.stop()

    async with running() as service:
        await service.create_queue(spec("q", 2))
        await produce(service, "q", "a")
    disk.rename(gone)
    async with running() as service:
        assert "Is its disk mounted?" in service.problems()[0]
        assert not disk.exists()
        with pytest.raises(SluicewayError, match="no partition took the request"):
            await produce(service, "q", "b", timeout=50)
    gone.rename(disk)
    async with running() as service:
        assert service.problems() == []
        assert payloads((await lease(service, "q")).batches) == ["a"]


# ---- time limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("whose", ["the backend's", "the queue's"])
@driven
async def test_a_commit_that_takes_too_long_is_settled_by_opening_anew(tmp_path: Path, lands: bool, whose: str) -> None:
    backend = QUICK if whose == "the backend's" else PATIENT
    async with serving_on(tmp_path, a=backend) as (service, stores):
        await service.create_queue(QueueSpec("q", write_timeout=500 if whose == "the queue's" else None))
        hung = Hung()

        async def never(ref: PartitionRef) -> Outcome | None:
            await hung(ref)
            return Outcome.REFUSED

        if lands:
            stores["a"].on_applied = hung
        else:
            stores["a"].on_apply = never
        work = asyncio.ensure_future(produce(service, "q", "a"))
        await eventually(lambda: hung.calls == 1)
        stores["a"].on_applied = stores["a"].on_apply = fine
        assert (await work).items == 1
        hung.answers.set()
        assert payloads((await lease(service, "q")).batches) == ["a"]
        (stats,) = service.stats("q").partitions
        assert stats.produced == 1
        assert stats.failures >= 1
        assert service.problems() == []


@driven
async def test_openings_of_a_hung_partition_end_and_do_not_pile_up(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK) as (service, stores):
        await service.create_queue(spec("q", 2))
        with hanging(stores["a"]):
            refused = asyncio.ensure_future(produce(service, "q", "a", timeout=300))
            openings = len(stores["a"].fences)
            await eventually(lambda: service._drivers["q"].queue.executors[0].opening >= 4)
            assert len(stores["a"].fences) <= openings + 2, "one of each partition at most"
            assert await code(refused) == "outcome_unknown"
            assert service.problems()
        await produce(service, "q", "b")
        await eventually(lambda: service.problems() == [])


@driven
async def test_a_read_that_hangs_is_answered_for(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    async with serving_on(tmp_path, a=QUICK) as (service, stores):
        stores["a"].on_read = Hung()
        assert await code(asyncio.ensure_future(lease(service, "q"))) == "unavailable"
        assert await code(asyncio.ensure_future(produce_and_peek(service))) == "unavailable"


async def produce_and_peek(service: Service) -> object:
    await produce(service, "q", "b")
    forget_rows(service)
    return await service.peek("q", Peek(1, partition=0))


@pytest.fixture
def disk() -> Iterator[Disk]:
    before = apsw.vfs_names()[0]
    disk = Disk(before)
    apsw.set_default_vfs("faulty")
    yield disk
    apsw.set_default_vfs(before)
    disk.unregister()


@driven
async def test_a_disk_that_stalls_is_waited_for_no_longer_than_that(tmp_path: Path, disk: Disk) -> None:
    """On the real store, whose threads carry the stalled commit to its end: it lands, once."""
    service = Service(tmp_path, {"default": QUICK})
    await service.start()
    record = await service.create_queue(spec("q", 2))
    go_on = threading.Event()

    def stall(_call: str, path: Path) -> None:
        if path.name.startswith(f"{record.incarnation}-0."):
            go_on.wait(PATIENCE)

    disk.hook = stall
    first = asyncio.ensure_future(produce(service, "q", "a", timeout=60_000))
    await eventually(lambda: bool(service.problems()))
    assert not first.done()
    assert (await produce(service, "q", "b")).partition == 1
    assert payloads((await lease(service, "q")).batches) == ["b"]
    go_on.set()
    assert (await first).partition == 0
    await eventually(lambda: service.problems() == [])
    assert payloads((await lease(service, "q")).batches) == ["a"]
    assert [each.produced for each in service.stats("q").partitions] == [1, 1]
    await service.stop()


# ---- a backend that fails as a whole --------------------------------------------------------------------------


@driven
async def test_partitions_that_fail_together_are_one_problem_and_one_probe(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK) as (service, stores):
        for name in ("p", "q"):
            await service.create_queue(spec(name, 10))
        store, openings = stores["a"], Hung()

        async def unknown(_: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN

        store.on_open, store.on_apply = openings, unknown
        work = [service.produce(name, Produce(rows(f"{n}"), 60_000, partition=n)) for name in ("p", "q") for n in range(10)]
        waiting = [asyncio.ensure_future(each) for each in work]
        executors = [executor for name in ("p", "q") for executor in service._drivers[name].queue.executors.values()]
        await eventually(lambda: sum(executor.failed_in_a_row >= 3 for executor in executors) >= 18)
        assert service.problems() == ["backend a does not answer: a commit had an unknown outcome"]
        assert openings.calls in (1, 2), "the probe, and perhaps one that was asked for before it was known"
        store.on_open = store.on_apply = fine
        openings.answers.set()
        await asyncio.gather(*waiting)
        assert service.problems() == []
        assert total(service, "p") == total(service, "q") == 10


@driven
async def test_once_it_answers_all_partitions_of_all_queues_are_opened_at_once(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK) as (service, _):
        for name in ("p", "q"):
            await service.create_queue(spec(name, 20))
    stores = {"a": Store(tmp_path / "a")}
    stores["a"].on_open = down
    service = Service(tmp_path, {"a": QUICK}, open_store=lambda name, *_: stores[name])
    await service.start()
    assert service.problems() == ["backend a does not answer: the disk is gone"]
    executors = [executor for name in ("p", "q") for executor in service._drivers[name].queue.executors.values()]
    await eventually(lambda: all(executor.state is ExecutorState.FAILED and executor.failed_in_a_row > 1 for executor in executors))
    # So long that only being told can be why they are opened again.
    for executor in executors:
        executor.failed_in_a_row, executor.retry_at = 10, executor.retry_at + 3_600_000
    stores["a"].on_open = fine
    await eventually(lambda: service.problems() == [])
    await service.stop()


@driven
async def test_a_store_that_cannot_be_closed_keeps_nothing_else_from_being_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    has_failed = asyncio.Event()

    async def begin() -> Service:
        stores = {name: Store(tmp_path / name) for name in ("bad", "good")}
        service = Service(tmp_path, dict.fromkeys(stores, SqliteBackend()), open_store=lambda name, *_: stores[name])
        await service.start()
        for name, store in stores.items():
            monkeypatch.setattr(store, "close", functools.partial(close, name, store.close))
        return service

    async def close(name: str, end: Callable[[], Awaitable[None]]) -> None:
        if name == "good":
            await has_failed.wait()
        await end()
        closed.append(name)
        if name == "bad":
            has_failed.set()
            raise OSError(5, "Input/output error")

    service = await begin()
    await service.create_queue(spec("q"))
    with pytest.raises(OSError, match="Input/output"):
        await service.stop()
    assert closed == ["bad", "good"]
    # The directory is free, and the meta store's file is closed.
    with pytest.raises(RuntimeError, match="after shutdown"):
        await service.meta.read([])
    monkeypatch.undo()
    again = await begin()
    assert [record.queue_name for record in again.queues()] == ["q"]
    with pytest.raises(OSError, match="Input/output"):
        await again.stop()


@driven
async def test_a_hung_backend_that_answers_late_is_served_again(tmp_path: Path) -> None:
    """The opening that was given up on is the first to hear of it."""
    async with serving_on(tmp_path, a=QUICK) as (service, stores):
        await service.create_queue(spec("q", 3))
        with hanging(stores["a"]) as hung:
            work = [asyncio.ensure_future(produce(service, "q", "x", timeout=60_000)) for _ in range(3)]
            await eventually(lambda: hung.calls >= 4 and bool(service.problems()))
        await asyncio.gather(*work)
        await eventually(lambda: service.problems() == [])
        assert total(service, "q") == 3


@driven
async def test_while_one_backend_is_down_produces_land_on_the_other(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK, b=QUICK) as (service, stores):
        record = await service.create_queue(spec("q", 4))
        on_b = {each.partition for each in record.partitions if each.backend == "b"}
        with hanging(stores["b"]):
            # Two find out, and can be answered only when it is known what became of them.
            work = [service.produce("q", Produce(rows(f"first {n}"), 60_000, partition=n)) for n in range(4)]
            first = [asyncio.ensure_future(each) for each in work]
            # Before the second of its partitions has failed, the problem is the first one's.
            await eventually(lambda: [problem.startswith("backend b does not answer") for problem in service.problems()] == [True])
            landed = [await produce(service, "q", f"then {n}") for n in range(10)]
            assert not {each.partition for each in landed} & on_b
            assert sum(each.done() for each in first) == 2
        await asyncio.gather(*first)
        got = await lease(service, "q", most=4)
        assert sorted(payloads(got.batches)) == sorted([f"first {n}" for n in range(4)] + [f"then {n}" for n in range(10)])
        assert (await settle(service, "q", got)).completed == 14
        await eventually(lambda: service.problems() == [])


@driven
async def test_a_keyed_lease_is_served_while_one_backend_is_away(tmp_path: Path) -> None:
    def keyed(key: str, timeout: int = 0) -> Lease:
        return Lease("c", 100, timeout, 600_000, 4, key)

    async with serving_on(tmp_path, a=QUICK, b=QUICK) as (service, stores):
        record = await service.create_queue(spec("q", 4))
        on_b = {each.partition for each in record.partitions if each.backend == "b"}
        await asyncio.gather(*(service.produce("q", Produce(rows(f"old {n}"), 60_000, partition=n)) for n in range(4)))
        old = await service.lease("q", keyed("old"))
        assert sorted(payloads(old.batches)) == [f"old {n}" for n in range(4)]
        await asyncio.gather(*(service.produce("q", Produce(rows(f"new {n}"), 60_000, partition=n)) for n in range(4)))
        with hanging(stores["b"]):
            work = [asyncio.ensure_future(service.produce("q", Produce(rows("late"), 60_000, partition=n))) for n in on_b]
            await eventually(lambda: [problem.startswith("backend b does not answer") for problem in service.problems()] == [True])
            new = await service.lease("q", keyed("new"))
            assert {lease.partition for lease in new.leases} == {0, 1, 2, 3} - on_b
            # Found again by partition: the first answer began where the client's round was.
            assert sorted((await service.lease("q", keyed("new"))).leases) == sorted(new.leases)
            assert await code(asyncio.ensure_future(service.lease("q", keyed("old", 50)))) == "unavailable", "not without what lies there"
        await asyncio.gather(*work)
        await eventually(lambda: service.problems() == [])
        assert sorted((await service.lease("q", keyed("old"))).leases) == sorted(old.leases)
        rest = await service.lease("q", keyed("rest"))
        assert {lease.partition for lease in rest.leases} == on_b


@driven
async def test_a_commit_to_a_backend_that_is_known_to_be_down_is_not_tried(tmp_path: Path) -> None:
    async with serving_on(tmp_path, a=QUICK) as (service, stores):
        await service.create_queue(spec("p", 2))
        await service.create_queue(spec("q"))
        tried: list[PartitionRef] = []

        async def unknown(ref: PartitionRef) -> Outcome | None:
            tried.append(ref)
            return Outcome.UNKNOWN

        stores["a"].on_apply, stores["a"].on_open = unknown, down
        waiting = [asyncio.ensure_future(produce(service, "p", "x", timeout=60_000)) for _ in range(2)]
        await eventually(lambda: bool(service.problems()))
        refused = asyncio.ensure_future(produce(service, "q", "y", timeout=100))
        assert await code(refused) == "unavailable", "surely not written, so not unknown"
        assert len(tried) == 2
        stores["a"].on_apply, stores["a"].on_open = fine, fine
        await asyncio.gather(*waiting)
