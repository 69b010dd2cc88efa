"""Bundles, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from sluiceway.contract.fields import Answer, ItemIdText, QueueName, Time, about, one_of, schema

BundleState = Literal["open", "closed", "done", "cancelled", "expired"]
BundleId = Annotated[str, schema("bundle id", minLength=1, maxLength=64, examples=["k7f3q2mah4t8w2xz"])]


class FollowUpInfo(Answer, frozen=True, kw_only=True):
    """The item that is produced when the bundle is over."""

    queue_name: Annotated[QueueName, about("The queue that gets the item.")]
    item: Annotated[dict[str, Any], about("The item, with the fields of `queue.produce`.")]
    id: Annotated[ItemIdText | None, about("Id that the item was given; null: it is not produced, or the id is not known any more.")] = None


class BundleInfo(Answer, frozen=True, kw_only=True):
    """A bundle, and how far it has come."""

    id: BundleId
    queue_name: Annotated[QueueName, about("The queue of its items.")]
    state: Annotated[
        str,
        one_of(BundleState),
        about(
            "`open`: takes items. `closed`: takes no more. `done`: all items have ended, and the follow-up is produced. `cancelled`, "
            "`expired`: there is no follow-up."
        ),
    ]
    items: Annotated[int | None, about("It is closed when so many items are stored; null: by `bundles.close` alone.")] = None
    stored: Annotated[int | None, about("Items of the bundle; null: a partition does not answer.")] = None
    completed: Annotated[int | None, about("Items that were completed.")] = None
    dead: Annotated[int | None, about("Items that have died.")] = None
    dropped: Annotated[int | None, about("Items that were deleted, cleared, or moved to another queue.")] = None
    left: Annotated[int | None, about("Items that have not ended.")] = None
    follow_up: Annotated[FollowUpInfo | None, about("The follow-up; null: there is none.")] = None
    problem: Annotated[str | None, about("Why the bundle makes no progress, as far as this instance knows; null: nothing is wrong.")] = None
    created_at: Annotated[Time, about("When it was created.")]
    closed_at: Annotated[Time | None, about("When it was closed; null: it is open.")] = None
    ended_at: Annotated[Time | None, about("When it was over; null: it is not.")] = None


class BundlePage(Answer, frozen=True, kw_only=True):
    """Some bundles, by id."""

    items: Annotated[list[BundleInfo], about("The bundles of this page.")]
    next: Annotated[str | None, about("The pivot of the next page; null on the last.")] = None
