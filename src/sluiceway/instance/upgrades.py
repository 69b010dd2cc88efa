"""Finalizing an upgrade: raising the compatibility level of this server or its cluster to the highest that all instances understand."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.ownership import KEYS, Ownership
from sluiceway.core.group.group_records import GroupView, read_group
from sluiceway.core.group.levels import next_step, understood
from sluiceway.kernel.compatibility import KNOWN
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError


class Upgrades:
    """Raises the compatibility level of this server or its cluster."""

    def __init__(self, meta: MetaStore, ownership: Ownership, audit: AuditTrail) -> None:
        self._meta, self._ownership, self._audit = meta, ownership, audit

    async def finalize(self, by: Actor) -> None:
        """Raise the level to the highest that all instances understand; nothing if it is that.

        Instances of releases that do not understand it cannot join any more. An instance that joins meanwhile holds the level where it was.
        A repeat completes what was interrupted. Raises `unavailable`, `outcome_unknown`.
        """
        look = await self._look()
        target = understood(look, KNOWN.newest)
        while (writes := next_step(look, KEYS, target)) is not None:
            key, entry = self._audit.entry("upgrades.finalize", by, detail=msgspec.json.decode(writes.puts[KEYS.level]))
            try:
                # After a conflict, the next look shows what holds.
                with contextlib.suppress(ConflictError):
                    await self._meta.commit(writes.checks, puts={**writes.puts, key: entry})
            except MetaUnknownError as error:
                raise SluicewayError("outcome_unknown", f"{error}; run the command again") from error
            try:
                look = await self._look()
            except SluicewayError as error:
                # The commit has landed, perhaps as the last one: earlier releases may be locked out.
                raise SluicewayError("outcome_unknown", f"{error.detail}; run the command again") from error
        assert look.level is not None, "it began with the start of the first instance"
        self._ownership.level_is(look.level.level)
        await self._ownership.follow(look.view.stamp)

    async def _look(self) -> GroupView:
        try:
            view = await self._meta.read(prefixes=[KEYS.prefix])
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", str(error)) from error
        look = read_group(view, KEYS, system.steady())
        # Members that a single server finds are those of a cluster that used this store before.
        return replace(look, members={}) if self._ownership.is_alone else look
