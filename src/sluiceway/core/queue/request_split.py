"""Splitting of requests into the parts for each executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sluiceway.core.queue.tickets import Compact, Rebalancing, TakeOut, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import DeleteItems, RunNow
from sluiceway.model.requests import BundleCounts, Clear, Cleared, CountBundles, Extend, Offsets, Produce, Selection, Settle


class SettlePart(NamedTuple):
    selections: list[Selection]
    stage: bool
    client_id: str | None


class ExtendPart(NamedTuple):
    numbers: list[int]
    offsets: Offsets | None
    deadline: Millis
    client_id: str | None


class DeletePart(NamedTuple):
    offsets: Offsets


class RunNowPart(NamedTuple):
    offsets: Offsets


Work = Produce | SettlePart | ExtendPart | DeletePart | RunNowPart | Clear | CountBundles | TakeOut | Compact | Rebalancing


def parts_of(ticket: Ticket, executors: Iterable[int], lease_timeout: Millis) -> Iterator[tuple[int, Work]]:
    """Yield the executors that a request concerns, each with its part. Produces and leases, which choose an executor, are not split.

    Ids that no executor can know are recorded in the ticket as ignored.
    """
    request = ticket.request
    if isinstance(request, Settle):
        _ignore(ticket, request.foreign)
        for number, selections in request.selections.items():
            yield number, SettlePart(selections, request.stage, request.client_id)
    elif isinstance(request, Extend):
        _ignore(ticket, request.foreign)
        timeout = lease_timeout if request.lease_timeout is None else request.lease_timeout
        deadline = ticket.deadline - request.request_timeout + timeout
        for number in sorted({*(partition for partition, _ in request.leases), *request.offsets}):
            numbers = [lease for partition, lease in request.leases if partition == number]
            yield number, ExtendPart(numbers, request.offsets.get(number), deadline, request.client_id)
    elif isinstance(request, DeleteItems | RunNow):
        _ignore(ticket, request.foreign)
        for number, offsets in request.offsets.items():
            yield number, DeletePart(offsets) if isinstance(request, DeleteItems) else RunNowPart(offsets)
    elif isinstance(request, TakeOut | Compact | Rebalancing):
        yield request.partition, request
    elif isinstance(request, Clear | CountBundles):
        yield from ((number, request) for number in (executors if request.partitions is None else request.partitions))


def _ignore(ticket: Ticket, foreign: Iterable[str]) -> None:
    names = list(foreign)
    if names:
        total = ticket.total
        assert not isinstance(total, Cleared | BundleCounts), "it names no ids"
        total.ignored.extend((name, "unknown") for name in names)
