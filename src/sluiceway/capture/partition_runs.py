"""Partition runs: the activity in the partitions that a member was told to open, each under its grant.

A run's final event (`Stopped`, `Ended`, `BrokenOff`) comes when all activity under its grant has ended; `fenced` is reported only for a
higher grant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from sluiceway.adapters import system
from sluiceway.capture.alarms import Alarms
from sluiceway.capture.partition_reader import Claim, Handler, first_of
from sluiceway.capture.timing import FAILURES, Timing
from sluiceway.core.group.task_member import BrokenOff, Cross, Ended, Event, Open, Opened, Reached, Read, Stop, Stopped
from sluiceway.core.group.task_state import State
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import AnnouncedPartition
from sluiceway.ports.change_stream import Barrier, BrokenOffError, ChangeStream, StaleBatchError, UnknownPositionError
from sluiceway.ports.position_store import FencedError, PositionStore, PositionUnknownError

log = logging.getLogger(__name__)


class _Run:
    """Activity in a partition under one grant."""

    def __init__(self, token: str, grant: int) -> None:
        self.token, self.grant = token, grant
        self.begin: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The position to read from."""
        self.stopping = asyncio.Event()
        self.claim: Claim | None = None


class Runs:
    """The runs of one member. Use from one event loop.

    `tell` receives the member's events, `found` children known before their parent ends; `begin` starts background work.
    """

    def __init__(
        self,
        name: str,
        positions: PositionStore,
        stream: ChangeStream,
        handler: Handler,
        alarms: Alarms,
        timing: Timing,
        *,
        tell: Callable[[Event], None],
        found: Callable[[str, tuple[AnnouncedPartition, ...]], None],
        begin: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._name, self._positions, self._stream, self._handler = name, positions, stream, handler
        self._alarms, self._timing = alarms, timing
        self._tell, self._found, self._begin = tell, found, begin
        self._runs: dict[tuple[str, int], _Run] = {}
        self._failures: dict[str, int] = {}
        """Failures of each partition since its last progress."""

    @property
    def claims(self) -> dict[str, Claim]:
        """The partitions being read."""
        return {run.token: run.claim for run in self._runs.values() if run.claim is not None}

    def carry_out(self, effect: Open | Read | Cross | Stop) -> None:
        match effect:
            case Open():
                run = self._runs[effect.token, effect.grant] = _Run(effect.token, effect.grant)
                self._begin(self._live(run))
            case Read():
                self._runs[effect.token, effect.grant].begin.set_result(effect.position)
            case Cross():
                run_at = self._runs.get((effect.token, effect.grant))
                if run_at is not None and run_at.claim is not None:
                    run_at.claim.let_cross(effect.mark)
            case Stop():
                # If there is none, its final event is on its way.
                if (stopped := self._runs.get((effect.token, effect.grant))) is not None:
                    stopped.stopping.set()

    def calm_down(self, state: State) -> None:
        """Clear failures and alarms of partitions that other members own, which report these themselves, or that have progressed."""
        for token in self._failures.keys() | self._alarms.partitions:
            if token not in state.partitions or state.partitions[token].owner != self._name:
                self._went_well(token)
                self._let_go(token)
        for claim in self.claims.values():
            if claim.moved:
                self._went_well(claim.token)
            elif claim.reads:
                self._alarms.of_partition(claim.token, "")

    async def _live(self, run: _Run) -> None:
        last = await self._fare(run)
        is_left = not isinstance(last, BrokenOff) or last.why == "fenced"
        if is_left:
            self._went_well(run.token)
        elif isinstance(last, BrokenOff) and not last.why:
            await self._leave_alone(run)
        del self._runs[run.token, run.grant]
        if is_left or run.stopping.is_set():
            self._let_go(run.token)
        self._tell(last)

    async def _fare(self, run: _Run) -> Stopped | Ended | BrokenOff:
        """Run a partition under this grant. On return all activity has ended."""
        token, grant = run.token, run.grant
        try:
            opening, kept = await self._positions.open(token, grant)
            if not run.stopping.is_set():
                self._tell(Opened(token, grant, kept.position))
                # Until the member says where to begin, or to stop.
                await first_of(run.begin, run.stopping)
            if run.stopping.is_set():
                return Stopped(token, grant)
            run.claim = Claim(opening, kept, run.begin.result(), self._finder(token), self._reacher(token, grant), run.stopping)
            try:
                end = await self._handler(run.claim)
            finally:
                if run.claim.moved:
                    self._went_well(token)
            return Stopped(token, grant) if end is None else Ended(token, grant, end.children, end.ended_at)
        except FencedError as error:
            if error.grant <= grant:
                return BrokenOff(token, grant)
            self._alarms.fenced(token, grant, error.grant)
            return BrokenOff(token, grant, "fenced")
        except UnknownPositionError as error:
            self._alarms.of_partition(token, str(error))
            return BrokenOff(token, grant, "unknown")
        except BrokenOffError as error:
            self._broke_off(token, str(error))
        except PositionUnknownError as error:
            log.warning("%s: reading of partition %s was interrupted: %s", self._name, token, error)
        except StaleBatchError as error:
            # Another member should have it by now, which the position store will show. If not, the position is older than the batch.
            if token in self._failures:
                self._alarms.of_partition(
                    token, f"{error}; check whether positions were restored from a backup, or the capture's name is used again"
                )
            else:
                log.warning("%s: another member reads partition %s: %s", self._name, token, error)
        except SluicewayError as error:
            self._alarms.of_partition(token, str(error))
        except asyncio.CancelledError:
            # A library may cancel its own future, which is not a cancellation of this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._broke_off(token, "what it waited for was cancelled")
        except Exception as error:
            # Errors of the stream, the sink or the handler are of many kinds. None must end the reading of other partitions.
            log.exception("%s: partition %s failed", self._name, token)
            self._broke_off(token, f"{type(error).__name__}: {error}")
        finally:
            run.claim = None
        return BrokenOff(token, grant)

    def _finder(self, token: str) -> Callable[[tuple[AnnouncedPartition, ...]], None]:
        return lambda children: self._found(token, children)

    def _reacher(self, token: str, grant: int) -> Callable[[Barrier], None]:
        return lambda barrier: self._tell(Reached(token, grant, barrier.mark, barrier.gives, barrier.takes))

    def _broke_off(self, token: str, why: str) -> None:
        """Record a transient failure; after a series of them, raise an alarm."""
        log.warning("%s: reading of partition %s was interrupted: %s", self._name, token, why)
        if self._failures.get(token, 0) + 1 >= FAILURES:
            self._alarms.of_partition(token, f"{why}; it is retried")

    def _went_well(self, token: str) -> None:
        self._failures.pop(token, None)
        self._alarms.of_partition(token, "")

    def _let_go(self, token: str) -> None:
        if all(each.token != token for each in self._runs.values()):
            self._stream.left(token)

    async def _leave_alone(self, run: _Run) -> None:
        """Pause before the partition is reopened, longer each time; ends early on a stop."""
        failures = self._failures[run.token] = self._failures.get(run.token, 0) + 1
        pause = min(self._timing.longest_pause, self._timing.again * 2 ** min(failures - 2, 16)) if failures > 1 else 0
        await system.wait(run.stopping, pause)
