"""Two queries of one queue, with random outcomes and triggers, while their drivers and the server are killed and the queue is rebalanced;
and queries that stand still for longer than their leases live.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.kernel.errors import SluicewayError
from tests.campaigns.kit.report import Report
from tests.campaigns.spark import judging
from tests.campaigns.spark.driver import Work
from tests.campaigns.spark.hooks import Stage
from tests.campaigns.spark.rig import PATIENCE, Driver, Rig, ended
from tests.spark.spark_world import Server, server, until

SIZE = 500
"""Items of a batch."""

LOGGED = ("partitions", "partitions-end", "read", "folder", "plain", "queue", "settled-1", "batch-end", "closing", "completed-1")
"""Where a driver is killed in any batch of its query. Of the first batch nothing is known before it is logged."""
ANYWHERE = (*LOGGED, "leased-1", "latest-end")

REBALANCES = (3, 12)
"""Partitions, from 8 on."""

LATE = {"closing": "is done, but", "batch-end": "of this batch ran out, so the batch cannot be read again as it was"}
"""Where a driver is killed that comes back too late, and what it is told then."""


@dataclass
class _Query:
    """One of the two, with a checkpoint and sinks of its own. `seed` makes its outcomes."""

    rig: Rig
    name: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.rig.folder / self.name

    def start(self, chance: random.Random, kill: bool) -> tuple[Driver, Stage | None]:
        """A driver that goes on, and where it is killed."""
        stage = None
        if kill:
            newest = self.rig.seen(self.folder).committed
            stage = Stage(chance.choice(ANYWHERE if newest else LOGGED), newest + chance.choice((1, 1, 2)))
        work = Work("", "", patience=8, name=self.name, outcomes=self.seed, triggers=chance.randrange(1 << 30))
        plan = [stage] if stage else []
        if stage:
            # The same place may have been meant before, and not reached.
            (self.folder / f"reached-{stage.name}").unlink(missing_ok=True)
        return self.rig.run(work, plan, place=self.folder), stage


def run_shared(report: Report, folder: Path, kills: int = 12, strikes: int = 6, seed: int = 1) -> None:
    """`kills` of drivers and `strikes` against the server, in rounds: in each, both queries run until they are killed."""
    chance = random.Random(seed)
    with server(folder) as world:
        rig = Rig(folder, world, items=0, batch=SIZE, partitions=8)
        queries = [_Query(rig, name, seed) for name in ("one", "two")]
        for query in queries:
            query.folder.mkdir()
        rebalances = _Rebalances(world)
        killed = struck = 0
        for number in range(1, 2 * kills + 1):
            if killed >= kills:
                break
            rig.fill(5 * SIZE)
            killed += _round(report, queries, chance, kills - killed, world if struck < strikes else None)
            struck += struck < strikes
            if number >= 2:
                rebalances.go_on()
        if (killed, struck) != (kills, strikes):
            report.fail(f"{killed} of {kills} drivers were killed, and the server {struck} of {strikes} times; see {folder}")
        for _ in range(4):
            _round(report, queries, chance, 0, None)
            rebalances.go_on()
            if not world.count("in", "total") and rebalances.are_done():
                break
        if not rebalances.are_done():
            report.fail(f"the rebalances have not ended: {rebalances.begun}; see {folder}")
        for line in rig.judge("each", moved=True, places=[query.folder for query in queries]).lines:
            report.fail(f"{line}; see {folder}")
        rebalanced = " → ".join(str(each) for each in (8, *REBALANCES[: len(rebalances.begun)]))
        report.figure(
            f"seed {seed}: {rig.items:,} items, {killed} drivers killed, {struck} times the server, partitions {rebalanced}: "
            f"{'0 lost, 0 done twice' if not report.wrong else 'see above'}"
        )


def _round(report: Report, queries: Sequence[_Query], chance: random.Random, kills: int, struck: Server | None) -> int:
    """Both queries, each until it is killed or has nothing to do. Returns how many were killed. `struck`: a server that is killed, too."""
    killed = 0
    with ExitStack() as stack:
        begun = [query.start(chance, number < kills) for number, query in enumerate(queries)]
        for driver, _ in begun:
            stack.enter_context(ended(driver))
        if struck is not None:
            reached = [driver.plan.reached(stage) for driver, stage in begun if stage]
            until("a driver is killed, or ends", lambda: any(p.exists() for p in reached) or any(d.over() for d, _ in begun), PATIENCE)
            struck.kill()
            struck.start()
        for query, (driver, stage) in zip(queries, begun, strict=True):
            code = driver.wait()
            if stage and driver.plan.reached(stage).exists():
                killed += 1
                report.say(f"{query.name} was killed at {stage.event} of batch {stage.batch}")
                driver.plan.reached(stage).unlink()
            elif code not in (0, 3) and driver.was_starved():
                report.say(f"{query.name} found the machine too busy; it goes on from its checkpoint")
            elif code not in (0, 3):
                report.fail(f"{query.name} ended with {code}: {driver.tail()}; see {query.folder}")
    return killed


class _Rebalances:
    """Each as soon as the one before it has ended."""

    def __init__(self, world: Server) -> None:
        self._world = world
        self.begun: list[int] = []

    def go_on(self) -> None:
        if len(self.begun) < len(REBALANCES) and self.are_done(len(self.begun)):
            try:
                answer = self._world.call("/v1/queue.rebalance", queue_name="in", requested_partitions=REBALANCES[len(self.begun)])
                self.begun.append(answer["id"])
            except SluicewayError as error:
                if error.code != "rebalance_open":
                    raise

    def are_done(self, count: int = len(REBALANCES)) -> bool:
        """Whether so many were begun, and all that were have ended."""
        states = [self._world.call("/v1/rebalances.get", id=each)["state"] for each in self.begun]
        return len(states) >= count and all(state == "done" for state in states)


def run_late(report: Report, folder: Path, events: Sequence[str] = tuple(LATE)) -> None:
    """A driver is killed, and the next one comes when its leases have run out: refused in words, and goes on if it may."""
    for event in events:
        place = folder / event
        place.mkdir()
        with server(place) as world:
            rig = Rig(place, world, items=3 * SIZE, batch=SIZE, partitions=2)
            short = {"holdFor": "20s"}
            stage = Stage(event, 1)
            driver = _run(rig, Work("", "", options=short), [stage])
            if not driver.plan.reached(stage).exists():
                report.fail(f"{event}: not reached: {driver.tail()}; see {place}")
                continue
            until("the leases run out", lambda: not world.count("in", "leases"), PATIENCE)
            before = judging.folders(place)
            for _ in range(2):
                driver = _run(rig, Work("", "", options=short))
                if driver.wait() in (0, 3) or LATE[event] not in driver.log() or "failOnLeaseLoss=false" not in driver.log():
                    report.fail(f"{event}: not refused in words, it ended with {driver.wait()}: {driver.tail()}; see {place}")
                if world.count("in", "leases") or not judging.folders(place).equals(before):
                    report.fail(f"{event}: a driver that was refused has done something; see {place}")
            driver = _run(rig, Work("", "", options={**short, "failOnLeaseLoss": "false"}))
            if code := driver.wait():
                report.fail(f"{event}: it ended with {code}: {driver.tail()}; see {place}")
            _judge_late(report, rig, event, before)


def _run(rig: Rig, work: Work, stages: Sequence[Stage] = ()) -> Driver:
    """A driver, when it has ended. One that found the machine too busy is started again."""
    for _ in range(3):
        with ended(rig.run(work, stages)) as driver:
            code = driver.wait()
            if code <= 0 or not driver.was_starved():
                break
    return driver


def _judge_late(report: Report, rig: Rig, event: str, before: pa.Table) -> None:
    """Nothing is lost. What Spark had committed is done again, as it was announced; a batch that it had not is replaced."""
    rows = judging.folders(rig.folder)
    final = rows.filter(pc.not_equal(rows.column("outcome"), "retry")).column("text")
    again = len(final) - pc.count_distinct(final).as_py()
    expected = pc.sum(pc.not_equal(before.column("outcome"), "retry")).as_py() if event == "closing" else 0
    faults = judging.judge_names("the sink that replaces", final, rig.items, once=False) + judging.judge_rest(rig.counters())
    for line in faults.lines:
        report.fail(f"{event}: {line}; see {rig.folder}")
    if again != expected:
        report.fail(f"{event}: {again} items are done again in the sink that replaces, not {expected}; see {rig.folder}")
    dead = rig.names("dead").to_pylist()
    if sorted(dead) != sorted(set(rows.filter(pc.equal(rows.column("outcome"), "dead")).column("text").to_pylist())):
        report.fail(f"{event}: the dead queue has {len(dead)} items, and others than died; see {rig.folder}")
    if not report.wrong:
        report.figure(f"too late after {event}: refused twice, then 0 of {rig.items:,} lost and {again} done again, as announced")
