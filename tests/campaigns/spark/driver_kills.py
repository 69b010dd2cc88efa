"""A driver is killed at every stage of a batch, started again, and killed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.kit.report import Report
from tests.campaigns.spark import judging
from tests.campaigns.spark.driver import Work
from tests.campaigns.spark.hooks import IN_A_CALL, Stage
from tests.campaigns.spark.judging import Faults
from tests.campaigns.spark.rig import BATCH, Rig, Seen, ended
from tests.spark.spark_world import server

FIRST, MIDDLE, LAST = 1, 3, 6
"""Batches. Five take all that was there at the beginning, and the sixth, smaller one, what was put back by then."""


@dataclass(frozen=True)
class Point:
    """Where a driver is killed in batch n. `logged` and `committed`: the newest batch in Spark's logs then, as n plus this; `held`: what is
    leased, in batches. `doubles`: the plain sink has the batch by then, and gets it again.
    """

    event: str
    text: str
    logged: int
    committed: int
    held: float
    sinks: str = "each"
    batches: Sequence[int] = (FIRST, MIDDLE, LAST)
    doubles: bool = False

    @property
    def name(self) -> str:
        return self.event if self.sinks == "each" else f"{self.sinks}-{self.event}"


POINTS = (
    Point("initial", "the first offset is made", -1, -1, 0, batches=(FIRST,)),
    Point("leased-1", "some of the batch is leased, and more is to be", -1, -1, IN_A_CALL / BATCH, batches=(FIRST, MIDDLE, 5)),
    Point("latest-end", "all of the batch is leased, the offset is not in the log", -1, -1, 1),
    Point("commit", "the offset of the next batch is in the log, its tasks are not planned", 1, 0, 1, batches=(FIRST, MIDDLE, 4)),
    Point("partitions", "the offset is in the log", 0, -1, 1),
    Point("partitions-end", "the leases are extended", 0, -1, 1),
    Point("read", "a task has read, the batch is not written", 0, -1, 1),
    Point("folder", "one sink has the batch", 0, -1, 1),
    Point("plain", "two sinks have it", 0, -1, 1, doubles=True),
    Point("queue", "all sinks have it", 0, -1, 1, doubles=True),
    Point("settled-1", "some outcomes are staged", 0, -1, 1, doubles=True),
    Point("batch-end", "all outcomes are staged, the batch is not in Spark's commit log", 0, -1, 1, doubles=True),
    Point("closing", "the batch is in the commit log, its leases are not closed", 0, 0, 1),
    Point("completed-1", "its leases are closed, some of the next batch is leased", 0, 0, IN_A_CALL / BATCH),
    Point("idle", "nothing was left to lease", 0, 0, 0, batches=(LAST,)),
    Point("produced-1", "the streaming sink has some of the batch", 0, -1, 1, "stream", (FIRST, MIDDLE, 5)),
    Point("sink", "all tasks have written, the sink has not committed", 0, -1, 1, "stream", (FIRST, MIDDLE, 5)),
    Point("sink-end", "the sink has committed, Spark has not", 0, -1, 1, "stream", (FIRST, MIDDLE, 5)),
    Point("closing", "after a streaming write the batch is in the commit log", 0, 0, 1, "stream", (FIRST, MIDDLE, 5)),
    Point("settled-1", "some outcomes are staged by a stream", 0, -1, 1, "settle"),
    Point("sink-end", "all outcomes are staged by a stream, Spark has not committed", 0, -1, 1, "settle"),
)


def run_kills(report: Report, folder: Path, rounds: int, names: Sequence[str] = ()) -> None:
    """One queue, and one history, for each point: killed there in one batch after the other. `rounds`: in how many."""
    kills = compared = 0
    for point in [point for point in POINTS if point.name in names or not names]:
        place = folder / point.name
        place.mkdir()
        # Of a few, those in the middle say most.
        batches = point.batches if rounds >= len(point.batches) else point.batches[-1 - rounds : -1]
        with server(place) as world:
            told = History(Rig(place, world), [(point, batch) for batch in batches]).run()
        for line in told.faults.lines:
            report.fail(f"{point.name}: {line}; see {place}")
        report.say(f"{point.name}: {point.text}: batches {', '.join(map(str, batches))}; {told}")
        kills, compared = kills + len(batches), compared + told.compared
    report.figure(f"{kills} kills at {len(names) or len(POINTS)} points, {compared} reads repeated")


@dataclass(frozen=True)
class Told:
    """`compared`: attempts of tasks that read what another had read. `again`: rows that the plain sink has more than once."""

    faults: Faults
    compared: int = 0
    again: int = 0

    def __str__(self) -> str:
        return f"{self.compared} reads repeated" + (f", {self.again} rows twice in the plain sink" if self.again else "")


class History:
    """One driver after the other: each is killed at its point, in that batch, and the last one ends by itself."""

    def __init__(self, rig: Rig, kills: Sequence[tuple[Point, int]], sabotage: str = "", patience: float = 30.0) -> None:
        self._rig = rig
        self._kills = kills
        self._sabotage = sabotage
        # What is lost is only seen in the sink if the query goes on without it.
        self._options = {"failOnLeaseLoss": "false"} if sabotage == "lost" else {}
        self._patience = patience

    def run(self) -> Told:
        faults = Faults()
        for point, batch in self._kills:
            found = self._killed(point, batch)
            faults += found
            if "missed" in found.kinds:
                return Told(faults)
        sinks = self._kills[0][0].sinks
        with ended(self._rig.run(Work("", "", sinks, self._options, patience=self._patience), [], self._sabotage)) as driver:
            if (code := driver.wait()) not in (0, 3):
                return Told(faults + Faults((("failed", f"it ended with {code}: {driver.tail()}"),)))
        _, compared = judging.judge_reads(self._rig.folder / "reads")
        faults += self._rig.judge(sinks)
        if sinks != "each":
            return Told(faults, compared)
        rows, plain = judging.folders(self._rig.folder), judging.read_parquet(self._rig.folder / "plain")
        again = plain.num_rows - rows.num_rows
        if not again and any(point.doubles for point, _ in self._kills):
            faults += Faults((("missed", "the plain sink has nothing twice, so nothing can have been killed after it was written"),))
        return Told(faults, compared, again)

    def _killed(self, point: Point, batch: int) -> Faults:
        stage = Stage(point.event, batch)
        # What nothing remembers comes back when its leases have run out: soon.
        unlogged = batch + point.logged == 0 and point.held
        options = self._options | ({"holdFor": "3s"} if unlogged else {})
        with ended(self._rig.run(Work("", "", point.sinks, options, patience=self._patience), [stage], self._sabotage)) as driver:
            code = driver.wait()
            if not driver.plan.reached(stage).exists():
                return Faults((("missed", f"it ended ({code}) before {stage.name}: {driver.tail()}"),))
        return self._where(point, batch)

    def _where(self, point: Point, batch: int) -> Faults:
        """Whether the kill was where it was meant to be."""
        seen = self._rig.seen()
        expected = Seen(batch + point.logged, batch + point.committed, seen.held)
        # The last batch is smaller than the others.
        size = seen.held / self._rig.batch if batch != LAST else point.held
        if seen != expected or (size != point.held and not self._sabotage):
            what = f"killed at {point.name} of batch {batch}, and it is {seen}; meant was {expected}, {point.held} batches held"
            return Faults((("missed", what),))
        return Faults()
