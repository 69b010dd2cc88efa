"""Planning in the driver of a micro-batch capture, on one event loop: feeds the pure planner, and carries out its results."""

from __future__ import annotations

import asyncio
import logging

from sluiceway.adapters import system
from sluiceway.capture.partition_reader import Handler
from sluiceway.capture.task_driver import TaskRunner
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import PositionRecord
from sluiceway.ports.change_stream import ChangeStream
from sluiceway.ports.position_store import PositionStore, PositionUnknownError
from sluiceway.spark.capture_member import Offering
from sluiceway.spark.capture_plan import Done, EndFacts, Offset, is_over, recorded

log = logging.getLogger(__name__)

_WAIT: Millis = 500
"""Timeout of a trigger's wait for an offer. Spark asks again 10 ms after an empty answer."""
_LOOK: Millis = 1_000
"""Interval of reads of the position store, for what others have recorded, while batches are carried on."""
_ALARM: Millis = 10_000
"""Time after which a partition that needs an operator fails the query, to make that visible."""
_STEADY: Millis = 10_000
"""Members unchanged for this long are alive: a dead one has been given up by then."""


class Planning:
    """Plans the next batch. `begin` and `watch` are passed to `run_member`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runner: TaskRunner | None = None
        self._offering: Offering | None = None
        self._positions: PositionStore
        self._stored: dict[str, PositionRecord] = {}
        self._looked_at: Millis | None = None
        self._alarms: dict[tuple[str, str], Millis] = {}
        self._members: tuple[str, ...] = ()
        self._members_since: Millis = 0
        self._up_to_now = False

    def begin(self, stream: ChangeStream, positions: PositionStore) -> Handler:
        self._positions = positions
        offering = self._offering = Offering(stream, positions, self._limit)
        if self._up_to_now:
            offering.read_up_to_now()
        return offering.handle

    def watch(self, runner: TaskRunner) -> None:
        self._runner = runner

    def read_up_to_now(self) -> None:
        """From now on `following` waits for a batch, or until everything present at this moment is read. May precede `begin`."""
        self._up_to_now = True
        if self._offering is not None:
            self._offering.read_up_to_now()

    def close(self) -> None:
        """Allow batches in flight to be given back as they are."""
        if self._offering is not None:
            self._offering.close()

    async def following(self, start: Offset, most: int) -> Offset:
        """The offset of the next batch, of about `most` rows; `start` itself if there is none now.

        Everything in `start` is recorded as done. Raises SluicewayError for what cannot proceed without an operator.
        """
        while True:
            runner, offering = self._runner, self._offering
            if runner is None or offering is None or runner.name not in runner.state.joined:
                # There is no member yet, or its knowledge of partitions may be outdated.
                await asyncio.sleep(_WAIT / 1000)
            else:
                following = await self._plan(runner, offering, start, most)
                if following is not None:
                    return following
            if runner is not None:
                self._check_alarms(runner)
            if not self._up_to_now or (runner is not None and offering is not None and self._is_over(runner, offering)):
                return start

    async def _plan(self, runner: TaskRunner, offering: Offering, start: Offset, most: int) -> Offset | None:
        left = await offering.settle(start.committed())
        await self._drop_recorded(runner, offering.held(), left)
        slices = await offering.plan(most, left, _WAIT)
        return start.following(slices, left.values()) if slices else None

    async def _drop_recorded(self, runner: TaskRunner, held: frozenset[str], left: dict[str, Done]) -> None:
        """Drop entries that other members were to record, and have recorded."""
        others = [each for token, each in left.items() if token not in held]
        if not others:
            return
        now = system.steady()
        if self._looked_at is None or now - self._looked_at >= _LOOK:
            self._looked_at = now
            try:
                self._stored = {token: stored.kept for token, stored in (await self._positions.read()).items()}
            except PositionUnknownError as error:
                log.warning("the position store could not be read: %s", error)
        for each in others:
            if recorded(each, runner.state, self._stored.get(each.token)):
                del left[each.token]

    def _check_alarms(self, runner: TaskRunner) -> None:
        """Raise an alarm that has lasted for a while."""
        now = system.steady()
        self._alarms = {alarm: self._alarms.get(alarm, now) for alarm in runner.alarms.items()}
        for (token, why), since in self._alarms.items():
            if now - since >= _ALARM:
                raise SluicewayError("unavailable", f"{f'partition {token}' if token else 'the capture'} makes no progress: {why}")

    def _is_over(self, runner: TaskRunner, offering: Offering) -> bool:
        state, now = runner.state, system.steady()
        if state.members != self._members:
            self._members, self._members_since = state.members, now
        return is_over(EndFacts(state, runner.name, offering.reached(), now - self._members_since >= _STEADY))
