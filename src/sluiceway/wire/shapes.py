"""Types of API answers that only the server needs. Answers are encoded from them, and the OpenAPI document is generated from them.

A `Meta` only documents a field. The decoders do the checks, because an error has to say more than that a pattern did not match.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sluiceway.contract.item_answers import Ignored
from sluiceway.contract.problem_answers import ProblemInfo


class Shape(msgspec.Struct, gc=False):
    """An answer, or a part of one. Every field is present, even if it is null. Clients ignore unknown fields."""


class Done(Shape):
    """An empty answer: the call succeeded."""


class Alive(Shape):
    """The server process is running."""

    alive: bool


class CheckInfo(Shape):
    """The check of one dependency of the server. `took_ms`: the duration of the check in milliseconds."""

    name: str
    ok: bool
    detail: str
    took_ms: int


class Ready(Shape):
    """The server's readiness. `problems`: the reasons if it is not ready. `checks` and `attention`: present if the request asked for them.
    `attention`: what is wrong with this instance and its queues, which does not make it less ready."""

    ready: bool
    problems: list[str]
    checks: list[CheckInfo] | msgspec.UnsetType = msgspec.UNSET
    attention: list[ProblemInfo] | msgspec.UnsetType = msgspec.UNSET


class HealthCheck(Shape, rename="camel", omit_defaults=True):
    """One component's health. `output`: the reason for a failure."""

    component_type: str
    status: Literal["pass", "fail"]
    output: str = ""


class Health(Shape):
    """The readiness of the server, in the health check format for HTTP APIs (draft-inadarei-api-health-check-06)."""

    status: Literal["pass", "fail"]
    version: str
    checks: dict[str, list[HealthCheck]]


class Problem(Shape, omit_defaults=True):
    """An error. `field`: the invalid field of the request, if there is one. `ignored`: the ignored ids, with `stale_ids` only."""

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
