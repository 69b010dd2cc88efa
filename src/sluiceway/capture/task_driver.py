"""Task driver: runs one member of a group of tasks: follows the log, carries out the machine's effects, and reports their results.

docs/project/tasks.md states the machine's assumptions. This file's share: nothing blocks a step; the member begins with the whole log and a
position store that answers. The assumptions about partition readers are in `partition_runs.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from sluiceway.adapters import system
from sluiceway.capture.alarms import AlarmBoard, Alarms
from sluiceway.capture.capture_gc import drop_old
from sluiceway.capture.log_reader import PAGE, decoded, whole
from sluiceway.capture.partition_reader import Claim, Handler
from sluiceway.capture.partition_runs import Runs
from sluiceway.capture.timing import FAILURES, Timing
from sluiceway.core.group.task_fold import trimmable
from sluiceway.core.group.task_member import (
    Alarm,
    Append,
    AskSeeds,
    ChildrenFound,
    Cross,
    Effect,
    Elected,
    Event,
    Folded,
    Going,
    JoinGroup,
    LeaveGroup,
    Open,
    Pace,
    Prepared,
    Preset,
    Read,
    Restored,
    SeedsFound,
    Stop,
    TaskMember,
    Tick,
)
from sluiceway.core.group.task_parts import cut_snapshot
from sluiceway.core.group.task_state import State, encode
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import AnnouncedPartition
from sluiceway.ports.change_stream import BrokenOffError, ChangeStream
from sluiceway.ports.position_store import PositionStore, PositionUnknownError
from sluiceway.ports.sync_log import Election, LogUnavailableError, SyncLog

__all__ = ["TaskRunner", "Timing"]

log = logging.getLogger(__name__)

APPEND = 500
"""Maximum records per append."""
GOODBYE = 10.0
"""Seconds allowed for leaving the election."""
MAIL = 100
"""Maximum events per step. A step costs by the number of partitions, and little by its events."""


class TaskRunner:
    """One member of a capture, from start to end. `name` is never reused; neither is the runner. Use on one event loop.

    `handler` reads a partition that the member may read. The log, the position store and the stream may be shared with others, the election
    may not; their opener closes them.
    """

    def __init__(
        self,
        name: str,
        *,
        log: SyncLog,
        election: Election,
        positions: PositionStore,
        stream: ChangeStream,
        handler: Handler,
        preset: Preset = "log-leader",
        pace: Pace | None = None,
        timing: Timing | None = None,
        board: AlarmBoard | None = None,
    ) -> None:
        """`board`: publishes its alarms."""
        self.name = name
        self._log, self._election, self._positions, self._stream = log, election, positions, stream
        self._timing = timing or Timing()
        self._member = TaskMember(name, preset, pace)
        self._mail: list[Event] = []
        self._woken = asyncio.Event()
        self._alarms = Alarms(name, board, self._timing.again)
        self._runs = Runs(
            name, positions, stream, handler, self._alarms, self._timing, tell=self._tell, found=self._found, begin=self._begin
        )
        self._current_at: Millis = 0
        """Start of the last log read that found nothing new."""
        self._pending: dict[bytes, None] = {}
        """Records to append; a repeated one is in it once."""
        self._unsaid = asyncio.Event()
        self._said = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fatal: BaseException | None = None
        self._go_by: Millis | None = None
        self._left = self._in_group = self._ending = False
        self._asked = ""
        self._ask_again: Millis = 0
        self._seeking = False
        self._unsown = 0
        """Consecutive failures of the stream to name its partitions."""
        self._trimmed = 0
        self._chores_at = system.steady()
        self._forget_at = system.steady() + self._timing.forget

    @property
    def state(self) -> State:
        """The state as folded so far."""
        return self._member.state

    @property
    def alarms(self) -> dict[str, str]:
        """Reasons by stalled partition; "" stands for the stream itself, or the log."""
        return self._alarms.now

    @property
    def claims(self) -> dict[str, Claim]:
        """The partitions being read."""
        return self._runs.claims

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as it knows."""
        return self.state.leader == self.name

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until, after `stop`, the member has left, or the time for that is over.

        If cancelled it goes at once, as if it had died, but leaves the election. Raises errors that cannot be repaired here: a log that it
        does not understand.
        """
        try:
            self._begin(self._prepare())
            self._begin(self._follow())
            self._begin(self._speak())
            self._begin(self._alarms.tell())
            await self._turns()
        finally:
            try:
                await self._end_all()
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE):
                        await asyncio.gather(self._alarms.leave(), self._leave_group())

    async def _leave_group(self) -> None:
        """Leave the election: otherwise other members, which consider it alive, would give it partitions that it does not read."""
        if self._in_group:
            await self._election.leave()

    def stop(self) -> None:
        """Stop reading, report it, and leave; `run` then returns. After `Timing.leave` it goes anyway."""
        if self._go_by is None:
            self._go_by = system.steady() + self._timing.leave
            self._tell(Going())

    async def _turns(self) -> None:
        while not self._left:
            self._woken.clear()
            mail, self._mail = self._mail, []
            for start in range(0, len(mail), MAIL):
                self._step(mail[start : start + MAIL])
                # Yield to others: the election must not wait for all of a long mail.
                await asyncio.sleep(0)
            self._step([Tick()])
            self._lead()
            self._calm_down()
            if self._fatal is not None:
                raise self._fatal
            if self._go_by is not None and system.steady() >= self._go_by:
                log.warning("%s stopped without leaving: other members read its partitions once it counts as dead", self.name)
                return
            await system.wait(self._woken, self._timing.tick)

    async def _end_all(self) -> None:
        self._ending = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # No task is cancelled before the end: the member would seem alive, and no longer read or write the log.
        error = SluicewayError("internal", "a task of the member was cancelled") if task.cancelled() else task.exception()
        if error is not None and not self._ending:
            self._fatal = error
            self._woken.set()

    # ---- member -------------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self._mail.append(event)
        self._woken.set()

    def _step(self, events: Sequence[Event]) -> None:
        for effect in self._member.step_all(events, system.steady()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Append():
                self._say(encode(effect.record))
            case Open() | Read() | Cross() | Stop():
                self._runs.carry_out(effect)
            case JoinGroup():
                self._in_group = True
                self._begin(self._election.join(self.name, lambda group: self._tell(Elected(group))))
            case LeaveGroup():
                self._left = True
            case AskSeeds():
                self._seek(effect.after)
            case Alarm():
                # The detecting component has given more detail.
                if effect.token not in self._alarms.partitions:
                    self._alarms.of_partition(effect.token, effect.why)

    # ---- log ----------------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Wait until the log as of now can be read and the position store answers; then the member may join."""
        while True:
            try:
                end = (await self._log.read(0, 1)).end
                await self._positions.read()
                break
            except (LogUnavailableError, PositionUnknownError) as error:
                log.warning("%s cannot start yet: %s", self.name, error)
                await self._pause(self._timing.again)
        self._tell(Prepared(end))

    async def _follow(self) -> None:
        after = 0
        while True:
            try:
                began = system.steady()
                page = await self._log.read(after, PAGE)
                if page.end < after:
                    raise SluicewayError(
                        "internal", f"the log has lost records: it ends at {page.end}, and this member has read up to {after}"
                    )
                if after < page.first - 1:
                    # Unread records were trimmed: the rest contains their effect.
                    state, after = await whole(self._log, page)
                    self._tell(Restored(state))
                elif page.entries:
                    after = page.entries[-1][0]
                    self._tell(Folded(decoded(page)))
                else:
                    self._current_at = began
                    await self._wait(after)
            except LogUnavailableError as error:
                log.warning("%s cannot reach the log: %s", self.name, error)
                await self._pause(self._timing.again)

    async def _wait(self, after: int) -> None:
        """Wait for news, or for an append by this member."""
        said = asyncio.ensure_future(self._said.wait())
        news = asyncio.ensure_future(self._log.wait(after, self._timing.wait))
        try:
            await asyncio.wait((said, news), return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()
            news.cancel()
        await asyncio.wait((news,))
        self._said.clear()
        if not news.cancelled():
            news.result()

    def _say(self, record: bytes) -> None:
        self._pending[record] = None
        self._unsaid.set()

    async def _speak(self) -> None:
        """Append the member's records. The member repeats lost ones."""
        while True:
            await self._unsaid.wait()
            self._unsaid.clear()
            while self._pending:
                records = list(self._pending)[:APPEND]
                try:
                    await self._log.append(records)
                    self._said.set()
                except LogUnavailableError as error:
                    log.warning("%s could not append %d records: %s", self.name, len(records), error)
                except (SluicewayError, ValueError) as error:
                    self._alarms.of_log(f"a record cannot be appended: {error}")
                for record in records:
                    del self._pending[record]

    async def _pause(self, millis: Millis) -> None:
        await asyncio.sleep(millis / 1000)

    # ---- leader chores -------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        now, state, timing = system.steady(), self.state, self._timing
        if not self.leads or self._go_by is not None:
            return
        if now >= self._chores_at:
            # Seeds of which more are to come would make it large, and come soon.
            if not state.staged and state.seq - state.kept_from >= max(timing.snapshot, len(state.partitions)):
                self._chores_at = now + timing.chores
                for part in cut_snapshot(state):
                    self._say(encode(part))
            elif trimmable(state) > self._trimmed:
                self._chores_at = now + timing.chores
                self._begin(self._trim(trimmable(state)))
        if now >= self._forget_at:
            self._forget_at = now + timing.forget
            self._begin(drop_old(self.name, state, self._positions, self._alarms, timing.keep))

    async def _trim(self, upto: int) -> None:
        try:
            await self._log.trim(upto)
            self._trimmed = max(self._trimmed, upto)
        except LogUnavailableError as error:
            log.warning("%s could not trim the log: %s", self.name, error)

    def _seek(self, after: str) -> None:
        """Ask for seeds, unless a request is in progress, or was just answered with none: the member asks repeatedly."""
        if not self._seeking and (after != self._asked or system.steady() >= self._ask_again):
            self._seeking = True
            self._begin(self._ask(after))

    async def _ask(self, after: str) -> None:
        try:
            upto, partitions = await self._stream.seeds(after)
        except SluicewayError as error:
            self._alarms.of_stream(str(error))
        except BrokenOffError as error:
            self._unsaid_seeds(str(error))
        except Exception as error:
            # An error inside the stream must not end the reading of its partitions.
            log.exception("%s: the stream failed to list its partitions", self.name)
            self._unsaid_seeds(f"{type(error).__name__}: {error}")
        else:
            self._unsown = 0
            self._alarms.of_stream("")
            if upto != after:
                self._tell(SeedsFound(after, upto, partitions))
        finally:
            self._asked, self._ask_again = after, system.steady() + self._timing.seeds
            self._seeking = False

    def _unsaid_seeds(self, why: str) -> None:
        """Record a transient failure; after a series of them, raise an alarm."""
        log.warning("%s: the stream could not list its partitions: %s", self.name, why)
        self._unsown += 1
        if self._unsown >= FAILURES:
            self._alarms.of_stream(f"{why}; it is retried")

    def _calm_down(self) -> None:
        self._runs.calm_down(self.state)
        # Only a leader asks the stream.
        if not self.leads:
            self._unsown = 0
            self._alarms.of_stream("")
        # The mail may contain a later grant.
        self._alarms.calm(self.state, 0 if self._mail else self._current_at, 3 * self._timing.chores)

    def _found(self, token: str, children: tuple[AnnouncedPartition, ...]) -> None:
        """Report children known before their parent ends, if leader; the parent's owner reports them again at the end."""
        if self.leads:
            self._tell(ChildrenFound(token, children))
