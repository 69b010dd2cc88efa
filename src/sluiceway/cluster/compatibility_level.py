"""The compatibility level of a cluster or a single server: its record in the meta store, and what this instance knows of it."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from sluiceway import __version__
from sluiceway.cluster.ownership import GRANT, KEYS
from sluiceway.core.group.group_records import Level
from sluiceway.core.group.levels import admits
from sluiceway.kernel.compatibility import KNOWN, UNRECORDED
from sluiceway.kernel.errors import invalid
from sluiceway.model.meta import View
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError

_AGAIN = 0.1
"""Seconds before the meta store is read again: it may read well, and fail at each commit."""


async def begin_level(meta: MetaStore, new: int | None = None) -> int:
    """Return the level of that meta store's cluster or server. A new one gets the level `new`, or the newest; what is older than
    levels, the first.

    Raises `invalid_request` if this release does not understand it, StoreUnavailableError.
    """
    while True:
        view = await meta.read([KEYS.level, KEYS.resource, GRANT])
        level = level_in(view, new)
        if KEYS.level in view.entries:
            check_understood(level)
            return level.level
        checks = {key: entry.stamp if (entry := view.entries.get(key)) else None for key in (KEYS.level, KEYS.resource, GRANT)}
        # The next read shows the outcome.
        with contextlib.suppress(ConflictError, MetaUnknownError):
            await meta.commit(checks, puts={KEYS.level: msgspec.json.encode(level)})
            continue
        await asyncio.sleep(_AGAIN)


def level_in(view: View, new: int | None = None) -> Level:
    """The level by a view of its record and of those of ownership, which a new server or cluster does not have."""
    entry = view.entries.get(KEYS.level)
    if entry is not None:
        return msgspec.json.decode(entry.value, type=Level)
    is_new = view.entries.keys().isdisjoint((KEYS.resource, GRANT))
    return Level(level=(new or KNOWN.newest) if is_new else UNRECORDED)


def check_understood(level: Level, field: str = "data") -> None:
    """Raise `invalid_request` for `field` if this release does not understand the level."""
    if admits(level, KNOWN):
        return
    oldest, newest = KNOWN
    this = f"Sluiceway {__version__} understands {oldest}" + (f" to {newest}" if newest > oldest else "")
    if level.level < oldest:
        raise invalid(
            field,
            f"the data are of compatibility level {level.level}, and {this}: start them with the release before this one, and run "
            "`sluiceway upgrade finalize` there",
        )
    if level.level > newest:
        raise invalid(field, f"the data are of compatibility level {level.level}, and {this}: install a later release")
    raise invalid(
        field,
        f"the cluster is being raised to compatibility level {level.rising_to}, and {this}: install a later release, or run "
        "`sluiceway upgrade finalize` again if it was interrupted",
    )
