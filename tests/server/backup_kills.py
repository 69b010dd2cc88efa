"""`kill -9` of `backup create`, of `restore`, and of the server while a backup is taken, at random moments under load.

After each kill the next backup succeeds, and a restore of it is compared with the ledger.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar

from tests.server.backup_rounds import Traffic, command, create_queues, play_round
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until

KINDS = ("create", "restore", "server")
WITHOUT_SERVER = {4, 5}
"""Exit codes of a backup whose server is gone: it could not be reached, or did not say what became of a call."""
_IDLE = "from sluiceway.instance import backups; backups.BACKUP_IDLE = 3_000"


class HastyServer(ServerProcess):
    """A server that ends a backup which is not read after 3 s, where others do after a minute: the next one need not wait for so long."""

    command: ClassVar[Sequence[str]] = [sys.executable, "-c", f"{_IDLE}; from sluiceway.cli.main import main; main()"]


class Killer:
    """Kills commands at random moments of their usual length. `killed` counts those that had not ended by then."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.killed: Counter[str] = Counter()
        self._lasts: dict[str, float] = {}
        """Seconds that each command takes."""

    def measure(self, *arguments: str) -> None:
        """Run a command to its end."""
        began = time.monotonic()
        command(*arguments)
        self._lasts[arguments[0]] = time.monotonic() - began

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command, and return at a random moment of it."""
        process = subprocess.Popen([*COMMAND, *arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        threading.Event().wait(self.random.uniform(0.2, 0.9) * self._lasts[arguments[0]])
        return process

    def kill(self, *arguments: str) -> bool:
        """Kill a command at a random moment. Returns whether it had not ended by then."""
        process = self.begin(*arguments)
        process.kill()
        process.communicate(timeout=PATIENCE)
        assert process.returncode in (0, -9), process.returncode
        self.killed[arguments[0]] += process.returncode != 0
        return process.returncode != 0


def kill_restore(killer: Killer, data: Path, arguments: Sequence[str]) -> None:
    """Kill a restore: the data directory is there whole or not at all."""
    if killer.kill(*arguments) and not data.exists():
        return
    # It was complete.
    shutil.rmtree(data)


def kill_server(killer: Killer, server: ServerProcess, target: str, data: Path) -> ServerProcess:
    """Kill the server while a backup is taken, which fails without a trace. Returns the server that was started in its place."""
    before = listed(target)
    process = killer.begin("backup", target, "--url", server.url)
    server.kill()
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode in {0, *WITHOUT_SERVER}, said
    assert "Traceback" not in said
    killer.killed["server"] += process.returncode != 0
    assert len(listed(target)) == len(before) + (process.returncode == 0)
    return HastyServer(data, listen=server.address)


def listed(target: str) -> list[str]:
    """The backups that can be seen."""
    done = subprocess.run([*COMMAND, "backup", "list", target], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


def verify(target: str) -> None:
    """Fail unless all backups are good."""
    done = subprocess.run([*COMMAND, "backup", "verify", target], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run(folder: Path, kinds: Sequence[str], seed: int, target: str) -> Counter[str]:
    """Kill what each of the kinds names, one after the other. Returns how often a kill came before the end, by command."""
    killer = Killer(seed)
    data = folder / "data"
    server: ServerProcess = HastyServer(data)
    try:
        create_queues(server.url)
        with Traffic(server.url, seed, outlives=True) as traffic:
            wait_until(lambda: len(traffic.ledger.completed) > 200, "some load")
            killer.measure("backup", target, "--url", server.url)
            killer.measure("restore", target, "--data", str(folder / "measured"))
            for number, kind in enumerate(kinds):
                restored = folder / f"restored-{number}"
                if kind == "create":
                    killer.kill("backup", target, "--url", server.url)
                elif kind == "server":
                    server = kill_server(killer, server, target, data)
                play_round(traffic, server.url, target, restored, partial(kill_restore, killer, restored) if kind == "restore" else None)
                shutil.rmtree(restored)
        verify(target)
    finally:
        if server.process.returncode is None:
            server.kill()
    return killer.killed
