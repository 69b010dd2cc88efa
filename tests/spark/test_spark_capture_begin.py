"""`sluiceway spark capture`, at its two ends: what is wrong is told before Spark is started, and it always ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.capture import CaptureConfig, Look, check, look, run_member
from sluiceway.cli.stop_signal import Asked
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import capture_resident
from sluiceway.spark.capture_resident import Leash, Resident, check_before, settings
from tests.cli.cli_shell import Shell
from tests.spark.spark_world import PATIENCE, Server, server, until

AWAY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        running.create("there", partitions=1)
        yield running


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    def none(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("sluiceway.spark.session", none)
    return Shell("there", monkeypatch, capsysbinary)


def _what(folder: Path, **other: str) -> list[str]:
    said = {"stream": "queue", "to": AWAY, "queue": "there", "meta": f"sqlite:{folder}/meta.sqlite"} | other
    return ["spark", "capture", "c", "--resident", *(word for name, value in said.items() for word in (f"--{name}", value))]


SOURCE = ["--option", f"url={AWAY}", "--option", "queue=source"]


@pytest.mark.parametrize(
    ("other", "more", "code", "words"),
    [
        ({"meta": "sqlite:/no-such-folder/meta.sqlite"}, SOURCE, 3, "there is no folder /no-such-folder"),
        ({"meta": "env:NO_SUCH_VARIABLE"}, SOURCE, 3, "NO_SUCH_VARIABLE"),
        ({"meta": "sqlite:/"}, SOURCE, 4, "meta store /"),
        ({}, [*SOURCE, "--option", "quue=source"], 3, "did you mean queue"),
        ({}, SOURCE[:2], 3, "queue: this option is required"),
        ({"stream": "postgres"}, ["--option", "publications=p", "--option", "dsn_env=NO_SUCH_VARIABLE"], 3, "dsn_env"),
        ({"to-key": "env:NO_SUCH_VARIABLE"}, SOURCE, 3, "NO_SUCH_VARIABLE"),
        ({}, [*SOURCE, "--conf", "spark.speculation=true"], 3, "spark.speculation"),
        ({"master": "local[8]"}, SOURCE, 3, "ends the job when a task fails"),
    ],
)
def test_what_is_wrong_is_told_before_spark_is_started(
    shell: Shell, tmp_path: Path, other: dict[str, str], more: list[str], code: int, words: str
) -> None:
    ended, _, err = shell.ends(*_what(tmp_path, **other), *more)
    assert (ended, words in err) == (code, True), err


def test_a_queue_that_is_not_there_is_told_with_how_to_make_it(shell: Shell, world: Server, tmp_path: Path) -> None:
    code, _, err = shell.ends(*_what(tmp_path, to=world.url, queue="nowhere"), *SOURCE)
    assert (code, "there is no queue 'nowhere'" in err, "sluiceway queue create" in err) == (3, True, True), err


def test_a_server_that_does_not_say_is_no_fault(world: Server, tmp_path: Path) -> None:
    for url in (world.url, AWAY):
        asyncio.run(check(CaptureConfig(name="c", meta=f"sqlite:{tmp_path}/m.sqlite", stream="queue", url=url, queue="there")))


def test_what_lies_where_the_tasks_are_is_left_to_them(tmp_path: Path) -> None:
    options = {"publications": "p", "dsn_env": "NO_SUCH_VARIABLE"}
    config = CaptureConfig(name="c", meta=f"sqlite:{tmp_path}/m.sqlite", stream="postgres", options=options, url=AWAY, queue="q")
    with pytest.raises(SluicewayError, match="NO_SUCH_VARIABLE"):
        check_before(config, settings(2), 2)
    elsewhere = settings(2) | {"spark.master": "spark://host:7077"}
    check_before(config, elsewhere, 2)
    with pytest.raises(SluicewayError, match=r"spark\.speculation"):
        check_before(config, elsewhere | {"spark.speculation": True}, 2)


def test_a_capture_of_which_nothing_is_known_has_no_watermark(world: Server, tmp_path: Path) -> None:
    world.create("source", partitions=1)
    options = {"url": world.url, "queue": "source"}
    config = CaptureConfig(name="c", meta=f"sqlite:{tmp_path}/m.sqlite", stream="queue", options=options, url=world.url, queue="there")

    async def begun() -> Look:
        # Makes the file.
        await check(config)
        stop = asyncio.Event()
        member = asyncio.create_task(run_member(config, stop=stop))
        while not (seen := await look("c", config.meta)).state.partitions:  # noqa: ASYNC110 - it is in a file
            await asyncio.sleep(0.05)
        stop.set()
        await member
        return seen

    # Items of a queue have no time.
    assert asyncio.run(asyncio.wait_for(begun(), PATIENCE)).watermark is None


# ---- the end -----------------------------------------------------------------------------------------------------------


def test_a_task_that_cannot_begin_says_why_and_ends_well_when_it_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_resident, "_AGAIN", 200.0)
    leash = Leash("127.0.0.1", threading.Event())
    # A folder is no file.
    config = CaptureConfig(name="c", meta=f"sqlite:{tmp_path}", stream="queue", url=AWAY, queue="q")

    def let_go() -> None:
        until("it says why", lambda: "meta store" in leash.trouble)
        leash.drop()

    thread = threading.Thread(target=let_go)
    thread.start()
    # Raised, it would be begun again, for ever.
    asyncio.run(capture_resident._Member(config, leash.address, leash.nonce)._run(0, 0))
    thread.join()
    leash.close()
    assert leash.failed is None


def test_a_task_that_leaves_is_there_until_it_has_left() -> None:
    import socket

    leash = Leash("127.0.0.1", threading.Event())
    with socket.create_connection(leash.address, timeout=60) as task:
        task.sendall(f"{leash.nonce} 0 0 host 22\n".encode())
        until("it is there", lambda: leash.present)
        leash.drop()
        assert task.recv(1) == b""
        assert leash.present
        # Also its last words are heard.
        task.sendall(b'{"code": "unavailable", "detail": "late", "field": null}\n')
        until("it is heard", lambda: leash.trouble == "late", seconds=30)
    until("it has left", lambda: not leash.present)
    leash.close()


def test_a_job_without_tasks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when no task gets as far as to say that it is there."""
    monkeypatch.setattr(capture_resident, "_NOBODY", 0.0)
    cancelled: list[str] = []

    class Context:
        def cancelJobGroup(self, group: str) -> None:
            cancelled.append(group)
            job._over.set()

    job = Resident.__new__(Resident)
    job._leash, job._over, job._group = Leash("127.0.0.1", threading.Event()), threading.Event(), "group"
    job._context = Context()  # type: ignore[assignment]
    ended = threading.Thread(target=job.stop, daemon=True)
    ended.start()
    until("it has ended", lambda: not ended.is_alive(), seconds=capture_resident._LEAVE - 5)
    assert cancelled == ["group"]


def test_whoever_says_it_again_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Asked() as asked:
        signal.raise_signal(signal.SIGTERM)
        # From a program around this one, that hands on what it was told.
        signal.raise_signal(signal.SIGTERM)
        assert asked.to_end
        monkeypatch.setattr("sluiceway.cli.stop_signal._AGAIN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.spark
def test_ctrl_c_ends_it_while_spark_is_starting(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sluiceway.cli.main", *_what(tmp_path), *SOURCE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        assert "starting Spark" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=200)
    assert child.returncode == 130
    assert "Traceback" not in err
