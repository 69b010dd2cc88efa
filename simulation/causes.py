"""Client requests to one queue: the possible causes of every observed effect. A sent request may take effect until it is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import RELEASE, Clear, Disposition


@dataclass(slots=True)
class Asks:
    """All requests of a queue's clients. Items are keyed by (partition, offset), leases by (partition, number)."""

    dispositions: dict[tuple[int, int], set[Disposition]] = field(default_factory=dict)
    closing: dict[tuple[int, int], dict[int, set[Disposition]]] = field(default_factory=dict)
    """Dispositions that closing the lease may apply, by lease, then by offset."""
    releasing: set[tuple[int, int]] = field(default_factory=set)
    lease_timeouts: dict[str, Millis | None] = field(default_factory=dict)
    """Requested lease timeout by client id. Each client requests leases of one timeout only."""
    targets: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """Queues to which an item may be redriven."""
    clearing: list[Clear] = field(default_factory=list)

    def settle(self, partition: int, offsets: Iterable[int], disposition: Disposition) -> None:
        for offset in offsets:
            self.dispositions.setdefault((partition, offset), set()).add(disposition)

    def close(self, lease: tuple[int, int], outcomes: Mapping[int, set[Disposition]]) -> None:
        known = self.closing.setdefault(lease, {})
        for offset, dispositions in outcomes.items():
            known.setdefault(offset, set()).update(dispositions)

    def redrive(self, partition: int, offsets: Iterable[int], target: str) -> None:
        for offset in offsets:
            self.targets.setdefault((partition, offset), set()).add(target)

    def of(self, partition: int, lease: int, offset: int) -> set[Disposition]:
        """Return every disposition that a client has requested for the leased item."""
        asked = self.dispositions.get((partition, offset), set()) | self.closing.get((partition, lease), {}).get(offset, set())
        return asked | {RELEASE} if (partition, lease) in self.releasing else asked

    def clears(self, *, scheduled: bool) -> bool:
        return any(each.scheduled if scheduled else each.ready for each in self.clearing)
