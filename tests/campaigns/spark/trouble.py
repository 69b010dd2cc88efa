"""What befalls a batch while it runs: its server is killed, its queue rebalanced, the processes of its tasks die, and nothing is to do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sluiceway.kernel.errors import SluicewayError
from tests.campaigns.kit.report import Report
from tests.campaigns.spark.driver import Work
from tests.campaigns.spark.hooks import Stage
from tests.campaigns.spark.rig import PATIENCE, Driver, Rig, ended
from tests.servers.postgres_server import NoServerError, PostgresServer
from tests.spark.spark_world import Server, server, until

STRUCK = (
    Stage("leased-1", 1, "wait"),
    Stage("reading", 2, "wait"),
    Stage("produced-1", 3, "wait"),
    Stage("settled-1", 4, "wait"),
    Stage("closing", 4, "wait"),
    Stage("completed-1", 5, "wait"),
)
"""Where a server is killed: whatever is in between, the next call finds a broken line."""

BEGUN = (
    Stage("partitions-end", 1, "wait"),
    Stage("reading", 2, "wait"),
    Stage("settled-1", 3, "wait"),
    Stage("folder", 4, "wait"),
    Stage("reading", 5, "wait"),
    Stage("closing", 5, "wait"),
)
"""Where a rebalance is begun, if the one before it has ended."""

DYING = (Stage("reading", 1, "worker"), Stage("read", 2, "worker"), Stage("produced-1", 3, "worker"), Stage("settled-1", 4, "worker"))
"""Where the process of a task dies, and Spark runs the task again."""


def run_servers(report: Report, folder: Path) -> None:
    """On each kind of storage."""
    with _storages(report, folder) as storages:
        for kind, config in storages.items():
            with _world(folder, kind, config) as (rig, world):

                def strike(number: int, driver: Driver, world: Server = world) -> None:
                    world.kill()
                    driver.release(STRUCK[number])
                    world.start()

                _through(report, rig, STRUCK, strike)
            report.figure(f"{len(STRUCK)} kills of a server on {kind}")


def run_moved(report: Report, folder: Path) -> None:
    """Partitions are added, removed with and without copying, and moved to another backend."""
    with _storages(report, folder) as storages:
        for kind, config in storages.items():
            with _world(folder, kind, config) as (rig, world):
                begun = _Rebalances(world, config)

                def begin(number: int, driver: Driver, begun: _Rebalances = begun) -> None:
                    begun.begin_next()
                    driver.release(BEGUN[number])

                _through(report, rig, BEGUN, begin, moved=True)
                begun.await_ends()
            if len(begun.ids) < 2:
                report.fail(f"{kind}: only {len(begun.ids)} rebalances could be begun")
            report.figure(f"{len(begun.ids)} rebalances on {kind}")


def run_workers(report: Report, folder: Path) -> None:
    """Spark runs a task again, in another process, up to four times."""
    with _world(folder, "workers", None) as (rig, _):
        with ended(rig.run(Work("", "", master="local[2,4]"), DYING)) as driver:
            if code := driver.wait():
                report.fail(f"the driver ended with {code}: {driver.tail()}")
            missed = [stage.name for stage in DYING if not driver.plan.reached(stage).exists()]
        for line in [*rig.judge("each").lines, *(f"missed: {name}" for name in missed)]:
            report.fail(line)
    report.figure(f"{len(DYING)} kills of a task's process")


def run_idle(report: Report, folder: Path) -> None:
    """A query that goes on for ever has no lease as soon as there is nothing to do, each time."""
    with _world(folder, "idle", None) as (rig, world):
        with ended(rig.run(Work("", "", "stream", forever=True))) as driver:
            for _ in range(3):
                until(f"nothing is left; see {rig.folder}", lambda: world.count("in", "total") == 0, PATIENCE)
                until("no lease is held", lambda: world.count("in", "leases") == 0, PATIENCE)
                rig.fill(1_000)
            until("nothing is left", lambda: world.count("in", "total") == 0, PATIENCE)
            until("no lease is held", lambda: world.count("in", "leases") == 0, PATIENCE)
            (rig.folder / "stop").touch()
            if code := driver.wait():
                report.fail(f"the driver ended with {code}: {driver.tail()}")
        for line in rig.judge("stream").lines:
            report.fail(line)
    report.figure("4 times idle, without a lease")


def _through(report: Report, rig: Rig, stages: Sequence[Stage], strike: Callable[[int, Driver], None], moved: bool = False) -> None:
    """One driver, which waits at each stage until it was struck."""
    with ended(rig.run(Work("", ""), stages)) as driver:
        for number, stage in enumerate(stages):
            driver.until_reached(stage)
            strike(number, driver)
            report.say(f"struck at {stage.event} of batch {stage.batch}")
        if code := driver.wait():
            report.fail(f"the driver ended with {code}: {driver.tail()}; see {rig.folder}")
    for line in rig.judge("each", moved).lines:
        report.fail(f"{line}; see {rig.folder}")


class _Rebalances:
    """One after the other, each as soon as the one before has ended."""

    def __init__(self, world: Server, config: Path) -> None:
        self._world = world
        self._config = config
        self._steps: list[dict[str, Any]] = [
            {"requested_partitions": 6},
            {"requested_partitions": 2, "drain": "copy"},
            {"requested_partitions": None, "drain": "copy"},
            {"requested_partitions": 5},
            {"requested_partitions": 1, "drain": "copy"},
        ]
        self.ids: list[str] = []

    def begin_next(self) -> None:
        step = self._steps[len(self.ids)]
        try:
            if step["requested_partitions"] is None:
                _weigh(self._config, "second")
                self._world.call("/v1/config.reload")
            self.ids.append(self._world.call("/v1/queue.rebalance", queue_name="in", **step)["id"])
        except SluicewayError as error:
            if error.code != "rebalance_open":
                raise

    def await_ends(self) -> None:
        for number in self.ids:
            until(f"rebalance {number} is done", lambda: self._world.call("/v1/rebalances.get", id=number)["state"] == "done")  # noqa: B023


@contextlib.contextmanager
def _storages(report: Report, folder: Path) -> Iterator[dict[str, Path]]:
    """By kind a configuration of two backends, the first of which takes everything."""
    found = {"SQLite": folder / "sqlite.toml"}
    found["SQLite"].write_text("".join(_sqlite(folder, name) for name in ("first", "second")))
    with contextlib.ExitStack() as stack:
        try:
            postgres = stack.enter_context(PostgresServer())
            found["PostgreSQL"] = folder / "postgres.toml"
            first = f'[backends.first]\nkind = "postgres"\nurl = {json.dumps(postgres.dsn())}\n'
            found["PostgreSQL"].write_text(first + _sqlite(folder / "beside", "second"))
        except NoServerError as error:
            report.say(f"NOT RUN: {error}")
            report.missed.append("not run on PostgreSQL: there is none")
        for config in found.values():
            _weigh(config, "first")
        yield found


def _sqlite(folder: Path, name: str) -> str:
    return f'[backends.{name}]\nkind = "sqlite"\npath = {json.dumps(str(folder / name))}\n'


def _weigh(path: Path, chosen: str) -> None:
    """Everything is to lie on that backend."""
    blocks = path.read_text().split("[backends.")[1:]
    text = ""
    for block in blocks:
        lines = [line for line in block.splitlines() if line and not line.startswith("partition_affinity")]
        affinity = float(block.partition("]")[0] == chosen)
        text += "[backends." + "\n".join([*lines, f"partition_affinity = {affinity}"]) + "\n"
    path.write_text(text)


@contextlib.contextmanager
def _world(folder: Path, kind: str, config: Path | None) -> Iterator[tuple[Rig, Server]]:
    place = folder / kind
    place.mkdir()
    with server(place, config) as world:
        yield Rig(place, world), world
