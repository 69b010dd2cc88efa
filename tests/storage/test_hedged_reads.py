"""Reads that are slow are sent twice, and those that fail are repeated; writes are neither."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluiceway.adapters.storage import hedged_reads
from sluiceway.adapters.storage.hedged_reads import PAUSES, HedgedReads
from sluiceway.ports.object_store import Object, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.storage.test_bucket_faults import Seam, fails


class Stuck(Seam):
    """A bucket whose first reads are never answered."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.left = reads
        self.given_up = 0

    async def get(self, name: str) -> Object | None:
        if self.left:
            self.left -= 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
        return await super().get(name)


@driven
async def test_a_read_that_is_late_is_sent_again_and_the_first_is_given_up() -> None:
    stuck = Stuck(1)
    await stuck.create("name", b"data")
    found = await HedgedReads(stuck).get("name")
    assert found is not None
    assert found.data == b"data"
    await asyncio.sleep(0)
    assert stuck.given_up == 1


@driven
async def test_a_quick_read_is_sent_once() -> None:
    seam = Seam()
    await seam.create("name", b"data")
    reads = HedgedReads(seam)
    assert await reads.get_range("name", 1, 2) == b"at"
    assert await reads.list("", "") == ["name"]
    assert await reads.get("nothing") is None
    assert [call for call, _ in seam.calls] == ["create", "get", "list", "get"]


@driven
async def test_a_read_that_fails_is_repeated_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedged_reads, "PAUSES", (0.0,) * len(PAUSES))
    seam = Seam()
    await seam.create("name", b"data")
    reads = HedgedReads(seam)
    seam.before = fails(len(PAUSES), "get", "name", StoreUnavailableError("slow down"))
    assert await reads.get_range("name", 0, 4) == b"data"
    seam.before = fails(len(PAUSES), "list", "", StoreUnavailableError("slow down"))
    assert await reads.sizes("") == {"name": 4}
    seam.before = fails(1_000, "get", "name", StoreUnavailableError("slow down"))
    with pytest.raises(StoreUnavailableError):
        await reads.get("name")


@driven
async def test_a_write_goes_through_once() -> None:
    seam = Seam()
    reads: Any = HedgedReads(seam)
    seam.before = fails(1_000, "create", "name", UnknownWriteError("no answer"))
    with pytest.raises(UnknownWriteError):
        await reads.create("name", b"data")
    assert len(seam.calls) == 1
