"""A real server whose stored bytes are damaged, or whose disk has no room: it says so, loses nothing else, and goes on."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest

from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until
from tests.server.server_running import running
from tests.storage.test_sqlite_faults import Disk, sound

MARK = "the payload in which a bit will flip "


class Api:
    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, call: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self._url}/v1/{call}", json={"queue_name": "q", **fields}, timeout=PATIENCE)

    def ask(self, call: str, **fields: Any) -> Any:
        answer = self.post(call, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def lease_all(self) -> list[str]:
        """The payloads of everything that can be leased; asks again after a refusal, which is how a stopped partition shows."""
        payloads: list[str] = []
        while True:
            answer = self.post("queue.lease", client_id="c", batch_size=1_000, max_partitions=3)
            if answer.status_code == 200 and not answer.json()["items"]:
                return payloads
            assert answer.status_code == 200 or answer.json()["code"] == "partition_damaged", answer.text
            payloads += [base64.b64decode(item["bytes"]).decode() for item in answer.json().get("items", ())]

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self._url}/readyz", timeout=PATIENCE)


def flip_a_bit(partitions: Path, content: bytes) -> Path:
    """In the middle of the one place that holds `content`."""
    (file,) = [path for path in partitions.glob("*.sqlite") if content in path.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    file.write_bytes(data)
    return file


@pytest.mark.crash
@pytest.mark.slow
def test_a_flipped_bit_stops_its_partition_by_name_and_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data) as server:
        api = Api(server.url)
        incarnation = api.ask("queues.create", requested_partitions=3)["incarnation"]
        stored = {api.ask("queue.produce", items=[{"utf8": text} for text in texts])["partition"]: texts for texts in _requests()}
        assert sorted(stored) == [0, 1, 2]
        assert server.interrupt() == 0
    (hit,) = [number for number, texts in stored.items() if MARK in texts[0]]
    sound_items = sorted(text for number, texts in stored.items() if number != hit for text in texts)
    file = flip_a_bit(data / "partitions", MARK.encode())

    with ServerProcess(data) as server:
        api = Api(server.url)
        leased = api.lease_all()
        assert sorted(leased) == sound_items
        answer = api.ready()
        (problem,) = answer.json()["problems"]
        assert answer.status_code == 503
        assert f"queue q, partition {hit}: stopped" in problem
        assert "failed its checksum" in problem
        log = (tmp_path / "data.log").read_text()
        assert f"queue q, partition {hit} is stopped" in log
        assert "Traceback" not in log
        for n in range(4):
            assert api.ask("queue.produce", items=[{"utf8": f"later {n}"}])["partition"] != hit
        assert sorted(api.lease_all()) == [f"later {n}" for n in range(4)]
        assert server.interrupt() == 0

    # Whoever brings the bit back has everything back: the stopped partition was left as it was.
    data_bytes = bytearray(file.read_bytes())
    damaged = bytearray(MARK.encode())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(data_bytes.replace(damaged, MARK.encode()))
    with ServerProcess(data) as server:
        api = Api(server.url)
        assert api.ready().status_code == 200
        items = api.ask("queue.peek", lease_id=f"{incarnation}.{hit}.L1", limit=100)["items"]
        assert [base64.b64decode(item["bytes"]).decode() for item in items] == stored[hit]


@pytest.mark.crash
@pytest.mark.slow
def test_a_flipped_bit_in_the_log_of_a_killed_server_stops_by_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with ServerProcess(data) as server:
        api = Api(server.url)
        api.ask("queues.create", requested_partitions=2)
        for n in range(10):
            api.ask("queue.produce", items=[{"utf8": f"{n}"}])
        done = api.ask("queue.lease", client_id="c", batch_size=4, max_partitions=2)["items"]
        assert api.ask("queue.complete", ids=[item["id"] for item in done])["completed"] == 4
        server.kill()
    log = data / "partitions" / next(path.name for path in (data / "partitions").glob("*-0.sqlite-wal"))
    whole = log.read_bytes()
    log.write_bytes(_flipped(whole, len(whole) // 2))
    with ServerProcess(data) as server:
        (problem,) = Api(server.url).ready().json()["problems"]
        assert "queue q, partition 0: stopped" in problem
        assert f"the log {log} is damaged at byte" in problem
        assert server.interrupt() == 0
    assert log.read_bytes() == _flipped(whole, len(whole) // 2)
    log.write_bytes(whole)

    # The server was stopped in good order, so the meta store has a log again only after the next start.
    with ServerProcess(data) as server:
        api = Api(server.url)
        assert api.ready().status_code == 200
        assert sorted(api.lease_all()) == sorted({f"{n}" for n in range(10)} - {base64.b64decode(item["bytes"]).decode() for item in done})
        server.kill()
    log = data / "meta.sqlite-wal"
    log.write_bytes(_flipped(log.read_bytes(), log.stat().st_size // 2))
    refused = subprocess.run(
        [*COMMAND, "serve", "--data", str(data), "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert refused.returncode != 0
    assert f"the log {log} is damaged at byte" in refused.stderr
    assert "Traceback" not in refused.stderr


def _flipped(log: bytes, at: int) -> bytes:
    return log[:at] + bytes([log[at] ^ 16]) + log[at + 1 :]


def _requests() -> list[list[str]]:
    return [["a", "b"], [MARK, "c"], ["d", "e"]]


@pytest.fixture
def disk() -> Iterator[Disk]:
    before = apsw.vfs_names()[0]
    disk = Disk(before)
    apsw.set_default_vfs("faulty")
    yield disk
    apsw.set_default_vfs(before)
    disk.unregister()


@pytest.mark.parametrize("code", [apsw.SQLITE_FULL, apsw.SQLITE_IOERR_WRITE])
def test_a_disk_without_room_refuses_and_the_server_goes_on_when_there_is_room(tmp_path: Path, disk: Disk, code: int) -> None:
    def fails(call: str, _path: Path) -> None:
        if call == "write":
            raise apsw.exception_for(code)

    with running(tmp_path) as server:
        api = Api(server.url)
        api.ask("queues.create", requested_partitions=2)
        api.ask("queue.produce", items=[{"utf8": "before"}])
        leased = api.ask("queue.lease", client_id="c")
        disk.hook = fails
        for call, fields in (
            ("queue.produce", {"items": [{"utf8": "refused"}], "request_timeout": "300ms"}),
            ("queue.complete", {"ids": [leased["items"][0]["id"]], "request_timeout": "300ms"}),
        ):
            problem = api.post(call, **fields).json()
            assert problem["code"] == "unavailable" if code == apsw.SQLITE_FULL else problem["code"] in ("unavailable", "outcome_unknown")
            assert problem["retryable"] is True
        assert api.post("queue.lease", client_id="c").json().get("items", []) == []
        disk.hook = sound
        wait_until(lambda: api.ready().status_code == 200, "both partitions serving")
        api.ask("queue.produce", items=[{"utf8": "after"}])
        assert api.ask("queue.complete", ids=[leased["items"][0]["id"]])["completed"] == 1
        left = api.lease_all()
    assert left == ["after"]
