"""The supervisor of a worker with several processes, over processes that are told what to do."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from sluiceway.worker import Options, supervisor
from sluiceway.worker.supervisor import Child, Supervisor


class Process:
    """Stands in for a process: runs until it is told to stop, or has ended at once with `code`."""

    def __init__(self, code: int | None = None) -> None:
        self._code = code
        self.stdin = io.BytesIO()

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int) -> None:
        self._code = 0

    def wait(self, timeout: float | None = None) -> int | None:
        return self._code


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_that_has_failed_a_thousand_times_is_still_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Process(1))
    child = Child("tasks:handle", 1, Options(queue_name="q", processes=2))
    for _ in range(1_100):
        child.start()
        assert child.ended() == 1
        assert not child.may_start(only_once=False), "after a pause"
    monkeypatch.setattr(supervisor, "PAUSES", (0.0, 0.0))
    assert child.may_start(only_once=False)


def test_a_process_that_cannot_be_started_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when there is no memory for it, which is often why an earlier one was killed."""
    monkeypatch.setattr(supervisor, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(supervisor, "LOOK_EVERY", 0.0)
    started: list[Process] = []
    refusals = [BlockingIOError(11, "Resource temporarily unavailable")]

    def start(*_: object, **__: object) -> Process:
        if refusals:
            raise refusals.pop()
        started.append(Process())
        if len(started) == 2:
            worker._is_stopping.set()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    worker = Supervisor("tasks:handle", Options(queue_name="q", processes=2))
    before = open_files()
    worker.run()
    assert [each.poll() for each in started] == [0, 0], "both were started, and told to stop"
    assert "process 1 could not be started" in caplog.text
    assert open_files() == before
