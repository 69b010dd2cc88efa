"""Servers whose partitions lie on several backends at once, which a reload of the configuration adds, weighs and takes away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.campaigns.kit.fleet import Instance, PostgresFleet, in_bucket, postgres_url
from tests.campaigns.rebalance.holding import PostgresSteps, SqliteSteps
from tests.server.server_process import COMMAND, wait_until
from tests.servers.faulty_bucket import FaultyBucket
from tests.servers.postgres_server import PostgresServer

LOCAL, SHARED = "local", "shared"
"""The usual two: SQLite, and PostgreSQL or a bucket."""


@dataclass(frozen=True)
class Backend:
    """What a configuration says of one. `dsn`: of a PostgreSQL database; `bucket`: a folder in it; neither: a folder of SQLite files."""

    affinity: float = 1.0
    dsn: str = ""
    bucket: FaultyBucket | None = None


class MixedFleet(PostgresFleet):
    """One server, or instances of a cluster, with `backends` that may be changed and then reloaded everywhere.

    A cluster's meta store is a PostgreSQL database made for it, or, `on_one_machine`, an SQLite file. A single server has its own.
    `bucket`: where the shared backend is instead of PostgreSQL.
    """

    def __init__(
        self,
        folder: Path,
        postgres: PostgresServer,
        size: int,
        backends: Mapping[str, Backend] | None = None,
        on_one_machine: bool = False,
        command: Sequence[str] = COMMAND,
        bucket: FaultyBucket | None = None,
    ) -> None:
        self._folder = folder
        self._on_one_machine = on_one_machine
        super().__init__(folder, postgres, size, command=list(command), bucket=bucket)
        self._dsn = make_conninfo("", **self._parts)
        shared = Backend(dsn=self._dsn) if bucket is None else Backend(bucket=bucket)
        self.backends = dict(backends) if backends is not None else {LOCAL: Backend(), SHARED: shared}

    def _config_of(self, number: int) -> Callable[[int], str]:
        def config(start: int) -> str:
            name = f"i{number}.{start}"
            text = "".join(self._backend(each, backend, name) for each, backend in self.backends.items())
            if self._is_cluster:
                parts = self._parts | {"application_name": name}
                meta = f"sqlite:{self._folder / 'meta.sqlite'}" if self._on_one_machine else postgres_url(parts)
                text += f"[cluster]\nmeta = {json.dumps(meta)}\n"
            return text

        return config

    def _backend(self, name: str, backend: Backend, application: str) -> str:
        if backend.bucket is not None:
            return in_bucket(name, backend.bucket, f"{self.prefix}/{name}", application) + f"partition_affinity = {backend.affinity}\n"
        if backend.dsn:
            parts = {key: str(value) for key, value in conninfo_to_dict(backend.dsn).items()} | {"application_name": application}
            where = f'kind = "postgres"\nurl = {json.dumps(make_conninfo("", **parts))}'
        else:
            where = f'kind = "sqlite"\npath = {json.dumps(str(self._folder / "stores" / name))}'
        return f"[backends.{name}]\n{where}\npartition_affinity = {backend.affinity}\n"

    def weigh(self, affinities: Mapping[str, float], by_signal: bool = False) -> None:
        """Give the backends of these names those affinities, everywhere, while it runs."""
        self.backends |= {name: replace(self.backends[name], affinity=affinity) for name, affinity in affinities.items()}
        if by_signal:
            self.reload_by_signal()
        else:
            self.reload()

    def settle_on(self, name: str, by_signal: bool = False) -> None:
        """Give one of the usual two everything, and the other nothing."""
        self.weigh({each: float(each == name) for each in (LOCAL, SHARED)}, by_signal)

    def reload(self) -> None:
        """By the call, of each instance that runs; returns when all have the backends that there are now."""
        for instance in self._write_configs():
            answer = httpx.post(f"{instance.url}/v1/config.reload", json={}, timeout=60)
            assert answer.status_code == 200, answer.text

    def is_reload_refused(self) -> bool:
        """Whether no instance that runs takes the backends that there are now."""
        return all(
            httpx.post(f"{instance.url}/v1/config.reload", json={}, timeout=60).status_code != 200 for instance in self._write_configs()
        )

    def reload_by_signal(self) -> None:
        """The same by SIGHUP."""
        for instance in self._write_configs():
            os.kill(instance.pid, signal.SIGHUP)
            wait_until(lambda url=instance.url: self._affinities(url) == self._wanted(), f"the reload of {instance.name}")  # type: ignore[misc]

    def _write_configs(self) -> list[Instance]:
        running = [instance for instance in self.instances if instance.runs]
        for instance in running:
            number = self.instances.index(instance)
            path = instance.log.with_suffix(".toml")
            # In one piece: the server looks by itself whether the file has changed.
            fresh = path.with_suffix(".new")
            fresh.write_text(self._config_of(number)(instance.starts))
            fresh.replace(path)
        return running

    def _wanted(self) -> dict[str, float]:
        return {name: backend.affinity for name, backend in self.backends.items()}

    @staticmethod
    def _affinities(url: str) -> dict[str, float]:
        listed = httpx.post(f"{url}/v1/backends.list", json={}, timeout=60).json()
        return {each["backend"]: each["partition_affinity"] for each in listed["items"]}

    def steps(self) -> PostgresSteps:
        """The steps of the rebalances, where the meta store is in PostgreSQL; the fleet must run."""
        return PostgresSteps(self._dsn)

    def own_steps(self) -> SqliteSteps:
        """The steps of the rebalances of a single server."""
        return SqliteSteps(self._folder / self.instances[0].name / "meta.sqlite")

    def instance(self, writer: str) -> Instance:
        """The instance that has written under that name, if it has not been started again since."""
        name, _, start = writer.partition(".")
        instance = next(each for each in self.instances if each.name == name)
        assert str(instance.starts) == start, f"{writer} has written, but {name} was started {instance.starts} times"
        return instance
