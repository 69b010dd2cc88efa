"""The rebalance API: plan, begin, list and cancel rebalances. A `Coordinator` carries them out."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.coordinator import BY_KEY, IN_ORDER, Coordinator, begun_detail, check_bundles
from sluiceway.cluster.ownership import Ownership
from sluiceway.cluster.queue_changes import QueueChanges, Shares
from sluiceway.cluster.rebalance_records import RebalanceRecords, StaleError, dropping_key, said
from sluiceway.cluster.rebalance_run import RebalanceContext
from sluiceway.cluster.router import Router
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.rebalance import steps as machine
from sluiceway.core.rebalance.partition_plan import plan
from sluiceway.core.rebalance.steps import Change
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.backend_pool import BackendPool
from sluiceway.local.queue_catalog import Catalog
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.meta import Stamp
from sluiceway.model.queue import QueueRecord
from sluiceway.model.rebalance import LeftOut, Plan, Rebalance, RebalanceBatch, RebalanceProgress
from sluiceway.ports.meta_store import ConflictError, MetaStore

BATCH_AT_ONCE = 100
"""Maximum number of a batch's rebalances recorded by one commit."""
_UNCOUNTED = ("unavailable", "error")
"""Partition states without counts."""

T = TypeVar("T")


class Rebalancing:
    """Rebalances as one instance sees and changes them. The caller runs `coordinator`."""

    def __init__(
        self,
        meta: MetaStore,
        catalog: Catalog,
        ownership: Ownership,
        router: Router,
        audit: AuditTrail,
        backends: BackendPool,
        changes: QueueChanges,
        shares: Shares,
    ) -> None:
        self._catalog = catalog
        self._router = router
        self._audit = audit
        self._backends = backends
        self._changes = changes
        self._shares = shares
        self._records = RebalanceRecords(meta, catalog, ownership)
        parts = RebalanceContext(
            catalog, router, audit, changes, shares, self._records, lambda key, those: self.coordinator.drop(key, those)
        )
        self.coordinator = Coordinator(parts, ownership, backends.affinities)

    # ---- plan -------------------------------------------------------------------------------------------------

    def plan(self, record: QueueRecord, requested: int | None) -> tuple[str, Plan]:
        """Plan a rebalance. Returns an id of the plan and the plan. Raises rebalance_open, invalid_request."""
        if record.rebalance is not None:
            detail = f"rebalance {record.rebalance} of queue {record.queue_name!r} is open"
            raise SluicewayError("rebalance_open", detail, "queue_name")
        made = plan(record, len(record.partitions) if requested is None else requested, self._backends.affinities())
        check_bundles(made, record, self._shares)
        said_of = msgspec.json.encode((record.incarnation, record.given, record.partitions, made))
        return hashlib.sha256(said_of).hexdigest()[:16], made

    # ---- begin ------------------------------------------------------------------------------------------------

    async def begin(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor
    ) -> Rebalance:
        """Record a rebalance; the coordinator carries it out from then on. `plan_id`, if given, must be the current plan's.

        Raises queue_not_found, rebalance_open, plan_changed, nothing_to_rebalance, invalid_request.
        """

        async def change() -> tuple[Rebalance, Stamp]:
            record = self._catalog.get(queue_name)
            id, made = self.plan(record, requested)
            if plan_id not in (None, id):
                raise SluicewayError("plan_changed", f"the current plan for queue {queue_name!r} is {id}, not {plan_id}", "plan_id")
            if made.is_empty:
                raise SluicewayError("nothing_to_rebalance", f"queue {queue_name!r} already has the requested partitions", "queue_name")
            if made.drains_naturally and drain == "copy":
                raise invalid("drain", IN_ORDER if made.in_order else BY_KEY)
            now = system.now()
            asked = _asked(record, requested, drain, rate, by, now)
            begun = machine.begin(record, asked, made, now)
            entry = self._audit.entry("queue.rebalance", by, queue_name, begun_detail(begun, record))
            return begun.rebalance, await self._records.write(None, begun, [entry], None)

        async with self._changes.lock:
            rebalance, stamp = await self._changes.decide(lambda: _anew(change))
        self.coordinator.poke()
        await self._shares.tell(stamp)
        return rebalance

    async def begin_many(self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor) -> RebalanceBatch:
        """Record one rebalance for each queue whose name matches, in the order of the names; each waits for the one before it.

        A queue that keeps its order drains naturally, whatever `drain` is. Raises `outcome_unknown`, `unavailable`.
        """
        now = system.now()
        batch = f"{now:015d}-{system.new_incarnation()}"
        those: list[Rebalance] = []
        left_out: list[LeftOut] = []
        await self._changes.follow()
        for record in [each for each in self._catalog if fnmatchcase(each.queue_name, match)]:
            reason = self._why_not(record, requested)
            if reason is not None:
                left_out.append(LeftOut(record.queue_name, reason))
                continue
            asked = _asked(record, requested, drain, rate, by, now)
            after = those[-1].id if those else None
            those.append(msgspec.structs.replace(asked, state="waiting", batch=batch, after=after))
        try:
            for start in range(0, len(those), BATCH_AT_ONCE):
                some = those[start : start + BATCH_AT_ONCE]
                detail = {"batch": batch, "match": match, "drain": drain, "queues": len(some), "left_out": len(left_out)}
                await self._records.put_new(some, [self._audit.entry("queues.rebalance", by, detail=detail)])
        finally:
            # Some may be recorded, and nothing else makes a server that is alone look.
            self.coordinator.poke()
        return RebalanceBatch(batch, those, left_out)

    def _why_not(self, record: QueueRecord, requested: int | None) -> str | None:
        """Return the reason to leave the queue out of the batch, as text; None to include it."""
        try:
            _, made = self.plan(record, requested)
        except SluicewayError as error:
            return error.detail
        return "there is nothing to do" if made.is_empty else None

    # ---- queries ----------------------------------------------------------------------------------------------

    async def list(self, queue_name: str | None, *, only_open: bool) -> list[Rebalance]:
        """List rebalances, newest first. Raises `unavailable`."""
        found = await self._records.list(only_open=only_open)
        return [each for each in found if queue_name in (None, each.queue_name)]

    async def get(self, id: str) -> Rebalance:
        """Return a rebalance. Raises rebalance_not_found, `unavailable`."""
        stored = await self._records.get(id)
        if stored is None:
            raise _missing(id)
        return stored.rebalance

    async def progress(self, rebalance: Rebalance) -> RebalanceProgress:
        """Count the items left to drain in the partitions whose owners answer."""
        record = self._catalog.of(rebalance.incarnation)
        if record is None:
            return RebalanceProgress(0, 0, 0, {})
        stats = await self._router.count(record)
        drained = [each for each in stats.partitions if each.partition in rebalance.plan.drains and each.state not in _UNCOUNTED]
        left = sum(each.total + each.transferring for each in drained)
        rate = _rate(rebalance, left)
        return RebalanceProgress(
            left,
            sum(each.total_leased for each in drained),
            sum(each.scheduled for each in drained),
            {each.partition: each.total + each.transferring for each in drained},
            rate,
            None if not rate else int(left * 1000 / rate),
        )

    # ---- cancel -----------------------------------------------------------------------------------------------

    async def cancel(self, id: str, by: Actor) -> Rebalance:
        """Cancel a rebalance; the coordinator reverts it. Raises rebalance_not_found, not_cancellable."""

        async def change() -> tuple[Change, Stamp]:
            stored = await self._records.get(id)
            if stored is None:
                raise _missing(id)
            record = self._catalog.of(stored.rebalance.incarnation)
            back = machine.cancelled(record, stored.rebalance, system.now())
            entries = [self._audit.entry("rebalances.cancel", by, stored.rebalance.queue_name, said(back, record, stored.rebalance))]
            if not back.rebalance.is_open:
                entries.append(
                    self._audit.entry("rebalance.finish", SYSTEM, stored.rebalance.queue_name, said(back, record, stored.rebalance))
                )
            return back, await self._records.write(stored, back, entries, None)

        async with self._changes.lock:
            back, stamp = await self._changes.decide(lambda: _anew(change))
        self.coordinator.poke()
        if back.record is not None:
            await self._shares.tell(stamp)
        if back.removed:
            self.coordinator.drop(dropping_key(back.rebalance.incarnation, back.removed), back.removed)
        return back.rebalance


async def _anew(change: Callable[[], Awaitable[T]]) -> T:
    """Make the change, treating a change of the rebalance's record as a conflict, as for a queue's record, so that it is decided anew."""
    try:
        return await change()
    except StaleError:
        raise ConflictError("the rebalance has changed") from None


def _asked(record: QueueRecord, requested: int | None, drain: DrainMode, rate: int | None, by: Actor, now: Millis) -> Rebalance:
    wanted = len(record.partitions) if requested is None else requested
    id = f"{now:015d}-{record.incarnation}"
    return Rebalance(
        id,
        record.queue_name,
        record.incarnation,
        wanted,
        Plan(),
        drain,
        now,
        now,
        by.name,
        by.request_id,
        None if drain == "natural" else rate,
    )


def _missing(id: str) -> SluicewayError:
    return SluicewayError("rebalance_not_found", f"there is no rebalance {id[:64]!r}", "id")


def _rate(rebalance: Rebalance, left: int) -> float | None:
    """Items per second since draining began; None before there is progress."""
    if rebalance.drain_at is None or rebalance.items <= left:
        return None
    return (rebalance.items - left) * 1000 / max(1, system.now() - rebalance.drain_at)
