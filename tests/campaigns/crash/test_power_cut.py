"""Power cuts under load: what an instance synced survives, and any part of the rest. With control groups that must lose."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import apsw
import pytest

from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.instance.service import Service
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Disposition, Lease, Produce, ProduceKey
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, RecordKind, Snapshot, StoreUnavailableError
from tests.campaigns.crash.aftermath import Aftermath, aftermath
from tests.campaigns.crash.power import PowerDisk, powered
from tests.campaigns.kit.ledger import name_of, payload_of
from tests.instance.instance_rig import PATIENCE, payloads, produce, rows, serving, settle, spec

pytestmark = pytest.mark.crash

CLIENTS = 4
EVERY = 25
"""Changes of a file between two cuts, on the average."""


class Entry(NamedTuple):
    """What was asked for or, with `answered`, said to be done: `produced`, `completed`, `killed`, `retried`."""

    verb: str
    names: list[str]
    answered: bool


class Cut(NamedTuple):
    directory: Path
    answered: int
    """How much of the diary stood there when the power went."""
    asked: int


class Faults(NamedTuple):
    lost: list[str]
    wrong: list[str]


class Run:
    """An instance under load on a disk that notes, again and again, what a power cut would leave."""

    def __init__(self, folder: Path, most_cuts: int, seed: int) -> None:
        self.root = folder / "disk"
        self.root.mkdir()
        self.diary: list[Entry] = []
        self.cuts: list[Cut] = []
        self._copies = folder / "cuts"
        self._most_cuts = most_cuts
        self._random = random.Random(seed)
        self._until_cut = 0
        self._numbers = itertools.count()

    def run(self) -> None:
        with powered(self.root) as disk:
            asyncio.run(self._serve(disk))

    async def _serve(self, disk: PowerDisk) -> None:
        async with serving(self.root / "data") as (service, _):
            await service.create_queue(spec("dead", 2))
            await service.create_queue(spec("q", 3, dead_queue="dead"))
            disk.before_change = lambda: self._count_down(disk)
            async with asyncio.timeout(PATIENCE * 3):
                await asyncio.gather(*(self._client(service, n) for n in range(CLIENTS)))
            disk.before_change = lambda: None

    def _count_down(self, disk: PowerDisk) -> None:
        with disk.mutex:
            self._until_cut -= 1
            if self._until_cut < 0 and len(self.cuts) < self._most_cuts:
                self._until_cut = self._random.randrange(2 * EVERY)
                directory = self._copies / str(len(self.cuts))
                directory.mkdir(parents=True)
                answered = len(self.diary)
                disk.cut(directory, self._random)
                self.cuts.append(Cut(directory, answered, len(self.diary)))

    # -- load -----------------------------------------------------------------------------------

    async def _client(self, service: Service, number: int) -> None:
        chance = random.Random(number)
        while len(self.cuts) < self._most_cuts:
            names = [f"{number}.{next(self._numbers)}.{n}" for n in range(chance.choice((1, 5, 30)))]
            self.diary.append(Entry("produced", names, False))
            key = chance.choice((None, ProduceKey(names[0])))
            await produce(service, "q", *map(payload_of, names), key=key)
            self.diary.append(Entry("produced", names, True))
            await self._consume(service, f"c{number}", chance)

    async def _consume(self, service: Service, client: str, chance: random.Random) -> None:
        leased = await service.lease("q", Lease(client, chance.choice((3, 20)), max_partitions=chance.choice((1, 3))))
        if not leased.leases:
            return
        names = [name_of(payload) or "torn" for payload in payloads(leased.batches)]
        verb, disposition = chance.choice(
            (("completed", DONE), ("completed", DONE), ("killed", Disposition("dead")), ("retried", Disposition("retry")))
        )
        self.diary.append(Entry(verb, names, False))
        settled = await settle(service, "q", leased, disposition)
        assert settled.total == len(names)
        self.diary.append(Entry(verb, names, True))

    # -- judgement ------------------------------------------------------------------------------

    def faults(self, cut: Cut) -> Faults:
        def names(verb: str, *, answered: bool) -> set[str]:
            entries = self.diary[: cut.answered if answered else cut.asked]
            return {name for entry in entries if entry.verb == verb and (entry.answered or not answered) for name in entry.names}

        waiting, dead = (Counter(name_of(payload) or "torn" for payload in part.elements()) for part in self._left(cut))
        there = waiting + dead
        lost = {name for name in names("produced", answered=True) - names("completed", answered=False) if not there[name]}
        lost |= {name for name in names("killed", answered=True) if not dead[name]}
        lost |= {name for name in names("completed", answered=True) if there[name]}
        twice = {name for name, times in there.items() if times > 1}
        unasked = set(there) - names("produced", answered=False)
        return Faults(sorted(lost), sorted(twice | unasked))

    def _left(self, cut: Cut) -> Aftermath:
        return aftermath(cut.directory / "data")


@pytest.mark.parametrize("cuts", [25, pytest.param(150, marks=pytest.mark.slow)])
def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int) -> None:
    # Many checkpoints, since that is when bytes of the database itself are at stake.
    monkeypatch.setattr(partition_file, "CHECKPOINT_BYTES", 64 << 10)
    run = Run(tmp_path, cuts, seed=cuts)
    run.run()
    assert len(run.cuts) == cuts
    for cut in run.cuts:
        assert run.faults(cut) == Faults([], []), cut


@pytest.mark.parametrize("synchronous", ["off", "normal"])
def test_without_syncs_the_same_cuts_lose_what_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str) -> None:
    honest = PartitionFile._set_up

    def set_up(self: PartitionFile) -> None:
        honest(self)
        self._db.pragma("synchronous", synchronous)

    monkeypatch.setattr(PartitionFile, "_set_up", set_up)
    run = Run(tmp_path, 20, seed=2)
    run.run()
    assert any(run.faults(cut).lost for cut in run.cuts)


class LyingRun(Run):
    """The same on a disk that says "synced" and, this `share` of the times, has not. Keeps every state that a partition ever had."""

    def __init__(self, folder: Path, most_cuts: int, share: float) -> None:
        super().__init__(folder, most_cuts, seed=most_cuts)
        self._share = share
        self._states: dict[str, list[Snapshot]] = {}
        self._blobs: dict[str, dict[int, bytes]] = {}
        self._at_cut: list[dict[str, int]] = []
        """Turns of each partition that were answered as done when the power went."""

    def run(self) -> None:
        chance = random.Random(3)
        apply = PartitionFile.apply

        def noted(file: PartitionFile, changes: Changes, fence: Fence) -> Outcome:
            outcome = apply(file, changes, fence)
            assert outcome is Outcome.DONE
            self._note(file._name, changes)
            return outcome

        with powered(self.root) as disk, mock.patch.object(PartitionFile, "apply", noted):
            disk.lies = lambda: chance.random() < self._share
            asyncio.run(self._serve(disk))

    def _note(self, name: str, changes: Changes) -> None:
        states = self._states.setdefault(name, [Snapshot(0, None, {})])
        records = {key: value for key, value in states[-1].records.items() if key not in changes.deletes}
        states.append(Snapshot(changes.txn, changes.header, records | changes.puts))
        self._blobs.setdefault(name, {}).update(changes.blobs)

    def _count_down(self, disk: PowerDisk) -> None:
        with disk.mutex:
            before = len(self.cuts)
            super()._count_down(disk)
            if len(self.cuts) > before:
                self._at_cut.append({name: states[-1].txn for name, states in list(self._states.items())})

    def judge(self) -> Counter[str]:
        """What became of each partition in each cut. Fails if one has a state that it never had, or a blob that was never written."""
        seen: Counter[str] = Counter()
        for cut, done in zip(self.cuts, self._at_cut, strict=True):
            seen.update(self._verdict(cut.directory / "data" / "partitions" / f"{name}.sqlite", name, txn) for name, txn in done.items())
        return seen

    def _verdict(self, path: Path, name: str, txn: int) -> str:
        try:
            with contextlib.closing(PartitionFile(path) if path.exists() else NoFile()) as file:
                found = file.browse()
                assert found == self._states[name][found.txn], f"{path}: never was so"
                for kind, key in found.records:
                    if kind is RecordKind.BLOB:
                        assert file.read([int(key)]) == {int(key): self._blobs[name][int(key)]}, f"{path}: blob {key}"
        except (DamagedError, StoreUnavailableError) as error:
            assert name in str(error)
            return "damaged"
        return "whole" if found.txn >= txn else "older"


class NoFile:
    """Stands for a partition whose file is gone: the same as a new one."""

    def browse(self) -> Snapshot:
        return Snapshot(0, None, {})

    def read(self, blobs: Sequence[int]) -> dict[int, bytes]:
        return {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("cuts", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_a_disk_that_lies_about_syncs_loses_but_nothing_false_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int, share: float
) -> None:
    monkeypatch.setattr(partition_file, "CHECKPOINT_BYTES", 64 << 10)
    run = LyingRun(tmp_path, cuts, share)
    run.run()
    seen = run.judge()
    assert seen["older"], "the disk's lies have cost nothing"
    assert seen["damaged"], "no damage was met, so it may be that none is found"


def test_a_disk_that_does_not_lie_keeps_every_partition_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_file, "CHECKPOINT_BYTES", 64 << 10)
    run = LyingRun(tmp_path, 25, 0.0)
    run.run()
    assert set(run.judge()) == {"whole"}


def test_a_power_cut_while_a_layout_is_brought_up_to_date_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    path, fence = root / "k7f3q2ma-0.sqlite", Fence(1, 1, 1)
    older = len(partition_file.MIGRATIONS)
    cuts = itertools.count()

    def cut() -> None:
        (tmp_path / str(number := next(cuts))).mkdir()
        disk.cut(tmp_path / str(number), random.Random(number))

    with powered(root) as disk:
        file = PartitionFile(path)
        file.open(fence)
        file.apply(Changes(1, b"header", {(RecordKind.LEASE, "7"): b"record"}), fence)
        state = file.browse()
        file.close()
        further = "CREATE TABLE added (number INTEGER); INSERT INTO added VALUES (7);"
        monkeypatch.setattr(partition_file, "MIGRATIONS", (*partition_file.MIGRATIONS, further))
        disk.before_change = cut
        PartitionFile(path).close()
        cut()
    versions = set()
    for number in range(next(cuts)):
        copy = tmp_path / str(number) / path.name
        with contextlib.closing(apsw.Connection(str(copy))) as database:
            versions.add(version := database.pragma("user_version"))
            tables = database.execute("SELECT name FROM sqlite_schema").fetchall()
            assert version == (older + 1 if ("added",) in tables else older)
        with contextlib.closing(PartitionFile(copy)) as file:
            assert file.browse() == state
    assert versions == {older, older + 1}


@pytest.mark.parametrize("step", ["queue", "items"])
def test_a_new_data_directory_survives_from_the_first_answer_on(tmp_path: Path, step: str) -> None:
    root = tmp_path / "disk"
    root.mkdir()

    async def work(disk: PowerDisk) -> None:
        async with serving(root / "new" / "data") as (service, _):
            await service.create_queue(spec("q"))
            if step == "items":
                await service.produce("q", Produce(rows("a"), 10_000))
            for number in range(10):
                disk.cut(tmp_path / str(number), random.Random(number))

    async def look(directory: Path) -> None:
        async with serving(directory) as (service, _):
            assert [record.queue_name for record in service.queues()] == ["q"]
        if step == "items":
            assert (await asyncio.to_thread(aftermath, directory)).waiting == Counter("a")

    with powered(root) as disk:
        asyncio.run(work(disk))
    for number in range(10):
        asyncio.run(look(tmp_path / str(number) / "new" / "data"))
