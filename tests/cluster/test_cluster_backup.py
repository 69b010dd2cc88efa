"""Backups of a cluster: of one moment at all instances, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.instance import backups
from sluiceway.instance.restoration import restore
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.backends import PostgresBackend
from sluiceway.model.changes import PartitionRef
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import BackupStep, PeerRequest, ReadBackup
from sluiceway.model.requests import Disposition, Redrive
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import MORTAL, Gate, cluster, put, shares
from tests.instance.instance_rig import eventually, lease, payloads, settle, spec, total
from tests.instance.test_backups import Saved, read, taken

BACKENDS = {"default": PostgresBackend(url="postgresql://elsewhere")}
DEAD = Disposition("dead", reason="broken")


@contextlib.asynccontextmanager
async def restored(saved: Saved, data: Path) -> AsyncIterator[Service]:
    """A single server on what was a cluster's."""
    disk = MemoryDisk()
    await restore(saved, data, BACKENDS, lambda _: None, open_store=lambda *_: MemoryPartitionStore(disk))
    service = Service(data, BACKENDS, open_store=lambda *_: MemoryPartitionStore(disk))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@driven
async def test_a_cluster_is_restored_into_a_server(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, _)):
        await a.create_queue(spec("q", 6))
        for number in range(6):
            await put(b, "q", number, f"{number}")
        leased = await lease(made.owner("q", 0), "q", 1)
        saved = await taken(b)
        await put(a, "q", 0, "later")
        assert len(saved.partitions) == 6
        # All of it once more: nothing is held back.
        assert len((await taken(a)).partitions) == 6
    async with restored(saved, tmp_path / "new") as service:
        assert total(service, "q") == 6
        assert (await settle(service, "q", leased)).completed == 1
        rest = payloads((await lease(service, "q", most=6)).batches)
        assert sorted([*rest, *payloads(leased.batches)]) == list("012345")


@driven
async def test_any_instance_can_be_asked_for_a_part(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b", "c") as (_, (a, b, c)):
        await a.create_queue(spec("q", 6))
        for number in range(6):
            await put(a, "q", number, f"{number}")
        backup = await b.backups.begin(SYSTEM)
        saved = await read(c, backup)
        assert [len(blobs) for blobs in saved.blob_data.values()] == [1] * 6
        await c.backups.end_anywhere(backup.id)
        await eventually(lambda: all(each.backups._share.has("") for each in (a, b, c)))
        with pytest.raises(SluicewayError) as caught:
            await c.backups.records(backup.id, None, 0)
        assert caught.value.code == "snapshot_gone"


@driven
async def test_no_instance_commits_before_all_are_frozen(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        number = shares(b, "q")[0]
        held = Gate(only=lambda _, request: isinstance(request, BackupStep) and request.step == "freeze")
        made.wires.on_ask = held
        taking = asyncio.create_task(a.backups.begin(SYSTEM))
        await held.reached.wait()
        began: list[PartitionRef] = []

        async def note(ref: PartitionRef) -> Outcome | None:
            began.append(ref)
            return None

        made.stores["b"].on_apply = note
        producing = asyncio.create_task(put(b, "q", number, "held back"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not began
        held.open()
        saved = await read(a, await taking)
        await producing
        assert began
    async with restored(saved, tmp_path / "new") as service:
        assert total(service, "q") == 0


@driven
async def test_items_between_instances_are_there_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, services):
        await services[0].create_queue(spec("dead", 2))
        await services[0].create_queue(spec("q", 4, dead_queue="dead"))
        for number in range(40):
            await put(services[0], "q", number % 4, f"{number}")
        saved: list[Saved] = []

        async def bury(service: Service) -> None:
            while len(saved) < 8:
                await settle(service, "q", await lease(service, "q", 3, most=2), DEAD)
                await asyncio.sleep(0)

        async def dig_up(service: Service) -> None:
            while len(saved) < 8:
                await service.redrive("dead", Redrive(10_000, 5))
                await asyncio.sleep(0)

        async def back_up() -> None:
            while len(saved) < 8:
                saved.append(await taken(services[len(saved) % 2]))

        await asyncio.gather(*map(bury, services), dig_up(services[0]), back_up())
    for number, each in enumerate(saved):
        async with restored(each, tmp_path / f"new-{number}") as service:
            await eventually(partial(_all_arrived, service))
            assert total(service, "q") + total(service, "dead") == 40


def _all_arrived(service: Service) -> bool:
    return not any(part.transferring for name in ("q", "dead") for part in service.stats(name).partitions)


@pytest.mark.parametrize("step", ["record", "hold", "freeze"])
def test_an_instance_that_does_not_answer_refuses_it(tmp_path: Path, step: str) -> None:
    @driven
    async def story() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))

            async def fail(_: str, request: PeerRequest) -> None:
                if isinstance(request, BackupStep) and request.step == step:
                    raise SluicewayError("unavailable", "broken on the way")

            made.wires.on_ask = fail
            with pytest.raises(SluicewayError, match="broken on the way"):
                await a.backups.begin(SYSTEM)
            made.wires.on_ask = made.wires.on_answer
            # Neither keeps anything, nor holds commits back.
            for number in range(2):
                await put(b, "q", number, "x")
            assert len((await taken(a)).partitions) == 2

    story()


@driven
async def test_an_instance_whose_hold_ran_out_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        monkeypatch.setattr(backups, "PATIENCE", 50)

        async def late(_: str, request: PeerRequest) -> None:
            if isinstance(request, BackupStep) and request.step == "freeze":
                await put(b, "q", shares(b, "q")[0], "in between")

        made.wires.on_ask = late
        with pytest.raises(SluicewayError, match="did not answer in time"):
            await a.backups.begin(SYSTEM)


@driven
async def test_a_partition_that_has_moved_refuses_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (made, (a, _)):
        await a.create_queue(spec("q", 4))
        made.die("b")
        with pytest.raises(SluicewayError) as caught:
            await a.backups.begin(SYSTEM)
        assert caught.value.code == "unavailable"
        await eventually(lambda: len(shares(a, "q")) == 4)
        assert len((await taken(a)).partitions) == 4


@driven
async def test_parts_elsewhere_are_kept_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "BACKUP_IDLE", 400)
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        await put(a, "q", 0, "x")
        backup = await a.backups.begin(SYSTEM)
        asked = len(made.wires.asked)
        # Only the meta store is read, which is at a.
        async with asyncio.timeout(60):
            while sum(isinstance(each, BackupStep) for _, each in made.wires.asked[asked:]) < 8:
                await a.backups.records(backup.id, None, 0)
                await asyncio.sleep(0.01)
        assert b.backups._share.has(backup.id)
        assert not any(isinstance(each, ReadBackup) for _, each in made.wires.asked)
        await a.backups.end(backup.id)
        await eventually(lambda: b.backups._share.has(""))


@driven
async def test_who_has_read_its_records_waits_for_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them may take many times as long as a backup is kept that nobody reads."""
    monkeypatch.setattr(backups, "BACKUP_IDLE", 1_000)
    async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, c)):
        await a.create_queue(spec("q", 3))
        for number in range(3):
            await put(a, "q", number, "x")

        async def slow(address: str, request: PeerRequest) -> None:
            if address == made.name(c) and isinstance(request, BackupStep) and request.step == "record":
                # Twice BACKUP_IDLE, or until one has given up.
                while sum(isinstance(each, BackupStep) and each.step == "keep" for _, each in made.wires.asked) < 16:
                    if any(each.backups._share.has("") for each in (a, b)):
                        break
                    await asyncio.sleep(0.01)

        made.wires.on_ask = slow
        await eventually(lambda: len(a._router.owners(a.queue("q"))) == 3)
        assert len((await taken(a)).partitions) == 3
