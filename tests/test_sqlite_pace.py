"""When SqlitePartitionStore commits on the event loop, and when in a thread (ADR 10)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from node_rig import eventually
from server_process import PATIENCE
from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.sqlite import ON_LOOP_BYTES, ON_LOOP_RECORDS, Pace, SqlitePartitionStore
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, RecordKey, RecordKind
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, REF


def proved(pace: Pace, quick: int) -> bool:
    """Whether the pace is proved after so many more quick commits."""
    for _ in range(quick):
        pace.note(Pace.QUICK, on_loop=False)
    return pace.is_quick


def test_quick_commits_are_proved_by_a_long_run_and_a_slow_one_asks_for_a_longer() -> None:
    pace = Pace()
    assert not proved(pace, Pace.FIRST - 1)
    assert proved(pace, 1)
    for times in (2, 3, 5, 9, 17, 33, 65, 65):
        pace.note(Pace.HANGS * 1.1, on_loop=True)
        assert not proved(pace, times * Pace.PROOF - 1)
        assert proved(pace, 1)


def test_what_was_slow_is_forgotten_after_a_long_time_on_the_loop() -> None:
    pace = Pace()
    for well, times in ((0, 2), (Pace.WELL - 1, 3), (Pace.WELL, 2)):
        assert proved(pace, 100 * Pace.PROOF)
        for _ in range(well):
            pace.note(Pace.QUICK, on_loop=True)
        pace.note(Pace.HANGS * 1.1, on_loop=True)
        assert not proved(pace, times * Pace.PROOF - 1)


def test_of_many_quick_commits_on_the_loop_few_may_be_slow_and_none_may_hang() -> None:
    hangs = 1.01 * Pace.HANGS / Pace.QUICK
    for slow, stays in ([1.01] * 2, True), ([1.01] * 3, False), ([2.9], True), ([30], True), ([30] * 2, False), ([hangs], False):
        pace = Pace()
        assert proved(pace, 3 * Pace.PROOF)
        for each in slow:
            pace.note(Pace.QUICK * each, on_loop=True)
        assert pace.is_quick is stays, slow
        assert proved(pace, 2 * Pace.PROOF)


def test_a_slow_commit_in_a_thread_sets_the_proof_back_a_little() -> None:
    """It may have waited for the interpreter: under load that is common, and a proof that began anew each time would never be there."""
    pace = Pace()
    assert not proved(pace, Pace.FIRST - 1)
    pace.note(Pace.QUICK * 9, on_loop=False)
    assert not proved(pace, 1)
    assert proved(pace, 1)
    uneven = Pace()
    for _ in range(10 * Pace.PROOF):
        uneven.note(Pace.QUICK * 9, on_loop=False)
    assert not proved(uneven, 2 * Pace.PROOF - 1), "as after a slow one on the loop"
    assert proved(uneven, 1)


@driven
async def test_a_commit_of_many_records_never_moves_to_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, commits = threading.get_ident(), list[bool]()
    commit = partition_file.PartitionFile.apply

    def applied(file: partition_file.PartitionFile, changes: Changes, fence: Fence) -> Outcome:
        commits.append(threading.get_ident() == here)
        return commit(file, changes, fence)

    monkeypatch.setattr(partition_file.PartitionFile, "apply", applied)
    monkeypatch.setattr(Pace, "FIRST", 0)
    monkeypatch.setattr(Pace, "QUICK", float("inf"))
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    await eventually(lambda: not store._strands[REF].running)
    many: dict[RecordKey, bytes] = {(RecordKind.LEASE, str(number)): b"" for number in range(ON_LOOP_RECORDS)}
    await store.apply(REF, Changes(1, b"", puts=many), FENCE)
    await store.apply(REF, Changes(2, b"", deletes={*many, (RecordKind.LEASE, "one too many")}), FENCE)
    assert commits == [True, False]
    await store.close()


class NoRoom:
    """A connection whose COMMIT fails."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, sql: str, *values: Any) -> Any:
        if sql == "COMMIT":
            raise apsw.FullError
        return self._db.execute(sql, *values)


def test_a_commit_that_fails_late_was_not_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = partition_file.PartitionFile(tmp_path / "p.sqlite")
    file.open(FENCE)
    assert file.apply(Changes(1, b"h"), FENCE) is Outcome.DONE
    monkeypatch.setattr(partition_file, "stopwatch", iter([1.0, 3.5]).__next__)
    monkeypatch.setattr(file, "_db", NoRoom(file._db))
    assert file.apply(Changes(2, b"h"), FENCE) is Outcome.REFUSED
    assert file.commit_took == 2.5
    file.close()


@driven
async def test_a_busy_partition_is_not_said_to_be_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Pace, "FIRST", 1)
    monkeypatch.setattr(Pace, "QUICK", float("inf"))
    store = SqlitePartitionStore(tmp_path)
    assert not store.at_once(REF)
    await store.open(REF, FENCE)
    await eventually(lambda: not store._strands[REF].running)
    monkeypatch.setattr(partition_file, "CHECKPOINT_BYTES", 1)
    monkeypatch.setattr(partition_file.PartitionFile, "checkpoint", lambda _: go_on.wait(PATIENCE))
    await store.apply(REF, Changes(1, b"h"), FENCE)
    assert not store.at_once(REF), "a checkpoint is under way"
    go_on.set()
    await eventually(lambda: not store._strands[REF].running)
    assert store.at_once(REF)
    await store.release(REF)
    assert not store.at_once(REF), "it is not open"
    await store.close()


@driven
async def test_small_commits_move_to_the_event_loop_when_proved_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, commits, checkpoints = threading.get_ident(), list[bool](), list[bool]()
    go_on = threading.Event()
    commit, checkpoint = partition_file.PartitionFile.apply, partition_file.PartitionFile.checkpoint

    def applied(file: partition_file.PartitionFile, changes: Changes, fence: Fence) -> Outcome:
        commits.append(threading.get_ident() == here)
        if changes.txn == 101:
            go_on.wait(PATIENCE)
        return commit(file, changes, fence)

    def checkpointed(file: partition_file.PartitionFile) -> None:
        checkpoints.append(threading.get_ident() == here)
        checkpoint(file)

    monkeypatch.setattr(partition_file.PartitionFile, "apply", applied)
    monkeypatch.setattr(partition_file.PartitionFile, "checkpoint", checkpointed)
    monkeypatch.setattr(Pace, "FIRST", 3)
    monkeypatch.setattr(Pace, "QUICK", float("inf"))
    store = SqlitePartitionStore(tmp_path)
    await store.open(REF, FENCE)
    blob = b"b" * (ON_LOOP_BYTES // 2)
    for txn in range(1, 101):
        assert await store.apply(REF, Changes(txn, b"h", blobs={txn: blob}), FENCE) is Outcome.DONE
        # A thread may still be busy with the log.
        await eventually(lambda: not store._strands[REF].running)
    assert commits == [False] * 3 + [True] * 97
    assert checkpoints
    assert not any(checkpoints)
    large = Changes(101, b"h", blobs={200: blob * 3})
    both = asyncio.gather(store.apply(REF, large, FENCE), store.apply(REF, Changes(102, b"h"), FENCE))
    await eventually(lambda: len(commits) == 101 and len(store._strands[REF].jobs) == 1)
    assert not store.at_once(REF)
    go_on.set()
    assert list(await both) == [Outcome.DONE, Outcome.DONE]
    assert commits[-2:] == [False, False]
    assert (await store.browse(REF)).txn == 102
    assert set(await store.read(REF, range(1, 101))) == set(range(1, 101))
    await store.close()
