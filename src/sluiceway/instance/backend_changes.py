"""Live changes of the backends, made alongside other instances that receive the same configuration."""

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
"""Maximum wait of a change for a removed backend to be empty: a rebalance's data is removed a while after its partitions."""
READ_PATIENCE: Millis = 5_000
"""How long a change waits for the meta store to be read again after a commit without an answer."""
LOOK: Millis = 250


class BackendChanges:
    """Changes of the backends: one at a time, and none while this process changes a queue."""

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
        """Replace the backends of one configuration by those of the other, all or none.

        Returns the names of all changed keys, including other sections' and `also`; one audit entry records them. Raises
        `restart_required`, `invalid_request`, `unavailable`, `outcome_unknown`; then nothing has changed.
        """
        await self._let_drop(old.backends.keys() - new.backends.keys())
        async with self._queues.lock:
            changed = await self._queues.decide(lambda: self._make(old, new, also, by))
        if changed:
            log.info("configuration changed: %s", ", ".join(changed))
        return changed

    async def _let_drop(self, going: Set[str]) -> None:
        """Wait until those backends hold no data of removed partitions, at most DROP_PATIENCE ms."""
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
        # Each instance applies the change at its own time.
        who = {} if self._ownership.is_alone else {"instance": self._ownership.name}
        key, entry = self._audit.entry("config.reload", by, detail={"changed": changed, **who})
        try:
            checks = dict.fromkeys(replacement.puts)
            # Fails if another instance has just created a queue on a removed backend.
            unchanged = {QUEUE: self._catalog.stamp}
            await self._meta.commit(checks, unchanged, {**replacement.puts, key: entry}, replacement.deletes)
        except MetaUnknownError as error:
            # The change must be applied if its audit entry was recorded.
            if not await self._is_recorded(key):
                await replacement.discard()
                raise SluicewayError("outcome_unknown", f"nothing was applied: the meta store did not answer: {error}") from error
        except StoreUnavailableError as error:
            await replacement.discard()
            raise SluicewayError("unavailable", f"the meta store cannot be reached: {error}") from error
        except BaseException:
            await replacement.discard()
            raise
        self._backends.switch(replacement)
        return changed

    async def _is_recorded(self, key: str) -> bool:
        """Whether the meta store has this audit entry. Patient, since a commit without an answer is often followed by reads that fail."""
        until = system.steady() + READ_PATIENCE
        while True:
            try:
                return key in (await self._meta.read([key])).entries
            except StoreUnavailableError:
                if system.steady() >= until:
                    return False
            await asyncio.sleep(LOOK / 1000)

    async def _dropping(self) -> list[PartitionRecord]:
        """List removed partitions whose data still exists."""
        try:
            entries = (await self._meta.read(prefixes=[DROPPING])).prefix(DROPPING).values()
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        return [each for entry in entries for each in dropped(entry.value)]

    async def _holding(self) -> Counter[str]:
        """Count the partitions on each backend, including removed ones whose data still exists."""
        partitions = [each for record in self._catalog for each in record.partitions]
        return Counter(each.backend for each in (*partitions, *await self._dropping()))
