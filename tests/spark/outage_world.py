"""A stream reader over the real logical queue, in virtual time: partitions go away, servers restart, answers are lost, drivers die."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from sluiceway.core.partition.queries import open_slices
from sluiceway.core.queue.tickets import Request, Ticket
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import LeaseId
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Lease, Selection, Settle, Settled
from sluiceway.spark.offsets import HeldLease, Offset
from sluiceway.spark.options import source_options
from sluiceway.spark.source import LeaseStreamReader
from tests.core.queue_rig import Rig, produce

PARTITIONS = 3
START = Offset("nonce", 4).to_dict()
"""What Spark has logged before: a checkpoint that other drivers may have begun to go on from."""

Item = tuple[int, int]
"""Partition and offset."""


class World:
    """A server with one queue, and Spark, which logs, runs and commits the batches of its present driver."""

    def __init__(self, seed: int, **options: str) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(PARTITIONS)
        self.away: set[int] = set()
        self.faults = 0.0
        """Probability that a commit, or an answer, is lost."""
        self._options = options
        self.start, self.logged = START, [START]
        self.read: dict[int, list[Item]] = {}
        """The items of each batch."""
        self.done: set[int] = set()
        """The batches that Spark has committed."""
        self.limits_change = False
        """Whether each attempt at a batch has a limit of its own, as after restarts with other options."""
        self.attempts = 0
        self.driver = self.new_driver()

    # ---- the server -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The server starts again. It knows nothing of the partitions that are away."""
        after = Rig(PARTITIONS, opened=False)
        after.stores, after.now = self.rig.stores, self.rig.now
        self.rig = after
        for number in {*range(PARTITIONS)} - self.away:
            self.rig.open(number)

    def lose(self, number: int) -> None:
        """The partition's backend is away from its next commit on."""
        executor = self.rig.queue.executors[number]
        executor.put(Ticket(produce(), self.rig.now + 1_000), produce())
        self.rig.cycle()
        self._fail(number)
        self._end_commits()

    def _fail(self, number: int) -> None:
        outcome = self.random.choice((Outcome.REFUSED, Outcome.UNKNOWN))
        self.away.add(number)
        self.rig.end(number, outcome, landed=outcome is Outcome.UNKNOWN and self.random.random() < 0.5)

    def bring_back(self, number: int) -> None:
        self.away.discard(number)
        while number not in self.rig.opens:
            self.rig.wait(1_000)
        self.rig.open(number)
        self._end_commits()

    def fill(self, number: int, count: int) -> None:
        self.rig.queue.executors[number].put(Ticket(produce(count), self.rig.now + 1_000), produce(count))
        self.rig.cycle()
        self._end_commits()

    def _end_commits(self) -> None:
        while self.rig.commits:
            number = min(self.rig.commits)
            if self.random.random() < self.faults:
                self._fail(number)
            else:
                self.rig.end(number)

    def ask(self, request: Request) -> Any:
        """The server's answer. Raises its errors, `too_many_requests` at times, and `outcome_unknown` for an answer that is lost."""
        if self.random.random() < self.faults:
            raise SluicewayError("too_many_requests", "later")
        ticket = self.rig.ask(request)
        self._end_commits()
        while ticket not in self.rig.answers:
            self.rig.wait(1_000)
            self._end_commits()
        answer = self.rig.answers[ticket]
        if isinstance(answer, SluicewayError):
            raise answer
        if self.random.random() < self.faults:
            raise SluicewayError("outcome_unknown", "the answer was lost")
        return answer

    def call(self, path: str, body: Mapping[str, Any], patience: int | None = None) -> dict[str, Any]:
        """As `Client.call`."""
        if path == "/v1/queue.stats":
            found = [{"partition": each.partition, "next_offset": each.next_offset} for each in self.rig.queue.stats().partitions]
            return {"logical_queues": [{"partitions": found}]}
        if path == "/v1/queue.complete":
            selections: dict[int, list[Selection]] = {}
            for lease_id in body["lease_ids"]:
                selections.setdefault(partition_of(lease_id), []).append(Selection(DONE, lease=number_of(lease_id)))
            settled: Settled = self.ask(Settle(selections, 1_000))
            return {"ignored": [{"id": lease_id, "reason": reason} for lease_id, reason in settled.ignored]}
        if path == "/v1/queues.info":
            return {"partitions": [{"partition": number, "state": "available"} for number in range(PARTITIONS)], "incarnation": "q"}
        assert path == "/v1/queue.lease"
        completed = self._completed(body["complete"]) if "complete" in body else None
        before = body.get("before_offsets")
        request = Lease(
            body["client_id"],
            body.get("batch_size", 1),
            0,
            parse_duration(body["lease_timeout"], ""),
            body.get("max_partitions", 1),
            body["lease_key"],
            body.get("partition"),
            before=None if before is None else {int(number): offset for number, offset in before.items()},
        )
        infos = [grant.info for grant in self.ask(request)]
        leases = [{"lease_id": str(LeaseId("q", info.partition, info.number)), "count": info.items} for info in infos]
        return {"leases": leases, "completed": completed}

    def _completed(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """As a lease call completes: an error of the completion is not told."""
        try:
            return self.call("/v1/queue.complete", body)
        except SluicewayError:
            return None

    # ---- Spark ------------------------------------------------------------------------------------------------

    def new_driver(self) -> LeaseStreamReader:
        """A driver that starts from the checkpoint."""
        given = {"url": "http://127.0.0.1:1", "queue": "q", "consumer": "c", "requestTimeout": "1s", "holdFor": "30d"}
        driver = LeaseStreamReader(source_options({**given, **self._options}))
        driver._client = SimpleNamespace(call=self.call)  # type: ignore[assignment]
        return driver

    def trigger(self, dies: float = 0.0) -> bool:
        """Plan, log, run and commit a batch, or as much of that until the driver dies. Returns whether there was one."""
        try:
            self.attempts += 1
            most = 3 + 7 * (self.attempts if self.limits_change else len(self.done)) % 10
            end = self.driver.latestOffset(self.start, ReadMaxRows(most))
        except SluicewayError as error:
            assert error.code in ("unavailable", "outcome_unknown", "too_many_requests"), error
            self.driver = self.new_driver()
            return False
        if self.random.random() < dies:
            self.driver = self.new_driver()
            return False
        if end == self.start:
            return False
        batch = Offset.parse(end)
        self.run(batch)
        self.logged.append(end)
        self.start = end
        if self.random.random() < dies:
            self.driver = self.new_driver()
            self.run(batch)
        self.done.add(batch.sequence)
        return True

    def run(self, batch: Offset) -> None:
        """Read the batch, as soon as all of its partitions are there; again, it is the same."""
        # Its driver keeps its leases, and may close them together with leasing the next batch.
        self.driver._keeper = SimpleNamespace(release=lambda: None)  # type: ignore[assignment]
        items: list[Item] = []
        for lease in batch.leases:
            number = partition_of(lease.lease_id)
            if number in self.away:
                self.bring_back(number)
            if number in self.away:
                return self.run(batch)
            items += self._items(lease)
        assert self.read.setdefault(batch.sequence, items) == items, "a replay reads something else"
        return None

    def _items(self, lease: HeldLease) -> list[Item]:
        number = partition_of(lease.lease_id)
        state = self.rig.queue.executors[number].partition.leases[number_of(lease.lease_id)]
        found = [(number, offset) for piece in open_slices(state) for offset in piece.offsets.tolist()]
        assert len(found) == lease.count, "not what was logged"
        return found

    # ---- histories --------------------------------------------------------------------------------------------

    def live(self, steps: int) -> None:
        """A random history, then a good end."""
        self.faults = 0.03
        for _ in range(steps):
            self._step()
        self.faults = 0.0
        for number in sorted(self.away):
            self.bring_back(number)
        for _ in range(50):
            # Twice: the first may find only what was left.
            if not self.trigger() and not self.trigger():
                break
        self.check()

    def _step(self) -> None:
        chance = self.random.random()
        here = sorted({*range(PARTITIONS)} - self.away)
        if chance < 0.3 and here:
            self.fill(self.random.choice(here), self.random.randint(1, 8))
        elif chance < 0.4 and here:
            self.lose(self.random.choice(here))
        elif chance < 0.5 and self.away:
            self.bring_back(self.random.choice(sorted(self.away)))
        elif chance < 0.56:
            self.restart()
        else:
            self.trigger(dies=0.25)

    def check(self) -> None:
        """Each item was in one batch, and none is left."""
        every = [item for items in self.read.values() for item in items]
        assert len(every) == len(set(every)), "an item is in two batches"
        partitions = [executor.partition for executor in self.rig.queue.executors.values()]
        assert not any(partition.leases for partition in partitions), "leases are left behind"
        assert not any(partition.log.ready_count for partition in partitions), "items are left behind"
        produced = sum(partition.log.header.produced for partition in partitions)
        completed = sum(partition.log.header.completed for partition in partitions)
        assert produced == completed == len(every), "items were completed without a batch, or not at all"


def partition_of(lease_id: str) -> int:
    return int(lease_id.split(".")[1])


def number_of(lease_id: str) -> int:
    return int(lease_id.rpartition("L")[2])


class Clock:
    """Stands for `time`: it passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
