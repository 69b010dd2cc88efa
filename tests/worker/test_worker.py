"""`sluiceway work`, as real processes: stops, ends and starts."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluiceway import testing
from sluiceway.client import Item
from tests.server.server_running import eventually
from tests.worker.worker_rig import Worker


@pytest.fixture
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        server.client.create_queue("q", requested_partitions=2)
        yield server


@pytest.fixture
def start(tmp_path: Path, served: testing.TestServer) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def one(handler: str, *options: str, queue: str = "q") -> Worker:
        started.append(Worker(tmp_path, served, handler, *options, queue=queue))
        return started[-1]

    yield one
    for worker in started:
        if worker.process.poll() is None:
            worker.kill()


def totals(served: testing.TestServer, *counters: str) -> list[int]:
    partitions = served.client.stats("q").partitions
    return [sum(getattr(each, counter) for each in partitions) for counter in counters]


def produce(served: testing.TestServer, count: int) -> None:
    served.client.produce("q", [str(number) for number in range(count)])


def stop_under_load(start: Callable[..., Worker], served: testing.TestServer, number: int, handler: str, *options: str) -> None:
    """Stop a worker that has more to do. No lease is left, and nothing was begun that was not finished."""
    produced, completed = totals(served, "produced", "completed")
    served.client.produce("q", [str(produced + at) for at in range(400)])
    worker = start(handler, *options)
    eventually(lambda: totals(served, "completed")[0] > completed + 20)
    assert worker.stop(number) == 0, worker.log
    begun, done = ([payload for _, payload, _, _ in worker.journal(word)] for word in ("begun", "done"))
    assert Counter(begun) == Counter(done), worker.log
    assert max(Counter(begun).values()) == 1, "handled twice"
    assert f"stopped: {len(done) - completed:,} items done\n" in worker.log
    assert totals(served, "total_leased", "completed", "retried", "expired") == [0, len(done), 0, 0]


WAYS = [
    ("slow", []),
    ("slow_async", []),
    ("batch", ["--batch-size", "10"]),
    ("table", ["--tables", "--batch-size", "10", "--concurrency", "2"]),
    ("slow", ["--processes", "2"]),
]


@pytest.mark.parametrize(("handler", "options"), WAYS, ids=["sync", "async", "batch", "tables", "processes"])
def test_a_stop_under_load_leaves_no_lease_and_nothing_half_done(
    start: Callable[..., Worker], served: testing.TestServer, handler: str, options: list[str]
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        stop_under_load(start, served, number, handler, *options)


@pytest.mark.slow
def test_fifty_stops_under_load(start: Callable[..., Worker], served: testing.TestServer) -> None:
    for at in range(50):
        handler, options = WAYS[at % len(WAYS)]
        stop_under_load(start, served, signal.SIGTERM, handler, *options)


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["one process", "processes"])
def test_items_whose_handlers_outlast_the_shutdown_timeout_are_released(
    start: Callable[..., Worker], served: testing.TestServer, options: list[str]
) -> None:
    produce(served, 50)
    worker = start("stuck", "--concurrency", "2", "--shutdown-timeout", "100ms", *options)
    eventually(lambda: len(worker.begun()) == 2 * (2 if options else 1))
    assert worker.stop() == 0
    assert totals(served, "total_leased", "ready", "retried", "expired") == [0, 50, 0, 0]
    assert {item.attempts for item in served.client.lease("q", batch_size=50, max_partitions=2)} == {1}, "no attempt was counted"


def test_a_second_signal_does_not_wait_for_handlers(start: Callable[..., Worker], served: testing.TestServer) -> None:
    produce(served, 10)
    worker = start("stuck", "--concurrency", "2", "--shutdown-timeout", "1h")
    eventually(lambda: len(worker.begun()) == 2)
    worker.process.send_signal(signal.SIGINT)
    eventually(lambda: totals(served, "total_leased")[0] == 2)

    def is_ended() -> bool:
        worker.process.send_signal(signal.SIGINT)
        return worker.process.poll() is not None

    eventually(is_ended)
    # The last of these signals may come when it is past its own handler.
    assert worker.wait() in (0, 130, -signal.SIGINT)
    assert totals(served, "total_leased", "ready") == [0, 10]


def test_a_process_that_dies_is_started_again(start: Callable[..., Worker], served: testing.TestServer) -> None:
    served.client.produce("q", ["die"])
    worker = start("dies", "--processes", "2", "--lease-timeout", "1h")
    eventually(lambda: "ended with exit code 7" in worker.log)
    served.clock.advance("2h")
    produce(served, 20)
    eventually(lambda: totals(served, "total")[0] == 0)
    assert worker.stop() == 0
    assert len(worker.journal("done")) == 21


def test_processes_end_when_their_supervisor_is_killed(start: Callable[..., Worker], served: testing.TestServer) -> None:
    produce(served, 400)
    worker = start("slow", "--processes", "2")
    eventually(lambda: len({pid for *_, pid in worker.journal()}) == 2)
    worker.kill()
    pids = {int(pid) for *_, pid in worker.journal()}
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    assert totals(served, "total_leased", "retried", "expired") == [0, 0, 0]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that has ended stays in the table until it is waited for.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc/self/stat").exists() else True


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["one process", "processes"])
def test_a_worker_that_cannot_work_says_why(start: Callable[..., Worker], options: list[str]) -> None:
    unknown = start("nothing", *options)
    assert unknown.wait() == 3
    assert "handlers has no 'nothing'; its functions: batch, dies, note, slow, slow_async, stuck, table" in unknown.log


@pytest.mark.parametrize(("handler", "options"), [WAYS[0], WAYS[1], WAYS[3], WAYS[4]], ids=["sync", "async", "tables", "processes"])
def test_a_worker_waits_for_its_queue(start: Callable[..., Worker], served: testing.TestServer, handler: str, options: list[str]) -> None:
    stopped = start(handler, *options, "--listen", "127.0.0.1:0", queue="late")
    started = start(handler, *options, queue="late")
    for worker in (stopped, started):
        eventually(lambda worker=worker: "create it with `sluiceway queue create late`" in worker.log)  # type: ignore[misc]
    url = stopped.log.partition("health and metrics at ")[2].partition("/healthz")[0]
    eventually(lambda: get(url, "/readyz") == (503, "there is no queue 'late'\n"))
    assert get(url, "/healthz")[0] == 200
    assert stopped.stop() == 0, stopped.log
    served.client.create_queue("late")
    served.client.produce("late", ["1"])
    eventually(lambda: started.begun() == ["1"])
    assert started.log.count("the queue does not exist") == (2 if "--processes" in options else 1)
    assert started.stop() == 0, started.log


def test_an_ordered_worker_has_several_items_of_a_key_and_begins_one(start: Callable[..., Worker], served: testing.TestServer) -> None:
    served.client.create_queue("ordered", order="key")
    served.client.produce("ordered", [Item(f"a{number}", key="a") for number in range(3)])
    worker = start("stuck", "--ordered", queue="ordered")
    eventually(lambda: worker.begun() == ["a0"])
    assert [each.total_leased for each in served.client.stats("ordered").partitions] == [3]
    served.client.produce("ordered", [Item("b0", key="b")])
    eventually(lambda: worker.begun() == ["a0", "b0"])


def get(url: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics(start: Callable[..., Worker], served: testing.TestServer) -> None:
    produce(served, 30)
    worker = start("slow", "--processes", "2", "--listen", "127.0.0.1:0")
    eventually(lambda: "health and metrics at" in worker.log)
    url = worker.log.partition("health and metrics at ")[2].partition("/healthz")[0]
    eventually(lambda: 'sluiceway_worker_items_total{outcome="done",queue="q"} 30.0' in get(url, "/metrics")[1])
    assert get(url, "/healthz") == (200, "ok\n")
    assert get(url, "/readyz") == (200, "ok\n")
    assert get(url, "/")[0] == 404
    served.client.delete_queue("q", force=True)
    assert worker.wait() == 3


def test_changed_code_is_loaded_with_reload(start: Callable[..., Worker], served: testing.TestServer, tmp_path: Path) -> None:
    produce(served, 1)
    worker = start("slow", "--reload")
    eventually(lambda: totals(served, "completed") == [1])
    code = tmp_path / "handlers.py"
    good = code.read_text()
    code.write_text("this is no Python\n")
    eventually(lambda: "handlers.py changed: starting again" in worker.log and "process 1 ended" in worker.log)
    code.write_text(good.replace('note("done", item)', 'note("new", item)'))
    produce(served, 1)
    eventually(lambda: len(worker.journal("new")) == 1)
    assert worker.stop() == 0
