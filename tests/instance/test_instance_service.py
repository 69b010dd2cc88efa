"""The instance on a real directory: what outlives it, what is deleted for good, and who may own it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from sluiceway.adapters import system
from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.core.queue.tickets import Ticket
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import queries
from sluiceway.local.blob_cache import ENTRY_BYTES
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.local.row_fetcher import RowFetcher
from sluiceway.model.items import batch_from_rows, stored_schema
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Disposition, Extend, Lease, Peek, Produce, ProduceKey, Selection, Settle
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.meta_store import MetaUnknownError, Stamp
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from sluiceway.wire.outcome_selection import group_items
from tests.instance.instance_rig import (
    PATIENCE,
    Store,
    down,
    eventually,
    fine,
    lease,
    payloads,
    produce,
    service_on,
    serving,
    settle,
    spec,
    total,
)


def counts(service: Service) -> list[PartitionStats]:
    """Without what is of this process."""
    return [msgspec.structs.replace(each, commit_time_ms=0.0) for each in service.stats("q").partitions]


def files(directory: Path, incarnation: str) -> list[str]:
    return sorted(path.name for path in (directory / "partitions").glob(f"{incarnation}-*"))


# ---- restart --------------------------------------------------------------------------------------------------


@driven
async def test_a_restart_keeps_everything(tmp_path: Path) -> None:
    later = system.now() + 3_600_000
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        record = await service.create_queue(spec("q", 2, max_attempts=3, dead_queue="dead"))
        first = await produce(service, "q", "a", "b", "c", key=ProduceKey("once"))
        held = await lease(service, "q", 1)
        await produce(service, "q", "d", "e", "f", "g")
        await service.produce("q", Produce(batch_from_rows([{"payload": b"later", "enqueue_at": later}]), 1_000))
        before = counts(service)
    async with serving(tmp_path) as (service, _):
        assert service.queue("q") == record
        assert [queue.queue_name for queue in service.queues()] == ["dead", "q"]
        assert counts(service) == before
        again = await produce(service, "q", "a", "b", "c", key=ProduceKey("once"))
        assert again == first._replace(deduplicated=True)
        assert (await settle(service, "q", held)).completed == 1
        rest = await lease(service, "q", 100, most=2)
        assert sorted(payloads(rest.batches)) == ["b", "c", "d", "e", "f", "g"]
        assert service.problems() == []


@driven
async def test_consumers_of_many_and_of_single_items_in_step_take_evenly_of_all_partitions(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 4))
        for _ in range(4):
            await produce(service, "q", *["x"] * 500)
        ready = {each.partition: each.ready for each in service.stats("q").partitions}
        assert ready == dict.fromkeys(range(4), 500)
        seen: dict[str, list[int]] = {client: [] for client in "abcd"}
        for _ in range(4):
            for client, want in zip(seen, (100, 1, 1, 1), strict=True):
                leased = await service.lease("q", Lease(client, want, 0))
                seen[client].append(leased.leases[0].partition)
        assert [sorted(partitions) for partitions in seen.values()] == [[0, 1, 2, 3]] * 4
        assert {each.ready for each in service.stats("q").partitions} == {500 - 103}


@driven
async def test_each_start_takes_a_higher_grant(tmp_path: Path) -> None:
    grants = []
    for _ in range(3):
        async with serving(tmp_path) as (service, store):
            if not service.queues():
                await service.create_queue(spec("q"))
            grants.append(max(fence.grant for fence in store.fences))
    assert grants == [1, 2, 3]


@driven
async def test_what_arrives_while_others_are_read_shares_their_turn(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q", 1))
        commits: list[PartitionRef] = []

        async def noted(ref: PartitionRef) -> Outcome | None:
            commits.append(ref)
            return None

        store.on_apply = noted
        first = asyncio.create_task(produce(service, "q", "a"))
        await asyncio.sleep(0)
        await asyncio.gather(produce(service, "q", "b"), first)
        assert len(commits) == 1


@driven
async def test_a_second_process_is_refused_clearly_and_the_first_goes_on(tmp_path: Path) -> None:
    start = f"""
import asyncio, pathlib
from sluiceway.instance.service import Service
asyncio.run(Service(pathlib.Path({str(tmp_path)!r})).start())
"""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        process = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", start], capture_output=True, text=True)
        assert process.returncode != 0
        assert "DirectoryInUseError" in process.stderr
        assert str(tmp_path) in process.stderr
        with pytest.raises(DirectoryInUseError):
            await Service(tmp_path).start()
        assert (await produce(service, "q", "a")).items == 1


# ---- create and delete ----------------------------------------------------------------------------------------


@driven
async def test_a_queue_of_the_same_name_is_another_queue(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        old = await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        held = await lease(service, "q")
        await service.delete_queue("q", True)
        assert files(tmp_path, old.incarnation) == []
        new = await service.create_queue(spec("q"))
        await produce(service, "q", "b")
        taken = await lease(service, "q")
        assert payloads(taken.batches) == ["b"]
        name = f"{old.incarnation}.0.{in_columns(held.batches[0]).column('offset')[0]}"
        grouped = group_items([name], [DONE], new, lambda n: f"ids[{n}]")
        answer = await service.settle("q", Settle(grouped.selections, 1_000, foreign=grouped.foreign))
        assert (answer.completed, answer.ignored) == (0, [(name, "unknown")])
        extended = await service.extend("q", Extend([], 1_000, foreign=[f"{old.incarnation}.0.L1"]))
        assert extended.ignored == [(f"{old.incarnation}.0.L1", "unknown")]
        assert total(service, "q") == 1


@driven
async def test_a_deletion_that_was_cut_off_is_finished_at_the_next_start(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        record = await service.create_queue(spec("q", 3))
        store.on_drop = down
        await service.delete_queue("q", False)
        with pytest.raises(SluicewayError, match="no queue 'q'"):
            service.queue("q")
        assert files(tmp_path, record.incarnation)
    async with serving(tmp_path) as (service, _):
        assert service.queues() == []
        assert files(tmp_path, record.incarnation) == []
        assert not (await service.meta.read(prefixes=["dropping/"])).entries


@driven
async def test_data_that_cannot_be_removed_does_not_keep_the_service_from_starting(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await service.create_queue(spec("other"))
        store.on_drop = down
        await service.delete_queue("q", False)
    store = Store(tmp_path / "partitions")
    store.on_drop = down
    service = service_on(tmp_path, store)
    await service.start()
    assert [queue.queue_name for queue in service.queues()] == ["other"]
    await service.stop()


@driven
async def test_a_queue_with_items_is_deleted_only_by_force(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a", "b")
        with pytest.raises(SluicewayError, match="2 items") as refused:
            await service.delete_queue("q", False)
        assert refused.value.code == "queue_not_empty"
        assert (await produce(service, "q", "c")).items == 1, "it goes on as if nothing had been asked"
        await service.delete_queue("q", True)
        assert service.queues() == []


@driven
async def test_a_queue_whose_items_cannot_be_counted_is_deleted_only_by_force(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "precious")
    store = Store(tmp_path / "partitions")
    store.on_open = down
    service = service_on(tmp_path, store)
    await service.start()
    with pytest.raises(SluicewayError, match="partition 0") as refused:
        await service.delete_queue("q", False)
    assert refused.value.code == "queue_not_empty"
    await service.stop()
    async with serving(tmp_path) as (service, _):
        assert payloads((await lease(service, "q")).batches) == ["precious"]


@driven
async def test_what_is_produced_while_a_queue_is_deleted_is_not_acknowledged(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        deletion = asyncio.create_task(service.delete_queue("q", False))
        answers = []
        while not deletion.done():
            try:
                answers.append(await produce(service, "q", "x", timeout=1_000))
            except SluicewayError as error:
                assert error.code in ("unavailable", "queue_not_found")
            await asyncio.sleep(0)
        if deletion.exception() is None:
            assert not answers, "acknowledged and deleted without force"
        else:
            assert total(service, "q") == len(answers)


@driven
async def test_a_dead_queue_in_use_is_not_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        with pytest.raises(SluicewayError) as refused:
            await service.delete_queue("dead", True)
        assert refused.value.code == "queue_in_use"
        await service.delete_queue("q", False)
        await service.delete_queue("dead", False)


@pytest.mark.parametrize(
    ("name", "dead_queue", "code"),
    [("q", None, "queue_exists"), ("new", "new", "invalid_request"), ("new", "none", "invalid_request")],
)
@driven
async def test_queues_that_are_not_created(tmp_path: Path, name: str, dead_queue: str | None, code: str) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        with pytest.raises(SluicewayError) as refused:
            await service.create_queue(spec(name, dead_queue=dead_queue))
        assert refused.value.code == code
        assert len(service.queues()) == 2


@driven
async def test_an_incarnation_is_never_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(["aaaaaaaa", "aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "bbbbbbbb", "aaaaaaaa", "cccccccc"])
    monkeypatch.setattr(system, "new_incarnation", lambda: next(given))
    async with serving(tmp_path) as (service, store):
        assert (await service.create_queue(spec("one"))).incarnation == "aaaaaaaa"
        assert (await service.create_queue(spec("two"))).incarnation == "bbbbbbbb"
        store.on_drop = down
        await service.delete_queue("two", False)
        assert (await service.create_queue(spec("three"))).incarnation == "cccccccc", "the data of two is still there"


# ---- looking and waiting --------------------------------------------------------------------------------------


@driven
@pytest.mark.parametrize("readable", [True, False])
async def test_a_queue_whose_creation_ended_unknown_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    """Recorded and not served, it could be neither used nor deleted until the next start."""
    async with serving(tmp_path) as (service, _):
        commit, read, refresh = service.meta.commit, service.meta.read, service.meta.refresh

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            await commit(*arguments, **fields)
            if not readable:
                monkeypatch.setattr(service.meta, "read", down)
                monkeypatch.setattr(service.meta, "refresh", down)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.create_queue(spec("q"))
        assert unknown.value.code == "outcome_unknown"
        monkeypatch.setattr(service.meta, "commit", commit)
        monkeypatch.setattr(service.meta, "read", read)
        monkeypatch.setattr(service.meta, "refresh", refresh)
        assert bool(service.queues()) == readable
        with pytest.raises(SluicewayError) as again:
            await service.create_queue(spec("q"))
        assert again.value.code == "queue_exists"
        await produce(service, "q", "a")
        assert payloads((await lease(service, "q")).batches) == ["a"]


@pytest.mark.parametrize("key", [None, "k"])
@driven
async def test_a_lease_of_a_partition_that_is_not_to_wait_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    waits: list[int] = []
    submit = QueueDriver.submit

    def noted(self: QueueDriver, request: Any, payload: bool = True) -> Ticket:
        waits.append(request.request_timeout)
        return submit(self, request, payload)

    monkeypatch.setattr(QueueDriver, "submit", noted)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        for timeout in (0, 20):
            assert not (await service.lease("q", Lease("c", 1, timeout, lease_key=key, partition=1))).leases
        assert waits[0] == 0
        assert 0 < waits[1] <= 20


@driven
async def test_a_peek_is_no_larger_than_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backlog may be larger than the memory."""
    monkeypatch.setattr(queries, "MAX_LEASE_BYTES", 2_500)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        for _ in range(4):
            await produce(service, "q", "x" * 500, "y" * 500)
        assert len(payloads(await service.peek("q", Peek(10)))) == 4
        assert len(payloads(await service.peek("q", Peek(10, partition=1)))) == 4
        assert len(payloads(await service.peek("q", Peek(1)))) == 1
        leased = await lease(service, "q", 10, most=2)
        looked = [await service.peek("q", Peek(10, info.partition, info.number)) for info in leased.leases]
        assert sum(len(payloads(batches)) for batches in looked) == 8, "what is leased is shown whole: Spark counts on it"


@driven
async def test_a_small_item_does_not_keep_its_large_body(tmp_path: Path) -> None:
    body = pa.RecordBatch.from_arrays([pa.array([b"x" * 1_000_000, b"small"])], schema=stored_schema(0))
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await service.produce("q", Produce(body.slice(1), 1_000))
        kept = [in_columns(batch) for batch, _ in service._cache._batches.values()]
        assert [batch.column("payload").to_pylist() for batch in kept] == [[b"small"]]
        assert sum(batch.get_total_buffer_size() for batch in kept) < 1_000
        assert service._cache.size >= ENTRY_BYTES


@driven
async def test_peek(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        for payload in "abcd":
            await produce(service, "q", payload)
        assert sorted(payloads(await service.peek("q", Peek(10)))) == ["a", "b", "c", "d"]
        assert payloads(await service.peek("q", Peek(1, partition=1))) == ["b"]
        assert len(payloads(await service.peek("q", Peek(3)))) == 3
        leased = await lease(service, "q", 2)
        info = leased.leases[0]
        looked = await service.peek("q", Peek(10, info.partition, info.number))
        assert payloads(looked) == payloads(leased.batches)
        assert payloads(await service.peek("q", Peek(10, info.partition, info.number, start=1))) == payloads(leased.batches)[1:]
        assert looked[0].column("lease").to_pylist()[0] == info.number
        assert len(payloads(await service.peek("q", Peek(10)))) == 2, "what is leased does not come next"
        await service.settle("q", Settle({info.partition: [Selection(DONE, lease=info.number)]}, 1_000))
        with pytest.raises(SluicewayError) as gone:
            await service.peek("q", Peek(10, info.partition, info.number))
        assert gone.value.code == "lease_not_found"
        assert service.stats("q").partitions[info.partition].ready == 0


@driven
async def test_a_cancelled_waiting_lease_takes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        waiting = asyncio.create_task(lease(service, "q", timeout=30_000))
        await eventually(lambda: service.stats("q").lease_waiting == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert service.stats("q").lease_waiting == 0
        await produce(service, "q", "a")
        assert payloads((await lease(service, "q")).batches) == ["a"]


@driven
async def test_a_waiting_lease_is_woken_by_a_produce_and_by_a_due_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        waiting = asyncio.create_task(lease(service, "q", timeout=30_000))
        await eventually(lambda: service.stats("q").lease_waiting == 1)
        await produce(service, "q", "a")
        assert payloads((await waiting).batches) == ["a"]
        due = system.now() + 60
        await service.produce("q", Produce(batch_from_rows([{"payload": b"due", "enqueue_at": due}]), 1_000))
        assert payloads((await lease(service, "q", timeout=30_000)).batches) == ["due"]
        assert system.now() >= due


@driven
async def test_an_expired_lease_is_served_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        first = await lease(service, "q", lease_timeout=50)
        second = await lease(service, "q", timeout=30_000)
        assert payloads(second.batches) == ["a"]
        assert in_columns(second.batches[0]).column("attempts").to_pylist() == [2]
        late = await settle(service, "q", first)
        assert (late.completed, [reason for _, reason in late.ignored]) == (0, ["expired"])
        assert (await settle(service, "q", second)).completed == 1


@driven
async def test_leases_without_items_are_not_read(tmp_path: Path) -> None:
    async def never(_: PartitionRef) -> None:
        raise AssertionError("nobody asked for the items")

    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    async with serving(tmp_path) as (service, store):
        store.on_read = never
        leased = await service.lease("q", Lease("c", 1), payload=False)
        assert (len(leased.leases), list(leased.batches)) == (1, [])


@driven
async def test_leased_items_are_read_while_their_lease_is_written(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
    async with serving(tmp_path) as (service, store):
        begun, written = asyncio.Event(), asyncio.Event()
        reads = 0

        async def waits_for_the_read(_: PartitionRef) -> Outcome | None:
            async with asyncio.timeout(PATIENCE):
                await begun.wait()
            written.set()
            return None

        async def waits_for_the_commit(_: PartitionRef) -> None:
            nonlocal reads
            reads += 1
            begun.set()
            async with asyncio.timeout(PATIENCE):
                await written.wait()

        store.on_apply, store.on_read = waits_for_the_read, waits_for_the_commit
        leased = await lease(service, "q")
        store.on_apply = fine
        assert [bytes(row) for row in in_columns(leased.batches[0]).column("payload").to_pylist()] == [b"a"]
        assert reads == 1


@driven
async def test_no_such_queue(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        for call in (produce(service, "q", "a"), lease(service, "q"), service.peek("q", Peek(1)), service.delete_queue("q", True)):
            with pytest.raises(SluicewayError) as missing:
                await call
            assert missing.value.code == "queue_not_found"


@driven
async def test_dispositions(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        await settle(service, "q", await lease(service, "q"), Disposition("retry"))
        await settle(service, "q", await lease(service, "q"), Disposition("dead"))
        assert total(service, "q") == 0
        (stats,) = service.stats("q").partitions
        assert (stats.produced, stats.leased, stats.retried, stats.dead) == (1, 2, 1, 1)


@driven
async def test_items_that_cannot_be_handed_out_at_once_do_not_end_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RowFetcher, grants: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(RowFetcher, "at_once", broken)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a", "b")
        first, second = await asyncio.gather(lease(service, "q", 1), lease(service, "q", 1))
        assert sorted(payloads(first.batches) + payloads(second.batches)) == ["a", "b"]
        assert (await produce(service, "q", "c")).items == 1
