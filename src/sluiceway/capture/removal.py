"""Ending a capture for good: whether anybody is at work, and dropping all that the meta store has of it."""

from __future__ import annotations

import asyncio

from sluiceway.adapters import system
from sluiceway.capture.group_election import group_name
from sluiceway.core.group.group_records import Keys, read_group
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import MAX_COMMIT_KEYS, MetaStore

LOOK: Millis = 200
"""Between two looks at whether a member shows that it lives."""
SLACK: Millis = 500


async def alive(store: MetaStore, name: str) -> list[str]:
    """Members of its election in the meta store that show that they live. Takes as long as a group takes to give up a dead one, at most.

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
    """All that the store has of it, a portion at a time and `register` last, so that it can be begun again: how many keys.

    Raises StoreUnavailableError, MetaUnknownError.
    """
    keys = Keys(group_name(name))
    prefixes = [f"tasks/{check_queue_name(name, 'name')}/", keys.prefix, keys.history]
    found = sorted((await store.read(prefixes=prefixes)).entries)
    for start in range(0, len(found), MAX_COMMIT_KEYS):
        await store.commit(deletes=found[start : start + MAX_COMMIT_KEYS])
    await store.commit(deletes=[register])
    return len(found) + 1
