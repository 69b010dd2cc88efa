"""Schedules, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from sluiceway.contract.fields import Answer, Duration, ItemIdText, QueueName, Time, about, one_of, schema

CatchUp = Literal["last", "skip", "all"]
"""What to do about times that were missed: fire the latest one, none, or each."""
ScheduleName = QueueName
"""It is written as a queue's name is."""
CronText = Annotated[str, schema("cron expression", examples=["*/5 * * * *"])]
ZoneText = Annotated[str, schema("time zone", examples=["Europe/Berlin"])]


class LastFired(Answer, frozen=True, kw_only=True):
    """The latest time that was fired."""

    scheduled_at: Annotated[Time, about("The time, without jitter.")]
    fired_at: Annotated[Time, about("When the item was stored.")]
    id: Annotated[
        ItemIdText | None,
        about("Id that the item was given; null: an earlier attempt stored it, and its id is not known any more."),
    ] = None


class LastFailure(Answer, frozen=True, kw_only=True):
    """Why a firing failed. It is repeated until it succeeds, or is missed."""

    scheduled_at: Annotated[Time, about("The time that was to be fired.")]
    failed_at: Annotated[Time, about("When it failed.")]
    code: Annotated[str, about("The error's code.")]
    detail: Annotated[str, about("What happened.")]


class ScheduleInfo(Answer, frozen=True, kw_only=True):
    """A schedule."""

    name: ScheduleName
    queue_name: QueueName
    cron: Annotated[CronText, about("The cron expression.")]
    timezone: Annotated[ZoneText, about("The time zone of the expression.")]
    jitter: Annotated[Duration, about("Each firing is delayed by a part of this.")]
    catch_up: Annotated[str, one_of(CatchUp), about("What happens with missed times.")]
    paused: Annotated[bool, about("Whether it is paused.")]
    item: Annotated[dict[str, Any], about("The item that it produces, with the fields of `queue.produce`.")]
    created_at: Annotated[Time, about("When it was created.")]
    updated_at: Annotated[Time, about("When it was last changed, paused or resumed.")]
    next_at: Annotated[Time | None, about("The next firing, jitter included; null: none, for instance while it is paused.")] = None
    last_fired: Annotated[LastFired | None, about("The latest time that was fired; null: none yet.")] = None
    last_failure: Annotated[LastFailure | None, about("The latest failure since then; null: none.")] = None


class SchedulePage(Answer, frozen=True, kw_only=True):
    """Some schedules, by name."""

    items: Annotated[list[ScheduleInfo], about("The schedules of this page.")]
    next: Annotated[str | None, about("The pivot of the next page; null on the last.")] = None


class ScheduleTimes(Answer, frozen=True, kw_only=True):
    """The next times of an expression."""

    times: Annotated[list[Time], about("The times, earliest first; fewer than asked for if there are no more.")]


class ScheduleRun(Answer, frozen=True, kw_only=True):
    """An item that was produced out of turn."""

    name: ScheduleName
    queue_name: QueueName
    id: Annotated[ItemIdText, about("Id of the item.")]
