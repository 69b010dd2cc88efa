"""Removal of a capture: detects live members, and drops its keys from the meta store."""

from __future__ import annotations

import asyncio

from sluiceway.adapters import system
from sluiceway.capture.group_election import group_name
from sluiceway.core.group.group_records import Keys, read_group
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import MAX_COMMIT_KEYS, MetaStore

LOOK: Millis = 200
"""Interval between two checks of the members' beats."""
SLACK: Millis = 500


async def alive(store: MetaStore, name: str) -> list[str]:
    """The live members of its election in the meta store. Takes at most as long as a group takes to give up a dead member.

    Raises StoreUnavailableError.
    """
    keys = Keys(group_name(name))
    begun = system.steady()
    before: dict[str, int] | None = None
    while True:
        look = read_group((await store.read(prefixes=[keys.prefix])), keys, system.steady())
        beats = {member: each.beat for member, each in look.members.items()}
        if before is not None and (living := [member for member, beat in beats.items() if before.get(member) != beat]):
            return sorted(look.members[member].address or member for member in living)
        patience = look.resource.parameters.member_timeout + SLACK if look.resource is not None else 0
        if not beats or system.steady() - begun >= patience:
            return []
        before = beats if before is None else before
        await asyncio.sleep(LOOK / 1000)


async def drop(store: MetaStore, name: str, register: str) -> int:
    """Drop the capture's keys from the store, in portions, with `register` last, so that it can be repeated. Returns the number of keys.

    Raises StoreUnavailableError, MetaUnknownError.
    """
    keys = Keys(group_name(name))
    prefixes = [f"tasks/{check_queue_name(name, 'name')}/", keys.prefix, keys.history]
    found = sorted((await store.read(prefixes=prefixes)).entries)
    for start in range(0, len(found), MAX_COMMIT_KEYS):
        await store.commit(deletes=found[start : start + MAX_COMMIT_KEYS])
    await store.commit(deletes=[register])
    return len(found) + 1
