"""A server of each backend, for the length of a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.servers.postgres_server import PostgresServer

PASSWORD_VARIABLE = "SLUICEWAY_CONFORMANCE_URL"


class Server:
    """Somebody's server: it is only talked to."""

    durable = False
    """It may be killed and started again, and remembers."""
    stoppable = False
    """What it stores its partitions in may be stopped and continued."""

    def __init__(self, url: str) -> None:
        self.url = url

    def restart(self) -> None:
        """Kill it, without a chance to tidy up, and start it again at the same address."""
        raise NotImplementedError

    def stop_storage(self) -> None:
        """From now on what it stores its partitions in does not answer."""
        raise NotImplementedError

    def continue_storage(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what was started."""


class OwnServer(Server):
    """`sluiceway serve` with its partitions in one kind of backend."""

    def __init__(self, kind: str, folder: Path, postgres: PostgresServer | None = None) -> None:
        self._folder = folder
        self._postgres = postgres
        self.durable = kind != "memory"
        self.stoppable = postgres is not None
        lines = ["[backends.default]", f'kind = "{kind}"']
        if postgres is not None:
            lines += [f'url_env = "{PASSWORD_VARIABLE}"', 'write_timeout = "2s"']
        (folder / "sluiceway.toml").write_text("\n".join(lines) + "\n")
        super().__init__(self._start("127.0.0.1:0"))

    def restart(self) -> None:
        self.close()
        self._start(self.url.removeprefix("http://"))

    def stop_storage(self) -> None:
        assert self._postgres is not None
        self._postgres.pause()

    def continue_storage(self) -> None:
        assert self._postgres is not None
        self._postgres.resume()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=120)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self, listen: str) -> str:
        """The URL, when it takes requests."""
        command = [sys.executable, "-m", "sluiceway.cli.main", "serve", "--data", str(self._folder / "data"), "--listen", listen]
        command += ["--config", str(self._folder / "sluiceway.toml")]
        environment = {**os.environ}
        if self._postgres is not None:
            environment[PASSWORD_VARIABLE] = self._postgres.dsn()
        log = self._folder / "log"
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("sluiceway listening on http://"), f"{line!r}\n{log.read_text()}"
        return line.split()[-1]
