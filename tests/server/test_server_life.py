"""How a server process starts and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually, running


def test_stopping_ends_long_polls_and_closes_idle_connections(tmp_path: Path) -> None:
    with running(tmp_path) as server, ThreadPoolExecutor(2) as pool:
        name = server.queue()
        body = {"queue_name": name, "client_id": "c", "request_timeout": "15m"}
        polls = [pool.submit(httpx.post, f"{server.url}/v1/queue.lease", json=body, timeout=PATIENCE) for _ in range(2)]
        eventually(lambda: server.waiting(name) == 2)
        server.stop()
        for poll in polls:
            answer = poll.result(PATIENCE)
            assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "unavailable", True)
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/livez")


def test_what_was_answered_before_a_stop_is_there_after_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        name = server.queue(requested_partitions=2)
        made = server.produce(name, "a", "b", idempotency_key="k")
    with running(tmp_path) as server:
        assert server.produce(name, "a", "b", idempotency_key="k") == {**made, "deduplicated": True}
        assert len(server.lease(name)["items"]) == 2


class Child:
    """A server process of its own."""

    def __init__(self, data: Path, *options: str) -> None:
        command = [sys.executable, "-m", "sluiceway.server.run", "--data", str(data), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    url_file = tmp_path / "url"
    child = Child(tmp_path / "data", "--url-file", str(url_file))
    try:
        url = url_file.read_text().strip()
        assert child.line == f"sluiceway listening on {url}\n"
        assert httpx.get(f"{url}/readyz", timeout=PATIENCE).json()["ready"] is True
        httpx.post(f"{url}/v1/queues.create", json={"queue_name": "q"}, timeout=PATIENCE).raise_for_status()
        answers: list[int] = []

        def poll() -> None:
            body = {"queue_name": "q", "client_id": "c", "request_timeout": "15m"}
            answers.append(httpx.post(f"{url}/v1/queue.lease", json=body, timeout=PATIENCE).status_code)

        def waiting() -> bool:
            stats = httpx.post(f"{url}/v1/queue.stats", json={"queue_name": "q"}, timeout=PATIENCE).json()
            return bool(stats["logical_queues"][0]["lease_waiting"])

        thread = threading.Thread(target=poll)
        thread.start()
        eventually(waiting)
        child.process.send_signal(number)
        out, err = child.process.communicate(timeout=PATIENCE)
        thread.join(PATIENCE)
        assert (child.process.returncode, out, answers) == (0, "", [503]), err
        assert "Traceback" not in err
    finally:
        child.process.kill()
        child.process.communicate()


def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with running(tmp_path):
        child = Child(tmp_path)
        _, err = child.process.communicate(timeout=PATIENCE)
        assert child.line == ""
        assert child.process.returncode == 1
        assert "is in use by the process with id" in err
        assert "Traceback" not in err


HUNG_UP = """
import os, signal, sys
from pathlib import Path
from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.server.run import serve

def hung_up(name):
    plain = getattr(Service, name)
    async def wrapped(self):
        os.kill(os.getpid(), signal.SIGHUP)
        await plain(self)
    setattr(Service, name, wrapped)

hung_up("start")
hung_up("stop")
loaded = load(environment={}, flags={"server.listen": "127.0.0.1:0"})
serve(Path(sys.argv[1]), loaded, lambda url: os.kill(os.getpid(), signal.SIGTERM))
"""


def test_a_hangup_while_it_starts_or_stops_does_not_end_the_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HUNG_UP, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "stopped" in done.stderr
