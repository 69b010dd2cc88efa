"""A queue with one partition is moved, forth and back, while it is filled and emptied: not one item may overtake another."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

from sluiceway.client import Client
from sluiceway.client.answers import LeasedItem
from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.rebalance_judging import Moves
from tests.server.server_process import wait_until

QUEUE = "fifo"
BATCH = 50
UNTOLD = 5
"""Leases that the consumer holds at a time: the next one is taken while these are not completed yet."""
FILL_BATCH = 500


class Order:
    """Told of each item in the order in which it is served: 0, 1, 2, … and nothing else."""

    def __init__(self) -> None:
        self.expected = 0
        self.faults: list[str] = []

    def served(self, number: int) -> None:
        if number != self.expected:
            self.faults.append(f"item {number} was served where {self.expected} was due")
        self.expected = number + 1

    def ended(self, produced: int) -> None:
        """Nothing is left, and so many were produced."""
        if self.expected != produced:
            self.faults.append(f"{produced} items were produced, and {self.expected} were served")


class Line:
    """One producer and one consumer of the queue, each in a thread. Each waits for its answer before it calls again."""

    def __init__(self, url: str, order: Order, pause: float) -> None:
        self.order = order
        self.produced = 0
        self.errors: list[str] = []
        self._url = url
        self._pause = pause
        self._burst = 0
        self._mutex = threading.Lock()
        self._filling, self._emptying = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._fill, daemon=True), threading.Thread(target=self._empty, daemon=True)]

    def fill(self, items: int) -> None:
        """Have so many produced beside all else, as fast as it goes; returns when they are."""
        with self._mutex:
            self._burst += items
        wait_until(lambda: self._burst == 0 or bool(self.errors), f"{items} items")

    def _produce(self, client: Client, size: int) -> None:
        client.produce(QUEUE, [str(number) for number in range(self.produced, self.produced + size)])
        self.produced += size

    def start_filling(self) -> None:
        self._filling.set()
        self._threads[0].start()

    def start_emptying(self) -> None:
        self._emptying.set()
        self._threads[1].start()

    def stop_filling(self) -> None:
        self._filling.clear()
        self._threads[0].join(60)

    def await_empty(self) -> None:
        """Returns when all that was produced was served."""
        wait_until(lambda: self.order.expected >= self.produced or bool(self.errors), "the last item")
        self._emptying.clear()
        self._threads[1].join(60)

    def _fill(self) -> None:
        rest = threading.Event()
        try:
            with Client(self._url) as client:
                for size in itertools.cycle((1, 3, 10)):
                    if not self._filling.is_set():
                        return
                    burst = min(self._burst, FILL_BATCH)
                    self._produce(client, burst or size)
                    with self._mutex:
                        self._burst -= burst
                    rest.wait(0.0 if burst else self._pause)
        except Exception as error:
            self.errors.append(f"the producer: {error!r}")

    def _empty(self) -> None:
        try:
            with Client(self._url) as client:
                for items in self._leased(client):
                    for item in items:
                        self.order.served(int(item.payload))
        except Exception as error:
            self.errors.append(f"the consumer: {error!r}")

    def _leased(self, client: Client) -> Iterator[list[LeasedItem]]:
        held: list[str] = []
        rest = threading.Event()
        for number in itertools.count():
            if not self._emptying.is_set():
                break
            lease = client.lease(QUEUE, batch_size=BATCH, request_timeout="200ms", lease_timeout="2m", lease_key=str(number))
            yield list(lease.items)
            held += [item.id for item in lease.items]
            # A few leases stay open across the next ones: what comes after a move must wait for them.
            if len(held) >= UNTOLD * BATCH or not lease.items:
                if held:
                    client.complete(QUEUE, held)
                held = []
            rest.wait(self._pause)
        if held:
            client.complete(QUEUE, held)


def move_in_order(report: Report, fleet: MixedFleet, items: int, pause: float = 0.02) -> None:
    """From the local backend to the shared one and back, each with so many items waiting."""
    moves = Moves(report, fleet)
    fleet.settle_on(LOCAL)
    with Client(fleet.url(0)) as client:
        client.create_queue(QUEUE, requested_partitions=1)
    line = Line(fleet.url(fleet.homes - 1), Order(), pause)
    seconds = []
    line.start_filling()
    for there in (SHARED, LOCAL):
        line.fill(max(0, items - (line.produced - line.order.expected)))
        begun = time.monotonic()
        fleet.settle_on(there)
        rebalance = moves.ask_for(QUEUE)
        if there == SHARED:
            line.start_emptying()
        found = moves.follow(rebalance)
        seconds.append(time.monotonic() - begun)
        if not found["plan"]["in_order"]:
            report.fail(f"{QUEUE} was moved without regard to its order: {found['plan']}")
    line.stop_filling()
    line.await_empty()
    line.order.ended(line.produced)
    for fault in [*line.errors, *line.order.faults[:10]]:
        report.fail(fault)
    moves.judge_audit()
    report.figure(
        f"{line.produced:,} items through one partition moved to the shared backend and back in {seconds[0]:.1f} s and {seconds[1]:.1f} s, "
        f"{len(line.order.faults)} out of order"
    )
