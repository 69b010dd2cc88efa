"""Peers' servers as child processes: on loopback, on free ports, ended by their ids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INSTALLED = Path(".tools/peers")
"""Directory in which `make bench-peers` puts programs that the system's packages lack."""
PATIENCE = 60.0
"""Seconds within which a server must start, and end."""


def program(name: str) -> str | None:
    """Find a program. Fetched programs come before the system's; Debian has servers in directories outside of users' PATH."""
    return shutil.which(name, path=f"{INSTALLED.absolute()}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def output_of(name: str, *arguments: str) -> str:
    """Return the first line that a program prints."""
    ended = subprocess.run([program(name) or name, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return (ended.stdout or ended.stderr).strip().partition("\n")[0]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listening(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the port accepts connections. Raises RuntimeError if the process ends first, or takes too long."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it listened")
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen on port {port} after {PATIENCE:.0f} s")


@contextmanager
def stopped_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kill_family(pid: int) -> None:
    """Kill a process and all of its descendants, each by its id."""
    # Stopped first, so that none of them can have another child meanwhile.
    for each in (found := _family(pid)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGSTOP)
    for each in {*found, *_family(pid)}:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found
