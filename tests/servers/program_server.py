"""A server of the tests' own that is another project's program: a process on loopback, in a directory that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import httpx
import pytest

from tests.server.server_process import PATIENCE, wait_until
from tests.servers.etcd_server import free_port

TOOLS = Path(__file__).resolve().parents[2] / ".tools"
"""Where programs are installed that this machine does not have."""


class NoServerError(Exception):
    """This machine has no such server."""


class ProgramServer(ABC):
    """Started by entering the block, stopped by leaving it."""

    program: ClassVar[str]
    folder: ClassVar[Path]
    """Where `installer` puts the program."""
    installer: ClassVar[Sequence[str]]
    installer_environment: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def binary(cls) -> Path:
        """The program: SLUICEWAY_TEST_<PROGRAM> if that is set, otherwise this machine's, otherwise what `install` has installed.
        Raises NoServerError."""
        chosen = os.environ.get(f"SLUICEWAY_TEST_{cls.program.upper().replace('-', '_')}")
        found = chosen or shutil.which(cls.program, path=f"{os.environ['PATH']}:{cls.folder}")
        if found is None:
            raise NoServerError(f"no {cls.program}: neither on PATH nor installed; `python -m {cls.__module__}` installs it")
        return Path(found).absolute()

    @classmethod
    def install(cls) -> None:
        """Install the program if there is none. Raises NoServerError without the tool for that, or if it fails."""
        with contextlib.suppress(NoServerError):
            cls.binary()
            return
        if shutil.which(cls.installer[0]) is None:
            raise NoServerError(f"no {cls.program}, and no {cls.installer[0]} to install it")
        print(f"installing {cls.program}, which takes a minute", flush=True)
        if subprocess.run(cls.installer, env={**os.environ, **cls.installer_environment}, check=False).returncode:
            raise NoServerError(f"{cls.program} could not be installed")

    @classmethod
    def install_or_warn(cls) -> None:
        try:
            cls.install()
        except NoServerError as error:
            print(f"NOTHING WILL BE TESTED ON {cls.program.upper()}: {error}")

    @classmethod
    @contextlib.contextmanager
    def started_or_skipped(cls) -> Iterator[Self]:
        """For a fixture: a server for the length of a block, or a skip that cannot be overlooked."""
        try:
            cls.binary()
        except NoServerError as error:
            message = f"NOTHING IS TESTED ON {cls.program.upper()}: {error}"
            warnings.warn(message, stacklevel=2)
            pytest.skip(message)
        with cls() as server:
            yield server

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix=f"sluiceway-{self.program}-"))
        try:
            self.port = free_port()
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ended = self._process.poll()
        log = self._log()
        self._remove()
        # Otherwise nobody would learn why its tests failed.
        assert ended is None, f"{self.program} had ended by itself with {ended}:\n{log}"

    @abstractmethod
    def _arguments(self) -> Sequence[str]:
        """Make in the directory what the program needs, and return its arguments."""

    @abstractmethod
    def _environment(self) -> Mapping[str, str]:
        """The program's environment, beside PATH and HOME."""

    def _is_ready(self) -> bool:
        return httpx.get(f"http://127.0.0.1:{self.port}", trust_env=False, timeout=2).status_code > 0

    def _start(self) -> None:
        arguments = self._arguments()
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.binary()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env={"PATH": os.environ["PATH"], "HOME": str(self._directory), **self._environment()},
                start_new_session=True,
            )
        wait_until(self._answers, f"the start of {self.program}")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.program} ended with {self._process.returncode}:\n{self._log()}")
        try:
            return self._is_ready()
        except httpx.HTTPError:
            return False

    def _log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-40_000:]

    def _remove(self) -> None:
        if (process := getattr(self, "_process", None)) is not None:
            process.kill()
            process.wait(PATIENCE)
        shutil.rmtree(self._directory, ignore_errors=True)
