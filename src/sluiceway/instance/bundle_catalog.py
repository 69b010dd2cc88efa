"""Bundles: their records in the meta store, which every instance knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from sluiceway.adapters import system
from sluiceway.contract.bundle_answers import BundleState
from sluiceway.instance.indexed_records import IndexedRecords
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_BUNDLES
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import BundleCount
from sluiceway.ports.meta_store import MetaStore

BUNDLE: Final = "bundle/"
INDEX: Final = "bundles"

Permit = Callable[[str], None]
"""Called with the name of a bundle's queue; may raise."""


class Bundles(IndexedRecords[BundleRecord]):
    """All bundles, as of the last `follow`: those that are not over, and those that ended within a day."""

    def __init__(self, meta: MetaStore, audit: AuditTrail) -> None:
        super().__init__(meta, BundleRecord, BUNDLE, INDEX)
        self._audit = audit

    async def check(self, id: str, queue: QueueRecord) -> None:
        """Check that the bundle takes items of that queue. Raises `bundle_not_found`, `bundle_closed`, `unavailable`."""
        record = await self.get(id)
        if record is None or record.queue_incarnation != queue.incarnation:
            raise not_found(id, "bundle")
        if record.state != "open":
            raise SluicewayError("bundle_closed", f"bundle {id} is {record.state}: it takes no items", "bundle")

    def any_left(self, queue: QueueRecord) -> bool:
        """Whether the queue has a bundle that is not over."""
        return any(each.ended_at is None and each.queue_incarnation == queue.incarnation for each in self._records.values())

    # ---- changes by callers -----------------------------------------------------------------------------------

    async def create(self, record: BundleRecord, by: Actor) -> BundleRecord:
        """Record a new bundle, whose id is new. Raises `invalid_request`, `unavailable`, `outcome_unknown`."""
        target = None if record.follow_up is None else record.follow_up.queue_name
        detail = {"items": record.items, "follow_up_queue": target}
        await self._record_change(record.id, lambda _: record, "bundles.create", by, detail)
        return record

    async def close(self, id: str, by: Actor, permit: Permit) -> BundleRecord:
        """Take no more items. Idempotent. Raises `bundle_not_found`, `bundle_closed` for one that has ended without a follow-up."""

        def closed(before: BundleRecord | None) -> BundleRecord:
            record = _existing(before, id, permit)
            if record.state in ("cancelled", "expired"):
                raise SluicewayError("bundle_closed", f"bundle {id} is {record.state}: it has no follow-up", "id")
            return replace(record, state="closed", closed_at=system.now()) if record.state == "open" else record

        return await self._changed(id, closed, "bundles.close", by)

    async def cancel(self, id: str, by: Actor, permit: Permit) -> BundleRecord:
        """End the bundle without a follow-up; its items stay. Idempotent. Raises `bundle_not_found`, and `bundle_closed` if it is done."""

        def cancelled(before: BundleRecord | None) -> BundleRecord:
            record = _existing(before, id, permit)
            if record.state == "done":
                raise SluicewayError("bundle_closed", f"bundle {id} is done: its follow-up is produced", "id")
            return record if record.ended_at is not None else replace(record, state="cancelled", ended_at=system.now())

        return await self._changed(id, cancelled, "bundles.cancel", by)

    async def _changed(self, id: str, decide: Callable[[BundleRecord | None], BundleRecord], action: str, by: Actor) -> BundleRecord:
        changed = await self._record_change(id, decide, action, by, {})
        assert changed is not None, "it was not deleted"
        return changed

    async def _record_change(
        self, id: str, decide: Callable[[BundleRecord | None], BundleRecord | None], action: str, by: Actor, detail: Mapping[str, Any]
    ) -> BundleRecord | None:
        def entry(record: BundleRecord) -> dict[str, bytes]:
            return dict([self._audit.entry(action, by, record.queue_name, {"id": id, **detail})])

        too_many = f"there are {MAX_BUNDLES:,} bundles, which is the maximum; one that has ended is kept for a day"
        return await self._change(id, decide, entry, MAX_BUNDLES, too_many)

    # ---- steps of the driver ----------------------------------------------------------------------------------

    async def take_step(self, record: BundleRecord, after: Callable[[BundleRecord], BundleRecord | None]) -> None:
        """Record a step, None: delete the record, unless another one was taken meanwhile. Raises `unavailable`, `outcome_unknown`."""

        def decide(before: BundleRecord | None) -> BundleRecord | None:
            return before if before is None or before.state != record.state else after(before)

        await self._change(record.id, decide, lambda _: {}, MAX_BUNDLES, "")


def closed(record: BundleRecord) -> BundleRecord:
    """The record once so many items are stored as its creator has said."""
    return replace(record, state="closed", closed_at=system.now())


def ended(record: BundleRecord, state: BundleState, count: BundleCount, follow_up_id: str = "") -> BundleRecord:
    """The record of a bundle that is over."""
    return replace(record, state=state, ended_at=system.now(), count=count, follow_up_id=follow_up_id)


def not_found(id: str, field: str = "id") -> SluicewayError:
    """The error for a bundle that does not exist, or that the caller may not see: which of both is not said."""
    return SluicewayError("bundle_not_found", f"there is no bundle {id[:64]!r} that this caller may use here", field)


def _existing(record: BundleRecord | None, id: str, permit: Permit) -> BundleRecord:
    if record is None:
        raise not_found(id)
    permit(record.queue_name)
    return record
