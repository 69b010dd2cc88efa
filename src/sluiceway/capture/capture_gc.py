"""Garbage collection of a capture, by its leader: old positions, and alarms of former members."""

from __future__ import annotations

import logging

from sluiceway.adapters import system
from sluiceway.capture.alarms import Alarms
from sluiceway.core.group.task_state import State
from sluiceway.kernel.clock import Millis
from sluiceway.ports.position_store import PositionStore, PositionUnknownError

log = logging.getLogger(__name__)


async def drop_old(member: str, state: State, positions: PositionStore, alarms: Alarms, keep: Millis) -> None:
    """Drop positions of removed partitions, `keep` ms after they were written, and alarms of former members."""
    try:
        stored = await positions.read()
        until = system.now() - keep
        old = [token for token, each in stored.items() if token not in state.partitions and each.written_at < until]
        if old:
            await positions.forget(old)
        await alarms.forget_others(state.joined)
    except PositionUnknownError as error:
        log.warning("%s could not remove outdated records: %s", member, error)
