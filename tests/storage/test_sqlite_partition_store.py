"""What SqlitePartitionStore promises beyond the port: damage is found, a killed process loses nothing, handles are bounded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.partition_file import CHECKPOINT_BYTES, MIGRATIONS
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.model.changes import RecordKey
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, PartitionRef, RecordKind, Snapshot, StoreUnavailableError
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, OTHER, REF, after, cycle
from tests.instance.instance_rig import eventually
from tests.server.server_process import PATIENCE

BLOB = b"blob to be damaged " * 5_000
NEXT = Fence(1, 2, 1)


async def written(directory: Path) -> Path:
    """Two partitions on disk; the file of the first."""
    store = SqlitePartitionStore(directory)
    for ref in (REF, OTHER):
        await store.open(ref, FENCE)
        changes = Changes(1, b"header to be damaged", puts={(RecordKind.LEASE, "7"): b"record to be damaged"}, blobs={1: b"sound", 2: BLOB})
        assert await store.apply(ref, changes, FENCE) is Outcome.DONE
    await store.close()
    return directory / "k7f3q2ma-0.sqlite"


def flip(file: Path, content: bytes) -> None:
    """Cycle one bit over in the middle of the first place that holds `content`."""
    data = bytearray(file.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    file.write_bytes(data)


@driven
async def test_a_damaged_blob_is_named_and_the_rest_is_readable(tmp_path: Path) -> None:
    flip(await written(tmp_path), b"blob to be damaged")
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match="k7f3q2ma-0: blob 2 "):
        await store.read(REF, [1, 2])
    assert await store.read(REF, [1]) == {1: b"sound"}
    assert await store.read(OTHER, [2]) == {2: BLOB}
    await store.close()


@pytest.mark.parametrize(("content", "named"), [(b"record to be damaged", "record lease:7"), (b"header to be damaged", "header")])
@driven
async def test_damaged_small_records_are_found(tmp_path: Path, content: bytes, named: str) -> None:
    flip(await written(tmp_path), content)
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match=f"k7f3q2ma-0: (the )?{named}"):
        await store.open(REF, NEXT)
    with pytest.raises(DamagedError):
        await store.browse(REF)
    # The fence stayed where it was.
    assert await store.apply(REF, Changes(2, b""), NEXT) is Outcome.REFUSED
    await store.close()


@driven
async def test_many_leases_are_read_packed_and_are_as_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_file, "_AT_ONCE", 4)
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    others: dict[RecordKey, bytes] = {(kind, "12"): kind.value.encode() for kind in RecordKind if kind is not RecordKind.LEASE}
    leases: dict[RecordKey, bytes] = {(RecordKind.LEASE, str(number)): b"lease %d" % number for number in range(2, 13)}
    assert await store.apply(REF, Changes(1, b"header", puts=others | leases), FENCE) is Outcome.DONE
    opened = await store.open(REF, Fence(1, 1, 2))
    assert [len(batch.numbers) for batch in opened.leases] == [4, 4, 3]
    assert opened.records == others
    assert opened.size == len(others | leases)
    assert opened.whole() == await store.browse(REF) == Snapshot(1, b"header", others | leases)
    await store.close()
    flip(tmp_path / "k7f3q2ma-0.sqlite", b"lease 11")
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match="record lease:11 failed"):
        await store.open(REF, NEXT)
    await store.close()


@driven
async def test_a_missing_lease_among_many_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_file, "_AT_ONCE", 4)
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    leases: dict[RecordKey, bytes] = {(RecordKind.LEASE, str(number)): b"lease" for number in range(9)}
    assert await store.apply(REF, Changes(1, b"header", puts=leases), FENCE) is Outcome.DONE
    await store.close()
    database = apsw.Connection(str(tmp_path / "k7f3q2ma-0.sqlite"))
    database.execute("DELETE FROM record WHERE key = '5'")
    database.close()
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match="inconsistent"):
        await store.open(REF, NEXT)
    await store.close()


@pytest.mark.parametrize(
    "older",
    [
        "DELETE FROM record WHERE kind = 'lease'",
        "UPDATE record SET (crc, value) = (SELECT crc, value FROM older.record)",
        "UPDATE partition SET (grant, txn, header, crc) = (SELECT grant, txn, header, crc FROM older.partition)",
        "INSERT INTO record SELECT kind, '8', crc, value FROM record",
    ],
)
@driven
async def test_records_of_several_moments_are_damage(tmp_path: Path, older: str) -> None:
    file = await written(tmp_path)
    shutil.copy(file, tmp_path / "older")
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, NEXT)
    assert await store.apply(REF, Changes(2, b"later", puts={(RecordKind.LEASE, "7"): b"later"}), NEXT) is Outcome.DONE
    await store.close()
    database = apsw.Connection(str(file))
    database.execute("ATTACH ? AS older", (str(tmp_path / "older"),))
    database.execute(older)
    database.close()
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match=r"k7f3q2ma-0: (its records are inconsistent|record lease:8)"):
        await store.open(REF, NEXT._replace(opening=NEXT.opening + 1))
    assert (await store.open(OTHER, NEXT)).txn == 1
    await store.close()


@driven
async def test_a_blob_that_is_gone_is_damage_as_long_as_it_has_a_record(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    changes = Changes(1, b"", puts={(RecordKind.BLOB, "1"): b"", (RecordKind.BLOB, "2"): b""}, blobs={1: b"1", 2: b"2"})
    await store.apply(REF, changes, FENCE)
    await store.apply(REF, Changes(2, b"", deletes={(RecordKind.BLOB, "1")}, dropped_blobs={1}), FENCE)
    await store.close()
    database = apsw.Connection(str(tmp_path / "k7f3q2ma-0.sqlite"))
    database.execute("DELETE FROM blob")
    database.close()
    store = SqlitePartitionStore(tmp_path)
    assert await store.read(REF, [1, 3]) == {}
    with pytest.raises(DamagedError, match="k7f3q2ma-0: blob 2 is missing"):
        await store.read(REF, [1, 2])
    await store.close()


@pytest.mark.parametrize("damage", ["no database", "cut short", "pages of zeros"])
@driven
async def test_a_damaged_file_stops_its_partition_alone(tmp_path: Path, damage: str) -> None:
    file = await written(tmp_path)
    data = file.read_bytes()
    file.write_bytes(
        {"no database": os.urandom(len(data)), "cut short": data[:9_000], "pages of zeros": data[:8_192] + bytes(len(data) - 8_192)}[damage]
    )
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DamagedError, match="k7f3q2ma-0"):
        await store.open(REF, NEXT)
    with pytest.raises(DamagedError, match="k7f3q2ma-0"):
        await store.read(REF, [1, 2])
    assert await store.apply(REF, Changes(2, b""), FENCE) is Outcome.REFUSED
    assert (await store.open(OTHER, NEXT)).txn == 1
    assert await store.apply(OTHER, Changes(2, b""), NEXT) is Outcome.DONE
    await store.drop(REF)
    assert not file.exists()
    await store.close()


@driven
async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    file = await written(tmp_path)
    apsw.Connection(str(file)).pragma("user_version", len(MIGRATIONS) + 1)
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(StoreUnavailableError, match="newer version"):
        await store.open(REF, NEXT)
    assert await store.apply(REF, Changes(2, b""), FENCE) is Outcome.REFUSED
    await store.close()


@driven
async def test_an_empty_file_left_by_a_crash_is_a_new_partition(tmp_path: Path) -> None:
    (tmp_path / "k7f3q2ma-0.sqlite").touch()
    store = SqlitePartitionStore(tmp_path)
    assert (await store.open(REF, FENCE)).header is None
    assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE
    await store.close()


def logs(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith("-wal")]


@driven
async def test_open_files_are_bounded(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path, max_open=4, threads=2)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(30)]
    for txn in (1, 2):
        for ref in refs:
            if txn == 1:
                await store.open(ref, FENCE)
            assert await store.apply(ref, cycle(txn), FENCE) is Outcome.DONE
            # SQLite removes the log of a file that it closes; one may be about to be closed.
            assert len(logs(tmp_path)) <= 5
    assert [await store.browse(ref) for ref in refs] == [after(2)] * 30
    await store.close()
    assert not logs(tmp_path)


@driven
async def test_files_that_were_needed_at_one_time_do_not_stay_open(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path, max_open=4, threads=2)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(30)]
    await asyncio.gather(*(store.open(ref, FENCE) for ref in refs))
    await eventually(lambda: len(logs(tmp_path)) <= 4)
    outcomes = await asyncio.gather(*(store.apply(ref, cycle(1), FENCE) for ref in refs))
    assert list(outcomes) == [Outcome.DONE] * 30
    await eventually(lambda: len(logs(tmp_path)) <= 4)
    await store.close()


@driven
async def test_what_is_released_has_no_open_file(tmp_path: Path) -> None:
    # Of another process, which serves the partition and drops it.
    here, there = SqlitePartitionStore(tmp_path, shared=True), SqlitePartitionStore(tmp_path, shared=True)
    await here.open(REF, FENCE)
    await here.open(OTHER, FENCE)
    await here.release(REF)
    assert logs(tmp_path) == ["k7f3q2ma-1.sqlite-wal"]
    await here.release(REF)
    await there.open(REF, NEXT)
    assert await there.apply(REF, cycle(1), NEXT) is Outcome.DONE
    assert await here.browse(REF) == after(1)
    await there.drop(REF)
    await here.release(REF)
    assert not [path for path in map(os.readlink, handles()) if path.endswith(" (deleted)") and str(tmp_path) in path]
    for store in (here, there):
        await store.close()


def handles() -> list[Path]:
    """The open files of this process. The one that lists them is gone by then."""
    return [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


@driven
async def test_the_log_is_bounded(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    blob = os.urandom(CHECKPOINT_BYTES // 8)
    for txn in range(1, 41):
        await store.apply(REF, Changes(txn, b"", blobs={txn: blob}, dropped_blobs={txn - 2}), FENCE)
    assert (tmp_path / "k7f3q2ma-0.sqlite-wal").stat().st_size < 2 * CHECKPOINT_BYTES
    assert (tmp_path / "k7f3q2ma-0.sqlite").stat().st_size < CHECKPOINT_BYTES
    await store.close()


@driven
async def test_dropping_leaves_no_file(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    await store.apply(REF, cycle(1), FENCE)
    await store.drop(REF)
    assert os.listdir(tmp_path) == ["lock"]
    for left_by_a_crash in ("", "-journal", "-wal"):
        (tmp_path / f"k7f3q2ma-1.sqlite{left_by_a_crash}").write_bytes(os.urandom(10_000))
    await store.drop(OTHER)
    assert os.listdir(tmp_path) == ["lock"]
    await store.close()


@driven
async def test_an_incarnation_cannot_leave_the_directory(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path / "partitions")
    for incarnation in ("../outside", "", "a/b", "ä", "a.b"):
        with pytest.raises(ValueError, match="incarnation"):
            await store.open(PartitionRef(incarnation, 0), FENCE)
    await store.close()
    assert os.listdir(tmp_path) == ["partitions"]


@driven
async def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"process with id {os.getpid()}"):
        SqlitePartitionStore(tmp_path)
    other = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OWNER, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert other.returncode != 0
    assert f"process with id {os.getpid()}" in other.stderr
    await store.close()
    await SqlitePartitionStore(tmp_path).close()


OWNER = """
import asyncio, sys
from pathlib import Path
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.sqlite import ON_LOOP_BYTES, ON_LOOP_RECORDS, Pace, SqlitePartitionStore
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Fence
from sluiceway.testing.partition_store_suite import REF, cycle

async def main():
    store = SqlitePartitionStore(Path(sys.argv[1]))
    fence = Fence(1, int(sys.argv[2]), 1)
    txn = (await store.open(REF, fence)).txn
    while True:
        txn += 1
        changes = cycle(txn)
        changes.blobs = {txn: b"blob %d" % txn * 10_000}
        assert await store.apply(REF, changes, fence) is Outcome.DONE
        print(txn, flush=True)

asyncio.run(main())
"""


def durable_until_killed(directory: Path, grant: int, turns: int) -> int:
    """The last turn that a process reported as done before it was killed, at some moment after `turns` turns."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(directory), str(grant)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as reports:
        last = [int(reports.readline()) for _ in range(turns)][-1]
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        return int((reports.read().split() or [str(last)])[-1])


@pytest.mark.crash
@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_reported(tmp_path: Path) -> None:
    for grant in range(1, 6):
        reported = durable_until_killed(tmp_path, grant, turns=grant * 17)

        @driven
        async def check(reported: int) -> None:
            store = SqlitePartitionStore(tmp_path)
            snapshot = await store.browse(REF)
            assert snapshot.txn in (reported, reported + 1)
            assert snapshot == after(snapshot.txn)
            numbers = range(snapshot.txn - 1, snapshot.txn + 1)
            assert await store.read(REF, range(snapshot.txn + 2)) == {number: b"blob %d" % number * 10_000 for number in numbers}
            await store.close()

        check(reported)


@driven
async def test_one_store_serves_several_event_loops(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    await store.open(OTHER, FENCE)

    def elsewhere() -> None:
        async def work() -> None:
            for txn in range(1, 21):
                assert await store.apply(OTHER, cycle(txn), FENCE) is Outcome.DONE

        asyncio.run(work())

    thread = asyncio.create_task(asyncio.to_thread(elsewhere))
    for txn in range(1, 21):
        assert await store.apply(REF, cycle(txn), FENCE) is Outcome.DONE
    await thread
    assert await store.browse(OTHER) == after(20)
    await store.close()
