"""SQLite partitions on a disk that fails, fills up, stalls or loses power: a shim below SQLite plays the disk."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from sluiceway.adapters.storage.partition_file import CHECKPOINT_BYTES
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef, Snapshot, StoreUnavailableError
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, OTHER, REF, after, cycle
from tests.server.server_process import PATIENCE

Hook = Callable[[str, Path], None]


def sound(_call: str, _path: Path) -> None:
    """The hook of a disk that works."""


class Disk(apsw.VFS):
    """The real disk, with a hook before each write and sync, and a copy of what each file held when it was last synced."""

    def __init__(self, base: str) -> None:
        super().__init__("faulty", base)
        self.base = base
        self.hook: Hook = sound
        self.synced: dict[Path, bytes] = {}

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return DiskFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.synced.pop(Path(filename), None)


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(disk.base, name, flags)
        self._disk = disk
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "")

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.hook("write", self._path)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._disk.hook("sync", self._path)
        super().xSync(flags)
        self._disk.synced[self._path] = self._path.read_bytes()


@pytest.fixture
def disk() -> Iterator[Disk]:
    before = apsw.vfs_names()[0]
    disk = Disk(before)
    apsw.set_default_vfs("faulty")
    yield disk
    apsw.set_default_vfs(before)
    disk.unregister()


def fail_at(nth: int, call: str, code: int) -> Hook:
    """From the nth such call on, every one fails with that code of SQLite's."""
    count = itertools.count(1)

    def hook(called: str, _path: Path) -> None:
        if called == call and next(count) >= nth:
            raise apsw.exception_for(code)

    return hook


async def crashed(directory: Path, copy: Path) -> Snapshot:
    """What the partition holds if the process dies now: the state of a copy of its files."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    store = SqlitePartitionStore(copy)
    try:
        return await store.browse(REF)
    finally:
        await store.close()


@pytest.mark.parametrize("code", [apsw.SQLITE_FULL, apsw.SQLITE_READONLY, apsw.SQLITE_IOERR_WRITE])
@driven
async def test_a_failing_write_is_never_done_and_the_store_goes_on(tmp_path: Path, disk: Disk, code: int) -> None:
    directory = tmp_path / "partitions"
    store = SqlitePartitionStore(directory)
    await store.open(REF, FENCE)
    txn, fence, outcomes = 1, FENCE, []
    await store.apply(REF, cycle(txn), fence)
    for nth in itertools.count(1):
        disk.hook = fail_at(nth, "write", code)
        outcome = await store.apply(REF, cycle(txn + 1), fence)
        disk.hook = sound
        outcomes.append(outcome)
        if outcome is Outcome.DONE:
            break
        in_ruins = await crashed(directory, tmp_path / "copy")
        assert in_ruins == after(txn) or (outcome is Outcome.UNKNOWN and in_ruins == after(txn + 1))
        if outcome is Outcome.UNKNOWN:
            fence = Fence(1, 1, fence.opening + 1)
            assert await store.open(REF, fence) == after(txn)
            assert await crashed(directory, tmp_path / "copy") == after(txn)
        else:
            assert await store.browse(REF) == after(txn)
            txn += 1
            assert await store.apply(REF, cycle(txn), fence) is Outcome.DONE
    assert len(outcomes) > 3
    assert code != apsw.SQLITE_FULL or Outcome.UNKNOWN not in outcomes
    assert await store.browse(REF) == after(txn + 1)
    await store.close()
    assert await crashed(directory, tmp_path / "copy") == after(txn + 1)


@driven
async def test_a_failing_sync_is_unknown_until_a_higher_fence_opens(tmp_path: Path, disk: Disk) -> None:
    directory = tmp_path / "partitions"
    store = SqlitePartitionStore(directory)
    await store.open(REF, FENCE)
    await store.apply(REF, cycle(1), FENCE)
    disk.hook = fail_at(1, "sync", apsw.SQLITE_IOERR_FSYNC)
    assert await store.apply(REF, cycle(2), FENCE) is Outcome.UNKNOWN
    disk.hook = sound
    # REFUSED would have been a lie: had the process died here, the turn would have landed.
    assert await crashed(directory, tmp_path / "copy") == after(2)
    disk.hook = fail_at(1, "sync", apsw.SQLITE_IOERR_FSYNC)
    with pytest.raises(StoreUnavailableError):
        await store.open(REF, Fence(1, 1, 2))
    disk.hook = sound
    assert await store.open(REF, Fence(1, 1, 2)) == after(1)
    assert await crashed(directory, tmp_path / "copy") == after(1)
    assert await store.apply(REF, cycle(2, "b"), Fence(1, 1, 2)) is Outcome.DONE
    assert (await crashed(directory, tmp_path / "copy")).txn == 2
    await store.close()


@driven
async def test_done_means_synced(tmp_path: Path, disk: Disk) -> None:
    store = SqlitePartitionStore(tmp_path / "partitions")
    await store.open(REF, FENCE)
    padding = {100: bytes(CHECKPOINT_BYTES // 3)}
    for txn in range(1, 13):
        changes = cycle(txn)
        changes.blobs |= {number + txn: blob for number, blob in padding.items()}
        assert await store.apply(REF, changes, FENCE) is Outcome.DONE
        left = tmp_path / f"after-power-cut-{txn}"
        left.mkdir()
        for path, content in list(disk.synced.items()):
            (left / path.name).write_bytes(content)
        survivor = SqlitePartitionStore(left)
        assert await survivor.browse(REF) == after(txn)
        assert await survivor.read(REF, [txn]) == {txn: b"blob %d" % txn}
        await survivor.close()
        # The survivor went through the same shim.
        disk.synced = {path: content for path, content in disk.synced.items() if path.parent != left}
    await store.close()


@driven
async def test_a_failing_checkpoint_stops_nothing_and_is_made_up_for(tmp_path: Path, disk: Disk) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    file = tmp_path / "k7f3q2ma-0.sqlite"

    def hook(_call: str, path: Path) -> None:
        if path == file:
            raise apsw.exception_for(apsw.SQLITE_FULL)

    disk.hook = hook
    blob = bytes(CHECKPOINT_BYTES)
    for txn in (1, 2, 3):
        assert await store.apply(REF, Changes(txn, b"", blobs={txn: blob}), FENCE) is Outcome.DONE
    assert file.stat().st_size < CHECKPOINT_BYTES
    disk.hook = sound
    assert await store.apply(REF, Changes(4, b""), FENCE) is Outcome.DONE
    assert await store.read(REF, [1, 2, 3]) == dict.fromkeys((1, 2, 3), blob)
    assert file.stat().st_size > 3 * CHECKPOINT_BYTES
    await store.close()


@driven
async def test_the_answer_does_not_wait_for_the_checkpoint(tmp_path: Path, disk: Disk) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    begun, go_on = threading.Event(), threading.Event()

    def hook(_call: str, path: Path) -> None:
        if path.suffix == ".sqlite":
            begun.set()
            go_on.wait(2 * PATIENCE)

    disk.hook = hook
    try:
        async with asyncio.timeout(PATIENCE):
            assert await store.apply(REF, Changes(1, b"", blobs={1: bytes(CHECKPOINT_BYTES)}), FENCE) is Outcome.DONE
            assert await asyncio.to_thread(begun.wait, PATIENCE)
    finally:
        go_on.set()
    assert await store.apply(REF, Changes(2, b""), FENCE) is Outcome.DONE
    await store.close()


@driven
async def test_a_stalled_commit_holds_up_its_partition_alone(tmp_path: Path, disk: Disk) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    await store.open(OTHER, FENCE)
    go_on = threading.Event()

    def hook(_call: str, path: Path) -> None:
        if path.name.startswith("k7f3q2ma-0."):
            go_on.wait(2 * PATIENCE)

    disk.hook = hook
    stalled = asyncio.create_task(store.apply(REF, cycle(1), FENCE))
    waiting = asyncio.create_task(store.browse(REF))
    try:
        async with asyncio.timeout(PATIENCE):
            for txn in range(1, 6):
                assert await store.apply(OTHER, cycle(txn), FENCE) is Outcome.DONE
        assert not stalled.done()
        assert not waiting.done()
    finally:
        go_on.set()
    assert await stalled is Outcome.DONE
    assert await waiting == after(1)
    await store.close()


@driven
async def test_a_partition_that_cannot_be_created_is_unavailable(tmp_path: Path, disk: Disk) -> None:
    store = SqlitePartitionStore(tmp_path)
    for nth in range(1, 4):
        disk.hook = fail_at(nth, "write", apsw.SQLITE_FULL)
        with pytest.raises(StoreUnavailableError):
            await store.open(PartitionRef("k7f3q2ma", nth), FENCE)
        assert await store.apply(PartitionRef("k7f3q2ma", nth), cycle(1), FENCE) is Outcome.REFUSED
        disk.hook = sound
        assert await store.open(PartitionRef("k7f3q2ma", nth), FENCE) == Snapshot(0, None, {})
        assert await store.apply(PartitionRef("k7f3q2ma", nth), cycle(1), FENCE) is Outcome.DONE
    await store.close()
