"""Several processes on one store: each partition has one owner after the other, and what an owner of the past writes is refused."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import apsw
import pytest

from sluiceway.adapters.lock import DirectoryInUseError, DirectoryLock, one_at_a_time
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.storage import partition_file, sqlite
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.local import storage_identity
from sluiceway.local.backend_pool import BackendPool
from sluiceway.local.stores import open_store
from sluiceway.model.backends import SqliteBackend
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.meta_store import View
from sluiceway.ports.partition_store import Fence, PartitionStore, StoreUnavailableError
from sluiceway.testing.drive import OpenStore, driven
from sluiceway.testing.partition_store_suite import FENCE, PartitionStoreSuite, after, cycle
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually as wait_for
from tests.servers import pids
from tests.servers.postgres_server import PostgresServer, server_or_skip
from tests.storage.store_process import StoreProcess

numbers = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes may use."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'partitions'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return f"postgres:shared{next(numbers)}:{server.dsn()}"


class TestSharedSqlitePartitionStore(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return SqlitePartitionStore(tmp_path / "partitions", shared=True)

        return open_store


# ---- one owner after the other --------------------------------------------------------------------------------------


def test_each_process_has_partitions_of_its_own(where: str) -> None:
    with StoreProcess(where) as one, StoreProcess(where) as two:
        owners = {"0:": one, "1:": two}
        assert [owner.ask(partition, "open", 1) for partition, owner in owners.items()] == ["0", "0"]
        for txn in range(1, 30):
            for partition, owner in owners.items():
                owner.tell(partition, "apply", 1, txn)
            assert [owner.hear() for owner in owners.values()] == ["DONE", "DONE"]
            # Each reads what the other has written.
            assert [owner.ask(partition, "browse") for partition, owner in zip(owners, (two, one), strict=True)] == [str(txn)] * 2


def test_what_an_owner_of_the_past_writes_is_refused(where: str) -> None:
    with StoreProcess(where) as one, StoreProcess(where) as two:
        assert one.ask("open", 1) == "0"
        assert one.ask("apply", 1, 1) == "DONE"
        # What the one had read before the other wrote is of no use to it any more, in no direction.
        for owner, before, grant in ((two, one, 2), (one, two, 3), (two, one, 4)):
            txn = grant
            assert owner.ask("open", grant) == str(txn - 1)
            assert before.ask("apply", grant - 1, txn) == "REFUSED"
            assert owner.ask("apply", grant, txn) == "DONE"
            assert before.ask("apply", grant - 1, txn + 1) == "REFUSED"
            assert before.ask("browse") == str(txn)
            assert before.ask("read", txn) == str({txn: b"blob %d" % txn})
            assert before.ask("open", grant - 1).startswith("FencedError: partition k7f3q2ma-0 was opened with")


def test_what_a_killed_owner_had_written_is_there_for_the_next(where: str) -> None:
    with StoreProcess(where) as one, StoreProcess(where) as two:
        assert one.ask("open", 1) == "0"
        assert [one.ask("apply", 1, txn) for txn in (1, 2, 3)] == ["DONE"] * 3
        one.kill()
        assert two.ask("open", 2) == "3"
        assert two.ask("apply", 2, 4) == "DONE"


def test_an_owner_that_stood_still_writes_nothing_once_it_goes_on(where: str) -> None:
    with StoreProcess(where) as one, StoreProcess(where) as two:
        assert one.ask("open", 1) == "0"
        assert one.ask("apply", 1, 1) == "DONE"
        pids.stop(one.pid)
        one.tell("apply", 1, 2)
        assert two.ask("open", 2) == "1"
        assert two.ask("apply", 2, 2) == "DONE"
        one.send(signal.SIGCONT)
        assert one.hear() == "REFUSED"
        assert two.ask("apply", 2, 3) == "DONE"


def test_what_another_process_has_dropped_takes_nothing_more(where: str) -> None:
    with StoreProcess(where) as one, StoreProcess(where) as two:
        assert one.ask("open", 1) == "0"
        assert one.ask("apply", 1, 1) == "DONE"
        assert two.ask("drop") == "dropped"
        assert one.ask("apply", 1, 2) == "REFUSED"
        assert one.ask("browse") == "0"
        assert one.ask("read", 1) == "{}"
        # Nor does an opening find what is gone; and what is opened anew is the same for both.
        assert one.ask("open", 3) == "0"
        assert one.ask("apply", 3, 1) == "DONE"
        assert two.ask("open", 4) == "1"


@pytest.mark.slow
def test_of_many_that_open_a_new_partition_at_once_the_highest_has_it(where: str) -> None:
    with contextlib.ExitStack() as stack:
        owners = [stack.enter_context(StoreProcess(where)) for _ in range(4)]
        for partition in map("{}:".format, range(8)):
            for grant, owner in enumerate(owners, 1):
                owner.tell(partition, "open", grant)
            *lower, highest = [owner.hear().partition(":")[0] for owner in owners]
            assert highest == "0"
            assert set(lower) <= {"0", "FencedError"}
            assert [owner.ask(partition, "apply", grant, 1) for grant, owner in enumerate(owners, 1)] == ["REFUSED"] * 3 + ["DONE"]


# ---- in the middle of a commit --------------------------------------------------------------------------------------


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PartitionFile, apsw.Connection]]:
    """A partition that is open here, and a commit that another connection is in the middle of. Nothing but an opening waits for it."""
    monkeypatch.setattr(partition_file, "BUSY_TIMEOUT", 0)
    file = PartitionFile(tmp_path / "k7f3q2ma-0.sqlite", shared=True)
    file.open(FENCE)
    other = apsw.Connection(str(tmp_path / "k7f3q2ma-0.sqlite"))
    other.execute("BEGIN IMMEDIATE")
    yield file, other
    other.close()
    file.close()


def test_an_opening_waits_for_the_commit_of_the_owner_before(
    busy: tuple[PartitionFile, apsw.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_file, "TAKEOVER_TIMEOUT", int(PATIENCE * 1_000))
    file, other = busy
    opening = threading.Thread(target=file.open, args=[Fence(1, 2, 1)])
    opening.start()
    # It is there whenever one looks, where it has not failed yet and cannot have succeeded.
    looks = itertools.count()
    wait_for(lambda: "_begin_takeover" in where_is(opening) and next(looks) == 3)
    other.execute("ROLLBACK")
    opening.join(PATIENCE)
    assert file.apply(cycle(1), Fence(1, 2, 1)) is Outcome.DONE


def where_is(thread: threading.Thread) -> list[str]:
    """The functions it is in, and an error if it has ended."""
    frame: FrameType | None = sys._current_frames()[thread.ident or 0]
    found = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_a_commit_that_hangs_is_named(busy: tuple[PartitionFile, apsw.Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_file, "TAKEOVER_TIMEOUT", 1)
    with pytest.raises(StoreUnavailableError, match="k7f3q2ma-0: another process has been in the middle of a commit for 1 ms; if it hangs"):
        busy[0].open(Fence(1, 2, 1))


def test_a_commit_that_cannot_begin_is_refused(busy: tuple[PartitionFile, apsw.Connection]) -> None:
    file, other = busy
    assert file.apply(cycle(1), FENCE) is Outcome.REFUSED
    other.execute("ROLLBACK")
    assert file.apply(cycle(1), FENCE) is Outcome.DONE
    assert file.browse() == after(1)


# ---- who may use the directory --------------------------------------------------------------------------------------


def test_instances_of_a_cluster_share_a_directory_and_nobody_else_does(tmp_path: Path) -> None:
    where = f"sqlite:{tmp_path}"
    with StoreProcess(where), StoreProcess(where) as last:
        with pytest.raises(DirectoryInUseError, match=rf"in use by instances of a cluster \(the last .* id {last.pid}\).*stop all of them"):
            DirectoryLock(tmp_path)
        DirectoryLock(tmp_path, shared=True).release()
    # However they ended.
    alone = DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUseError, match=r"process with id \d+, a standalone server"):
        DirectoryLock(tmp_path, shared=True)
    with pytest.raises(DirectoryInUseError, match=r"process with id \d+, another server"):
        DirectoryLock(tmp_path)
    alone.release()
    DirectoryLock(tmp_path, shared=True).release()


@driven
async def test_instances_that_begin_at_once_agree_on_what_a_directory_is(tmp_path: Path) -> None:
    meta = Slow()
    pools = [BackendPool(tmp_path, {"default": SqliteBackend()}, functools.partial(open_store, shared=True)) for _ in range(4)]
    await asyncio.gather(*(pool.start(meta) for pool in pools))
    assert [pool.infos()[0].problem for pool in pools] == [None] * 4
    for pool in pools:
        await pool.close()


class Slow(MemoryMetaStore):
    """All that read at the same time get the same answer before the first of them commits."""

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        view = await super().read(keys, prefixes)
        await asyncio.sleep(0)
        return view


def test_only_the_first_gives_a_directory_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def late(directory: Path) -> Iterator[None]:
        with one_at_a_time(directory):
            (directory / "identity").write_text("theirs00\n")
            yield

    monkeypatch.setattr(sqlite, "one_at_a_time", late)
    found = asyncio.run(storage_identity.identify("default", tmp_path / "partitions", MemoryMetaStore()))
    assert found == (None, {"backend/default": b"theirs00"})


def test_one_at_a_time_waits(tmp_path: Path) -> None:
    entered = threading.Event()

    def enter() -> None:
        with one_at_a_time(tmp_path):
            entered.set()

    other, handle = threading.Thread(target=enter), os.open(tmp_path, os.O_RDONLY)
    with one_at_a_time(tmp_path):
        other.start()
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    assert entered.wait(PATIENCE)
    other.join(PATIENCE)
