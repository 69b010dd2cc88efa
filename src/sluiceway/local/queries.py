"""Read-only queries on an instance's share of a queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.contract.item_answers import failures_before_death
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.core.partition import held_keys, item_listing, queries
from sluiceway.core.queue.handler_times import percentile
from sluiceway.core.queue.key_ranking import busiest, oldest, together
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.kernel.clock import format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, LeaseId
from sluiceway.kernel.limits import MAX_LEASE_BYTES, MAX_REASONS
from sluiceway.local.answer_budget import first_rows, fitting
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.inspection import ItemsPage, ListItems
from sluiceway.model.item_keys import KEY, NO_KEY
from sluiceway.model.leased_items import Slice, present, served, take_rows, with_columns
from sluiceway.model.peers import Explain, KeyCount, RemainingItems, ShareKeys, ShareReasons
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Explanation, Failure, LeaseInfo, Peek
from sluiceway.model.unique_keys import UNIQUE_KEY

_READ_AT_ONCE: Final = 8
"""Blobs of a partition that are read at once for their keys: bounds what is in memory."""


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


def may_send_to(driver: QueueDriver, target: QueueRecord) -> bool:
    """Whether items may be on their way to that queue. A partition that is not open counts as a yes, since its contents are unknown."""
    for executor in driver.executors:
        transfers = executor.partition.transfers.by_number.values()
        bound = {(each.target or driver.record.dead_queue, each.target_incarnation) for each in transfers}
        if not bound.isdisjoint([(target.queue_name, None), (target.queue_name, target.incarnation)]) or not executor.takes_work:
            return True
    return False


async def explain(driver: QueueDriver, request: Explain) -> Explanation:
    """Explain the item's place, why it is not being served, and its failed attempts. Raises not_here."""
    found = _explain(driver, request)
    if found.state in ("ready", "leased", "scheduled"):
        stored = await _stored(driver, request, found.state == "scheduled")
        found.key, found.unique_key = stored.get(KEY), stored.get(UNIQUE_KEY)
        found.failures = [*_before_death(stored.get("headers")), *found.failures]
    return found


async def _stored(driver: QueueDriver, request: Explain, scheduled: bool) -> dict[str, Any]:
    """The item's keys and headers, if it has any and can be read."""
    with contextlib.suppress(SluicewayError):
        for batch, _ in (await list_items(driver, ListItems(request.partition, request.offset, 1, scheduled))).rows:
            if batch.column("offset")[0].as_py() == request.offset:
                return {name: batch.column(name)[0].as_py() for name in (KEY, UNIQUE_KEY, "headers") if name in batch.schema.names}
    return {}


def _before_death(headers: Sequence[tuple[str, str]] | None) -> list[Failure]:
    """The failed attempts that the header of an item of a dead queue has."""
    # A client may have produced the header itself, with a time without a zone or an invalid duration.
    with contextlib.suppress(SluicewayError, TypeError):
        return [Failure.of(each) for each in failures_before_death(dict(headers or ()))]
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
        if (holder := held_keys.holder_before(executor.partition, request.offset)) is not None:
            id = ItemId(driver.record.incarnation, executor.number, holder.origin)
            found.reason += f"; it waits for the item with the origin {id}, {_whereabouts(holder)}"
        if driver.queue.circuit is not None and driver.queue.circuit.state != "closed":
            found.reason += "; the queue's circuit breaker is open: too many items fail, and only probes are leased"
        slots = driver.queue.slots
        if slots is not None and not executor.slots_left and (executor.partition.leased_count or slots.holds_back):
            found.reason += f"; the queue is at its limit of {driver.record.concurrency} leased items"
        if (rate := driver.queue.rate) is not None and rate.is_used_up(system.now()):
            found.reason += f"; the queue is at its rate of {rate.rate.per_second:g} a second"
    if executor.degraded:
        found.reason += f"; its partition is slow: a commit takes {executor.slowness(system.now()):.0f} ms"
    return found


def _whereabouts(holder: held_keys.Holder) -> str:
    where = f"to be retried at {format_time(holder.due_at)}" if holder.due_at else f"leased by {holder.client_id}"
    return where + (f"; failed attempts: {holder.attempts}" if holder.attempts else "")


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


async def keys(driver: QueueDriver, limit: int) -> ShareKeys:
    """The keys of the open partitions: totals, the busiest, and those that wait longest."""
    answer = ShareKeys()
    found: list[KeyCount] = []
    rows: dict[int, tuple[int, Slice]] = {}
    for executor in driver.executors:
        if executor.takes_work:
            totals = queries.key_totals(executor.partition)
            answer.partitions += (executor.number,)
            answer.waiting += totals.waiting
            answer.blocked += totals.blocked
            answer.limited += totals.limited
            for count, row in queries.key_counts(executor.partition, limit):
                found.append(count)
                rows[count.hash] = executor.number, row
            # Other calls are served between two partitions, each of which may have a million keys.
            await asyncio.sleep(0)
    ranked = together(found)
    chosen = {each.hash: each for each in (*busiest(ranked, limit), *oldest(ranked, limit))}
    texts = await _texts(driver, {each: rows[each] for each in chosen if each != NO_KEY})
    answer.keys = [each._replace(text=texts.get(hashed)) for hashed, each in chosen.items() if hashed in texts or hashed == NO_KEY]
    return answer


async def keys_of(driver: QueueDriver, holders: Iterable[tuple[int, held_keys.Holder]]) -> dict[int, str]:
    """The keys of these items by their hashes, where they can be read. Each comes with the number of its partition."""
    rows: dict[int, tuple[int, Slice]] = {}
    for number, holder in holders:
        blob = driver.executor(number).partition.log.blobs.get(holder.blob)
        if blob is not None:
            row, offset = np.array([holder.origin - holder.blob]), np.array([holder.origin])
            rows[holder.key] = number, Slice(holder.blob, row, offset, holder.attempts, blob.written_at, blob.columns)
    return await _texts(driver, rows)


async def _texts(driver: QueueDriver, rows: Mapping[int, tuple[int, Slice]]) -> dict[int, str]:
    """The keys by their hashes, each from an item that has it. Without those of items that have gone or cannot be read."""
    texts: dict[int, str] = {}
    by_partition: dict[int, list[tuple[int, Slice]]] = {}
    for hashed, (number, row) in rows.items():
        by_partition.setdefault(number, []).append((hashed, row))
    for number, those in by_partition.items():
        for start in range(0, len(those), _READ_AT_ONCE):
            part = those[start : start + _READ_AT_ONCE]
            with contextlib.suppress(SluicewayError):
                blobs = await driver.blobs(number, [row for _, row in part], keep=False)
                for hashed, row in part:
                    if row.blob in blobs and (there := present(row, blobs[row.blob])) is not None:
                        texts[hashed] = take_rows(with_columns(blobs[row.blob], (KEY,)), there.rows).column(KEY)[0].as_py()
    return texts


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
