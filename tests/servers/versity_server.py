"""A real versitygw of the tests' own: an S3 gateway over a folder, on loopback, in a directory that goes with it.

`python -m tests.servers.versity_server` builds its program from the Go module into .tools/bin, unless there is one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import httpx
import pytest

from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from tests.server.server_process import PATIENCE, wait_until
from tests.servers.etcd_server import free_port

MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
"""Its conditional writes are atomic: each holds a lock on the name."""
BUILT = Path(__file__).resolve().parents[2] / ".tools/bin/versitygw"
REGION, KEY_ID, SECRET = "none", "tests", "tests"


class NoServerError(Exception):
    """This machine has no versitygw."""


def binary() -> Path:
    """The program: SLUICEWAY_TEST_VERSITYGW if that is set, otherwise this machine's, otherwise what `build` has built.
    Raises NoServerError."""
    found = os.environ.get("SLUICEWAY_TEST_VERSITYGW") or shutil.which("versitygw", path=f"{os.environ['PATH']}:{BUILT.parent}")
    if found is None:
        raise NoServerError("no versitygw: neither on PATH nor built; `python -m tests.servers.versity_server` builds it, with Go")
    return Path(found).absolute()


def build() -> None:
    """Build the program if there is none. Raises NoServerError if there is no Go, or it fails."""
    with contextlib.suppress(NoServerError):
        binary()
        return
    if shutil.which("go") is None:
        raise NoServerError("no versitygw, and no Go to build it")
    print("building versitygw, which takes a minute", flush=True)
    if subprocess.run(["go", "install", MODULE], env={**os.environ, "GOBIN": str(BUILT.parent)}, check=False).returncode:
        raise NoServerError("versitygw could not be built")


class VersityServer:
    """Started by entering the block, stopped by leaving it. It has one bucket, `tests`."""

    def __enter__(self) -> VersityServer:
        self._directory = Path(tempfile.mkdtemp(prefix="sluiceway-versity-"))
        try:
            (self._directory / "data/tests").mkdir(parents=True)
            (self._directory / "about").mkdir()
            self.url = f"http://127.0.0.1:{free_port()}"
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
        assert ended is None, f"versitygw had ended by itself with {ended}:\n{log}"

    def _start(self) -> None:
        address = self.url.removeprefix("http://")
        # Not in extended attributes, which not every file system has.
        backend = ["posix", "--sidecar", str(self._directory / "about"), str(self._directory / "data")]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(binary()), "--port", address, "--region", REGION, "--keep-alive", "--quiet", *backend],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self._directory), "ROOT_ACCESS_KEY": KEY_ID, "ROOT_SECRET_KEY": SECRET},
                start_new_session=True,
            )
        wait_until(self._answers, "the start of versitygw")

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"versitygw ended with {self._process.returncode}:\n{self._log()}")
        try:
            return httpx.get(self.url, trust_env=False, timeout=2).status_code > 0
        except httpx.HTTPError:
            return False

    def objects(self, prefix: str) -> BucketObjects:
        """A folder of the bucket."""
        return in_s3("tests", prefix, region=REGION, endpoint=self.url, access_key_id=KEY_ID, secret_access_key=SECRET)

    def _log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-40_000:]

    def _remove(self) -> None:
        if (process := getattr(self, "_process", None)) is not None:
            process.kill()
            process.wait(PATIENCE)
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def versity_or_skip() -> Iterator[VersityServer]:
    """For a fixture: a versitygw for the length of a block, or a skip that cannot be overlooked."""
    try:
        binary()
    except NoServerError as error:
        warnings.warn(f"NOTHING IS TESTED ON VERSITYGW: {error}", stacklevel=2)
        pytest.skip(f"NOTHING IS TESTED ON VERSITYGW: {error}")
    with VersityServer() as server:
        yield server


if __name__ == "__main__":
    try:
        build()
    except NoServerError as error:
        print(f"NOTHING WILL BE TESTED ON VERSITYGW: {error}")
