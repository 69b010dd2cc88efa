"""A disk that the queue itself has filled: produces are refused before the reserve is used, and all that frees room goes on."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from sluiceway.adapters.disk_reserve import FILE, HELD, DiskReserve
from sluiceway.instance import service as service_module
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.disk_room import DiskRoom
from sluiceway.model.backends import SqliteBackend
from sluiceway.model.requests import Clear, Lease, Produce
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, rows, settle, spec
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until

MB = 1 << 20
SOON = 60_000
"""Until when a call has to be done, in milliseconds."""


class Asked(NamedTuple):
    f_bavail: int
    f_blocks: int
    f_frsize: int = 1


class Disk:
    """What a disk says of itself: so much is left, without the reserves on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *reserves: Path) -> None:
        self.left = 100 * MB
        self.size = 1_000 * MB
        self.asked = 0
        self._reserves = reserves
        monkeypatch.setattr("sluiceway.adapters.disk_reserve.os.statvfs", self._statvfs)

    def _statvfs(self, _directory: Path) -> Asked:
        self.asked += 1
        held = sum(path.stat().st_blocks * 512 for path in self._reserves if path.exists())
        return Asked(max(0, self.left - held), self.size)


def test_the_file_is_made_given_up_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path / FILE)
    reserve = DiskReserve(tmp_path, 8 * MB)
    seen = []
    for left in (100, 9, 7.9, 1.5, 0.9, 0.9, 7, 8.5, 9.5):
        disk.left = int(left * MB)
        reserve.look()
        seen.append((left, reserve.is_low, reserve.is_given_up, (tmp_path / FILE).exists()))
    assert seen == [
        (100, False, False, True),
        (9, False, False, True),
        (7.9, True, False, True),
        # Half a megabyte beside the one in the file.
        (1.5, True, True, False),
        (0.9, True, True, False),
        (0.9, True, True, False),
        (7, True, True, False),
        # Low until there is somewhat more, so that it does not come and go.
        (8.5, True, False, True),
        (9.5, False, False, True),
    ]
    assert (tmp_path / FILE).stat().st_size == 8 * MB // HELD
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_of_a_small_disk_no_more_than_a_quarter_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path / FILE)
    disk.size = 4 * MB
    disk.left = 2 * MB
    reserve = DiskReserve(tmp_path, 64 * MB)
    reserve.look()
    assert (reserve.size, reserve.is_low) == (MB, False)


def test_what_logs_still_have_to_write_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, tmp_path / FILE)
    reserve = DiskReserve(tmp_path, 8 * MB)
    disk.left = 20 * MB
    reserve.look(11 * MB)
    assert (reserve.is_low, reserve.spare) == (False, MB)
    reserve.look(13 * MB)
    assert (reserve.is_low, reserve.is_given_up) == (True, False)
    reserve.look()
    assert not reserve.is_low


def test_a_disk_that_has_gone_does_not_keep_another_from_being_watched(tmp_path: Path) -> None:
    """As with a reload that adds a backend while the directory of another one is away: it had changed a part of the backends by then."""
    room = DiskRoom(MB, lambda: None)
    for name in ("gone", "there", "new"):
        (tmp_path / name).mkdir()
    room.watch("gone", tmp_path / "gone")
    (tmp_path / "gone" / FILE).unlink(missing_ok=True)
    (tmp_path / "gone").rmdir()
    for name in ("there", "new"):
        room.watch(name, tmp_path / name)
    assert room.disks["there"] is room.disks["new"]
    assert [check.ok for check in room.checks()] == [True] * 3


@driven
async def test_a_store_owes_what_its_logs_have_until_they_are_in_its_files(tmp_path: Path) -> None:
    service = Service(tmp_path, disk_reserve=8 * MB)
    await service.start()
    await service.create_queue(spec("q", 2))
    driver = service._drivers["q"]
    backend = driver._backends[0]
    before = backend.owed
    for partition in range(2):
        await service.produce("q", produce(2 * MB, partition))
    assert backend.owed >= before + 4 * MB
    service.room.look()
    assert service.room.disks["backend default"]._owed == backend.owed
    await backend.reusable(driver._ref(0))
    assert 2 * MB <= backend.owed < before + 3 * MB
    await service.stop()


@driven
async def test_no_unexpected_error_ends_the_watch_of_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LOOK_INTERVAL", 5)
    service = Service(tmp_path, disk_reserve=8 * MB)
    await service.start()
    look, failures = service.room.look, [ValueError("something new")]

    def failing() -> None:
        if failures:
            raise failures.pop()
        look()

    disk = Disk(monkeypatch)
    disk.left = 5 * MB
    monkeypatch.setattr(service.room, "look", failing)
    await eventually(lambda: bool(service.problems()))
    await service.stop()


def produce(nbytes: int, partition: int | None = None) -> Produce:
    return Produce(rows("x" * nbytes), SOON, partition=partition)


async def refused(service: Service, request: Produce) -> str:
    with pytest.raises(SluicewayError) as error:
        await service.produce("q", request)
    return error.value.code


@driven
async def test_what_frees_room_goes_on_when_nothing_may_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    service = Service(tmp_path, disk_reserve=8 * MB)
    await service.start()
    await service.create_queue(spec("q", 2))
    for _ in range(4):
        await service.produce("q", produce(2 * MB))
    leased = await service.lease("q", Lease("c", 1, SOON))
    disk.left = 5 * MB
    service.room.look()
    assert await refused(service, produce(10)) == "storage_full"
    assert await refused(service, produce(10, partition=1)) == "storage_full"
    (problem,) = service.problems()
    assert f"the disk of {tmp_path} is full: 5.0 MiB free, and 8.0 MiB are kept" in problem
    assert [check.ok for check in await service.checks() if check.name.startswith("disk of")] == [False, False]
    assert (await settle(service, "q", leased)).completed == 1
    assert (await service.pause("q", ["lease"], True)).paused
    assert not (await service.pause("q", ["lease"], False)).paused
    await service.clear("q", Clear(SOON))
    # What was cleared is free within the files, though the disk is as low as before.
    await eventually(lambda: service_takes(service))
    assert service.problems() == [problem]
    disk.left = 100 * MB
    service.room.look()
    assert service.problems() == []
    await service.produce("q", produce(2 * MB))
    await service.delete_queue("q", force=True)
    await service.stop()


def service_takes(service: Service) -> bool:
    return all(executor.has_room for driver in service._drivers.values() for executor in driver.queue.executors.values())


@driven
async def test_the_disk_is_asked_before_produces_can_have_filled_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr("sluiceway.instance.service.LOOK_INTERVAL", 3_600_000)
    service = Service(tmp_path, disk_reserve=8 * MB)
    await service.start()
    await service.create_queue(spec("q", 1))
    asked, stored = disk.asked, 0
    disk.left = 40 * MB
    while True:
        try:
            await service.produce("q", produce(MB))
        except SluicewayError as error:
            assert error.code == "storage_full"
            break
        disk.left -= 2 * MB
        stored += 1
    assert disk.left >= 2 * MB
    assert stored > 10
    asked = disk.asked - asked
    assert asked < stored
    await service.stop()


@driven
async def test_produces_go_to_the_disk_that_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"default": SqliteBackend(), "other": SqliteBackend(path=str(tmp_path / "other"))}
    service = Service(tmp_path / "data", backends, disk_reserve=MB)
    await service.start()
    record = await service.create_queue(spec("q", 4))
    (there,) = {each.backend for each in record.partitions} - {"default"}
    on_other = {each.partition for each in record.partitions if each.backend == there}
    monkeypatch.setattr(service.room, "is_low", lambda name: name == "default")
    service._note_room()
    for _ in range(8):
        assert (await service.produce("q", produce(10))).partition in on_other
    (full, *_) = {each.partition for each in record.partitions} - on_other
    assert await refused(service, produce(10, partition=full)) == "storage_full"
    await service.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one, of 48 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_up(folder: Path) -> None:
    """As another program does, to the last byte."""
    with (folder / "rubbish").open("wb", buffering=0) as rubbish, contextlib.suppress(OSError):
        while True:
            rubbish.write(bytes(4_096))


@pytest.mark.crash
@pytest.mark.slow
def test_a_disk_that_the_queue_has_filled_is_emptied_again(small_disk: Path) -> None:
    data = small_disk / "data"

    def call(server: ServerProcess, name: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/{name}", json={"queue_name": "q", **fields}, timeout=PATIENCE)

    def fill(server: ServerProcess) -> str:
        while (answer := call(server, "queue.produce", items=[{"utf8": "y" * 50_000}] * 20)).status_code == 200:
            pass
        return str(answer.json()["code"])

    with ServerProcess(data) as server:
        assert call(server, "queues.create", requested_partitions=2).status_code == 200
        call(server, "queue.produce", items=[{"utf8": "x"}] * 10)
        items = call(server, "queue.lease", client_id="c", batch_size=10).json()["items"]
        assert fill(server) == "storage_full"
        ready = httpx.get(f"{server.url}/readyz", timeout=PATIENCE)
        assert (ready.status_code, f"the disk of {data} is full" in ready.text) == (503, True)
        assert call(server, "queue.complete", ids=[item["id"] for item in items]).json()["completed"] == 10
        # Another program takes all the rest; the server's log is on that disk, too.
        fill_up(small_disk)
        wait_until(lambda: not (data / FILE).exists(), "the reserve is given up")
        assert call(server, "queue.pause", verbs=["lease"]).status_code == 200
        assert call(server, "queue.resume", verbs=["lease"]).status_code == 200
        server.kill()
    with ServerProcess(data) as server:
        assert call(server, "queue.clear").status_code == 200
        wait_until(lambda: call(server, "queue.produce", items=[{"utf8": "z"}]).status_code == 200, "room in the files is used again")
        assert call(server, "queues.delete", force=True).status_code == 200
        (small_disk / "rubbish").unlink()
        wait_until(lambda: httpx.get(f"{server.url}/readyz", timeout=PATIENCE).status_code == 200, "enough free space again")
        assert call(server, "queues.create", requested_partitions=1).status_code == 200
        assert fill(server) == "storage_full"
        assert server.interrupt() == 0
    assert "Traceback" not in (small_disk / "data.log").read_text()


@pytest.mark.crash
@pytest.mark.slow
def test_a_start_without_any_room_says_so(small_disk: Path) -> None:
    data = small_disk / "data"
    with ServerProcess(data) as server:
        assert server.interrupt() == 0
    (data / FILE).unlink(missing_ok=True)
    fill_up(small_disk)
    started = subprocess.run(
        [*COMMAND, "serve", "--data", str(data), "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert started.returncode != 0
    assert "meta store" in started.stderr
    assert "Traceback" not in started.stderr
