"""Power cuts under load: what an instance synced survives, and any part of the rest. With control groups that must lose."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from aftermath import Aftermath, aftermath
from ledger import name_of, payload_of
from power import PowerDisk, powered

from node_rig import PATIENCE, produce, rows, serving, settle, spec
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.model.requests import DONE, Fate, Lease, Produce, ProduceKey
from sluiceway.node.service import Service

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
        payloads = [payload.decode() for batch in leased.batches for payload in batch.column("payload").to_pylist()]
        names = [name_of(payload) or "torn" for payload in payloads]
        verb, fate = chance.choice((("completed", DONE), ("completed", DONE), ("killed", Fate("dead")), ("retried", Fate("retry"))))
        self.diary.append(Entry(verb, names, False))
        settled = await settle(service, "q", leased, fate)
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
