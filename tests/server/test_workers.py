"""Several processes that serve together: they are started again when they die, and end when they are told to, or when nobody is left to."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sluiceway.adapters.lock import DirectoryLock
from sluiceway.client import Client
from sluiceway.instance.configuration import load
from sluiceway.kernel.address import Address
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.configuration import ClusterSettings, Configuration, ServerSettings
from sluiceway.server import workers as module
from sluiceway.server.run import cluster_of
from sluiceway.server.wiring import Door
from sluiceway.server.workers import COMMAND as COMMAND_OF_WORKERS
from sluiceway.server.workers import LONGEST_DELAY, Said, WorkerOrder, next_delay
from sluiceway.testing.drive import driven
from tests.server.server_process import COMMAND, PATIENCE
from tests.server.server_running import eventually
from tests.server.test_tls import Files
from tests.servers.pids import is_alive

STAND_IN = Path(__file__).with_name("worker_stand_in.py")


# ---- decisions ------------------------------------------------------------------------------------------------------


def test_a_worker_that_keeps_dying_is_started_ever_more_rarely() -> None:
    delays = [0]
    for _ in range(10):
        delays.append(next_delay(delays[-1], 0))
    assert delays[1:] == [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000, 10_000]
    assert next_delay(10_000, LONGEST_DELAY - 1) == 10_000
    assert next_delay(10_000, LONGEST_DELAY) == 100


def test_what_a_worker_says_is_raised_as_it_was() -> None:
    error = SluicewayError("unavailable", "why", "data")
    again = Said(code=error.code, detail=error.detail, field=error.field).error()
    assert isinstance(again, SluicewayError)
    assert (again.code, again.detail, again.field) == ("unavailable", "why", "data")
    assert repr(Said(detail="taken").error()) == "OSError('taken')"


@driven
async def test_what_a_library_prints_is_not_taken_for_the_worker_s_message() -> None:
    output = asyncio.StreamReader(limit=1_000)
    output.feed_data(b"loaded\n\xff\n" + b"-" * 5_000 + b"\n" + msgspec.json.encode(Said("http://w")) + b"\n")
    child = cast(Any, SimpleNamespace(pid=7, stdout=output))
    assert (await module._hear(child)).url == "http://w"
    output.feed_eof()
    assert await module._hear(child) == Said()


@pytest.mark.parametrize(
    ("cluster", "workers", "at", "tls", "meta", "advertise"),
    [
        (ClusterSettings(), 2, Address("127.0.0.1", 7), False, "sqlite:/data/meta.sqlite", "http://127.0.0.1:7"),
        (ClusterSettings(meta="etcd://e:1"), 1, Address("10.0.0.5", 7), True, "etcd://e:1", "https://10.0.0.5:7"),
        (ClusterSettings(meta="sqlite:/m"), 1, Address("0.0.0.0", 7), False, "sqlite:/m", "http://127.0.0.1:7"),
        (ClusterSettings(meta="sqlite:/m"), 1, Address("::", 7), False, "sqlite:/m", "http://[::1]:7"),
        (ClusterSettings(meta="etcd://e:1", advertise="https://a:1/"), 1, Address("::", 7), False, "etcd://e:1", "https://a:1"),
        (ClusterSettings(meta="etcd://e:1", advertise="http://a"), 2, Address("::", 7), True, "etcd://e:1", "http://a:7"),
    ],
)
def test_how_others_reach_an_instance(cluster: ClusterSettings, workers: int, at: Address, tls: bool, meta: str, advertise: str) -> None:
    configuration = Configuration(server=ServerSettings(workers=workers), cluster=cluster)
    expected = msgspec.structs.replace(cluster, meta=meta, advertise=advertise)
    assert cluster_of(Path("/data"), configuration, at, tls) == expected


def test_a_server_by_itself_is_in_no_cluster() -> None:
    assert cluster_of(Path("/data"), Configuration(), Address("127.0.0.1", 7), False) is None


class Process:
    """Stands in for a worker's process that serves until it is told to stop, or `ends`."""

    def __init__(self) -> None:
        self.pid = 7
        self.stdin = io.BytesIO()
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(b'{"url":"http://here"}\n')
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ends(self, number: int = signal.SIGKILL) -> None:
        if not self._code.done():
            self._code.set_result(-number)
            self.stdout.feed_eof()

    send_signal = ends

    async def wait(self) -> int:
        return await self._code


def test_a_worker_that_cannot_be_started_again_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when there is no memory for it, which is often why the one before was killed."""
    monkeypatch.setattr(module, "FIRST_DELAY", 0)
    started: list[Process] = []
    refusals = [OSError(12, "Cannot allocate memory")] * 2

    async def start(*_: object, **__: object) -> Process:
        if len(started) == 2 and refusals:
            raise refusals.pop()
        started.append(Process())
        if len(started) == 3:
            supervisor._stop(signal.SIGTERM)
        return started[-1]

    async def run() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await supervisor.run(lambda: started[0].ends())

    supervisor = module.Supervisor(2, b"", [], 0)
    hangup = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert len(started) == 3
    assert caplog.text.count("could not be started") == 2


# ---- processes ------------------------------------------------------------------------------------------------------


class Family:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, workers: int, behaviour: str) -> None:
        folder.mkdir()
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, STAND_IN, folder, str(workers), behaviour], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> tuple[str, str]:
        return self.process.communicate(timeout=PATIENCE)

    def pids(self) -> set[int]:
        """Those of all workers that there have been."""
        return {int(path.name) for path in self._folder.iterdir()}

    def noted(self, pid: int) -> str:
        return (self._folder / str(pid)).read_text()

    def living(self) -> set[int]:
        return set(filter(is_alive, self.pids()))


@contextlib.contextmanager
def family(folder: Path, workers: int = 3, behaviour: str = "") -> Iterator[Family]:
    made = Family(folder, workers, behaviour)
    watch = threading.Timer(PATIENCE, made.process.kill)
    watch.start()
    try:
        yield made
    finally:
        watch.cancel()
        made.process.kill()
        for pid in made.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        made.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_all_serve_before_it_says_so_and_all_end_when_it_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    with family(tmp_path / "pids") as server:
        assert server.line() == "ready"
        assert len(server.living()) == 3
        # What a terminal sends to everybody goes to the parent alone, which passes it on.
        assert os.getpgid(server.process.pid) not in set(map(os.getpgid, server.living()))
        server.process.send_signal(number)
        out, err = server.finish()
        assert (out, server.process.returncode) == ("ended\n", 0)
        assert server.living() == set()
        assert len(server.pids()) == 3
        assert err.count("is ready; other workers reach it at http://worker-") == 3


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as server:
        assert server.line() == "ready"
        first = min(server.pids())
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(server.pids()) == 4 and len(server.living()) == 3)
        # The configuration may have been read again before it came, so it is told to do so, and nobody else.
        eventually(lambda: sorted(map(server.noted, server.living())) == ["", "", "reload"])
        server.process.terminate()
        out, err = server.finish()
        assert out == "ended\n"
        assert f"(process {first}) was killed by SIGKILL; restarting it in 100ms" in err


def test_a_worker_that_is_started_again_has_the_server_s_time(tmp_path: Path) -> None:
    """The machine's clock has jumped by an hour since the server started: its own goes on as before, in each of its workers."""
    with family(tmp_path / "x", 2, "tells the time") as made:
        assert made.line() == "ready"
        (first, *_) = made.living()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(made.pids()) == 3 and len(made.living()) == 2 and all(map(made.noted, made.living())))
        assert all(3_590_000 < int(made.noted(pid)) < 3_610_000 for pid in made.pids())


@pytest.mark.slow
def test_a_worker_that_stands_still_is_killed_and_started_again(tmp_path: Path) -> None:
    with family(tmp_path / "pids", 2, "watched") as server:
        assert server.line() == "ready"
        frozen = min(server.pids())
        os.kill(frozen, signal.SIGSTOP)
        eventually(lambda: frozen not in server.living() and len(server.living()) == 2)
        server.process.terminate()
        out, err = server.finish()
        assert out == "ended\n"
        assert f"(process {frozen}) did not respond for 3s and was killed" in err
        assert f"(process {frozen}) was killed by SIGKILL; restarting it" in err


@pytest.mark.slow
def test_a_worker_that_serves_says_so_again_and_again(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as file:
        _says_so(tmp_path, file.fileno())


def _says_so(folder: Path, seats: int) -> None:
    order = WorkerOrder(folder, load(environment={}, flags={"server.workers": "2"}), Door(keys=False), (), seats)
    with subprocess.Popen(COMMAND_OF_WORKERS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[seats]) as worker:
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(pickle.dumps(order))
            worker.stdin.flush()
            assert worker.stdout.readline().startswith(b'{"url":"http://127.0.0.1:')
            assert worker.stdout.read(3) == b"\n" * 3
        finally:
            worker.kill()


@pytest.mark.slow
def test_a_hangup_goes_to_all_of_them(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as server:
        assert server.line() == "ready"
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: [server.noted(pid) for pid in server.pids()] == ["reload"] * 3)
        assert len(server.living()) == 3


@pytest.mark.slow
def test_when_the_parent_is_killed_nobody_is_left(tmp_path: Path) -> None:
    with family(tmp_path / "pids") as server:
        assert server.line() == "ready"
        server.process.kill()
        eventually(lambda: not server.living())


@pytest.mark.slow
def test_one_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    with family(tmp_path / "pids", 2, "stuck") as server:
        assert server.line() == "ready"
        server.process.terminate()
        out, err = server.finish()
        assert out == "ended\n"
        assert err.count("did not stop in time and was killed") == 2
        assert server.living() == set()


@pytest.mark.parametrize(
    ("behaviour", "named"),
    [
        ("refuses", "SluicewayError: the disk is on fire"),
        pytest.param("taken", "OSError: the port is taken", marks=pytest.mark.slow),
        pytest.param("crashes", "SluicewayError: worker", marks=pytest.mark.slow),
    ],
)
def test_a_server_whose_workers_cannot_start_says_why_and_ends(tmp_path: Path, behaviour: str, named: str) -> None:
    with family(tmp_path / "pids", 3, behaviour) as server:
        out, _ = server.finish()
        assert out.startswith(named)
        assert server.process.returncode == 1
        assert server.living() == set()
        assert len(server.pids()) <= 3


# ---- the server itself ----------------------------------------------------------------------------------------------


class Serving:
    """`sluiceway serve --workers 2`; its log is a file."""

    def __init__(self, folder: Path, *more: str) -> None:
        self._log = folder / "log"
        command = [*COMMAND, "serve", "--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--workers", "2", *more]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    @property
    def url(self) -> str:
        return self.line.split()[-1]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def workers(self) -> list[int]:
        """The process ids of all that have served, in that order."""
        return [int(pid) for pid in re.findall(r"worker \d \(process (\d+)\) is ready", self.log)]


@contextlib.contextmanager
def serving(folder: Path, *more: str) -> Iterator[Serving]:
    made = Serving(folder, *more)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
        eventually(lambda: not any(map(is_alive, made.workers())))


def states(client: Client) -> list[str]:
    return [part.state for part in client.stats("tasks").partitions]


def serves_all(client: Client, ready: int) -> bool:
    """Whether one answer has all four partitions available, and this many ready items in them."""
    parts = client.stats("tasks").partitions
    return [part.state for part in parts] == ["available"] * 4 and sum(part.ready for part in parts) == ready


def test_workers_serve_one_address_and_survive_one_another(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Client(server.url) as client:
        client.create_queue("tasks", requested_partitions=4)
        client.produce("tasks", [b"one"])
        before = server.workers()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len(server.workers()) == 3)
        # Whoever takes the call, all partitions are there, with the item. A partition that moves to the new worker is away for a moment.
        eventually(lambda: serves_all(client, ready=1))
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert not any(map(is_alive, server.workers()))


@pytest.mark.slow
def test_workers_reach_one_another_without_the_certificate_that_others_see(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with serving(tmp_path, "--tls-certificate", str(files.certificate), "--tls-key", str(files.key)) as server:
        assert server.url.startswith("https://")
        with Client(server.url, ca_file=str(files.ca_file)) as client:
            client.create_queue("tasks", requested_partitions=4)
            # Two of them are the other's.
            assert states(client) == ["available"] * 4
            assert "other workers reach it at http://127.0.0.1:" in server.log


@pytest.mark.slow
def test_when_their_supervisor_is_killed_workers_end(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert len(server.workers()) == 2
        server.process.kill()
        eventually(lambda: not any(map(is_alive, server.workers())))


@pytest.mark.slow
def test_what_keeps_workers_from_starting_is_said_as_a_server_by_itself_says_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    alone = DirectoryLock(tmp_path / "data")
    with serving(tmp_path) as server:
        assert server.process.wait(PATIENCE) == 4
        assert server.line == ""
        assert f"is in use by the process with id {os.getpid()}, a standalone server" in server.log
        assert "Traceback" not in server.log
    alone.release()


@pytest.mark.slow
def test_a_server_by_itself_does_not_come_between_workers(tmp_path: Path) -> None:
    with serving(tmp_path):
        command = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert second.returncode == 4
        assert "is in use by instances of a cluster" in second.stderr
