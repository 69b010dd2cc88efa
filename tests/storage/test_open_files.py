"""Few file handles: a server that cannot work says so and does not start; with some more it keeps fewer partitions open, and all serve."""

from __future__ import annotations

import logging
import resource
import subprocess
from pathlib import Path

import httpx
import pytest

from sluiceway.adapters import system
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.local.stores import MAX_OPEN, MIN_OPEN, most_open
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, serving, spec
from tests.server.server_process import COMMAND, PATIENCE


def limited(files: int, data: Path) -> subprocess.Popen[str]:
    command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *COMMAND, "serve", "--data", str(data), "--listen", "127.0.0.1:0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_with_too_few_files_a_server_does_not_start(tmp_path: Path) -> None:
    server = limited(64, tmp_path / "data")
    _, told = server.communicate(timeout=PATIENCE)
    assert server.returncode != 0
    assert "the limit of open files is 64, and a server needs at least 128; raise it: ulimit -n" in told
    assert "Traceback" not in told


def test_with_few_files_fewer_partitions_stay_open_and_all_serve(tmp_path: Path) -> None:
    with limited(128, tmp_path / "data") as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            with httpx.Client(base_url=url, timeout=PATIENCE) as http:
                for n in range(8):
                    http.post("/v1/queues.create", json={"queue_name": f"q{n}", "requested_partitions": 4}).raise_for_status()
                for n in range(8):
                    for partition in range(4):
                        body = {"queue_name": f"q{n}", "items": [{"utf8": f"{partition}"}]}
                        http.post("/v1/queue.produce", json=body).raise_for_status()
                assert http.get("/readyz").status_code == 200
            server.terminate()
            _, told = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert "the limit of open files is 128, which allows 8 open partitions of a SQLite backend" in told
    assert "unable to open" not in told
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("files", "shared", "most"),
    [(128, False, MIN_OPEN), (256, False, 40), (256, True, 26), (4_096, False, MAX_OPEN), (resource.RLIM_INFINITY, True, MAX_OPEN)],
)
def test_partitions_that_stay_open_follow_from_the_limit(monkeypatch: pytest.MonkeyPatch, files: int, shared: bool, most: int) -> None:
    monkeypatch.setattr("sluiceway.local.stores.resource.getrlimit", lambda _: (files, files))
    assert most_open(shared) == most


@driven
async def test_a_partition_that_stays_closed_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path) as (service, store):
        tries = 0

        async def closed(*_: object) -> None:
            nonlocal tries
            tries += 1
            raise StoreUnavailableError("unable to open database file")

        await service.create_queue(spec("q", 1))
        store.on_open = closed
        driver = service._drivers["q"]
        while tries < 4:
            driver.queue.retry_now([0], system.now(), anew=True)
            driver._cycle()
            await eventually(lambda: driver.queue.executors[0].state is not ExecutorState.OPENING)
        told = [record for record in caplog.records if "unable to open" in record.message and "partition 0" in record.message]
        assert len(told) == 1
