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

        ready: Annotated[Series, about("Ready items at the end of the minute.")]
        total_leased: Annotated[Series, about("Items in leases at the end of the minute.")]
        scheduled: Annotated[Series, about("Scheduled items at the end of the minute.")]
        oldest_s: Annotated[Series, about("Age of the next ready item at the end of the minute, in seconds; null also if there was none.")]
        produced: Annotated[Series, about("Items produced in that minute.")]
        leased: Annotated[Series, about("Items leased in that minute.")]
        completed: Annotated[Series, about("Items completed in that minute.")]
        retried: Annotated[Series, about("Items retried in that minute.")]
        expired: Annotated[Series, about("Items whose lease ran out in that minute.")]
        dead: Annotated[Series, about("Items that became dead in that minute.")]
        released: Annotated[Series, about("Items released in that minute.")]
        cleared: Annotated[Series, about("Items cleared in that minute.")]
        redriven: Annotated[Series, about("Items redriven out of this queue in that minute.")]
        failures: Annotated[Series, about("Commits in that minute that failed or had an unknown outcome.")]


class QueueHistory(Answer, frozen=True, kw_only=True):
    """A queue's last minutes that have ended. The first begins at `first_at`, which is `from` in JSON."""

    queue_name: QueueName
    every: Annotated[str, one_of(Literal["1m"]), about("Interval between two values of a series.")] = "1m"
    first_at: Annotated[Time, about("Start of the first minute.")] = msgspec.field(name="from")
    series: Annotated[HistorySeries, about("One value per minute, by name.")] = {}
