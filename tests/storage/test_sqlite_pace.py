"""When SqlitePartitionStore commits on the event loop, and when in a thread (ADR 10)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from sluiceway.adapters.storage import partition_file
from sluiceway.adapters.storage.sqlite import ON_LOOP_BYTES, ON_LOOP_RECORDS, Pace, SqlitePartitionStore
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, RecordKey, RecordKind
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, REF
from tests.instance.instance_rig import eventually
from tests.server.server_process import PATIENCE


def proved(pace: Pace, quick: int) -> bool:
    """Whether the pace is proved after so many more quick commits in threads."""
    for _ in range(quick):
        pace.note(Pace.QUICK, on_loop=False)
    return pace.is_quick


def holds_up(pace: Pace) -> None:
    """Commits on the loop that are slow on average."""
    while pace.is_quick:
        pace.note(Pace.QUICK * 50, on_loop=True)


def test_quick_commits_are_proved_by_a_long_run_and_each_fall_asks_for_a_longer() -> None:
    pace = Pace()
    assert not proved(pace, Pace.FIRST - 1)
    assert proved(pace, 1)
    for times in (1, 2, 4, 8, 16, 32, 32):
        holds_up(pace)
        assert not proved(pace, times * Pace.PROOF - 1)
        assert proved(pace, 1)


def test_what_was_slow_is_forgotten_after_a_long_time_on_the_loop() -> None:
    pace = Pace()
    for well, times in ((0, 1), (Pace.WELL - 10, 2), (Pace.WELL, 1)):
        assert proved(pace, 2 * Pace.LONGEST_PROOF)
        for _ in range(well):
            pace.note(0.0, on_loop=True)
        holds_up(pace)
        assert not proved(pace, times * Pace.PROOF - 1)


@pytest.mark.parametrize(
    ("slow", "every", "stays"), [(10, 20, True), (3, 4, True), (1.01, 1, False), (3, 2, False), (10, 5, False), (50, 20, False)]
)
def test_on_the_loop_the_average_decides(slow: float, every: int, stays: bool) -> None:
    """Of `every` commits one takes `slow` times as long as may be, and the others a quarter of that."""
    pace = Pace()
    assert proved(pace, Pace.FIRST)
    for commit in range(Pace.WELL):
        pace.note(Pace.QUICK * (0.25 if (commit + 1) % every else slow), on_loop=True)
        if not pace.is_quick:
            break
    assert pace.is_quick is stays


def test_a_disk_that_turns_slow_holds_up_the_loop_for_a_fifth_of_a_second() -> None:
    for seconds in (2 * Pace.QUICK, 0.01, 0.05, 0.2):
        pace, held_up = Pace(), 0.0
        assert proved(pace, Pace.FIRST)
        while pace.is_quick:
            pace.note(seconds, on_loop=True)
            held_up += seconds
        assert held_up <= 0.2, seconds


def test_a_slow_commit_in_a_thread_sets_the_proof_back_by_one() -> None:
    """It may have waited for the interpreter: under load that is common, and a proof that began anew each time would never be there."""
    pace = Pace()
    assert not proved(pace, Pace.FIRST - 1)
    pace.note(Pace.QUICK * 9, on_loop=False)
    assert not proved(pace, 1)
    assert proved(pace, 1)
    pace.note(Pace.QUICK * 9, on_loop=False)
    assert pace.is_quick, "what is proved is judged by what is done on the loop"


def test_a_disk_that_was_slow_for_long_is_not_asked_for_more_than_a_proof() -> None:
    pace = Pace()
    for _ in range(10 * Pace.PROOF):
        pace.note(Pace.QUICK * 9, on_loop=False)
    assert not proved(pace, Pace.PROOF - 1)
    assert proved(pace, 1)


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
