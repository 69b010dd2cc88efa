"""Records of schedules in the meta store."""

from __future__ import annotations

from typing import Any

import msgspec

from sluiceway.contract.schedule_answers import CatchUp
from sluiceway.kernel.clock import Millis

SCHEDULE_GROUP = "schedule/"
"""Prefix of the idempotency groups of schedules; the incarnation follows, which only the meta store knows."""


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule. `item`: the item as JSON, with the fields of a produce. Times up to `after` are not its own, nor are those of a pause."""

    name: str
    incarnation: str
    queue_name: str
    cron: str
    timezone: str
    jitter: Millis
    catch_up: CatchUp
    item: msgspec.Raw
    paused: bool
    created_at: Millis
    updated_at: Millis
    after: Millis

    @property
    def group(self) -> str:
        """The idempotency group of its firings."""
        return SCHEDULE_GROUP + self.incarnation


class SchedulePatch(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a schedule; None: stays as it is."""

    cron: str | None = None
    timezone: str | None = None
    jitter: Millis | None = None
    catch_up: CatchUp | None = None
    item: msgspec.Raw | None = None
    paused: bool | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Fired(msgspec.Struct, frozen=True, array_like=True):
    """A fired time. `id` empty: not known."""

    at: Millis
    fired_at: Millis
    id: str = ""


class Failed(msgspec.Struct, frozen=True, array_like=True):
    at: Millis
    failed_at: Millis
    code: str
    detail: str


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a schedule has come. Times up to `through` are decided."""

    incarnation: str
    through: Millis
    fired: Fired | None = None
    failed: Failed | None = None
