"""A queue's history, as the server answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import msgspec

from sluiceway.contract.fields import Answer, QueueName, Time, about, one_of

Series = list[int | None]

if TYPE_CHECKING:
    # Callers look series up by names that they have in variables, which a type checker refuses for a TypedDict.
    HistorySeries = dict[str, Series]
else:

    class HistorySeries(TypedDict, total=False):
        """One number a minute, the first minute first; null: the server was not running."""

        ready: Annotated[Series, about("Items that waited at the end of the minute.")]
        total_leased: Annotated[Series, about("Items in leases at the end of the minute.")]
        scheduled: Annotated[Series, about("Items that were not due yet at the end of the minute.")]
        oldest_s: Annotated[
            Series, about("Age in seconds, at the end of the minute, of the item that came next; null, too, if there was none.")
        ]
        produced: Annotated[Series, about("Items that came in that minute.")]
        leased: Annotated[Series, about("Items that were leased in that minute.")]
        completed: Annotated[Series, about("Items that were completed in that minute.")]
        retried: Annotated[Series, about("Items that were retried in that minute.")]
        expired: Annotated[Series, about("Items whose lease ran out in that minute.")]
        dead: Annotated[Series, about("Items that died in that minute.")]
        released: Annotated[Series, about("Items that were given back untouched in that minute.")]
        cleared: Annotated[Series, about("Items that were dropped in that minute.")]
        redriven: Annotated[Series, about("Items that were sent back out of the queue, as a dead queue, in that minute.")]
        failures: Annotated[Series, about("Commits that failed, or whose outcome was unknown, in that minute.")]


class QueueHistory(Answer, frozen=True, kw_only=True):
    """A queue's last minutes that have ended. The first begins at `first_at`, which is `from` in JSON."""

    queue_name: QueueName
    every: Annotated[str, one_of(Literal["1m"]), about("The time between two numbers of a series.")] = "1m"
    first_at: Annotated[Time, about("When the first of the minutes began.")] = msgspec.field(name="from")
    series: Annotated[HistorySeries, about("A number for each minute, by what it is of.")] = {}
