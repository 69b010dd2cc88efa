"""Damage in a SQLite log is seen and named; the torn end that a crash leaves, and what it leaves behind that end, is no damage."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.partition_file import PAGE_BYTES, PartitionFile
from sluiceway.adapters.wal_check import find_damage
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, StoreUnavailableError
from sluiceway.testing.partition_store_suite import FENCE, after, cycle
from tests.storage.test_sqlite_faults import Disk, fail_at, sound

HEADER, FRAME = 32, 24 + PAGE_BYTES
SECTOR = 512


class Files(NamedTuple):
    """What a killed process leaves of a partition."""

    database: bytes
    log: bytes

    def put(self, path: Path, log: bytes | None = None) -> Path:
        path.write_bytes(self.database)
        path.with_name(f"{path.name}-wal").write_bytes(self.log if log is None else log)
        return path

    @property
    def frames(self) -> int:
        """Those of the log's own, whatever is left behind them."""
        salts = self.log[16:24]
        whole = range(HEADER, len(self.log) - FRAME + 1, FRAME)
        return sum(1 for _ in itertools.takewhile(lambda at: self.log[at + 8 : at + 16] == salts, whole))


def files_of(path: Path) -> Files:
    return Files(path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes())


class Story(NamedTuple):
    """The last turn is in the log's last frames; `before` is what was there without it."""

    before: Files
    last: Files
    turns: int


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A log that was copied into the database once and begun anew: behind its end there are the frames of the time before."""
    path = tmp_path_factory.mktemp("story") / "p-0.sqlite"
    file = PartitionFile(path)
    file.open(FENCE)
    for txn in range(1, 12):
        assert file.apply(cycle(txn), FENCE) is Outcome.DONE
    file.checkpoint()
    for txn in range(12, 15):
        assert file.apply(cycle(txn), FENCE) is Outcome.DONE
    before = files_of(path)
    assert file.apply(cycle(15), FENCE) is Outcome.DONE
    last = files_of(path)
    file.close()
    assert before.frames < last.frames < (len(last.log) - HEADER) // FRAME - 5
    return Story(before, last, 15)


def flipped(log: bytes, bit: int) -> bytes:
    changed = bytearray(log)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bits(story: Story) -> Iterator[int]:
    """Some of each page, and all of the last frame's header."""
    chance = random.Random(7)
    for frame in range(story.last.frames):
        at = HEADER + frame * FRAME
        if frame in (0, story.last.frames - 1):
            yield from range(at * 8, (at + 24) * 8, 1 if frame else 5)
        yield from (chance.randrange(at * 8, (at + FRAME) * 8) for _ in range(10))


def test_every_flipped_bit_of_a_committed_frame_is_seen_also_in_the_last(story: Story, tmp_path: Path) -> None:
    path = story.last.put(tmp_path / "p-0.sqlite")
    assert find_damage(path) is None
    for bit in bits(story):
        frame = (bit // 8 - HEADER) // FRAME
        story.last.put(path, flipped(story.last.log, bit))
        assert f"is damaged at byte {HEADER + frame * FRAME}," in (find_damage(path) or ""), bit


def test_damage_of_any_size_is_seen_before_the_last_transaction(story: Story, tmp_path: Path) -> None:
    path = tmp_path / "p-0.sqlite"
    chance = random.Random(3)
    for frame in range(story.before.frames - 4):
        at = HEADER + frame * FRAME + chance.randrange(FRAME - SECTOR)
        for rubbish in (bytes(SECTOR), chance.randbytes(SECTOR)):
            story.last.put(path, story.last.log[:at] + rubbish + story.last.log[at + SECTOR :])
            if path.with_name("p-0.sqlite-wal").read_bytes() != story.last.log:
                assert find_damage(path) is not None, (frame, at)


@pytest.mark.parametrize("shared", [False, True])
def test_a_partition_with_a_damaged_log_is_not_opened_and_left_as_it_was(story: Story, tmp_path: Path, shared: bool) -> None:
    for bit in (20 * 8, (HEADER + 4) * 8, (HEADER + 3 * FRAME + 500) * 8, (HEADER + (story.last.frames - 1) * FRAME + 4_000) * 8 + 7):
        path = story.last.put(tmp_path / "p-0.sqlite", flipped(story.last.log, bit))
        with pytest.raises(DamagedError, match=r"partition p-0: the log .*p-0.sqlite-wal is damaged at byte \d+.*truncate -s"):
            PartitionFile(path, shared=shared)
        assert files_of(path) == Files(story.last.database, flipped(story.last.log, bit))
    # The bit is brought back: so is all that was there.
    file = PartitionFile(story.last.put(path), shared=shared)
    assert file.browse() == after(story.turns)
    file.close()


def test_what_follows_the_damage_can_be_given_up(story: Story, tmp_path: Path) -> None:
    path = story.last.put(tmp_path / "p-0.sqlite", flipped(story.last.log, (HEADER + (story.before.frames + 1) * FRAME) * 8 + 3_000))
    words = (find_damage(path) or "").split("`")[1].split()
    assert words[:2] == ["truncate", "-s"]
    with Path(words[3]).open("r+b") as log:
        log.truncate(int(words[2]))
    file = PartitionFile(path)
    assert file.browse() == after(story.turns - 1)
    file.close()


@pytest.mark.parametrize("step", [499, pytest.param(1, marks=pytest.mark.slow)])
def test_a_last_turn_that_is_torn_at_any_byte_is_no_damage(story: Story, tmp_path: Path, step: int) -> None:
    path = story.last.put(tmp_path / "p-0.sqlite")
    begin, end = HEADER + story.before.frames * FRAME, HEADER + story.last.frames * FRAME
    # Every byte of the frames' headers; of the pages every place at which a disk tears, and some more.
    cuts = [at for at in range(begin, end + 1) if (at - begin) % FRAME < 24 or at % SECTOR == 0 or at % step == 0]
    for at in cuts:
        ends = (story.last.log[:at], story.last.log[:at] + story.before.log[at:])
        for log in ends:
            story.last.put(path, log)
            assert find_damage(path) is None, at
    for at in cuts[:: max(1, len(cuts) // 20)]:
        for log in (story.last.log[:at], story.last.log[:at] + story.before.log[at:]):
            file = PartitionFile(story.last.put(path, log))
            assert file.browse() == after(story.turns if at == end else story.turns - 1), at
            file.close()


def test_a_last_turn_of_which_any_sectors_were_written_is_no_damage(story: Story, tmp_path: Path) -> None:
    path = tmp_path / "p-0.sqlite"
    begin, end = HEADER + story.before.frames * FRAME, HEADER + story.last.frames * FRAME
    for seed in range(100):
        chance = random.Random(seed)
        log = bytearray(story.before.log)
        for at in range(begin, end, SECTOR):
            if chance.random() < 0.7:
                log[at : min(at + SECTOR, end)] = story.last.log[at : min(at + SECTOR, end)]
        story.last.put(path, bytes(log))
        assert find_damage(path) is None, seed


def test_a_torn_last_turn_that_differs_in_one_bit_from_what_was_written_is_no_damage(story: Story, tmp_path: Path) -> None:
    """What was missing of its first page lay there already, from the log before, but for a counter."""
    path = tmp_path / "p-0.sqlite"
    begin, end = HEADER + story.before.frames * FRAME, HEADER + story.last.frames * FRAME
    for torn in range(begin + FRAME, end, FRAME):
        for bit in ((begin + 24 + 27) * 8, (begin + 2_000) * 8 + 3, (begin + FRAME) * 8 - 1):
            for log in (story.last.log[:torn], story.last.log[:torn] + story.before.log[torn:]):
                story.last.put(path, flipped(log, bit))
                assert find_damage(path) is None, (torn, bit)


def test_flipped_bits_behind_the_end_are_none_of_the_partition(story: Story, tmp_path: Path) -> None:
    path = tmp_path / "p-0.sqlite"
    chance = random.Random(1)
    for bit in (chance.randrange((HEADER + story.last.frames * FRAME) * 8, len(story.last.log) * 8) for _ in range(30)):
        file = PartitionFile(story.last.put(path, flipped(story.last.log, bit)))
        assert file.browse() == after(story.turns)
        file.close()


@pytest.mark.parametrize("code", [apsw.SQLITE_FULL, apsw.SQLITE_IOERR_WRITE])
def test_what_failed_commits_leave_behind_is_no_damage(tmp_path: Path, disk: Disk, code: int) -> None:
    """Frames of the log's own, some of them with a commit mark, which the commits that followed did not overwrite."""
    path = tmp_path / "p-0.sqlite"
    file = PartitionFile(path)
    file.open(FENCE)
    fence, txn, failed = FENCE, 0, 0
    for nth in (60, 40, 25, 12, 7, 3, 2):
        for call in ("write", "sync"):
            disk.hook = fail_at(1 if call == "sync" else nth, call, code if call == "write" else apsw.SQLITE_IOERR_FSYNC)
            # Larger than SQLite's cache, so that parts of it are in the log before it is committed.
            large = Changes(txn + 1, b"large", blobs={1_000 + txn: bytes(4 << 20) if call == "write" else bytes(nth * PAGE_BYTES)})
            failed += file.apply(large, fence) is not Outcome.DONE
            disk.hook = sound
            fence = Fence(1, 1, fence.opening + 1)
            txn = file.open(fence).txn
            copy = files_of(path).put(tmp_path / "copy.sqlite")
            assert find_damage(copy) is None, (call, nth)
            assert file.apply(Changes(txn + 1, b"small"), fence) is Outcome.DONE
            txn += 1
            assert find_damage(files_of(path).put(copy)) is None, (call, nth)
    assert failed == 14
    file.close()


@pytest.fixture
def disk() -> Iterator[Disk]:
    before = apsw.vfs_names()[0]
    disk = Disk(before)
    apsw.set_default_vfs("faulty")
    yield disk
    apsw.set_default_vfs(before)
    disk.unregister()


def test_a_flipped_bit_in_the_header_is_seen_if_the_log_has_what_the_database_has_not(story: Story, tmp_path: Path) -> None:
    path = tmp_path / "p-0.sqlite"
    for bit in range(HEADER * 8):
        story.last.put(path, flipped(story.last.log, bit))
        assert "is damaged at byte 0," in (find_damage(path) or ""), bit


def test_a_log_of_one_frame_whose_header_is_damaged_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.sqlite"
    db = apsw.Connection(str(path))
    db.pragma("page_size", PAGE_BYTES)
    db.execute("CREATE TABLE t (a)")
    db.pragma("journal_mode", "wal")
    db.execute("INSERT INTO t VALUES (1)")
    files = files_of(path)
    db.close()
    assert files.frames == 1
    for bit in range(HEADER * 8):
        assert find_damage(files.put(path, flipped(files.log, bit))) is not None, bit


def test_a_header_that_is_torn_at_any_byte_is_no_damage(tmp_path: Path) -> None:
    """A log is begun anew once all of it is in the database. The frames are still those of before when the header is written."""
    path = tmp_path / "p-0.sqlite"
    file = PartitionFile(path)
    file.open(FENCE)
    for txn in range(1, 6):
        assert file.apply(cycle(txn), FENCE) is Outcome.DONE
    file.checkpoint()
    old = files_of(path)
    assert file.apply(cycle(6), FENCE) is Outcome.DONE
    new = files_of(path)
    file.close()
    assert old.log[:HEADER] != new.log[:HEADER]
    for at in range(HEADER + 1):
        file = PartitionFile(old.put(path, new.log[:at] + old.log[at:]))
        assert file.browse() == after(5), at
        file.close()
    for at in range(HEADER):
        file = PartitionFile(old.put(path, new.log[:at]))
        assert file.browse() == after(5), at
        file.close()


def test_a_meta_store_with_a_damaged_log_is_not_opened(tmp_path: Path) -> None:
    async def filled() -> None:
        store = SqliteMetaStore(path)
        for n in range(10):
            await store.commit(puts={f"key/{n}": b"value %d" % n})
        files.append(files_of(path))
        await store.close()

    async def kept() -> int:
        store = SqliteMetaStore(path)
        try:
            return len((await store.read(prefixes=["key/"])).entries)
        finally:
            await store.close()

    files: list[Files] = []
    path = tmp_path / "meta.sqlite"
    asyncio.run(filled())
    (whole,) = files
    chance = random.Random(2)
    for bit in (chance.randrange(len(whole.log) * 8) for _ in range(50)):
        whole.put(path, flipped(whole.log, bit))
        with pytest.raises(StoreUnavailableError, match=r"meta store .*meta\.sqlite: the log .* is damaged at byte \d+"):
            SqliteMetaStore(path)
        assert files_of(path) == Files(whole.database, flipped(whole.log, bit))
    whole.put(path)
    assert asyncio.run(kept()) == 10
    # Torn, the last commit may be gone, and it is no damage.
    for at in range(len(whole.log) - 24, len(whole.log)):
        whole.put(path, whole.log[:at])
        assert asyncio.run(kept()) == 9
