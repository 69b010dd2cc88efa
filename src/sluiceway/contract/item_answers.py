"""The answers of calls on items: produce, lease, the outcomes, and looking at items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec

from sluiceway.contract.fields import Answer, Duration, ItemIdText, LeaseIdText, QueueName, Time, about, one_of

IgnoredReason = Literal["completed", "expired", "retried", "released", "dead", "settled", "not_leased", "not_yours", "unknown"]
"""Why an id is ignored. The item was completed · its lease ran out, and it is offered again under another id · it was retried, released,
or is dead · it is one of these, longer ago than is remembered · waits, and is in no lease · is leased by another client · never was."""
FailedReason = Literal["unavailable", "partition_damaged", "queue_not_found", "outcome_unknown"]
"""The error code of an item's partition, in the answer of a call that took effect in others. Only with `outcome_unknown` may it have taken
effect there, too."""
LeftReason = Literal["leased", "ready", "no_source", "gone", "unknown", FailedReason]
"""Why a call on waiting items left this one alone: a client has it · it is ready already · it did not die in a queue to which it could go
back · it was settled, put back under another id, dropped, or is on its way to another queue · no partition has given such an id · see
`FailedReason`."""
Whereabouts = Literal["ready", "scheduled", "leased", "dying", "gone", "unknown", "unavailable"]
"""Where an item is. `gone`: see the explanation's reason. `unavailable`: its partition is not open."""
BrowseState = Literal["ready", "leased", "scheduled"]
"""Where a browsed item was."""


# -- produce and lease ------------------------------------------------------------------------------------------------


class Produced(Answer, frozen=True, kw_only=True):
    """The items are stored durably, in one partition."""

    queue_name: QueueName
    partition: int
    first_id: Annotated[ItemIdText, about("The first item's id. The others follow without a gap: each offset is one more.")]
    count: Annotated[int, about("How many items.")]
    deduplicated: Annotated[bool, about("Whether an earlier call with the same key had stored them.")] = False

    @property
    def ids(self) -> list[str]:
        """The ids of the items, in the order in which they were given; made when asked for."""
        place, _, offset = self.first_id.rpartition(".")
        first = int(offset)
        return [f"{place}.{first + n}" for n in range(self.count)]


class Lease(Answer, frozen=True, kw_only=True):
    """A claim on `count` items of one partition until `lease_deadline`. Unless it is extended before, they are then served again."""

    lease_id: Annotated[LeaseIdText, about("Names the lease in other calls.")]
    partition: int
    count: Annotated[int, about("How many items.")]
    lease_deadline: Time


class LeasedItem(Answer, frozen=True):
    """An item as it is served. `id` is good for this lease only. `lease_id` and `lease_deadline` are null where it is only looked at."""

    id: ItemIdText
    origin: ItemIdText
    partition: int
    lease_id: LeaseIdText | None = None
    lease_deadline: Time | None = None
    attempts: int = 0
    enqueued_at: Time | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: dict[str, str] | None = None
    payload: bytes = msgspec.field(name="bytes", default=b"")

    def json(self) -> Any:
        """The payload, decoded as JSON. Raises ValueError if it is not JSON."""
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the payload of item {self.id} is not JSON: {error}") from None


class Ignored(Answer, frozen=True, kw_only=True):
    """An id on which the call did nothing, and why."""

    id: Annotated[str, about("The item or lease that was named.")]
    reason: Annotated[str, one_of(IgnoredReason), about("What is known of it; docs/reference/api.md has the list.")]


_Ignored = Annotated[
    list[Ignored], about("What the call did nothing with, because it was settled before, or was never leased (by this client).")
]


class Completed(Answer, frozen=True, kw_only=True):
    """How many items were completed."""

    completed: Annotated[int, about("Items that are done.")]
    ignored: _Ignored = []


class Leased(Answer, frozen=True, kw_only=True):
    """What a lease call got: leases with their items, or none, if there was nothing in time. Iterating gives the items."""

    queue_name: QueueName
    partition: Annotated[int | None, about("That of the first lease.")] = None
    leases: Annotated[list[Lease], about("The leases.")] = []
    items: Annotated[list[LeasedItem], about("The items.")] = []
    completed: Annotated[Completed | None, about("What the call completed; null: it named nothing to complete.")] = None

    @property
    def ids(self) -> list[str]:
        """The ids of the items."""
        return [item.id for item in self.items]

    @property
    def lease_ids(self) -> list[str]:
        """The ids of the leases."""
        return [lease.lease_id for lease in self.leases]

    def __iter__(self) -> Iterator[LeasedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Peeked(Answer, frozen=True, kw_only=True):
    """Items that were looked at."""

    queue_name: QueueName = ""
    items: Annotated[list[LeasedItem], about("The items.")] = []


# -- outcomes ---------------------------------------------------------------------------------------------------------


class Left(Ignored, frozen=True, kw_only=True):
    """An id on which the call did not act, and why."""

    id: Annotated[str, about("The item that was named.")]
    reason: Annotated[str, one_of(LeftReason), about("Why, in a word: docs/reference/api.md has the list.")]


class Retried(Answer, frozen=True, kw_only=True):
    """How many items were put back, and how many died."""

    retried: Annotated[int, about("Items put back.")]
    dead: Annotated[int, about("Items that died: asked for, or because their attempts were used up.")] = 0
    ignored: _Ignored = []


class Released(Answer, frozen=True, kw_only=True):
    """How many items were given back without an attempt being counted."""

    released: Annotated[int, about("Items given back untouched.")]
    ignored: _Ignored = []


class Staged(Answer, frozen=True, kw_only=True):
    """How many items have an outcome that takes effect when their lease is completed."""

    staged: Annotated[int, about("Items whose outcome is stated.")]
    ignored: _Ignored = []


class Extended(Answer, frozen=True, kw_only=True):
    """The leases with their new deadlines."""

    leases: Annotated[list[Lease], about("The leases.")] = []
    ignored: _Ignored = []


class Deleted(Answer, frozen=True, kw_only=True):
    """How many items were deleted."""

    deleted: Annotated[int, about("Items dropped.")]
    ignored: Annotated[list[Left], about("What was not dropped, and why.")] = []


class MadeReady(Answer, frozen=True, kw_only=True):
    """How many scheduled items are ready now."""

    ready: Annotated[int, about("Scheduled items that were made ready. Each has a new id and its old origin.")]
    ignored: Annotated[list[Left], about("What was not made ready, and why.")] = []


class MovedItems(Answer, frozen=True, kw_only=True):
    """How many items left the queue, and how many of them have arrived."""

    matched: Annotated[int, about("Items that left the queue.")]
    moved: Annotated[int, about("Those of them that have arrived; the others are on their way.")] = 0
    targets: Annotated[dict[str, int], about("How many have arrived, by queue.")] = {}
    ignored: Annotated[list[Left], about("What was not moved, and why; with `outcome_unknown`, what may have been.")] = []


class Cleared(Answer, frozen=True, kw_only=True):
    """How many items were dropped."""

    ready: Annotated[int, about("Items that could be leased now.")] = 0
    scheduled: Annotated[int, about("Items that are not due yet.")] = 0


class Redriven(Answer, frozen=True, kw_only=True):
    """How many items were found, and how many of them are back where they came from."""

    matched: Annotated[int, about("Items that were found.")] = 0
    redriven: Annotated[int, about("Items sent back that have arrived; none in a dry run.")] = 0
    targets: Annotated[dict[str, int], about("How many, by queue.")] = {}


# -- looking ----------------------------------------------------------------------------------------------------------


class BrowsedItem(Answer, frozen=True):
    """An item as it stood when it was read. A scheduled item has the id under which it was produced."""

    state: Annotated[str, one_of(BrowseState), about("Where the item was when it was read.")]
    id: ItemIdText
    origin: ItemIdText
    partition: int
    attempts: Annotated[int, about("How often it was leased, the lease that it is in included.")] = 0
    enqueued_at: Time | None = None
    enqueue_at: Annotated[Time | None, about("When a scheduled item is due.")] = None
    expire_deadline: Time | None = None
    lease_id: LeaseIdText | None = None
    lease_deadline: Time | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    headers: dict[str, str] | None = None
    payload: bytes | None = msgspec.field(name="bytes", default=None)


class Browsed(Answer, frozen=True, kw_only=True):
    """A page of what a partition had at one moment. Iterating gives the items."""

    queue_name: QueueName
    partition: int
    items: Annotated[list[BrowsedItem], about("The items.")] = []
    cursor: Annotated[str | None, about("The cursor of the next page; null on the last.")] = None

    def __iter__(self) -> Iterator[BrowsedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


FAILURES_HEADER: Final = "sluiceway-failures"
"""Header of a dead item: a JSON list of `FailedAttempt`, the latest last."""


class FailedAttempt(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that did not complete its item, as far as it is known. What is not known is left out."""

    attempt: Annotated[int, about("1 for the first.")]
    at: Annotated[Time, about("When it ended.")]
    client_id: Annotated[str, about("The client that had leased the item.")] = ""
    host: Annotated[str, about("The client's machine.")] = ""
    handler_time: Annotated[Duration | None, about("How long the handler ran.")] = None
    reason: Annotated[str, about("Why: an exception's type and message, or what the client said.")] = ""
    trace: Annotated[str, about("The last lines of the exception's trace.")] = ""


class ReasonCount(Answer, frozen=True, kw_only=True):
    """Items that died alike."""

    reason: Annotated[str, about("An exception's type, or the reason that the client gave, up to 200 characters; empty: none was given.")]
    source: Annotated[str | None, about("The queue in which they died; null: not known.")] = None
    items: Annotated[int, about("How many are in the queue.")]


class Reasons(Answer, frozen=True, kw_only=True):
    """Why the items of a dead queue died. Iterating gives the reasons, the most frequent first."""

    queue_name: QueueName
    items: Annotated[int, about("Items of the queue, whether they died or not.")] = 0
    reasons: Annotated[list[ReasonCount], about("The 100 most frequent reasons, the most frequent first.")] = []
    skipped: Annotated[list[int], about("Partitions that are not counted, because they are not available.")] = []

    def __iter__(self) -> Iterator[ReasonCount]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)


class Searched(Answer, frozen=True, kw_only=True):
    """What one call of a search found. Iterating gives the items."""

    queue_name: QueueName
    items: Annotated[list[BrowsedItem], about("The items that match, by partition.")] = []
    looked_at: Annotated[int, about("Items that this call compared with the search.")] = 0
    skipped: Annotated[list[int], about("Partitions that this call could not look into, because they are not available.")] = []
    next: Annotated[str | None, about("Pass it to the next call to search on; null: the whole queue was searched.")] = None

    def __iter__(self) -> Iterator[BrowsedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Explanation(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Where an item is, and why it is not being served. What does not apply is left out."""

    id: ItemIdText
    state: Annotated[str, one_of(Whereabouts), about("Where the item is.")]
    reason: Annotated[str, about("Why, in words.")]
    ahead: Annotated[int | None, about("Ready items that are served before it.")] = None
    attempts: int | None = None
    due_at: Annotated[Time | None, about("When it can be leased.")] = None
    expires_at: Annotated[Time | None, about("When it is dead unless it is completed.")] = None
    lease_id: LeaseIdText | None = None
    client_id: Annotated[str | None, about("The client that has the lease.")] = None
    lease_deadline: Time | None = None
    failures: Annotated[list[FailedAttempt], about("The last attempts that failed, the latest last.")] = []


class PartitionExplanation(Answer, frozen=True, kw_only=True):
    """Which instance owns a partition, and why."""

    partition: int
    owner: Annotated[str | None, about("Instance that owns the partition; null: none at the moment.")] = None
    address: Annotated[str | None, about("The owner's URL; null: not known.")] = None
    backend: Annotated[str, about("The storage backend that holds it.")]
    state: Annotated[str, about("Whether the partition serves.")]
    reason: Annotated[str, about("Why, in words.")]
    era: Annotated[int, about("Rises with each change of the strategy; part of the fence.")] = 1
    grant: Annotated[
        int | None,
        about(
            "Which assignment of the partition this is, part of the fence: with `rounds` the number of the round. Null: a server that is "
            "alone, or no instance has it."
        ),
    ] = None
    waits_for: Annotated[list[str], about("Instances that may still serve it and have to stop first, or be given up.")] = []
