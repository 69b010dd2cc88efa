"""What the leader of a capture does now and then, so that what nobody needs any more is dropped."""

from __future__ import annotations

import logging

from sluiceway.adapters import system
from sluiceway.capture.alarms import Alarms
from sluiceway.core.group.task_state import State
from sluiceway.kernel.clock import Millis
from sluiceway.ports.position_store import PositionStore, PositionUnknownError

log = logging.getLogger(__name__)


async def drop_old(member: str, state: State, positions: PositionStore, alarms: Alarms, keep: Millis) -> None:
    """Drop positions of partitions that are removed, `keep` after they were written, and alarms of members that are no more."""
    try:
        stored = await positions.read()
        until = system.now() - keep
        old = [token for token, each in stored.items() if token not in state.partitions and each.written_at < until]
        if old:
            await positions.forget(old)
        await alarms.forget_others(state.joined)
    except PositionUnknownError as error:
        log.warning("%s could not drop what is old: %s", member, error)
