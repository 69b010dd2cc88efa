"""A data directory is for its owner alone, whatever the umask is, and one that was open to others is mended at the start."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.adapters.disk import keep_private, write_durably
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.instance.service import Service
from sluiceway.model.requests import QueueSpec
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, REF, cycle
from tests.server.server_process import COMMAND, PATIENCE


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("umask", [0o000, 0o022], indirect=True)
@driven
async def test_no_other_user_can_read_a_data_directory(tmp_path: Path, umask: int) -> None:
    service = Service(tmp_path / "data")
    await service.start()
    await service.create_queue(QueueSpec("q", 2))
    names = {path.name.split("-", 1)[-1] for path in (tmp_path / "data" / "partitions").iterdir()}
    assert {"0.sqlite", "0.sqlite-wal", "lock", "identity"} <= names
    assert (tmp_path / "data" / "meta.sqlite-shm").exists()
    assert open_to_others(tmp_path / "data") == []
    await service.stop()


@driven
async def test_files_that_processes_share_are_private_too(tmp_path: Path) -> None:
    store = SqlitePartitionStore(tmp_path / "shared", shared=True)
    await store.open(REF, FENCE)
    await store.apply(REF, cycle(1), FENCE)
    assert len(list((tmp_path / "shared").glob("*-shm"))) == 1
    assert open_to_others(tmp_path / "shared") == []
    await store.close()


@driven
async def test_a_directory_that_was_open_to_others_is_mended_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    service = Service(data)
    await service.start()
    await service.create_queue(QueueSpec("q", 1))
    await service.stop()
    (data / "notes.txt").touch(0o644)
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    caplog.set_level(logging.WARNING)
    service = Service(data)
    await service.start()
    # What is not Sluiceway's is left as it is; nobody else gets as far as there.
    assert open_to_others(data) == [str(data / "notes.txt")]
    told = [record.message for record in caplog.records if "open to other users" in record.message]
    assert told == [
        f"{data} was open to other users of this machine: the directory (755) and 2 files in it; now it is not",
        f"{data / 'partitions'} was open to other users of this machine: the directory (755) and 3 files in it; now it is not",
    ]
    await service.stop()
    caplog.clear()
    await service.start()
    assert not any("open to other users" in record.message for record in caplog.records)
    await service.stop()


def test_a_meta_store_by_itself_is_private(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    path.touch(0o644)
    path.chmod(0o644)
    store = SqliteMetaStore(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    del store


def test_a_folder_that_is_no_meta_store_keeps_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for path in (tmp_path, Path("/")):
        before = path.stat().st_mode
        with pytest.raises(StoreUnavailableError, match="unable to open"):
            SqliteMetaStore(path)
        assert path.stat().st_mode == before


def test_a_directory_for_all_users_is_told_of_and_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "lock").touch(0o644)
    keep_private(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    assert "for all users of this machine" in caplog.text


def test_the_first_key_can_be_made_before_the_directory_is_there(tmp_path: Path) -> None:
    data = tmp_path / "new" / "data"
    made = subprocess.run(
        [*COMMAND, "key", "create", "ops", "--scope", "admin", "--data", str(data)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("slw_")
    assert f"{data} is a new data folder" in made.stderr
    assert open_to_others(data) == []


def test_links_that_another_user_has_put_there_are_not_followed(tmp_path: Path) -> None:
    """What they lead to was overwritten."""
    (tmp_path / "other").write_text("kept")
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("lock", ".identity.part"):
        (folder / name).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        DirectoryLock(folder)
    with pytest.raises(OSError, match="symbolic link"):
        write_durably(folder / "identity", "new", private=True)
    assert (tmp_path / "other").read_text() == "kept"
