"""Read-only queries on an instance's share of a queue."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import msgspec
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.contract.item_answers import failures_before_death
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.core.partition import item_listing, queries
from sluiceway.core.queue.handler_times import percentile
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import LeaseId
from sluiceway.kernel.limits import MAX_LEASE_BYTES, MAX_REASONS
from sluiceway.local.answer_budget import first_rows, fitting
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.inspection import ItemsPage, ListItems
from sluiceway.model.leased_items import present, served
from sluiceway.model.peers import Explain, RemainingItems, ShareReasons
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Explanation, Failure, LeaseInfo, Peek


async def peek(driver: QueueDriver, request: Peek) -> list[pa.RecordBatch]:
    """Return the items of a lease, or the next ones to be leased. Raises lease_not_found, not_here, unavailable, partition_damaged."""
    if request.lease is not None:
        executor = driver.executor(request.partition) if request.partition in driver.numbers else None
        lease = executor.partition.leases.get(request.lease) if executor is not None else None
        if executor is None or lease is None:
            name = LeaseId(driver.record.incarnation, request.partition or 0, request.lease)
            raise SluicewayError("lease_not_found", f"lease {name} is closed, has expired, or never existed", "lease_id")
        return await driver.rows(executor.number, lease.number, queries.open_slices(lease, request.start, request.limit))
    batches: list[pa.RecordBatch] = []
    wanted, room = request.limit, float(MAX_LEASE_BYTES)
    for executor in driver.executors if request.partition is None else [driver.executor(request.partition)]:
        if wanted > 0 and executor.takes_work:
            pieces, nbytes = fitting(executor.partition, queries.ready_slices(executor.partition, wanted), room)
            wanted, room = wanted - sum(len(piece.rows) for piece in pieces), room - nbytes
            batches += await driver.rows(executor.number, 0, pieces)
    return batches


async def list_items(driver: QueueDriver, request: ListItems) -> ItemsPage:
    """Return a page of items by place; fewer than asked for if an answer holds no more. Raises as `peek`."""
    executor = driver.executor(request.partition)
    find = item_listing.scheduled if request.scheduled else item_listing.in_line
    found = find(executor.partition, request.start, request.limit + 1)
    wanted, _ = fitting(executor.partition, first_rows([listed.piece for listed in found], request.limit), MAX_LEASE_BYTES)
    shown = sum(len(piece.rows) for piece in wanted)
    more = shown < sum(len(listed.piece.rows) for listed in found)
    blobs = await driver.blobs(executor.number, wanted)
    rows = [
        (served(executor.number, listed.lease, there, blobs[piece.blob]), listed.standing)
        for piece, listed in zip(wanted, found, strict=False)
        if piece.blob in blobs and (there := present(piece, blobs[piece.blob])) is not None
    ]
    return ItemsPage(rows, int(wanted[-1].offsets[-1]) if more else None)


async def ready_rows(driver: QueueDriver) -> AsyncIterator[tuple[int, pa.RecordBatch]]:
    """Yield all ready items, extent by extent, each batch with its partition's opening. Reflects the state at the time of each read."""
    for executor in driver.executors:
        extents, opening = list(executor.partition.log.ready) if executor.takes_work else [], executor.opening
        for extent in extents:
            # Extent by extent, in its current state: the line may be long, and is served meanwhile.
            for batch in await driver.rows(executor.number, 0, queries.waiting_slices(executor.partition, extent)):
                yield opening, batch


def may_send_to(driver: QueueDriver, queue_name: str) -> bool:
    """Whether items may be on their way to that queue. A partition that is not open counts as a yes, since its contents are unknown."""
    for executor in driver.executors:
        targets = {transfer.target or driver.record.dead_queue for transfer in executor.partition.transfers.by_number.values()}
        if queue_name in targets or not executor.takes_work:
            return True
    return False


async def explain(driver: QueueDriver, request: Explain) -> Explanation:
    """Explain the item's place, why it is not being served, and its failed attempts. Raises not_here."""
    found = _explain(driver, request)
    if found.state in ("ready", "leased", "scheduled"):
        found.failures = [*await _before_death(driver, request, found.state == "scheduled"), *found.failures]
    return found


async def _before_death(driver: QueueDriver, request: Explain, scheduled: bool) -> list[Failure]:
    """The failed attempts that the header of an item of a dead queue has."""
    # A client may have produced the header itself, with a time without a zone or an invalid duration.
    with contextlib.suppress(SluicewayError, TypeError):
        for batch, _ in (await list_items(driver, ListItems(request.partition, request.offset, 1, scheduled))).rows:
            if "headers" in batch.schema.names and batch.column("offset")[0].as_py() == request.offset:
                found = failures_before_death(dict(batch.column("headers")[0].as_py() or ()))
                return [Failure.of(each) for each in found]
    return []


def _explain(driver: QueueDriver, request: Explain) -> Explanation:
    try:
        executor = driver.executor(request.partition)
    except SluicewayError as error:
        if error.code == "not_here":
            raise
        return Explanation("unavailable", error.detail)
    found = queries.explain(executor.partition, request.offset)
    if found.state == "ready":
        found.reason += "".join(f"; {why}" for why in _held_up(driver.record, executor.number))
        if driver.queue.circuit is not None and driver.queue.circuit.state != "closed":
            found.reason += "; the queue's circuit breaker is open: too many items fail, and only probes are leased"
    if executor.degraded:
        found.reason += f"; its partition is slow: a commit takes {executor.slowness(system.now()):.0f} ms"
    return found


def _held_up(record: QueueRecord, number: int) -> Iterator[str]:
    """Reasons why ready items of that partition are not served in their turn, or not there."""
    if "lease" in record.paused:
        yield "leasing from the queue is paused"
    each = record.partition(number)
    if each is None:
        return
    if each.state == "paused":
        yield "its partition is paused"
    elif each.state == "preparing":
        yield "its partition is not in use yet"
    elif each.state == "draining":
        yield "a rebalance is draining its partition and may move it to another one, under a new id with the same origin"
    if record.holds_back(each):
        yield f"partition {min(each.after)} has to be empty first"


def stats(driver: QueueDriver) -> LogicalQueueStats:
    """The counts of the partitions served here."""
    found = driver.counts()
    partitions = [msgspec.structs.replace(each, backend=driver.backend(each.partition).name) for each in found.partitions]
    partitions.sort(key=lambda each: each.partition)
    handled = driver.handler_times.recent(system.now())
    return msgspec.structs.replace(
        found,
        handled=sum(handled),
        handler_p50_ms=percentile(handled, 0.5),
        handler_p99_ms=percentile(handled, 0.99),
        partitions=partitions,
    )


def reasons(driver: QueueDriver) -> ShareReasons:
    """Why the items of the open partitions died."""
    found = Counter[tuple[str, str]]()
    executors = [executor for executor in driver.executors if executor.takes_work]
    for executor in executors:
        found.update(queries.reasons(executor.partition))
    counted = [queries.stats_of(executor.partition, executor.number) for executor in executors]
    items = sum(each.total + each.transferring for each in counted)
    return ShareReasons(
        tuple(executor.number for executor in executors),
        items,
        # More than are shown: what is rare here may be frequent elsewhere.
        [(*alike, count) for alike, count in found.most_common(10 * MAX_REASONS)],
    )


def left(driver: QueueDriver) -> RemainingItems:
    """The work left if nothing more arrives."""
    counted = stats(driver)
    unopened = [executor.number for executor in driver.executors if not executor.takes_work]
    items = sum(each.total + each.transferring for each in counted.partitions) + counted.produce_waiting
    return RemainingItems(tuple(each.partition for each in counted.partitions), items, unopened[0] if unopened else None)


def keyed_leases(driver: QueueDriver, client_id: str, lease_key: str) -> list[LeaseInfo]:
    """The live leases under that key. Raises `unavailable` if a partition that is not open may have some, and `partition_damaged`."""
    now = system.now()
    executors = driver.executors
    for executor in executors:
        # A stopped partition may have been fenced off by another owner: its contents are unknown here.
        if executor.state is ExecutorState.STOPPED or executor.may_hold((client_id, lease_key)):
            raise executor.unavailable()
    return [
        executor.lease_info(lease)
        for executor in executors
        if executor.takes_work
        for lease in executor.partition.keyed(client_id, lease_key)
        if lease.deadline is not None and lease.deadline > now
    ]


def problems(driver: QueueDriver) -> list[str]:
    """Return the reasons, in words, why partitions do not serve; excludes backends that are down, which report themselves."""
    return [
        f"queue {driver.record.queue_name}, partition {executor.number}: {executor.state.value}: {executor.problem or 'not open yet'}"
        for executor in driver.executors
        if not executor.takes_work and driver.backend(executor.number).problem is None
    ]
