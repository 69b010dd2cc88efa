"""The texts and answers of the API as types: answers are encoded from them, and OpenAPI is written from them and from the calls.

What a `Meta` says here is for the reader of the OpenAPI document. The checks themselves are in the decoders: a refusal has to say more than
that a pattern did not match.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON, MAX_PARTITIONS, MAX_TEXT_BYTES
from sluiceway.kernel.names import QUEUE_NAME
from sluiceway.model.access import PATTERN
from sluiceway.model.queue import PartitionState, Verb
from sluiceway.model.rebalance import RebalanceState, StepKind
from sluiceway.model.requests import IgnoredReason, Whereabouts


def _text(title: str | None = None, **schema: Any) -> Meta:
    return Meta(title=title, extra_json_schema=schema)


_NUMBER: Final = "(0|[1-9][0-9]{0,8})"
_LONG: Final = "(0|[1-9][0-9]{0,17})"

QueueName = Annotated[str, _text("queue name", pattern=f"^{QUEUE_NAME.pattern}$", examples=["orders"])]
Duration = Annotated[str, _text("duration", pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$", maxLength=32, examples=["30s"])]
Time = Annotated[str, _text("time", format="date-time", examples=["2026-01-31T08:00:00Z"])]
ItemIdText = Annotated[str, _text("item id", pattern=rf"^[^.]*\.{_NUMBER}\.{_LONG}$", maxLength=64, examples=["k7f3q2ma.0.1042"])]
LeaseIdText = Annotated[
    str, _text("lease id", pattern=rf"^[^.]*\.{_NUMBER}\.L(0|[1-9][0-9]{{0,16}})$", maxLength=64, examples=["k7f3q2ma.0.L17"])
]
Incarnation = Annotated[str, _text(pattern=f"^[{INCARNATION_ALPHABET}]{{{INCARNATION_LENGTH}}}$", examples=["k7f3q2ma"])]
ShortText = Annotated[str, _text(maxLength=MAX_TEXT_BYTES)]
Label = Annotated[str, _text(minLength=1, maxLength=MAX_TEXT_BYTES)]
"""A short text that must not be empty."""

LogicalQueueCount = Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)]
Pattern = Annotated[str, _text("pattern of queue names", pattern=f"^{PATTERN.pattern}$", examples=["orders-*"])]
Pivot = Annotated[str, _text(pattern=f"^({QUEUE_NAME.pattern})?$")]
"""Where a page begins: after that name, or (empty) at the first."""

ONE_PAYLOAD: Final = _text(
    oneOf=[
        {"required": [name], "properties": {name: {"type": "string"}, other: {"type": "null"}}}
        for name, other in (("bytes", "utf8"), ("utf8", "bytes"))
    ]
)
SOME: Final = _text(minItems=1)
UP_TO_JSON: Final = _text(maxItems=MAX_ITEMS_JSON)
SOME_JSON: Final = _text(minItems=1, maxItems=MAX_ITEMS_JSON)
SOME_ARROW: Final = _text(minItems=1, maxItems=MAX_ITEMS_ARROW)


class Shape(msgspec.Struct, gc=False):
    """An answer, or a part of one. Every field is there, also where it is null; a client passes over those that it does not know."""


class BackoffInfo(Shape):
    first: Duration
    most: Duration


class PartitionInfo(Shape):
    """A partition, and the instance that has it. `state` is the recorded one; whether it serves is in `queue.stats`."""

    partition: int
    backend: str
    state: PartitionState
    parents: list[int]
    owner: str | None
    address: str | None


class OpenRebalance(Shape):
    """The rebalance that a queue has open, in short."""

    id: str
    state: RebalanceState | None
    step: StepKind | None
    items_left: int | None


class QueueInfo(Shape):
    """A queue with its settings."""

    queue_name: QueueName
    incarnation: Incarnation
    created_at: Time
    updated_at: Time
    version: int
    lease_timeout: Duration
    max_lease_timeout: Duration
    max_attempts: int
    dead_queue: QueueName | None
    expire_timeout: Duration
    retry_backoff: BackoffInfo | None
    idempotency_window: Duration
    write_timeout: Duration | None
    logical_queues: LogicalQueueCount | Literal["auto"] | None
    reference: str
    paused: tuple[Verb, ...]
    requested_partitions: int
    partitions: list[PartitionInfo]
    rebalance: OpenRebalance | None


class QueuePage(Shape):
    """Some queues, by name."""

    items: list[QueueInfo]
    next: QueueName | None


class Done(Shape):
    """Nothing more to say: it is done."""


class Produced(Shape):
    """The items are stored."""

    queue_name: QueueName
    partition: int
    first_id: ItemIdText
    count: int
    deduplicated: bool


class HeldLease(Shape):
    """A lease of `count` items."""

    lease_id: LeaseIdText
    partition: int
    count: int
    lease_deadline: Time


class ServedItem(Shape):
    """An item as it is served. `lease_id` and `lease_deadline` are null where it is only looked at."""

    id: ItemIdText
    origin: ItemIdText
    partition: int
    lease_id: LeaseIdText | None
    lease_deadline: Time | None
    attempts: int
    enqueued_at: Time
    kind: str | None
    encoding: str | None
    reference: str | None
    headers: dict[str, str] | None
    payload: bytes = msgspec.field(name="bytes")


class Leased(Shape):
    """Leases and their items; none, where there was nothing in time. `partition` is that of the first lease."""

    queue_name: QueueName
    partition: int | None
    leases: list[HeldLease]
    items: list[ServedItem]


class Peeked(Shape):
    """What was looked at."""

    queue_name: QueueName
    items: list[ServedItem]


class Ignored(Shape):
    """An id on which the call did nothing, and why."""

    id: str
    reason: IgnoredReason


class Completed(Shape):
    completed: int
    ignored: list[Ignored]


class Retried(Shape):
    retried: int
    dead: int
    ignored: list[Ignored]


class Released(Shape):
    released: int
    ignored: list[Ignored]


class Staged(Shape):
    staged: int
    ignored: list[Ignored]


class Extended(Shape):
    leases: list[HeldLease]
    ignored: list[Ignored]


class Cleared(Shape):
    """How many items were dropped."""

    ready: int
    scheduled: int


class Redriven(Shape):
    """`matched` items were found, `redriven` of them are back; by queue in `targets`."""

    matched: int
    redriven: int
    targets: dict[str, int]


class Explained(Shape, omit_defaults=True):
    """Where an item is. What does not apply is left out."""

    id: ItemIdText
    state: Whereabouts
    reason: str
    ahead: int | None = None
    attempts: int | None = None
    due_at: Time | None = None
    expires_at: Time | None = None
    lease_id: LeaseIdText | None = None
    client_id: str | None = None
    lease_deadline: Time | None = None


class PartitionCounts(Shape):
    """A partition now, and what it has counted since the queue was created."""

    partition: int
    backend: str
    state: str
    commit_time_ms: float
    degraded: bool
    total: int
    ready: int
    total_leased: int
    scheduled: int
    transferring: int
    leases: int
    failures: int
    produced: int
    deduplicated: int
    leased: int
    completed: int
    retried: int
    expired: int
    dead: int
    released: int
    cleared: int
    redriven: int
    moved: int
    moved_in: int
    next_offset: int | None = None


class LogicalQueueCounts(Shape):
    """Requests that wait, and are in flight, at one logical queue, which is an instance's share of the queue."""

    instance: str | None
    produce_waiting: int
    lease_waiting: int
    complete_waiting: int
    in_flight: int
    partitions: list[PartitionCounts]


class QueueCounts(Shape):
    """What a queue's partitions hold."""

    queue_name: QueueName
    logical_queues: list[LogicalQueueCounts]


class Alive(Shape):
    """The process answers."""

    alive: bool


class CheckInfo(Shape):
    """Something that the server stands on, and how long it took to look at it."""

    name: str
    ok: bool
    detail: str
    took_ms: int


class Ready(Shape):
    """Whether all is well, and if not, why, in words. `checks` are there where they were asked for."""

    ready: bool
    problems: list[str]
    checks: list[CheckInfo] | msgspec.UnsetType = msgspec.UNSET


class HealthCheck(Shape, rename="camel", omit_defaults=True):
    """One component's health. `output` says what is wrong with it."""

    component_type: str
    status: Literal["pass", "fail"]
    output: str = ""


class Health(Shape):
    """The readiness of the server, in the health check format for HTTP APIs (draft-inadarei-api-health-check-06)."""

    status: Literal["pass", "fail"]
    version: str
    checks: dict[str, list[HealthCheck]]


class Problem(Shape, omit_defaults=True):
    """What went wrong. `field` is there where one field of the request is at fault, `ignored` with `stale_ids`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    request_id: str
    message: str
    field: str | None = None
    ignored: list[Ignored] | None = None
