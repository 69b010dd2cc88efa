"""A standalone Spark cluster of the PySpark distribution, and two Sluiceway instances of one cluster, all on the loopback address.

Every process is started here and ended by its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import pyspark

from sluiceway.spark import options
from sluiceway.spark.server_calls import Client
from sluiceway.spark.session import find_java_home
from tests.campaigns.kit.fleet import Fleet, Instance, started
from tests.server.server_guarded import ADMIN_KEY, certified
from tests.server.server_process import PATIENCE
from tests.servers import pids
from tests.spark.spark_world import PATIENCE as SPARK_PATIENCE
from tests.spark.spark_world import until

HOST = "127.0.0.1"
WORKERS = 2
_EXECUTOR = "CoarseGrainedExecutorBackend"
_ASKED = re.compile(r'sluiceway_peer_requests_total\{.*request="(\w+)".*\} (\S+)')

SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}
"""A small executor on each worker, and the driver's web pages."""


class Daemon:
    """A master or a worker of Spark."""

    def __init__(self, folder: Path, name: str, kind: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.log = folder / f"{name}.log"
        self._kind = kind
        command = [str(home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind.lower()}.{kind}", *arguments]
        more = ["--host", HOST, "--port", "0", "--webui-port", "0"]
        env = {**os.environ, "SPARK_HOME": str(home()), "SPARK_LOCAL_IP": HOST, "SPARK_DAEMON_MEMORY": "256m", **env}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*command, *more], env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    @property
    def ui(self) -> str:
        """Where its page is."""
        port = self.find(rf"service '{self._kind}UI' on port (\d+)")
        return f"http://{HOST}:{port}"

    def find(self, pattern: str) -> str:
        """What its log says there, as soon as it does."""
        found: list[str] = []

        def said() -> bool:
            found[:] = re.findall(pattern, self.text)
            assert found or self._process.poll() is None, self.text
            return bool(found)

        until(f"{self.log} says {pattern}", said)
        return found[0]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def children(self) -> list[int]:
        """Of a worker its executors."""
        return pids.children(self._process.pid)

    def end(self) -> None:
        """With all that it has started."""
        left = [self._process.pid, *self.children] if self._process.poll() is None else []
        for pid in left:
            pids.kill(pid)
        self._process.wait(PATIENCE)


class Spark:
    """One master and two workers with a core each. `url` is for `spark.master`; what `env` has, the executors' processes have, too.

    Workers may still be starting when this returns: whoever submits a job waits for them.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.daemons: list[Daemon] = []
        # A worker starts its executors with the Java that it was told, so that is not to depend on what is on the path.
        self._env = {"JAVA_HOME": str(find_java_home()), **(env or {})}
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self.master = self._daemon("master", "Master")
        self.url = self.master.find(r"Starting Spark master at (spark://\S+)")
        for number in range(WORKERS):
            self._daemon(f"worker{number}", "Worker", "--cores", "1", "--memory", "1g", "--work-dir", f"work{number}", self.url)

    def _daemon(self, name: str, kind: str, *arguments: str) -> Daemon:
        self.daemons.append(Daemon(self.folder, name, kind, arguments, self._env))
        return self.daemons[-1]

    @property
    def executors(self) -> list[int]:
        """Their process ids."""
        found = [pid for daemon in self.daemons[1:] for pid in daemon.children]
        return [pid for pid in found if _EXECUTOR in pids.command_line(pid)]

    def said(self) -> str:
        """By the executors."""
        return "".join(file.read_text(errors="replace") for file in self.folder.glob("work*/*/*/std*"))

    def end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.end()


class Pair(Fleet):
    """Two instances of one cluster, on SQLite. `guarded`: over TLS, for callers with a key."""

    def __init__(self, folder: Path, *, guarded: bool = False) -> None:
        shared, meta = json.dumps(str(folder / "shared")), json.dumps(f"sqlite:{folder / 'meta.sqlite'}")
        text = f'[cluster]\nmeta = {meta}\n[backends.default]\nkind = "sqlite"\npath = {shared}\n'
        self.ca_file = ""
        self._key = ADMIN_KEY if guarded else ""
        self._key_file = folder / "root"
        if guarded:
            _, self.ca_file = certified(folder / "tls")
            self._key_file.write_text(ADMIN_KEY)
            (folder / "admin").write_text(ADMIN_KEY)
            files = f'tls_certificate = "{folder}/tls/certificate.pem"\ntls_key = "{folder}/tls/key.pem"\n'
            text = text.replace("[backends", f'ca = "{self.ca_file}"\n[backends')
            text = f'[server]\nauth = "keys"\nadmin_key = "file:{folder}/admin"\n{files}{text}'
        super().__init__([Instance(folder, name, lambda _: text) for name in ("a", "b")])

    def await_ready(self) -> None:
        for instance in self.instances:
            until(f"{instance.name} is ready", lambda url=instance.url: self.read(f"{url}/readyz"))  # type: ignore[misc]
        if self._key == ADMIN_KEY:
            self._key = self.key("admin", "manage:*", "read:*")
            self._key_file.write_text(self._key)

    def call(self, path: str, body: dict[str, object], at: int = 0) -> dict[str, Any]:
        """By way of that one of the two."""
        client = Client(options.Server(self.instances[at].url, "", 60_000, f"file:{self._key_file}" if self._key else "", self.ca_file))
        try:
            return client.call(path, body)
        finally:
            client.close()

    def create(self, queue: str, partitions: int = 4, **more: object) -> str:
        """Returns when both have a share of it."""
        self.call("/v1/queues.create", {"queue_name": queue, "requested_partitions": partitions, **more})
        until("both have partitions", lambda: len(set(self.owners(queue).values()) - {None}) == 2)
        return queue

    def owners(self, queue: str, at: int = 0) -> dict[int, str | None]:
        """The address of each partition's owner."""
        info = self.call("/v1/queues.info", {"queue_name": queue}, at)
        return {part["partition"]: part.get("address") for part in info["partitions"]}

    def count(self, queue: str, name: str, at: int = 0) -> int:
        """A counter of `queue.stats`, summed over the partitions."""
        stats = self.call("/v1/queue.stats", {"queue_name": queue}, at)
        return sum(partition[name] for logical in stats["logical_queues"] for partition in logical["partitions"])

    def key(self, *scopes: str) -> str:
        """The text of a new one."""
        return str(self.call("/v1/keys.create", {"name": "spark", "scopes": scopes})["key"])

    def passed_on(self, queue: str) -> Counter[str]:
        """By request, how often one of the two has asked the other since they were started, but for polls for consumers' sake."""
        owners = self.owners(queue)
        incarnation = self.call("/v1/queues.info", {"queue_name": queue})["incarnation"]
        seen = [self._asked(instance)["explain"] for instance in self.instances]
        # Metrics may be a second old, so one more request is passed on, and is to be seen in them.
        for at, instance in enumerate(self.instances):
            elsewhere = next(number for number, address in owners.items() if address != instance.url)
            self.call("/v1/queue.explain", {"queue_name": queue, "id": f"{incarnation}.{elsewhere}.0"}, at)

        def counted() -> list[Counter[str]]:
            return [self._asked(instance) for instance in self.instances]

        until("the metrics are new", lambda: all(each["explain"] > before for each, before in zip(counted(), seen, strict=True)))
        found = sum(counted(), Counter())
        del found["poll"], found["explain"]
        return found

    def _asked(self, instance: Instance) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in self.read(f"{instance.url}/metrics").splitlines():
            if what := _ASKED.match(line):
                found[what[1]] += int(float(what[2]))
        return found

    def read(self, url: str) -> str:
        """What a GET gives; empty: it is refused, as by who is not ready."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else True
        with httpx.Client(verify=context, headers=headers, timeout=PATIENCE, trust_env=False) as http:
            answer = http.get(url)
            return answer.text if answer.status_code == 200 else ""


@contextlib.contextmanager
def pair(folder: Path, *, guarded: bool = False) -> Iterator[Pair]:
    """Both serve until the block ends."""
    made = Pair(folder, guarded=guarded)
    with started(made):
        yield made


@contextlib.contextmanager
def spark_cluster(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Spark]:
    made = Spark(folder, env)
    try:
        yield made
    finally:
        made.end()


class Driver:
    """A program in a process group of its own, which makes its session as `session("…", **settings)`: `settings` is there."""

    def __init__(self, cluster: Spark, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._log = cluster.folder / "driver.log"
        settings = {**SETTINGS, "spark.master": cluster.url}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"settings = {settings!r}\n{script}", *arguments],
                env={**os.environ, **(env or {})},
                cwd=cluster.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def go_on(self) -> None:
        """A line for it to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Poll until it holds, as long as the driver is there."""

        def holds() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, f"{what}: the driver has ended\n{self.said()[-8_000:]}"
            return False

        until(what, holds, 3 * SPARK_PATIENCE)

    def finish(self) -> str:
        """What it has said, once it has ended well."""
        until("the driver has ended", lambda: self.process.poll() is not None)
        assert self.process.returncode == 0, self.said()[-8_000:]
        return self.said()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        assert self.process.stdin is not None
        self.process.stdin.close()


def home() -> Path:
    """The PySpark distribution."""
    assert pyspark.__file__ is not None
    return Path(pyspark.__file__).parent


def page(url: str) -> str:
    """A page of Spark's."""
    answer = httpx.get(url, timeout=PATIENCE, trust_env=False, follow_redirects=True)
    answer.raise_for_status()
    return answer.text
