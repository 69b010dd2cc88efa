"""The answers of calls on items: produce, lease, the outcomes, and looking at items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """The items are stored durably, in one partition unless the queue keeps keys together; but for `duplicates`."""

    queue_name: QueueName
    partition: Annotated[int, about("Partition of the first item.")]
    first_id: Annotated[ItemIdText, about("Id of the first item. Without `offsets`, those of the others follow without a gap.")]
    count: Annotated[int, about("Number of items in the call.")]
    deduplicated: Annotated[bool, about("Whether an earlier call with the same key stored them.")] = False
    offsets: Annotated[
        list[int] | None,
        about("Of each item, in the order of the call, where the queue sorted or divided it by key, or has duplicates: the end of its id."),
    ] = None
    partitions: Annotated[
        list[int] | None, about("Of each item, in the order of the call, where they are not all in one: the middle of its id.")
    ] = None
    duplicates: Annotated[
        list[int],
        about(
            "Indexes of the items that were not stored, since there is an item with their `unique_key`: `offsets` has that of its first id."
        ),
    ] = []

    @property
    def stored(self) -> int:
        """Number of items that were stored, by this call or an earlier one with the same idempotency key."""
        return self.count - len(self.duplicates)

    @property
    def ids(self) -> list[str]:
        """The ids of the items, in the order in which they were given; made when asked for."""
        return [self.id_at(number) for number in range(self.count)]

    def id_at(self, number: int) -> str:
        """The id of the item that was given as number `number`."""
        incarnation, partition, first = self.first_id.split(".")
        offset = int(first) + number if self.offsets is None else self.offsets[number]
        return f"{incarnation}.{partition if self.partitions is None else self.partitions[number]}.{offset}"


class Lease(Answer, frozen=True, kw_only=True):
    """A claim on `count` items of one partition until `lease_deadline`. After that, items that are still open are served again."""

    lease_id: Annotated[LeaseIdText, about("Id of the lease, for other calls.")]
    partition: int
    count: Annotated[int, about("Number of items.")]
    lease_deadline: Time


class LeasedItem(Answer, frozen=True):
    """An item as it is served. `id` is valid for this lease only. `lease_id` and `lease_deadline` are null if the item is only read."""

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
    key: str | None = None
    priority: int | None = None
    unique_key: str | None = None
    headers: dict[str, str] | None = None
    payload: bytes = msgspec.field(name="bytes", default=b"")

    def json(self) -> Any:
        """The payload, decoded as JSON. Raises ValueError if it is not JSON."""
        try:
            return msgspec.json.decode(self.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the payload of item {self.id} is not JSON: {error}") from None


class Ignored(Answer, frozen=True, kw_only=True):
    """An id that the call ignored, and why."""

    id: Annotated[str, about("The item or lease id.")]
    reason: Annotated[str, one_of(IgnoredReason), about("Why it was ignored; docs/reference/api.md lists the reasons.")]


_Ignored = Annotated[list[Ignored], about("Ids that the call ignored: settled before, or never leased (by this client).")]


class Completed(Answer, frozen=True, kw_only=True):
    """How many items were completed."""

    completed: Annotated[int, about("Number of completed items.")]
    ignored: _Ignored = []


class Leased(Answer, frozen=True, kw_only=True):
    """Leases with their items, or none if no item was ready in time. Iterating gives the items."""

    queue_name: QueueName
    partition: Annotated[int | None, about("Partition of the first lease; null: no lease.")] = None
    leases: Annotated[list[Lease], about("The leases.")] = []
    items: Annotated[list[LeasedItem], about("The items.")] = []
    completed: Annotated[
        Completed | None, about("What the call completed; null: nothing was named, or it is not confirmed: complete it again.")
    ] = None

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
    """Items that were read, not leased."""

    queue_name: QueueName = ""
    items: Annotated[list[LeasedItem], about("The items.")] = []


# -- outcomes ---------------------------------------------------------------------------------------------------------


class Left(Ignored, frozen=True, kw_only=True):
    """An item that the call left alone, and why."""

    id: Annotated[str, about("The item id.")]
    reason: Annotated[str, one_of(LeftReason), about("Why it was left alone; docs/reference/api.md lists the reasons.")]


class Retried(Answer, frozen=True, kw_only=True):
    """How many items were put back, and how many died."""

    retried: Annotated[int, about("Number of items put back.")]
    dead: Annotated[int, about("Number of dead items: by request, or out of attempts.")] = 0
    ignored: _Ignored = []


class Released(Answer, frozen=True, kw_only=True):
    """How many items were given back without an attempt being counted."""

    released: Annotated[int, about("Number of items given back unprocessed.")]
    ignored: _Ignored = []


class Staged(Answer, frozen=True, kw_only=True):
    """How many items have an outcome that takes effect when their lease is completed."""

    staged: Annotated[int, about("Number of items with a staged outcome.")]
    ignored: _Ignored = []


class Extended(Answer, frozen=True, kw_only=True):
    """The leases with their new deadlines."""

    leases: Annotated[list[Lease], about("The leases.")] = []
    ignored: _Ignored = []


class Deleted(Answer, frozen=True, kw_only=True):
    """How many items were deleted."""

    deleted: Annotated[int, about("Number of deleted items.")]
    ignored: Annotated[list[Left], about("Items that were not deleted, and why.")] = []


class MadeReady(Answer, frozen=True, kw_only=True):
    """How many scheduled items are ready now."""

    ready: Annotated[int, about("Number of scheduled items that were made ready. Each has a new id and keeps its origin.")]
    ignored: Annotated[list[Left], about("Items that were not made ready, and why.")] = []


class MovedItems(Answer, frozen=True, kw_only=True):
    """How many items left the queue, and how many of them have arrived."""

    matched: Annotated[int, about("Number of items that left the queue.")]
    moved: Annotated[int, about("Number of them that have arrived; the others are in transit.")] = 0
    targets: Annotated[dict[str, int], about("Number of arrived items by target queue.")] = {}
    ignored: Annotated[list[Left], about("Items that were not moved, and why. Those with `outcome_unknown` may have been moved.")] = []


class Cleared(Answer, frozen=True, kw_only=True):
    """How many items were dropped."""

    ready: Annotated[int, about("Items that could be leased now.")] = 0
    scheduled: Annotated[int, about("Items that are not due yet.")] = 0


class Redriven(Answer, frozen=True, kw_only=True):
    """How many items matched, and how many of them have arrived in their target queues."""

    matched: Annotated[int, about("Number of matching items.")] = 0
    redriven: Annotated[int, about("Number of items that have arrived; 0 in a dry run.")] = 0
    targets: Annotated[dict[str, int], about("Number of items by target queue.")] = {}


# -- looking ----------------------------------------------------------------------------------------------------------


class BrowsedItem(Answer, frozen=True):
    """An item as it stood when it was read. A scheduled item has the id under which it was produced."""

    state: Annotated[str, one_of(BrowseState), about("State of the item when it was read.")]
    id: ItemIdText
    origin: ItemIdText
    partition: int
    attempts: Annotated[int, about("Number of leases so far, including a current one.")] = 0
    enqueued_at: Time | None = None
    enqueue_at: Annotated[Time | None, about("When a scheduled item is due.")] = None
    expire_deadline: Time | None = None
    lease_id: LeaseIdText | None = None
    lease_deadline: Time | None = None
    kind: str | None = None
    encoding: str | None = None
    reference: str | None = None
    key: str | None = None
    priority: int | None = None
    unique_key: str | None = None
    headers: dict[str, str] | None = None
    payload: bytes | None = msgspec.field(name="bytes", default=None)


class Browsed(Answer, frozen=True, kw_only=True):
    """A page of a partition's snapshot. Iterating gives the items."""

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
    """A failed attempt. Unknown fields are omitted."""

    attempt: Annotated[int, about("Number of the attempt, from 1.")]
    at: Annotated[Time, about("When the attempt ended.")]
    client_id: Annotated[str, about("The client that had leased the item.")] = ""
    host: Annotated[str, about("The client's machine.")] = ""
    handler_time: Annotated[Duration | None, about("How long the handler ran.")] = None
    reason: Annotated[str, about("Why it failed: an exception's type and message, or the client's own text.")] = ""
    trace: Annotated[str, about("The last lines of the exception's trace.")] = ""


def failures_before_death(headers: Mapping[str, str]) -> list[FailedAttempt]:
    """What a dead item's header says of its failed attempts; none if a client produced a header of that name itself."""
    try:
        return msgspec.json.decode(headers.get(FAILURES_HEADER, "[]"), type=list[FailedAttempt])
    except msgspec.MsgspecError:
        return []


class ReasonCount(Answer, frozen=True, kw_only=True):
    """Items that died for the same reason."""

    reason: Annotated[str, about("An exception's type, or the client's own text, up to 200 characters; empty: none given.")]
    source: Annotated[str | None, about("The queue in which they died; null: not known.")] = None
    items: Annotated[int, about("Number of such items in the queue.")]


class Reasons(Answer, frozen=True, kw_only=True):
    """Why the items of a dead queue died. Iterating gives the reasons, the most frequent first."""

    queue_name: QueueName
    items: Annotated[int, about("Number of all items in the queue, including those that did not die.")] = 0
    reasons: Annotated[list[ReasonCount], about("The 100 most frequent reasons, the most frequent first.")] = []
    skipped: Annotated[list[int], about("Partitions that are not counted, because they are not available.")] = []

    def __iter__(self) -> Iterator[ReasonCount]:
        return iter(self.reasons)

    def __len__(self) -> int:
        return len(self.reasons)


class Searched(Answer, frozen=True, kw_only=True):
    """The matches that one search call found. Iterating gives the items."""

    queue_name: QueueName
    items: Annotated[list[BrowsedItem], about("The matching items, by partition.")] = []
    looked_at: Annotated[int, about("Number of items that this call compared.")] = 0
    skipped: Annotated[list[int], about("Partitions that this call did not search, because they are not available.")] = []
    next: Annotated[str | None, about("Pass it to the next call to continue the search; null: the whole queue was searched.")] = None

    def __iter__(self) -> Iterator[BrowsedItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Explanation(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Where an item is, and why it is not being served. Fields that do not apply are omitted."""

    id: ItemIdText
    state: Annotated[str, one_of(Whereabouts), about("State of the item.")]
    reason: Annotated[str, about("The reason, in words.")]
    ahead: Annotated[
        int | None, about("Number of ready items that are served before it: of its partition, or, where keys decide, of its key.")
    ] = None
    attempts: int | None = None
    due_at: Annotated[Time | None, about("When it becomes ready.")] = None
    expires_at: Annotated[Time | None, about("When it becomes dead unless it is completed.")] = None
    lease_id: LeaseIdText | None = None
    client_id: Annotated[str | None, about("The client that has leased it.")] = None
    lease_deadline: Time | None = None
    failures: Annotated[list[FailedAttempt], about("The latest failed attempts, newest last.")] = []
    key: Annotated[str | None, about("The item's key.")] = None
    unique_key: Annotated[str | None, about("The item's unique key.")] = None


class PartitionExplanation(Answer, frozen=True, kw_only=True):
    """Which instance owns a partition, and why."""

    partition: int
    owner: Annotated[str | None, about("Instance that owns the partition; null: none at the moment.")] = None
    address: Annotated[str | None, about("The owner's URL; null: not known.")] = None
    backend: Annotated[str, about("The storage backend that holds it.")]
    state: Annotated[str, about("State of the partition.")]
    reason: Annotated[str, about("The reason, in words.")]
    era: Annotated[int, about("Rises with each change of the strategy; part of the fence.")] = 1
    grant: Annotated[
        int | None,
        about(
            "Number of the partition's assignment, part of the fence; with `rounds`, the number of the round. Null: a standalone server, "
            "or no owner."
        ),
    ] = None
    waits_for: Annotated[
        list[str], about("Instances that may still serve it. They have to stop, or be given up, before its owner serves it.")
    ] = []
    pinned_instance: Annotated[str | None, about("Instance that it is pinned to; null: none.")] = None
    pinned_zone: Annotated[str | None, about("Zone that it is pinned to; null: none.")] = None
