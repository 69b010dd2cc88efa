"""Servers in processes of their own that serve the same queues: started, killed, frozen, stopped and started again by their pids."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import httpx
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.campaigns.kit.history import BucketHistory, History, PostgresHistory
from tests.campaigns.kit.lines import HOST, Line, Switchboard
from tests.server.server_process import COMMAND, PATIENCE, line_of, wait_until
from tests.servers import pids
from tests.servers.faulty_bucket import FaultyBucket
from tests.servers.postgres_server import PostgresServer
from tests.servers.versity_server import VersityServer

Bucket = FaultyBucket | VersityServer

_fleets = itertools.count()
HANGOVER = 15.0
"""Seconds after a freeze during which a call may still end without an answer: it had waited so long by then."""


class Instance:
    """`sluiceway serve` on a data directory of its own. `config` makes its configuration file anew for each start, told its number."""

    def __init__(
        self,
        folder: Path,
        name: str,
        config: Callable[[int], str],
        flags: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        data: Path | None = None,
    ) -> None:
        self.name = name
        self.url = ""
        """Where it is, or was when it was last there."""
        self.starts = 0
        self.log = folder / f"{name}.log"
        self._data = data or folder / name
        self._config = config
        self._flags = flags
        self.command = command
        """What starts it, the next time."""
        self._child: subprocess.Popen[str] | None = None
        self.is_frozen = False
        self._hung_until = 0.0

    def launch(self) -> None:
        """Begin to start; returns at once."""
        self.starts += 1
        path = self.log.with_suffix(".toml")
        path.write_text(self._config(self.starts))
        command = [*self.command, "serve", "--data", str(self._data), "--config", str(path), "--listen", f"{HOST}:0", *self._flags]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def await_listening(self) -> None:
        """Returns when it takes requests. Raises AssertionError with the end of its log if it does not."""
        output = self._process.stdout
        assert output is not None
        line = line_of(output)
        assert line.startswith("sluiceway listening on "), f"{self.name} did not start; the end of its log:\n{self.tail()}"
        self.url = line.split()[-1]

    @property
    def _process(self) -> subprocess.Popen[str]:
        assert self._child is not None, f"{self.name} does not run"
        return self._child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._child is not None

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def children(self) -> list[int]:
        """The processes that it has started."""
        return pids.children(self.pid)

    def kill(self) -> None:
        """As a power cut would: no chance to tidy up."""
        self._process.kill()
        self._reap()

    def freeze(self) -> None:
        """Let it do nothing more; returns when that is so."""
        self.is_frozen = True
        pids.stop(self.pid)

    def thaw(self) -> None:
        pids.thaw(self.pid)
        self.is_frozen = False
        self._hung_until = time.monotonic() + HANGOVER

    def may_hang(self) -> bool:
        """Whether it is frozen, or was a moment ago."""
        return self.is_frozen or time.monotonic() < self._hung_until

    def stop(self) -> int:
        """Ask it to stop, as a service manager does; its exit code."""
        self._process.terminate()
        return self._reap()

    def wait(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._reap()

    def _reap(self) -> int:
        process, self._child, self.is_frozen = self._process, None, False
        code = process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3_000:]

    def has_failed(self) -> bool:
        """Whether its log has what no log should have."""
        return "Traceback" in self.log.read_text(errors="replace")


class Revival(NamedTuple):
    """What was killed, and what brings it back, if nothing else does."""

    name: str
    revive: Callable[[], None]


class Fleet:
    """Instances of one cluster. A *home* is where a client would go first; homes are numbered from 0 to `homes` - 1."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = instances
        self.homes = len(instances)
        self.faulty_bucket: FaultyBucket | None = None
        """Where the partitions are, if that tells of the requests to it."""
        self.prefix = ""
        """The folder of the partitions in a bucket."""

    def start(self) -> None:
        """All at once, as after a power cut; returns when they are ready."""
        for instance in self.instances:
            instance.launch()
        for instance in self.instances:
            self._await(instance)
        self.await_ready()

    def _await(self, instance: Instance) -> None:
        instance.await_listening()

    def await_ready(self) -> None:
        with httpx.Client(timeout=PATIENCE) as http:
            for instance in self.instances:
                wait_until(lambda url=instance.url: http.get(f"{url}/readyz").status_code == 200, f"readiness of {instance.name}")  # type: ignore[misc]

    def end(self) -> None:
        """Kill what runs."""
        for instance in self.instances:
            if instance.runs:
                instance.kill()

    def url(self, home: int) -> str:
        return self.instances[home % len(self.instances)].url

    def may_hang(self, url: str) -> bool:
        return any(instance.may_hang() for instance in self.instances if instance.url == url)

    def is_frozen(self, url: str) -> bool:
        return any(instance.is_frozen for instance in self.instances if instance.url == url)

    def restart(self, instance: Instance) -> None:
        """Returns when it takes requests."""
        instance.launch()
        self._await(instance)

    def strike(self, chance: random.Random) -> Revival:
        """Kill one of them."""
        victim = chance.choice([instance for instance in self.instances if instance.runs])
        victim.kill()
        return Revival(victim.name, lambda: self.restart(victim))

    def check_logs(self) -> list[str]:
        return [f"the log of {instance.name} has a traceback: {instance.log}" for instance in self.instances if instance.has_failed()]


class Lines(NamedTuple):
    """Of one instance: to the meta store, to the backend, and from the other instances to it."""

    meta: Line
    storage: Line
    peers: Line


class PostgresFleet(Fleet):
    """Instances whose meta store and backend are one PostgreSQL database, made for them; with a switchboard, over lines that can be cut.

    `bucket`: where the partitions are instead; `meta_in_bucket`: and all the rest.
    """

    def __init__(
        self,
        folder: Path,
        postgres: PostgresServer,
        size: int,
        switchboard: Switchboard | None = None,
        command: Sequence[str] = COMMAND,
        bucket: Bucket | None = None,
        *,
        meta_in_bucket: bool = False,
    ) -> None:
        self._meta_in_bucket = meta_in_bucket
        self._bucket = bucket
        storage_port = postgres.port if bucket is None else httpx.URL(bucket.url).port or 0
        database = f"fleet{next(_fleets)}"
        postgres.administer(f"CREATE DATABASE {database} OWNER sluiceway")
        self._parts = {name: str(value) for name, value in conninfo_to_dict(postgres.dsn()).items()} | {"dbname": database}
        self._is_cluster = size > 1
        ports = Lines(storage_port if meta_in_bucket else postgres.port, storage_port, 0)  # type: ignore[arg-type]
        self.lines = [] if switchboard is None else [Lines(*map(switchboard.line, ports)) for _ in range(size)]  # type: ignore[arg-type]
        super().__init__([Instance(folder, f"i{n}", self._config_of(n), command=command) for n in range(size)])
        self.faulty_bucket = bucket if isinstance(bucket, FaultyBucket) else None
        self.prefix = folder.name

    def history(self) -> History:
        """Who writes the partitions: in PostgreSQL from now on, and one must have been opened there; in a bucket from the beginning."""
        if isinstance(self._bucket, FaultyBucket):
            return BucketHistory(self._bucket, self.prefix)
        return PostgresHistory(make_conninfo("", **self._parts))

    def _await(self, instance: Instance) -> None:
        super()._await(instance)
        if self.lines:
            # It has another port at each start.
            self.lines[self.instances.index(instance)].peers.target = instance.port

    def _config_of(self, number: int) -> Callable[[int], str]:
        def config(start: int) -> str:
            # It is how the history tells who has written.
            name = f"i{number}.{start}"
            parts = self._parts | {"application_name": name}
            lines = self.lines[number] if self.lines else None
            if self._bucket is None:
                backend = make_conninfo("", **(parts if lines is None else parts | {"port": str(lines.storage.port)}))
                text = f'[backends.default]\nkind = "postgres"\nurl = {json.dumps(backend)}\n'
            else:
                text = in_bucket("default", self._bucket, self.prefix, name, None if lines is None else lines.storage.port)
            if self._is_cluster:
                meta = postgres_url(parts if lines is None else parts | {"port": str(lines.meta.port)})
                if self._bucket is not None and self._meta_in_bucket:
                    url = by_way_of(self._bucket.url, None if lines is None else lines.meta.port)
                    meta = f"s3://tests/{self.prefix}-meta?region=none&endpoint={url}&access_key_id=tests&secret_access_key=tests"
                text += f"[cluster]\nmeta = {json.dumps(meta)}\n"
                if lines is not None:
                    text += f'advertise = "http://{HOST}:{lines.peers.port}"\n'
            return text

        return config


class WorkerFleet(Fleet):
    """One `serve --workers N` on SQLite. Its parent brings back who is killed."""

    def __init__(self, folder: Path, workers: int) -> None:
        super().__init__([Instance(folder, f"workers{workers}", lambda _: "", ["--workers", str(workers)])])
        self.homes = workers

    def workers(self) -> list[int]:
        return self.instances[0].children()

    def end(self) -> None:
        left = self.workers() if self.instances[0].runs else []
        super().end()
        for pid in left:
            pids.kill(pid)

    def strike(self, chance: random.Random) -> Revival:
        pid = chance.choice(self.workers())
        pids.kill(pid)
        return Revival(f"worker {pid}", lambda: None)


def in_bucket(backend: str, bucket: Bucket, prefix: str, name: str, port: int | None = None) -> str:
    """The section of a configuration about a backend in a bucket, for the process of that name; by way of another port, if there is a
    line."""
    key_id = name if isinstance(bucket, FaultyBucket) else "tests"
    return (
        f'[backends.{backend}]\nkind = "s3"\nbucket = "tests"\nprefix = "{prefix}"\nregion = "none"\n'
        f'endpoint = "{by_way_of(bucket.url, port)}"\naccess_key_id = "{key_id}"\nsecret_access_key = "tests"\n'
    )


def by_way_of(url: str, port: int | None) -> str:
    """The URL with that port, if there is one."""
    return url if port is None else str(httpx.URL(url).copy_with(port=port))


def postgres_url(parts: dict[str, str]) -> str:
    """A connection URL from the parts of a connection string."""
    known = ("user", "password", "host", "port", "dbname")
    user, password, host, port, database = (quote(str(parts[name]), safe="") for name in known)
    more = urlencode({name: value for name, value in parts.items() if name not in known})
    return f"postgresql://{user}:{password}@{host}:{port}/{database}" + (f"?{more}" if more else "")


@contextlib.contextmanager
def started(fleet: Fleet) -> Iterator[None]:
    """It runs until the block ends, however that comes."""
    try:
        fleet.start()
        yield
    finally:
        fleet.end()
