"""Histories of the simulator's queues, for the trace check: each partition of a history is one.

For the length of `recording`, the simulated owners are watched at their edge: what they ask of the store and hear from it, and what their
clients hear and ask for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from simulation.owner import Flight, Handler, Owner
from simulation.queue_run import History
from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.tickets import Commit, Grant, Open, Request, Result
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Produced, Settle, Settled
from spec.history_recorder import Recorder, view_of
from spec.partition_fences import READY, SETTLED
from spec.trace_check import Event


class Leased(NamedTuple):
    item: int
    lease: int


class QueueRecorder:
    """The histories of one queue's partitions."""

    def __init__(self) -> None:
        self.partitions: dict[int, Recorder] = defaultdict(Recorder)
        self._leased: dict[tuple[int, int], Leased] = {}
        """By partition and offset, as clients know them."""

    def hears(self, at: int, request: Request, result: Result | SluicewayError | None) -> None:
        """A client hears the answer of owner number `at`."""
        if isinstance(result, Produced):
            first = result.first_offset
            self.partitions[result.partition].told(at, range(first, first + result.items), READY)
        elif isinstance(result, Settled) and isinstance(request, Settle) and not request.stage:
            self._settled(at, request, result)
        elif isinstance(result, list):
            for grant in result:
                self._granted(at, grant)

    def _granted(self, at: int, grant: Grant) -> None:
        partition, lease = grant.info.partition, grant.info.number
        items = []
        for piece in grant.slices:
            for offset, row in zip(piece.offsets.tolist(), piece.rows.tolist(), strict=True):
                self._leased[partition, offset] = Leased(piece.blob + row, lease)
                items.append(piece.blob + row)
        self.partitions[partition].told(at, items, lease)

    def _settled(self, at: int, request: Settle, result: Settled) -> None:
        ignored = {name.rpartition(".")[2] for name, _ in result.ignored}
        for partition, selections in request.selections.items():
            for each in selections:
                if each.offsets is not None and each.disposition.verdict == "done":
                    done = [
                        offset for offset in each.offsets.tolist() if str(offset) not in ignored and (partition, offset) in self._leased
                    ]
                    self.partitions[partition].told(at, [self._leased[partition, offset].item for offset in done], SETTLED)

    def asks(self, request: Request) -> None:
        """A client sends a request."""
        for partition, selections in request.selections.items() if isinstance(request, Settle) else ():
            for each in selections:
                if each.lease is not None:
                    self.partitions[partition].gave_up(each.lease)
                for offset in () if each.offsets is None else each.offsets.tolist():
                    if (partition, offset) in self._leased:
                        item, lease = self._leased[partition, offset]
                        self.partitions[partition].gave_up(lease, [item])


@contextmanager
def recording() -> Iterator[dict[str, QueueRecorder]]:
    """Record the histories of all queues that live within the block, by their names."""
    queues: dict[str, QueueRecorder] = defaultdict(QueueRecorder)
    originals = {name: getattr(Owner, name) for name in ("submit", "_commit", "_committed", "_open", "_opened")}

    def submits(self: Owner, request: Request, handler: Handler, partition: int | None = None) -> None:
        queue = queues[self.queue.incarnation]

        def hears(result: Result | SluicewayError | None) -> None:
            queue.hears(self.grant - 1, request, result)
            handler(result)

        queue.asks(request)
        originals["submit"](self, request, hears, partition)

    def commits(self: Owner, effect: Commit) -> None:
        view = view_of(self.executors[effect.partition].partition)
        recorder = queues[self.queue.incarnation].partitions[effect.partition]
        recorder.sent(self.grant - 1, (self.grant, effect.opening), effect.changes.txn, view, self.now())
        originals["_commit"](self, effect)

    def commit_ends(self: Owner, effect: Commit, flight: Flight, outcome: Outcome) -> None:
        told = flight.outcome() if outcome is Outcome.DONE else outcome
        recorder = queues[self.queue.incarnation].partitions[effect.partition]
        recorder.heard(self.grant - 1, (self.grant, effect.opening), told.value)
        originals["_committed"](self, effect, flight, outcome)

    def opens(self: Owner, effect: Open) -> None:
        queues[self.queue.incarnation].partitions[effect.partition].opening(self.grant - 1, (self.grant, effect.opening))
        originals["_open"](self, effect)

    def opening_ends(self: Owner, effect: Open, loaded: Partition | SluicewayError, final: bool) -> None:
        if isinstance(loaded, Partition):
            recorder = queues[self.queue.incarnation].partitions[effect.partition]
            recorder.opened(self.grant - 1, (self.grant, effect.opening), loaded.txn, view_of(loaded))
        originals["_opened"](self, effect, loaded, final)

    watching = {"submit": submits, "_commit": commits, "_committed": commit_ends, "_open": opens, "_opened": opening_ends}
    try:
        for name, method in watching.items():
            setattr(Owner, name, method)
        yield queues
    finally:
        for name, original in originals.items():
            setattr(Owner, name, original)


def histories(seed: int) -> dict[str, list[Event]]:
    """Run the seed's history and return those of its partitions, by name. Raises what the history does."""
    with recording() as queues:
        History(seed).live()
    return {f"{name}.{number}": recorder.events for name, queue in queues.items() for number, recorder in queue.partitions.items()}
