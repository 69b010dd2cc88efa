"""Backends that come, go and change while the instance serves, beside other instances that are given the same configuration."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence, Set

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.cluster.queue_changes import DROPPING, QueueChanges, dropped
from sluiceway.instance.config_changes import plan
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.backend_pool import BackendPool
from sluiceway.local.queue_catalog import QUEUE, Catalog
from sluiceway.model.access import Actor
from sluiceway.model.configuration import Configuration
from sluiceway.model.queue import PartitionRecord
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

DROP_PATIENCE: Millis = 20_000
"""How long a change waits for data to go from a backend that goes: a rebalance's go a while after their partitions."""
LOOK: Millis = 250


class BackendChanges:
    """One change at a time, and none while this process changes a queue."""

    def __init__(
        self, meta: MetaStore, catalog: Catalog, ownership: Ownership, audit: AuditTrail, backends: BackendPool, queues: QueueChanges
    ) -> None:
        self._meta = meta
        self._catalog = catalog
        self._ownership = ownership
        self._audit = audit
        self._backends = backends
        self._queues = queues

    async def make(self, old: Configuration, new: Configuration, also: Sequence[str], by: Actor) -> list[str]:
        """Change the backends from those of the one configuration to those of the other, whole or not at all.

        Returns the names of all keys that change, of other sections too, and `also`; they are audited, in one entry. Raises
        `restart_required`, `invalid_request`, `unavailable`, `outcome_unknown`; then nothing has changed.
        """
        await self._let_drop(old.backends.keys() - new.backends.keys())
        async with self._queues.lock:
            changed = await self._queues.decide(lambda: self._make(old, new, also, by))
        if changed:
            log.info("configuration changed: %s", ", ".join(changed))
        return changed

    async def _let_drop(self, going: Set[str]) -> None:
        """Returns when no data of removed partitions is left on those backends, or is not gone in time."""
        until = system.steady() + DROP_PATIENCE
        while going and system.steady() < until:
            if not any(each.backend in going for each in await self._dropping()):
                return
            await asyncio.sleep(LOOK / 1000)

    async def _make(self, old: Configuration, new: Configuration, also: Sequence[str], by: Actor) -> list[str]:
        planned = plan(old, new, await self._holding())
        planned.check()
        changed = [*planned.changed, *also]
        if not changed:
            return []
        replacement = await self._backends.prepare(new.backends, self._meta)
        # Each instance applies the change for itself, at a time of its own.
        who = {} if self._ownership.is_alone else {"instance": self._ownership.name}
        key, entry = self._audit.entry("config.reload", by, detail={"changed": changed, **who})
        try:
            checks = dict.fromkeys(replacement.puts)
            # Another instance may just have made a queue on a backend that goes.
            unchanged = {QUEUE: self._catalog.stamp}
            await self._meta.commit(checks, unchanged, {**replacement.puts, key: entry}, replacement.deletes)
        except MetaUnknownError as error:
            # What the entry says has happened must have.
            if not await self._is_recorded(key):
                await replacement.discard()
                raise SluicewayError("outcome_unknown", f"nothing was applied: the meta store did not answer: {error}") from error
        except BaseException:
            await replacement.discard()
            raise
        self._backends.switch(replacement)
        return changed

    async def _is_recorded(self, key: str) -> bool:
        try:
            return key in (await self._meta.read([key])).entries
        except StoreUnavailableError:
            return False

    async def _dropping(self) -> list[PartitionRecord]:
        """What is gone, and whose data is still there."""
        try:
            entries = (await self._meta.read(prefixes=[DROPPING])).prefix(DROPPING).values()
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        return [each for entry in entries for each in dropped(entry.value)]

    async def _holding(self) -> Counter[str]:
        """How many partitions each backend holds, those that are gone included whose data is still there."""
        partitions = [each for record in self._catalog for each in record.partitions]
        return Counter(each.backend for each in (*partitions, *await self._dropping()))
