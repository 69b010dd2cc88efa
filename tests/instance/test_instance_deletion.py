"""A queue that others send to, or that cannot be looked into, is deleted only by force; and a deletion that ended unknown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cluster.queue_changes import DROPPING
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import backend as backend_module
from sluiceway.local.deletion_guard import DeletionGuard
from sluiceway.model.requests import Disposition, QueuePatch
from sluiceway.ports.meta_store import MetaUnknownError, Stamp
from sluiceway.ports.partition_store import DamagedError, PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import Store, eventually, fine, lease, produce, service_on, serving, settle, spec, total


async def on_the_way(service: Service, then: str | None) -> None:
    """An item of q is on its way to d1, which does not take it; the next to die goes to that queue."""
    for name in ("d1", "d2"):
        await service.create_queue(spec(name))
    await service.create_queue(spec("q", dead_queue="d1"))
    await service.pause("d1", ["produce"], True)
    await produce(service, "q", "a")
    await settle(service, "q", await lease(service, "q"), Disposition("dead"))
    await service.update_queue("q", QueuePatch({"dead_queue": then}))


async def refused_to_delete(service: Service, queue: str) -> tuple[str, str | None]:
    with pytest.raises(SluicewayError) as refused:
        await service.delete_queue(queue, False)
    return refused.value.code, refused.value.field


@driven
async def test_a_queue_that_items_are_on_their_way_to_is_not_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await on_the_way(service, None)
        assert (total(service, "d1"), total(service, "d2")) == (0, 0)
        assert await refused_to_delete(service, "d1") == ("queue_in_use", "force")
        await service.pause("d1", ["produce"], False)
        await eventually(lambda: total(service, "q") == 0)
        assert await refused_to_delete(service, "d1") == ("queue_not_empty", "force")
        await settle(service, "d1", await lease(service, "d1"))
        await service.delete_queue("d1", False)


@driven
async def test_with_force_a_queue_that_items_are_on_their_way_to_is_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await on_the_way(service, None)
        former = service.queue("d1").incarnation

        async def fail(ref: PartitionRef) -> None:
            if ref.incarnation == former:
                raise StoreUnavailableError("the disk is gone")

        # Whether it has them, it does not say.
        store.on_open = store.on_apply = fail
        await service.update_queue("q", QueuePatch({"dead_queue": "d2"}))
        await service.delete_queue("d1", True)
        await eventually(lambda: (total(service, "q"), total(service, "d2")) == (0, 1))


@driven
async def test_while_a_partition_of_another_queue_is_not_open_nothing_is_deleted_without_force(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("empty"))
        closed = (await service.create_queue(spec("q"))).incarnation

        async def fail(ref: PartitionRef) -> None:
            if ref.incarnation == closed:
                raise StoreUnavailableError("the disk is gone")

        store.on_open = store.on_apply = fail
        waiting = asyncio.ensure_future(produce(service, "q", "a", timeout=60_000))
        await eventually(lambda: service.stats("q").partitions[0].state != "available")
        assert service.stats("empty").partitions[0].state == "available"
        assert await refused_to_delete(service, "empty") == ("queue_in_use", "force")
        await service.delete_queue("empty", True)
        assert [each.queue_name for each in service.queues()] == ["q"]
        store.on_open = store.on_apply = fine
        await waiting


@pytest.mark.parametrize("landed", [True, False])
@driven
async def test_a_deletion_that_ended_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool) -> None:
    """What is still recorded serves again; what may be gone takes nothing."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit = service.meta.commit

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            if landed:
                await commit(*arguments, **fields)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.delete_queue("q", False)
        assert unknown.value.code == "outcome_unknown"
        monkeypatch.setattr(service.meta, "commit", commit)
        if landed:
            with pytest.raises(SluicewayError) as refused:
                await produce(service, "q", "a")
            assert refused.value.code == "queue_not_found"
        else:
            assert (await produce(service, "q", "a")).items == 1
    async with serving(tmp_path) as (service, _):
        assert [each.queue_name for each in service.queues()] == ([] if landed else ["q"])


@driven
async def test_a_queue_is_deleted_although_the_end_of_its_data_is_not_confirmed(tmp_path: Path) -> None:
    """The deletion was answered as unknown, so that its dead queue stayed."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit = service.meta.commit

        async def cut_off(*args: Any, **named: Any) -> Stamp:
            if any(key.startswith(DROPPING) for key in named.get("deletes", ())):
                raise MetaUnknownError("cut off")
            return await commit(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service.meta, "commit", cut_off)
            await service.delete_queue("q", False)
        assert not service.queues()
        assert (await service.meta.read(prefixes=[DROPPING])).entries
    async with serving(tmp_path) as (service, _):
        assert not (await service.meta.read(prefixes=[DROPPING])).entries


@driven
async def test_an_error_that_nobody_expects_keeps_no_queue_closed(caplog: pytest.LogCaptureFixture) -> None:
    """After a deletion of which nothing was heard, the queue took nothing until a restart."""
    answers = iter([ValueError("something new"), SluicewayError("unavailable", "cut off")])
    stays = asyncio.Event()

    async def may_reopen() -> bool:
        for error in answers:
            raise error
        stays.set()
        return True

    guard = DeletionGuard(may_reopen)
    guard.close_for(1)
    await stays.wait()
    await eventually(lambda: not guard.closed)
    assert "something new" in caplog.text


@driven
async def test_damage_in_what_is_removed_keeps_no_server_from_starting(tmp_path: Path) -> None:
    """Whoever has a damaged queue deletes it."""
    async with serving(tmp_path) as (service, store):
        damaged = (await service.create_queue(spec("q", 2))).incarnation
        await service.create_queue(spec("other"))
        removed: list[int] = []

        async def damage(ref: PartitionRef) -> None:
            if ref == (damaged, 0):
                raise DamagedError("the server found damage")
            removed.append(ref.partition)

        store.on_drop = damage
        await service.delete_queue("q", True)
        assert removed == [1]
    store = Store(tmp_path / "partitions")
    store.on_drop = damage
    service = service_on(tmp_path, store)
    await service.start()
    assert [each.queue_name for each in service.queues()] == ["other"]
    await service.stop()
    async with serving(tmp_path) as (service, _):
        assert not await service._changes.to_drop()


@driven
async def test_a_backend_that_is_away_is_asked_once_for_all_that_is_removed(tmp_path: Path) -> None:
    """Each answer may take as long as its time limit, and a start waits for it."""
    asked: list[PartitionRef] = []

    async def away(ref: PartitionRef) -> None:
        asked.append(ref)
        raise StoreUnavailableError("no answer")

    async with serving(tmp_path) as (service, store):
        store.on_drop = away
        for name in ("a", "b"):
            await service.create_queue(spec(name, 3))
            await service.delete_queue(name, True)
        assert len(asked) == 2
    store = Store(tmp_path / "partitions")
    store.on_drop = away
    service = service_on(tmp_path, store)
    await service.start()
    assert len(asked) == 3
    await service.stop()
    async with serving(tmp_path) as (service, _):
        assert not await service._changes.to_drop()


@driven
async def test_other_queues_are_changed_while_data_are_removed(tmp_path: Path) -> None:
    """Which takes minutes for a large queue, and does not end on a disk that hangs."""
    async with serving(tmp_path) as (service, store):
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def hangs(ref: PartitionRef) -> None:
            begun.set()
            await goes_on.wait()

        store.on_drop = hangs
        await service.create_queue(spec("large"))
        deleting = asyncio.create_task(service.delete_queue("large", True))
        await begun.wait()
        await service.create_queue(spec("large"))
        await service.create_queue(spec("other"))
        await service.update_queue("other", QueuePatch({"max_attempts": 3}))
        assert not deleting.done()
        goes_on.set()
        await deleting
        assert not await service._changes.to_drop()
        assert [each.queue_name for each in service.queues()] == ["large", "other"]


@driven
async def test_the_removal_of_data_ends_on_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, store):
        goes_on = asyncio.Event()

        async def hangs(ref: PartitionRef) -> None:
            await goes_on.wait()

        store.on_drop = hangs
        await service.create_queue(spec("q", 3))
        monkeypatch.setattr(backend_module, "DROP_TIMEOUT", 20)
        await service.delete_queue("q", True)
        assert [len(each) for each in (await service._changes.to_drop()).values()] == [3]
