"""Load on all queues by way of all instances, with a ledger outside; and how the whole is judged.

Each producer and consumer has a home, the instance that it calls, and goes elsewhere for a while when that fails.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import httpx

from tests.campaigns.kit.fleet import Fleet, started
from tests.campaigns.kit.history import History, faults
from tests.campaigns.kit.ledger import Ledger, Tally, name_of, payload_of
from tests.campaigns.kit.load import LEASE_TIMEOUT, MAX_ATTEMPTS, Address, Answer, Load, call
from tests.campaigns.kit.report import Report
from tests.server.server_process import wait_until

DEAD_QUEUE = "dead"
QUEUES = {"wide": 20, "narrow": 8, "single": 1}
DEAD_PARTITIONS = 3
REQUEST_TIMEOUT = 5_000
PATIENCE = 30_000
AWAY = 2.0
"""Seconds that a client stays away from its home once a call there was not done."""
PAUSE = 0.05
"""Seconds: enough to leave the machine some air. What is to be judged is what happens beside the load, not how much of it there can be."""
DRAIN_CONSUMERS = 3
EMPTY_WITHIN = 180


class Door(Address):
    """Where a client calls: its home, and for a while another instance when the last call was not done."""

    def __init__(self, fleet: Fleet, home: int) -> None:
        super().__init__()
        self._fleet = fleet
        self._home = self._at = home
        self._home_again_at = 0.0

    def get(self) -> str:
        if time.monotonic() > self._home_again_at:
            self._at = self._home
        return self._fleet.url(self._at)

    def failed(self, url: str) -> None:
        if url == self._fleet.url(self._at):
            self._at = (self._at + 1) % self._fleet.homes
            self._home_again_at = time.monotonic() + AWAY

    def may_hang(self, url: str) -> bool:
        return self._fleet.may_hang(url)


def only(fleet: Fleet, home: int) -> Address:
    """That instance and no other."""
    address = Address()
    address.set(fleet.url(home))
    return address


class Traffic:
    """The queues, their ledgers and the load on them. What is wrong is in the tally."""

    ledger: ClassVar[type[Ledger]] = Ledger

    def __init__(self, fleet: Fleet, queues: Mapping[str, int] = QUEUES) -> None:
        self.fleet = fleet
        self.tally = Tally()
        self.queues = queues
        self.ledgers = {queue: self.ledger(self.tally) for queue in queues}
        self.history: History | None = None
        """Who writes the partitions, where that is watched."""
        self.http = httpx.Client(limits=httpx.Limits(max_connections=None))
        self._loads: list[Load] = []
        self._starts = 0

    def create_queues(self) -> None:
        """Each by way of another instance."""
        self.ask("queues.create", 0, queue_name=DEAD_QUEUE, requested_partitions=DEAD_PARTITIONS)
        limits = {"lease_timeout": f"{LEASE_TIMEOUT}ms", "max_attempts": MAX_ATTEMPTS, "dead_queue": DEAD_QUEUE}
        for home, (queue, partitions) in enumerate(self.queues.items()):
            self.ask("queues.create", home % self.fleet.homes, queue_name=queue, requested_partitions=partitions, **limits)

    def partitions(self) -> dict[str, int]:
        """All of them, the dead queue's too."""
        return {**self.queues, DEAD_QUEUE: DEAD_PARTITIONS}

    def try_to(self, call_name: str, address: Address, patience: int = PATIENCE, **fields: Any) -> Answer:
        """One call there. An answer that there must not be is in the tally, and as if there was none."""
        try:
            return call(self.http, address, call_name, fields, patience)
        except AssertionError as error:
            self.tally.wrong("other", str(error))
            return Answer("unknown", problem="wrong answer")

    def ask(self, call_name: str, home: int, **fields: Any) -> Any:
        """The answer of a call that is safe to repeat, from that instance alone."""
        answers: list[Answer] = []

        def done() -> bool:
            answers.append(self.try_to(call_name, only(self.fleet, home), **fields))
            return answers[-1].outcome == "done" or self.tally.faults > 0

        wait_until(done, f"an answer to {call_name}")
        assert answers[-1].outcome == "done", f"{call_name} is not done: {answers[-1].problem}, and something was wrong already"
        return answers[-1].body

    def put(self, queue: str, partition: int, name: str, address: Address, patience: int, **fields: Any) -> Answer:
        """One try to add the item of that name to that partition, of which the ledger is told."""
        ledger = self.ledgers[queue]
        ledger.sending([name])
        item = {"payload": base64.b64encode(payload_of(name).encode()).decode()}
        answer = self.try_to("storage/items.import", address, patience, queue_name=queue, partition=partition, items=[item], **fields)
        if answer.outcome == "done":
            ledger.stored([name], answer.body["first_id"])
        elif answer.outcome == "refused":
            ledger.refused([name])
        return answer

    # -- load -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Load on each queue at every home."""
        self._starts += 1
        self._loads = [self._load(queue, home) for queue in self.queues for home in range(self.fleet.homes)]
        for load in self._loads:
            load.start()

    def _load(self, queue: str, home: int) -> Load:
        """A producer and a consumer."""
        return Load(
            self.ledgers[queue],
            Door(self.fleet, home),
            queue,
            self._who(queue, home),
            REQUEST_TIMEOUT,
            producers=1,
            consumers=1,
            pause=PAUSE,
        )

    def _who(self, queue: str, home: int) -> str:
        return f"{queue}-{self._starts}h{home}"

    def progress(self, count: int) -> None:
        """Wait until so many items more were acknowledged, in every queue."""
        goals = {ledger: ledger.acknowledged + count for ledger in self.ledgers.values()}
        wait_until(lambda: self.tally.faults > 0 or all(ledger.acknowledged >= goal for ledger, goal in goals.items()), "progress")

    def drain(self, home: int) -> None:
        """Stop the load, empty every queue through that one instance, and judge every item."""
        loads, self._loads = self._loads, []
        try:
            for load in loads:
                load.stop_producing()
            for load in loads:
                load.stop_consuming()
            loads = [
                Load(
                    ledger,
                    only(self.fleet, home),
                    queue,
                    f"{queue}-{self._starts}drain",
                    REQUEST_TIMEOUT,
                    producers=0,
                    consumers=DRAIN_CONSUMERS,
                )
                for queue, ledger in self.ledgers.items()
            ]
            for load in loads:
                load.start()
            wait_until(lambda: self._is_empty(home), "an empty queue", EMPTY_WITHIN)
            for load in loads:
                load.stop_consuming()
        finally:
            for load in loads:
                load.abandon()
        if self.tally.faults:
            return  # the rest would look wrong, too
        dead = self._take_dead(home)
        for queue, ledger in self.ledgers.items():
            ledger.close(self.counters(queue, home), dead[queue], MAX_ATTEMPTS)

    def end(self) -> None:
        """Stop without judging anything."""
        for load in self._loads:
            load.abandon()
        self.http.close()

    # -- judging --------------------------------------------------------------------------------

    def counters(self, queue: str, home: int) -> Counter[str]:
        """What the queue's partitions count, added up."""
        sums: Counter[str] = Counter()
        for logical_queue in self.ask("queue.stats", home, queue_name=queue)["logical_queues"]:
            for partition in logical_queue["partitions"]:
                sums.update({name: value for name, value in partition.items() if type(value) is int})
        return sums

    def _is_empty(self, home: int) -> bool:
        if self.tally.faults:
            return True
        counts = [self.counters(queue, home) for queue in self.queues]
        return all(each["total"] + each["transferring"] == 0 for each in counts)

    def _take_dead(self, home: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """Everything that lies in the dead queue, which is then empty, by the queue that it was sent to at first."""
        taken: dict[str, list[tuple[str, dict[str, Any]]]] = {queue: [] for queue in self.queues}
        numbers = itertools.count()

        def take() -> bool:
            key = f"{self._starts}-{next(numbers)}"
            size = {"batch_size": 1_000, "max_partitions": DEAD_PARTITIONS}
            body = self.ask("queue.lease", home, queue_name=DEAD_QUEUE, client_id="undertaker", lease_key=key, **size)
            for item in body["items"]:
                payload = base64.b64decode(item["bytes"]).decode()
                queue = (name_of(payload) or "").partition("-")[0]
                # What cannot be told is for any ledger to complain of.
                taken[queue if queue in taken else next(iter(taken))].append((payload, item))
            if body["leases"]:
                self.ask("queue.complete", home, queue_name=DEAD_QUEUE, lease_ids=[lease["lease_id"] for lease in body["leases"]])
            return self.counters(DEAD_QUEUE, home)["total"] == 0

        wait_until(take, "an empty dead queue")
        return taken

    def judge(self, report: Report) -> None:
        """What the ledger, the logs and the history of the partitions have to say."""
        report.say(self.tally.summary())
        for line in (*self.tally.examples[:20], *self.fleet.check_logs()):
            report.fail(line)
        if self.history is not None:
            writes = self.history.writes()
            for line in faults(writes)[:20]:
                report.fail(line)
            writers = len({write.writer for write in writes})
            fences = len({(write.place, write.fence) for write in writes})
            report.say(f"{len(writes)} writes by {writers} processes under {fences} fences")


AnyTraffic = TypeVar("AnyTraffic", bound=Traffic)


@contextlib.contextmanager
def loaded(traffic: AnyTraffic) -> Iterator[AnyTraffic]:
    """Run the fleet, with its queues, until the block ends, however it ends. Nothing is produced yet."""
    with started(traffic.fleet):
        try:
            traffic.create_queues()
            yield traffic
        finally:
            traffic.end()


@contextlib.contextmanager
def judged(report: Report, traffic: AnyTraffic) -> Iterator[AnyTraffic]:
    """As `loaded`; the traffic is judged when the block ends."""
    with loaded(traffic):
        report.say(f"{traffic.fleet.homes} instances are ready")
        try:
            yield traffic
        except Exception:
            # The first faults say more than the exception that they led to.
            for line in traffic.tally.examples[:20]:
                report.fail(line)
            raise
        traffic.judge(report)
