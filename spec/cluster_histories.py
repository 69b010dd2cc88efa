"""Histories of the simulator's clusters, for the trace check: each partition of a history is one.

Each instance gets a recording store around its own, and the clients' ledgers say what they hear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from simulation import cluster
from simulation.cluster import ClusterWorld
from simulation.cluster_clients import Clients
from simulation.cluster_instance import Instance
from simulation.cluster_ledger import Hold, QueueLedger
from simulation.cluster_store import SimPartitionStore
from simulation.known_items import Batch
from simulation.planting import Bug, planted
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Disposition, Lease, Leased, Produced, Settled
from sluiceway.model.small_batch import in_columns
from spec.partition_fences import READY, SETTLED, Place
from spec.recording_store import Line, RecordingStore, histories
from spec.trace_check import Event


class ClusterRecorder:
    """What the stores and the clients of one history note."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._leased: dict[tuple[str, int, int], tuple[int, int]] = {}
        """Item and lease, by partition and offset."""

    def store(self, *arguments: Any) -> RecordingStore:
        """A store of an instance."""
        return RecordingStore(SimPartitionStore(*arguments), self.lines.append)

    def produced(self, original: Callable[..., None]) -> Callable[..., None]:
        def produced(ledger: QueueLedger, batch: Batch, answer: Produced) -> None:
            self._told(ledger, answer.partition, range(answer.first_offset, answer.first_offset + answer.items), READY)
            original(ledger, batch, answer)

        return produced

    def leased(self, original: Callable[..., list[Hold]]) -> Callable[..., list[Hold]]:
        def leased(ledger: QueueLedger, request: Lease, answer: Leased, before: set[tuple[int, int]], now: Millis) -> list[Hold]:
            for batch in map(in_columns, answer.batches):
                columns = [batch.column(name).to_pylist() for name in ("partition", "lease", "offset", "origin_offset")]
                for partition, lease, offset, item in zip(*columns, strict=True):
                    self._leased[ledger.incarnation, partition, offset] = item, lease
                    self._told(ledger, partition, [item], lease)
            return original(ledger, request, answer, before, now)

        return leased

    def settle_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def settle_once(
            clients: Clients, sent: Mapping[int, list[int]], disposition: Disposition, instance: Instance | None
        ) -> Settled | None:
            ledger = clients.ledger
            known = {
                (partition, offset): self._leased[ledger.incarnation, partition, offset]
                for partition, offsets in sent.items()
                for offset in offsets
                if (ledger.incarnation, partition, offset) in self._leased
            }
            for (partition, _), (item, lease) in known.items():
                self._note(ledger, partition, "gave_up", [item], lease)
            answer: Settled | None = await original(clients, sent, disposition, instance)
            if answer is not None and disposition.verdict == "done":
                ignored = {name.partition(".")[2] for name, _ in answer.ignored}
                for (partition, offset), (item, _) in known.items():
                    if f"{partition}.{offset}" not in ignored:
                        self._told(ledger, partition, [item], SETTLED)
            return answer

        return settle_once

    def _told(self, ledger: QueueLedger, partition: int, items: range | list[int], place: Place) -> None:
        self._note(ledger, partition, "told", list(items), place)

    def _note(self, ledger: QueueLedger, partition: int, what: str, items: list[int], place: Place) -> None:
        self.lines.append(Line(f"{ledger.incarnation}.{partition}", what, items=items, place=place))


@contextmanager
def recording() -> Iterator[ClusterRecorder]:
    """Record the history that is lived within the block."""
    recorder = ClusterRecorder()
    watching = [
        Bug("store", "", cluster, "SimPartitionStore", lambda _: recorder.store),
        Bug("produced", "", QueueLedger, "produced", recorder.produced),
        Bug("leased", "", QueueLedger, "leased", recorder.leased),
        Bug("settle", "", Clients, "_settle_once", recorder.settle_once),
    ]
    with ExitStack() as stack:
        for each in watching:
            stack.enter_context(planted(each))
        yield recorder


def cluster_histories(seed: int) -> dict[str, list[Event]]:
    """Run the seed's history of a cluster and return those of its partitions, by name. Raises what the history does."""
    with recording() as recorder:
        ClusterWorld(seed).live()
    return histories(recorder.lines)
