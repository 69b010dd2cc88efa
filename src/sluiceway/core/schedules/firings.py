"""Which moment of which schedule is to be fired next. Pure: told the time and what became of each firing, it says what to fire.

A firing is a produce under an idempotency group of the schedule, whose sequence is the moment. So firing a moment again adds nothing, and a
moment before the group's last one is refused: what this machine has forgotten, or another one has fired meanwhile, does no harm. That
holds for as long as a partition remembers the group, from its last use. Hence REACH, which depends on no record of what was fired: a moment
older than that is never fired, since nobody may remember it any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from sluiceway.contract.schedule_answers import CatchUp
from sluiceway.core.schedules.timetable import MINUTE, Timetable
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP, MAX_CATCH_UP

MISSED_AFTER: Millis = 60_000
"""How late a moment may be fired whatever the policy: longer than a restart, or a takeover by another instance."""
REACH: Millis = GROUP_KEEP - 86_400_000
"""How late a moment may be fired at all. A day less than groups are remembered: more than clocks differ, and than a call takes."""
FIRST_PAUSE: Millis = 500
LAST_PAUSE: Millis = 30_000
"""First and longest pause before a failed firing is repeated; each is twice the one before."""
_SLACK = 1_000
"""Entries of the heap beyond twice the schedules, from which on those that no longer count are removed."""
_BOUNDING = 50
"""As how many decisions it counts to find the last MAX_CATCH_UP of many missed moments."""


class Firing(NamedTuple):
    """Produce the item of that incarnation of schedule `key` for the moment `at`."""

    key: str
    incarnation: str
    at: Millis


@dataclass(slots=True)
class _Schedule:
    """`through`: the moments up to here are decided: fired, or not to be. `at`: the next moment; None: there is none."""

    incarnation: str
    timetable: Timetable
    catch_up: CatchUp
    through: Millis
    at: Millis | None = None
    due: Millis = 0
    """When to decide about `at`: its own due time, or the end of a pause."""
    queued: Millis | None = None
    """The `due` for which the heap has an entry."""
    flying: Millis | None = None
    failures: int = 0
    is_bounded: bool = False
    """Whether the limit of `all` was applied to the present run of missed moments."""


class Firings:
    """The schedules that one instance fires, by key."""

    def __init__(self) -> None:
        self._schedules: dict[str, _Schedule] = {}
        self._heap: list[tuple[Millis, str]] = []
        """Entries outlive their reason: only one whose time is its schedule's `queued` counts."""
        self.touched: dict[str, None] = {}
        """Schedules about which something was decided, or found out, since their driver last emptied this."""

    def __contains__(self, key: str) -> bool:
        return key in self._schedules

    def __len__(self) -> int:
        return len(self._schedules)

    # ---- events -----------------------------------------------------------------------------------------------

    def hold(self, key: str, incarnation: str, timetable: Timetable, catch_up: CatchUp, through: Millis) -> None:
        """Fire this schedule from now on, after `through`; or, if it is held, with these settings. Moments decided here stay so."""
        known = self._schedules.get(key)
        if known is None or known.incarnation != incarnation:
            known = self._schedules[key] = _Schedule(incarnation, timetable, catch_up, through)
        known.timetable, known.catch_up, known.through = timetable, catch_up, max(through, known.through)
        if known.flying is None:
            known.failures = 0
            self._go_on(key, known)

    def drop(self, key: str) -> None:
        """Fire this schedule no more."""
        self._schedules.pop(key, None)

    def begin(self, now: Millis, most: int) -> list[Firing]:
        """What to fire now, up to `most`, the longest due first. Answer each by `fired` or `failed`; until then its schedule waits.

        It decides about `most` schedules at most, or fewer that have many missed moments: `due` says whether there are more.
        """
        begun: list[Firing] = []
        decisions = 0
        while self._heap and self._heap[0][0] <= now and decisions < most:
            due, key = heapq.heappop(self._heap)
            schedule = self._schedules.get(key)
            if schedule is None or schedule.queued != due:
                continue
            schedule.queued = None
            if schedule.due != due or schedule.flying is not None or schedule.at is None:
                continue
            was_bounded = schedule.is_bounded
            at = self._choose(schedule, schedule.at, now)
            decisions += _BOUNDING if schedule.is_bounded and not was_bounded else 1
            if at is None:
                self.touched[key] = None
                self._go_on(key, schedule)
            else:
                schedule.flying = at
                begun.append(Firing(key, schedule.incarnation, at))
        return begun

    def fired(self, firing: Firing) -> None:
        """The moment is fired, by this firing or by an earlier one."""
        schedule = self._landed(firing)
        if schedule is not None:
            schedule.through, schedule.failures = max(schedule.through, firing.at), 0
            self._go_on(firing.key, schedule)

    def failed(self, firing: Firing, now: Millis) -> None:
        """The moment was not fired, or may have been. It is decided about again after a pause."""
        schedule = self._landed(firing)
        if schedule is None:
            return
        if schedule.through >= firing.at:
            # It was decided otherwise meanwhile.
            self._go_on(firing.key, schedule)
            return
        pause = min(LAST_PAUSE, FIRST_PAUSE << min(schedule.failures, 16))
        schedule.failures += 1
        self._decide_again(firing.key, schedule, now + pause)

    def put_back(self, firing: Firing, now: Millis) -> None:
        """The firing was not carried out for so long that its moment may be missed: decide about it again."""
        schedule = self._landed(firing)
        if schedule is not None:
            self._decide_again(firing.key, schedule, now)

    # ---- what holds -------------------------------------------------------------------------------------------

    def due(self) -> Millis | None:
        """When `begin` has something to do; None: never, without another event."""
        return self._heap[0][0] if self._heap else None

    def through(self, key: str) -> Millis:
        """The moments of a held schedule up to this one are decided."""
        return self._schedules[key].through

    def is_flying(self, firing: Firing) -> bool:
        """Whether the firing is still to be carried out: its schedule was not dropped since it was begun."""
        schedule = self._schedules.get(firing.key)
        return schedule is not None and schedule.flying == firing.at and schedule.incarnation == firing.incarnation

    def held(self) -> Iterable[str]:
        return self._schedules

    # ---- decisions --------------------------------------------------------------------------------------------

    def _choose(self, schedule: _Schedule, at: Millis, now: Millis) -> Millis | None:
        """Which moment to fire, of `at` and those after it that are due; None: none of them, so `through` has moved on."""
        table = schedule.timetable
        if now - table.due(at) < MISSED_AFTER:
            schedule.is_bounded = False
            return at
        latest = table.before(now + 1)
        if latest is not None and table.due(latest) > now:
            latest = table.before(latest)
        latest = at if latest is None else max(at, latest)
        if now - latest > REACH or (schedule.catch_up == "skip" and now - table.due(latest) >= MISSED_AFTER):
            schedule.through = latest
            return None
        if schedule.catch_up != "all":
            return latest
        if now - at > REACH:
            reached = table.after(now - REACH - 1)
            at = latest if reached is None else reached
        if not schedule.is_bounded:
            schedule.is_bounded, at = True, self._bounded(table, at, latest)
        return at

    def _bounded(self, table: Timetable, at: Millis, latest: Millis) -> Millis:
        """The first of the last MAX_CATCH_UP moments from `at` to `latest`."""
        if latest - at < MAX_CATCH_UP * MINUTE:
            # They are a minute apart at least.
            return at
        first = latest
        for _ in range(MAX_CATCH_UP - 1):
            earlier = table.before(first)
            if earlier is None or earlier <= at:
                return at
            first = earlier
        return first

    def _landed(self, firing: Firing) -> _Schedule | None:
        if not self.is_flying(firing):
            # It was dropped, and perhaps held again, meanwhile.
            return None
        schedule = self._schedules[firing.key]
        schedule.flying = None
        self.touched[firing.key] = None
        return schedule

    def _go_on(self, key: str, schedule: _Schedule) -> None:
        """Wait for the first moment that is not decided."""
        schedule.at = schedule.timetable.after(schedule.through)
        if schedule.at is not None:
            self._wait(key, schedule, schedule.timetable.due(schedule.at))

    def _decide_again(self, key: str, schedule: _Schedule, due: Millis) -> None:
        """Decide about the same moments again at that time."""
        # More moments may be missed by then, and the decision begins at the first of them, which the limit of `all` may leave out.
        schedule.is_bounded = False
        self._wait(key, schedule, due)

    def _wait(self, key: str, schedule: _Schedule, due: Millis) -> None:
        schedule.due = due
        if schedule.queued != due:
            schedule.queued = due
            heapq.heappush(self._heap, (due, key))
            if len(self._heap) > 2 * len(self._schedules) + _SLACK:
                # Of schedules that come and go with their partitions, or have changed, each time has left an entry, for up to years.
                self._heap = [(each.queued, name) for name, each in self._schedules.items() if each.queued is not None]
                heapq.heapify(self._heap)
