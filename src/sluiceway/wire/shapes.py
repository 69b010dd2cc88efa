"""The texts and answers of the API as types: answers are encoded from them, and OpenAPI is written from them and from the calls.

What a `Meta` says here is for the reader of the OpenAPI document. The checks themselves are in the decoders: a refusal has to say more than
that a pattern did not match.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sluiceway.contract.item_answers import Ignored


class Shape(msgspec.Struct, gc=False):
    """An answer, or a part of one. Every field is there, also where it is null; a client passes over those that it does not know."""


class Done(Shape):
    """Nothing more to say: it is done."""


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
