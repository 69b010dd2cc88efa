"""Memory of ended leases, which explains what became of a stale id."""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap

from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.core.partition.lease_spans import Spans
from sluiceway.core.partition.records import Blob, Extent, LeaseState, Part, lease_bytes
from sluiceway.kernel.limits import MAX_CLOSED_LEASES

_NO_BLOB, _NONE = Blob(0, 0, 0, 0, 0), BitMap()
"""Placeholders in all extents of remembered leases. Never read."""


@dataclass(slots=True)
class _Client:
    """Count and highest number of one client's remembered leases that ended as completed."""

    completed: int = 0
    last: int = 0


class ClosedLeases:
    """The most recently closed leases of a partition. Only those with items not completed are stored."""

    def __init__(self) -> None:
        self._leases: dict[int, LeaseState] = {}
        self._clients: dict[str, _Client] = {}
        self._spans = Spans()

    def add(self, lease: LeaseState) -> list[int]:
        """Remember an ended lease. Returns the numbers of stored leases forgotten in exchange."""
        # Copy the extents: keeping the lease's own would keep them and their rows alive.
        parts: list[Part] = []
        for part in lease.parts:
            last = parts[-1] if parts else None
            if last is not None and last.end == part.first:
                last.count += part.count
            else:
                parts.append(Part(Extent(part.first, part.count, _NO_BLOB, 0, None, 0, 0, gone=_NONE), 0, part.count, part.base))
        kept = LeaseState(lease.number, parts, lease.count, lease.client_id, None, settled=lease.settled, dispositions=lease.dispositions)
        kept.is_completed = lease.is_completed
        self._leases[lease.number] = kept
        self._spans.add(kept)
        if _why(kept) == "completed":
            client = self._clients.setdefault(lease.client_id, _Client())
            client.completed += 1
            client.last = max(client.last, lease.number)
        forgotten = []
        while len(self._leases) > MAX_CLOSED_LEASES:
            old = self._leases.pop(next(iter(self._leases)))
            self._spans.remove(old)
            if _why(old) == "completed":
                client = self._clients[old.client_id]
                client.completed -= 1
                if not client.completed:
                    del self._clients[old.client_id]
            if old.dispositions:
                forgotten.append(old.number)
        return forgotten

    def record(self, number: int) -> bytes | None:
        """The bytes to store; None if there are no outcomes to keep."""
        lease = self._leases.get(number)
        return lease_bytes(lease, closed=True) if lease is not None and lease.dispositions else None

    def why_offset(self, offset: int) -> IgnoredReason | None:
        """The outcome of an item that was in one of these leases; None if unknown."""
        place = self._spans.at(offset)
        return None if place is None else place[0].disposition_of(offset - place[1].first + place[1].base)

    def was_completed_after(self, number: int, client_id: str) -> bool:
        """Whether a later remembered lease of that client ended as completed."""
        client = self._clients.get(client_id)
        return client is not None and client.last > number

    def why_lease(self, number: int) -> IgnoredReason | None:
        """Return the end of a lease: `completed`, `expired` or `released`; None if forgotten."""
        lease = self._leases.get(number)
        if lease is None:
            return None
        return _why(lease)


def _why(lease: LeaseState) -> IgnoredReason:
    if lease.is_completed or not lease.dispositions:
        return "completed"
    return next((disposition for disposition in ("expired", "released") if disposition in lease.dispositions), "completed")


def unknown_extent(first: int, count: int) -> Extent:
    """Stand-in for an extent that is gone, or irrelevant, in a remembered lease."""
    return Extent(first, count, Blob(first, count, 0, 0, 0), 0, None, 0, 0)
