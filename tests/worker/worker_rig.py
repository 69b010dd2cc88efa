"""Real workers on a folder with handlers, against a server of the test's own process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from sluiceway import testing
from tests.server.server_process import PATIENCE

HANDLERS = '''
import asyncio, os, pathlib, time

def note(word, item):
    """Append a line to the journal; one write, so that lines of several processes do not mix."""
    file = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{word} {item.payload.decode()} {item.attempts} {os.getpid()}\\n".encode())
    os.close(file)

def slow(item):
    note("begun", item)
    time.sleep(0.02)
    note("done", item)

async def slow_async(item):
    note("begun", item)
    await asyncio.sleep(0.02)
    note("done", item)

def batch(items):
    for item in items:
        note("begun", item)
    time.sleep(0.02)
    for item in items:
        note("done", item)

class Row:
    def __init__(self, payload, attempts):
        self.payload, self.attempts = payload, attempts

def table(leased):
    rows = [Row(*row) for row in zip(leased.table["payload"].to_pylist(), leased.table["attempts"].to_pylist())]
    for row in rows:
        note("begun", row)
    time.sleep(0.02)
    for row in rows:
        note("done", row)

def stuck(item):
    note("begun", item)
    time.sleep(600)

def dies(item):
    note("begun", item)
    if item.payload == b"die" and item.attempts == 1:
        os._exit(7)
    note("done", item)
'''


class Worker:
    """A process `sluiceway work`, whose handlers write to a journal."""

    def __init__(self, folder: Path, served: testing.TestServer, handler: str, *options: str, queue: str = "q") -> None:
        self.folder = folder
        if not (folder / "handlers.py").exists():
            (folder / "handlers.py").write_text(HANDLERS)
        command = [
            sys.executable,
            "-m",
            "sluiceway.cli.main",
            "work",
            f"handlers:{handler}",
            "--queue",
            queue,
            "--url",
            served.url,
            *options,
        ]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def journal(self, word: str = "") -> list[list[str]]:
        """Words, payloads, attempts and process ids, of the lines that begin with this word."""
        file = self.folder / "journal"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split() for line in lines if line.startswith(word)]

    def begun(self) -> Sequence[str]:
        return [payload for _, payload, _, _ in self.journal("begun")]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
