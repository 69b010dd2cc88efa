"""Queue changes: create, update and delete queues, concurrently with other processes that do so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership, item_of, items_of
from sluiceway.cluster.router import Router
from sluiceway.contract.queue_settings import QueueSettings, Verb, settings_of_new
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.group.group_records import Pin, Writes
from sluiceway.core.queue.routing import Peer
from sluiceway.core.queue.scaling_policy import wanted
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import OtherQueueError, SluicewayError, invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name
from sluiceway.local.audit_trail import AuditTrail, changes, settings_of
from sluiceway.local.backend_pool import BackendPool
from sluiceway.local.queue_catalog import QUEUE, Catalog
from sluiceway.local.rate_tokens import deleted_with
from sluiceway.local.slot_quotas import SLOTS, written_with
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.meta import Stamp
from sluiceway.model.peers import RemainingItems
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import QueuePatch, QueueSpec
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import DamagedError, PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

DROPPING = "dropping/"
CLOSING = "closing/"
CLOSE_TIMEOUT: Millis = 30_000
"""Maximum time that a queue refuses requests while its deletion is decided."""
MAX_TRIES = 50

_WITH_PRIORITY = ("priority", "order", "fair", "key_concurrency", "key_rate")
"""Settings that may exclude each other."""

T = TypeVar("T")


class Shares(Protocol):
    """This instance's shares of the queues."""

    async def opened(self, record: QueueRecord) -> None:
        """Returns once this instance's share of the queue is open, or has failed once."""
        ...

    async def ended(self, record: QueueRecord) -> None:
        """Returns once nothing of the deleted queue is in flight here."""
        ...

    async def tell(self, stamp: Stamp) -> None:
        """Returns once the other instances follow the commit with that stamp, except those that do not answer in time."""
        ...

    def has_bundles(self, record: QueueRecord) -> bool:
        """Whether the queue has a bundle that is not over, as far as this instance knows."""
        ...


class QueueChanges:
    """Changes of queues, one at a time in this process. A concurrent change of another process is followed, and the change decided anew."""

    def __init__(
        self,
        meta: MetaStore,
        catalog: Catalog,
        ownership: Ownership,
        router: Router,
        audit: AuditTrail,
        backends: BackendPool,
        shares: Shares,
    ) -> None:
        self._meta = meta
        self._catalog = catalog
        self._ownership = ownership
        self._router = router
        self._audit = audit
        self._backends = backends
        self._shares = shares
        self.lock = asyncio.Lock()

    async def create(self, spec: QueueSpec, by: Actor) -> QueueRecord:
        """Record a queue, with its dead queue if the spec says so, and open it. Raises queue_exists, invalid_request."""
        check_queue_name(spec.queue_name)
        if not 1 <= spec.requested_partitions <= MAX_PARTITIONS:
            raise invalid("requested_partitions", f"expected 1 to {MAX_PARTITIONS}")
        async with self.lock:
            records, stamp = await self.decide(lambda: self._create(spec, by))
        await self._shares.tell(stamp)
        for record in records:
            await self._shares.opened(record)
            log.info("queue %s created with %d partitions", record.queue_name, len(record.partitions), extra=_said(by))
        return records[0]

    async def _create(self, spec: QueueSpec, by: Actor) -> tuple[list[QueueRecord], Stamp]:
        """Return the new queue, its dead queue if that is new, too, and the stamp of the commit."""
        if spec.queue_name in self._catalog:
            raise SluicewayError("queue_exists", f"queue {spec.queue_name!r} already exists", "queue_name")
        specs = [spec]
        if spec.dead_queue is not None and spec.makes_dead_queue and spec.dead_queue not in self._catalog:
            specs.append(QueueSpec(spec.dead_queue, **settings_of_new(spec.dead_queue)))
        elif spec.dead_queue is not None:
            self._check_dead_queue(spec.queue_name, spec.dead_queue)
        _check_priority(spec, "priority")
        now = system.now()
        records: list[QueueRecord] = []
        for each in specs:
            incarnation = await self._new_incarnation({record.incarnation for record in records})
            placed = self._backends.place(each.requested_partitions)
            records.append(QueueRecord(each.queue_name, incarnation, now, now, placed, **each.settings()))
        entries = dict(self._audit.entry("queues.create", by, each.queue_name, settings_of(each)) for each in records)
        limits = {each.incarnation: wanted(each.logical_queues, 1) for each in records if each.logical_queues is not None}
        writes = self._ownership.placing([item for each in records for item in items_of(each)], limits)
        for record in records:
            await self._write_slots(None, record, writes)
        return records, await self._catalog.put(records[0], entries, writes, *records[1:])

    async def _new_incarnation(self, others: Collection[str]) -> str:
        """Return an incarnation other than these, of no queue, and of no deleted queue whose data may still exist. Raises `unavailable`."""
        try:
            view = await self._meta.read(prefixes=[DROPPING])
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        used = {record.incarnation for record in self._catalog} | {incarnation_of(key) for key in view.entries} | {*others}
        while (incarnation := system.new_incarnation()) in used:
            pass
        return incarnation

    def _check_dead_queue(self, queue_name: str, dead_queue: str) -> None:
        check_queue_name(dead_queue, "dead_queue")
        if dead_queue == queue_name:
            raise invalid("dead_queue", "a queue cannot be its own dead queue")
        if dead_queue not in self._catalog:
            raise invalid("dead_queue", f"there is no queue {dead_queue!r}; create it first")
        _check_keys(self._catalog.get(dead_queue), {dead_queue}, "dead_queue")
        following: str | None = dead_queue
        while following is not None and (record := self._catalog.find(following)) is not None:
            following = record.dead_queue
            if following == queue_name:
                raise invalid("dead_queue", f"dead items of {dead_queue!r} end up in {queue_name!r}, so they would go round in a circle")

    async def update(self, queue_name: str, patch: QueuePatch, action: str, by: Actor) -> QueueRecord:
        """Change the settings in `patch`, durably and at once. Raises queue_not_found, version_conflict, invalid_request."""
        async with self.lock:
            record, stamp = await self.decide(lambda: self._update(queue_name, patch, action, by))
        if stamp:
            await self._shares.tell(stamp)
            log.info("queue %s changed: %s", queue_name, ", ".join(patch.settings), extra=_said(by))
        return record

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor) -> QueueRecord:
        """Pause or resume `produce` or `lease`, durably. Other verbs stay as they are."""

        async def change() -> tuple[QueueRecord, Stamp]:
            before = set(self._catalog.get(queue_name).paused)
            after = before | set(verbs) if paused else before - set(verbs)
            action = "queue.pause" if paused else "queue.resume"
            return await self._update(queue_name, QueuePatch({"paused": tuple(sorted(after))}), action, by)

        async with self.lock:
            record, stamp = await self.decide(change)
        if stamp:
            await self._shares.tell(stamp)
        return record

    async def set_partition(self, queue_name: str, number: int, paused: bool, by: Actor) -> QueueRecord:
        """Pause or resume one partition, durably. Raises queue_not_found, invalid_request, rebalance_open."""

        async def change() -> tuple[QueueRecord, Stamp]:
            record = self._catalog.get(queue_name)
            there = record.partition(number)
            if there is None:
                raise invalid("partition", f"the queue {queue_name!r} has no partition {number}")
            if there.state in ("preparing", "draining"):
                # The rebalance controls its state, and the next steps build on it.
                detail = f"partition {number} is {there.state}: it belongs to rebalance {record.rebalance}, which is open"
                raise SluicewayError("rebalance_open", detail, "partition")
            state: PartitionState = "paused" if paused else "available"
            if there.state == state:
                return record, 0
            changed = msgspec.structs.replace(there, state=state)
            partitions = tuple(changed if each is there else each for each in record.partitions)
            after = msgspec.structs.replace(record, partitions=partitions, updated_at=system.now())
            detail_of = {"partition": number, "state": {"from": there.state, "to": state}}
            entry = self._audit.entry("partition.pause" if paused else "partition.resume", by, queue_name, detail_of)
            return after, await self._catalog.put(after, dict([entry]))

        async with self.lock:
            record, stamp = await self.decide(change)
        if stamp:
            await self._shares.tell(stamp)
        return record

    async def pin(self, queue_name: str, number: int, where: Pin | None, by: Actor) -> None:
        """Pin one partition to an instance or a zone, durably; None: unpin it. A round follows.

        Raises queue_not_found, invalid_request, version_conflict, unavailable, outcome_unknown.
        """

        async def change() -> Stamp:
            record = self._catalog.get(queue_name)
            if record.partition(number) is None:
                raise invalid("partition", f"the queue {queue_name!r} has no partition {number}")
            writes = self._ownership.pinning(item_of(record.incarnation, number), where)
            if not writes.puts:
                return 0
            detail = {"partition": number} | ({} if where is None else {"to": str(where)})
            key, entry = self._audit.entry("partition.unpin" if where is None else "partition.pin", by, queue_name, detail)
            try:
                return await self._meta.commit(writes.checks, {QUEUE: self._catalog.stamp}, {**writes.puts, key: entry})
            except StoreUnavailableError as error:
                raise SluicewayError("unavailable", f"the meta store cannot be reached: {error}") from error
            except MetaUnknownError as error:
                raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error

        async with self.lock:
            stamp = await self.decide(change)
        if stamp:
            await self._ownership.follow(stamp)

    async def _update(self, queue_name: str, patch: QueuePatch, action: str, by: Actor) -> tuple[QueueRecord, Stamp]:
        """Return the record afterwards, and the stamp of its change; 0 if nothing changed."""
        record = self._catalog.get(queue_name)
        if patch.version not in (None, record.version):
            raise SluicewayError("version_conflict", f"queue {queue_name!r} is at version {record.version}, not {patch.version}", "version")
        if all(getattr(record, name) == value for name, value in patch.settings.items()):
            return record, 0
        changed = msgspec.structs.replace(record, **patch.settings, version=record.version + 1, updated_at=system.now())
        if changed.lease_timeout > changed.max_lease_timeout:
            raise invalid("lease_timeout", "longer than max_lease_timeout")
        if changed.dead_queue is not None and changed.dead_queue != record.dead_queue:
            self._check_dead_queue(queue_name, changed.dead_queue)
        if changed.placing is not None:
            _check_keys(changed, {each.dead_queue for each in self._catalog}, changed.placing)
            if record.rebalance is not None and (record.placing is None or (changed.unique is not None and record.unique is None)):
                field = changed.placing if record.placing is None else "unique"
                detail = f"a rebalance of {queue_name!r} is open, which would not keep its keys together"
                raise SluicewayError("rebalance_open", detail, field)
        _check_priority(changed, next((name for name in _WITH_PRIORITY if name in patch.settings), "priority"))
        entry = self._audit.entry(action, by, queue_name, changes(record, changed))
        writes = self._limiting(record, changed)
        await self._write_slots(record, changed, writes)
        return changed, await self._catalog.put(changed, dict([entry]), writes)

    async def _write_slots(self, before: QueueRecord | None, after: QueueRecord, writes: Writes) -> None:
        """Add what has to be written with a change of the queue's concurrency."""
        try:
            more = await written_with(self._meta, before, after)
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        writes.checks |= more.checks
        writes.puts |= more.puts
        writes.deletes += more.deletes

    def _limiting(self, before: QueueRecord, after: QueueRecord) -> Writes:
        if after.logical_queues == before.logical_queues:
            return Writes()
        if after.logical_queues is None:
            return self._ownership.limiting(after.incarnation, None)
        has = len({self._ownership.owner(after.incarnation, each.partition) for each in after.partitions} - {None})
        return self._ownership.limiting(after.incarnation, wanted(after.logical_queues, max(1, has)))

    async def spread(self, record: QueueRecord, had: int, count: int) -> None:
        """Set the number of logical queues of a queue that adjusts it by load. After a conflict, the autoscaler decides anew."""
        async with self.lock:
            writes = self._ownership.limiting(record.incarnation, count)
            if not writes.puts or self._catalog.of(record.incarnation) != record:
                return
            detail = {"logical_queues": {"from": had, "to": count}}
            key, entry = self._audit.entry("queue.spread", SYSTEM, record.queue_name, detail)
            try:
                await self._meta.commit(writes.checks, {QUEUE: self._catalog.stamp}, {**writes.puts, key: entry}, writes.deletes)
            except (ConflictError, MetaUnknownError) as error:
                log.info("queue %s: its number of logical queues could not be changed, will retry: %s", record.queue_name, error)
                return
        log.info("queue %s has %d logical queues now, before %d", record.queue_name, count, had)

    async def decide(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make the change, and repeat it after each conflict with another process, up to MAX_TRIES times. The caller holds `lock`."""
        # Outdated records could refuse the change, or take it for no change.
        await self.follow()
        for _ in range(MAX_TRIES):
            try:
                return await change()
            except ConflictError:
                await self._follow()
            except SluicewayError as error:
                if error.code == "outcome_unknown":
                    # The commit may have landed: a new queue, say, could otherwise be neither used nor deleted.
                    with contextlib.suppress(SluicewayError):
                        await self._catalog.follow()
                raise
        raise SluicewayError("version_conflict", "other processes keep changing the queues; try again", "version")

    async def follow(self) -> None:
        """Update the catalog if other instances may have changed queues. Raises `unavailable`."""
        if not self._ownership.is_alone:
            await self._catalog.follow()

    async def _follow(self) -> None:
        await self._catalog.follow()
        await self._ownership.follow(self._catalog.stamp)

    # ---- delete -----------------------------------------------------------------------------------------------

    async def delete(self, queue_name: str, force: bool, by: Actor) -> None:
        """Delete a queue and its items. Raises queue_not_found, queue_in_use, queue_not_empty (unless `force`)."""
        async with self.lock:
            record = self._catalog.get(queue_name)
            closing = await self._note_closing(record)
            left: dict[Peer, RemainingItems | SluicewayError] = {}

            async def change() -> tuple[QueueRecord, Stamp]:
                # Items that arrive between check and deletion would be acknowledged and lost. Instances that have joined count, too.
                while more := await self._router.close(record, CLOSE_TIMEOUT, left):
                    left.update(more)
                return await self._delete(record, list(left.values()), force, by, closing)

            try:
                deleted, stamp = await self.decide(change)
            except BaseException:
                # Serve again only if the queue surely still exists; one that may be deleted must not take anything.
                if await self._is_recorded(record):
                    await self._router.close(record, 0)
                raise
            await self._shares.ended(record)
            await self._shares.tell(stamp)
        # Other changes do not wait for this: it may take minutes, or not end on a disk that hangs.
        log.info("queue %s deleted", queue_name, extra=_said(by))
        try:
            await self.drop(DROPPING + record.incarnation, deleted.partitions)
        except SluicewayError as error:
            # The queue is gone all the same.
            log.warning("data of queue %s may still be there, the next start removes them: %s", queue_name, error.detail)

    async def _note_closing(self, record: QueueRecord) -> Stamp | None:
        """Record the pending deletion. An instance must remove this record before it serves the queue again, which fails the deletion."""
        if self._ownership.is_alone:
            return None
        try:
            return await self._meta.commit(puts={CLOSING + record.incarnation: b""})
        except MetaUnknownError as error:
            raise SluicewayError("unavailable", f"nothing was deleted: the meta store did not answer: {error}") from error

    async def may_reopen(self, record: QueueRecord) -> bool:
        """Whether a queue closed for deletion still exists, and that deletion can no longer succeed. Raises `unavailable`."""
        if not self._ownership.is_alone:
            try:
                await self._meta.commit(deletes=[CLOSING + record.incarnation])
            except MetaUnknownError as error:
                raise SluicewayError("unavailable", str(error)) from error
        await self._catalog.follow()
        return self._catalog.of(record.incarnation) is not None

    async def _is_recorded(self, record: QueueRecord) -> bool:
        try:
            return await self.may_reopen(record)
        except SluicewayError:
            return False

    async def _delete(
        self, record: QueueRecord, left: Sequence[RemainingItems | SluicewayError], force: bool, by: Actor, closing: Stamp | None
    ) -> tuple[QueueRecord, Stamp]:
        """Return the queue's last record, and the stamp of its deletion."""
        current = self._catalog.get(record.queue_name)
        if current.incarnation != record.incarnation:
            raise SluicewayError("queue_not_found", f"queue {record.queue_name!r} was deleted by another process", "queue_name")
        for other in self._catalog:
            if other.dead_queue == record.queue_name:
                text = "queue {other} sends its dead items to this queue; give that one another dead queue first"
                raise OtherQueueError("queue_in_use", text, other.queue_name, "queue_name")
        if not force:
            _check_empty(current, left)
        # From the current record: a rebalance may have added and removed partitions since the deletion began.
        writes = self._ownership.removing(items_of(current))
        writes.deletes += [*deleted_with(current), SLOTS + current.incarnation]
        if closing is not None:
            writes.checks[CLOSING + record.incarnation] = closing
            writes.deletes.append(CLOSING + record.incarnation)
        dropping = {DROPPING + record.incarnation: msgspec.json.encode(current.partitions)}
        entry = self._audit.entry("queues.delete", by, record.queue_name, {"force": force})
        return current, await self._catalog.delete(current, dict([*dropping.items(), entry]), writes)

    async def drop_rest(self) -> None:
        """Remove the data of queues and partitions deleted earlier. In a cluster the coordinator does so for partitions."""
        away = set[str]()
        for key, partitions in (await self.to_drop()).items():
            if self._ownership.is_alone or "/" not in key.removeprefix(DROPPING):
                await self.drop(key, partitions, away)

    async def to_drop(self) -> dict[str, tuple[PartitionRecord, ...]]:
        """Partitions whose data is to be removed, by meta store key. Raises StoreUnavailableError."""
        view = await self._meta.read(prefixes=[DROPPING])
        return {key: dropped(entry.value) for key, entry in view.prefix(DROPPING).items()}

    async def drop(self, key: str, partitions: Iterable[PartitionRecord], away: set[str] | None = None) -> bool:
        """Remove the data of a deleted queue or partition. Returns whether all of it is gone; if not, or if interrupted, the next start
        repeats it. Raises `outcome_unknown`.

        `away`: backends that did not answer, to which those are added that do not now. They are not asked again: each partition would wait
        as long as the first, and with it a start.
        """
        left, away = 0, set() if away is None else away
        refs = {PartitionRef(incarnation_of(key), each.partition): each.backend for each in partitions}
        for ref, backend in refs.items():
            if backend in away:
                left += 1
                continue
            try:
                await self._backends.get(backend).drop(ref)
            except (StoreUnavailableError, DamagedError) as error:
                # Damage in what nobody needs any more must not keep a server from starting.
                left += 1
                if isinstance(error, StoreUnavailableError):
                    away.add(backend)
                log.warning("data of a removed partition was not deleted, retrying at the next start: %s", error)
        if not left:
            try:
                # Last: remaining data must not be taken for a new partition's.
                await self._backends.openings.forget(list(refs))
                await self._meta.commit(deletes=(key,))
            except MetaUnknownError as error:
                raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error
        return not left


def _check_keys(record: QueueRecord, dead_queues: Collection[str | None], field: str) -> None:
    """A transfer to a dead queue may be taken back, which only one partition can answer."""
    if record.placing is not None and record.queue_name in dead_queues:
        raise invalid(field, f"{record.queue_name!r} is a dead queue, so it cannot have `order`, `key_concurrency`, `key_rate` or `unique`")


def _check_priority(settings: QueueSettings, field: str) -> None:
    if settings.priority is None:
        return
    if settings.order is not None:
        raise invalid(
            field, "`priority` and `order` exclude each other: in order, an item waits for the one before it, whatever its priority"
        )
    limit = next((name for name in ("key_concurrency", "key_rate") if getattr(settings, name)), None)
    if limit is not None and settings.fair is None:
        raise invalid(
            field,
            f"with `{limit}`, keys are served in turn, so `priority` can hold only within each: set `fair` to key, too, which says so",
        )


def _check_empty(record: QueueRecord, left: Sequence[RemainingItems | SluicewayError]) -> None:
    """Raise the error that prevents the deletion, if there is one."""
    name = record.queue_name
    found = [each for each in left if isinstance(each, RemainingItems)]
    for each in found:
        if each.sender is not None:
            text = "items of queue {other} are, or may be, in transit to this queue; wait until they arrive, or pass force to delete it"
            raise OtherQueueError("queue_in_use", text, each.sender, "force")
    items = sum(each.items for each in found)
    if items:
        raise SluicewayError("queue_not_empty", f"queue {name!r} has {items} items; pass force to delete them with the queue", "force")
    closed = {each.unopened for each in found if each.unopened is not None}
    closed |= {each.partition for each in record.partitions} - {number for each in found for number in each.partitions}
    if closed or len(found) < len(left):
        which = f"partition {min(closed)} of queue {name!r} is not open" if closed else "an instance does not answer"
        raise SluicewayError("queue_not_empty", f"{which}, so the items cannot be counted; pass force to delete the queue", "force")


def incarnation_of(key: str) -> str:
    """Incarnation of the queue whose data, or whose partition's data, the key names."""
    return key.removeprefix(DROPPING).partition("/")[0]


def dropped(entry: bytes) -> tuple[PartitionRecord, ...]:
    """Decode the partitions of a deleted queue. Old entries have only their number."""
    found = msgspec.json.decode(entry, type=int | tuple[PartitionRecord, ...])
    return tuple(map(PartitionRecord, range(found))) if isinstance(found, int) else found


def _said(by: Actor) -> dict[str, str]:
    """Fields of a log record that name the caller."""
    return {"caller": by.name, "request_id": by.request_id}
