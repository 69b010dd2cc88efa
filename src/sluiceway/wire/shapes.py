"""The texts and answers of the API as types: answers are encoded from them, and OpenAPI is written from them and from the calls.

What a `Meta` says here is for the reader of the OpenAPI document. The checks themselves are in the decoders: a refusal has to say more than
that a pattern did not match.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sluiceway.contract.fields import ItemIdText, LeaseIdText, QueueName, TimeText
from sluiceway.model.requests import IgnoredReason, Whereabouts


class Shape(msgspec.Struct, gc=False):
    """An answer, or a part of one. Every field is there, also where it is null; a client passes over those that it does not know."""


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
    lease_deadline: TimeText


class ServedItem(Shape):
    """An item as it is served. `lease_id` and `lease_deadline` are null where it is only looked at."""

    id: ItemIdText
    origin: ItemIdText
    partition: int
    lease_id: LeaseIdText | None
    lease_deadline: TimeText | None
    attempts: int
    enqueued_at: TimeText
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
    due_at: TimeText | None = None
    expires_at: TimeText | None = None
    lease_id: LeaseIdText | None = None
    client_id: str | None = None
    lease_deadline: TimeText | None = None


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
