"""The API described by itself: OpenAPI 3.1, from the tables of endpoints, pages and errors, and the types of calls and answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import UnionType
from typing import Any, Final, get_args

import msgspec

from sluiceway import __version__
from sluiceway.contract.config_answers import BackendInfo
from sluiceway.contract.fields import Answer
from sluiceway.contract.history_answers import HistorySeries
from sluiceway.contract.instance_answers import GroupTimes
from sluiceway.kernel.errors import KINDS
from sluiceway.server.docs_page import HEADERS, api_page, errors_page
from sluiceway.server.endpoints import Endpoint, Page, Reply
from sluiceway.server.http import ARROW, JSON, PACKED, PROBLEM, Request
from sluiceway.server.openapi_fields import FIELDS
from sluiceway.wire.shapes import Problem

Json = dict[str, Any]

EVERYWHERE: Final = ("internal",)
WITH_KEY: Final = ("unauthenticated", "forbidden", "rate_limited")
OF_CALLS: Final = (
    *("invalid_request", "invalid_body", "body_too_large", "unsupported_media_type", "too_many_requests", "unavailable"),
    *WITH_KEY,
    *EVERYWHERE,
)
"""The codes of every call. One that changes something may also end as `outcome_unknown`."""

_HTML: Final = b"text/html; charset=utf-8"
_TABLES: Final = (GroupTimes, HistorySeries, BackendInfo)
"""Parts of answers that are a `dict` for a client, with the keys that its server sent."""
_REF: Final = "#/components/schemas/{name}"
_ABOUT: Final = """\
A partitioned, lease-based work queue that feeds Spark. Every call is a `POST` with a JSON object. Calls that list Arrow also take an Arrow
does as well.

A field that ends in `_at` or `_deadline` is a time (RFC 3339, UTC), one in `_timeout` or `_after` a duration (`500ms`, `30s`, `1h30m`).
An unknown field is an error.

A call ends *done* (2xx), *refused* (nothing happened: 4xx except `stale_ids`, or 503 with `retryable: true`) or *unknown* (504
`outcome_unknown`: it may have happened; repeat a produce with the same idempotency key). Any path may also answer `not_found` or
`method_not_allowed`."""
_KEY: Final = (
    "An API key, sent as `Authorization: Bearer slw_…`. Its scopes are actions on the queues that match a pattern, such as "
    "`produce:orders-*`, or `admin`. `x-required-action` is the action that a call needs. A server that listens only on loopback does not "
    "require keys by default."
)
_PROTOBUF: Final = (
    "Also accepts `application/protobuf` from Querator's clients and answers with the statuses that they expect:"
    " docs/guides/from-querator.md."
)
_ELSEWHERE: Final = "Only with `X-Sluiceway-Redirect`: another instance can do the whole call. Nothing was done."
_REDIRECT: Final = "`1`: answer with a 307 and the address of the other instance, instead of forwarding the call to it."
_REQUEST_ID: Final = (
    "1 to 64 of `A-Z a-z 0-9 . _ : -`, returned in the answer and written to the server's log. By default the server generates one."
)


def describe(endpoints: Sequence[Endpoint], pages: Sequence[Page]) -> Json:
    """The OpenAPI document of these. The same tables make the same document."""
    return _Description(endpoints, pages).document()


def as_text(document: Json) -> bytes:
    """The document as it is served, and kept in `docs/reference/openapi.json`."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def codes_of(endpoint: Endpoint | Page) -> list[str]:
    """Every code that it may answer with, by status."""
    codes: set[str] = {*endpoint.errors}
    if isinstance(endpoint, Page):
        codes.update(EVERYWHERE, WITH_KEY if endpoint.action else (), ("invalid_request",) if endpoint.query else ())
    else:
        codes.update(OF_CALLS, () if endpoint.action in ("read", None) else ("outcome_unknown",))
    return [code for code in KINDS if code in codes]


class _Description:
    def __init__(self, endpoints: Sequence[Endpoint], pages: Sequence[Page]) -> None:
        self._endpoints, self._pages = endpoints, pages
        types: dict[Any, None] = {Problem: None}
        for endpoint in endpoints:
            types.update(dict.fromkeys((endpoint.call, *_kinds(endpoint.answer), *([endpoint.query] if endpoint.query else ()))))
        for page in pages:
            types.update(dict.fromkeys((page.answer, *([page.query] if page.query else ()))))
        made, self._schemas = msgspec.json.schema_components(types, ref_template=_REF)
        self._made = dict(zip(types, made, strict=True))
        self._answers = {each.__name__: each for each in (*_subclasses(Answer), *_TABLES)}
        self._responses: Json = {}

    def document(self) -> Json:
        paths = {endpoint.path: {"post": self._call(endpoint)} for endpoint in self._endpoints}
        paths |= {page.path: {"get": self._page(page)} for page in self._pages}
        parts: list[Endpoint | Page] = [*self._endpoints, *self._pages]
        queries = {each.query.__name__ for each in parts if each.query is not None}
        schemas = {
            name: _polished(name, _whole(self._answers[name], schema) if name in self._answers else schema)
            for name, schema in sorted(self._schemas.items())
            if name not in queries
        }
        return {
            "openapi": "3.1.0",
            "info": {
                "title": "Sluiceway",
                "version": __version__,
                "description": _ABOUT,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/"}],
            "security": [{"key": []}],
            "paths": paths,
            "components": {
                "schemas": schemas,
                "responses": dict(sorted(self._responses.items())),
                "parameters": {
                    "request_id": {"name": "X-Request-Id", "in": "header", "description": _REQUEST_ID, "schema": {"type": "string"}},
                    "redirect": {"name": "X-Sluiceway-Redirect", "in": "header", "description": _REDIRECT, "schema": {"type": "string"}},
                },
                "headers": {
                    "X-Request-Id": {
                        "description": "Finds the request in the server's log.",
                        "required": True,
                        "schema": {"type": "string"},
                    },
                    "Location": {
                        "description": "The same call at the instance that can do all of it.",
                        "required": True,
                        "schema": {"type": "string"},
                    },
                    "X-Sluiceway-Served-By": {
                        "description": "The URL of the other instance that did the work; absent if this instance or several did it.",
                        "schema": {"type": "string"},
                    },
                    "Retry-After": {
                        "description": "Seconds to wait before repeating the call; with `rate_limited`.",
                        "schema": {"type": "integer", "minimum": 0},
                    },
                },
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": _KEY}},
            },
        }

    def _call(self, endpoint: Endpoint) -> Json:
        content: Json = {JSON.decode(): {"schema": self._made[endpoint.call]}}
        parameters: list[Json] = [{"$ref": "#/components/parameters/request_id"}]
        responses: Json = {}
        if endpoint.redirects:
            parameters.append({"$ref": "#/components/parameters/redirect"})
            responses["307"] = self._good(_ELSEWHERE, {JSON.decode(): {"schema": {"type": "object"}}}, "Location")
        if endpoint.query is not None:
            content[ARROW.decode()] = {"schema": {}}
            parameters += self._query(endpoint.query, "Only with an Arrow body, in place of the JSON fields. ", required=False)
        kinds = [self._made[kind] for kind in _kinds(endpoint.answer)]
        answers: Json = {JSON.decode(): {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}
        if endpoint.gives_packed:
            answers = {PACKED.decode(): answers[JSON.decode()]}
        if endpoint.gives_arrow:
            answers[ARROW.decode()] = {"schema": {}}
        return {
            "operationId": _operation_id(endpoint.path),
            "summary": endpoint.summary,
            **({"description": _PROTOBUF} if endpoint.takes_protobuf else {}),
            "tags": [tag_of(endpoint.path)],
            **({"x-required-action": endpoint.action} if endpoint.action else {}),
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
            "responses": {
                "200": self._good("Done", answers, "X-Sluiceway-Served-By"),
                **responses,
                **self._problems(codes_of(endpoint)),
            },
        }

    def _page(self, page: Page) -> Json:
        content = {kind: {"schema": self._made[page.answer]} if kind.endswith("json") else {} for kind in page.content_types}
        operation: Json = {
            "operationId": _operation_id(page.path),
            "summary": page.summary,
            "tags": [tag_of(page.path)],
            "parameters": [{"$ref": "#/components/parameters/request_id"}, *(self._query(page.query) if page.query else ())],
        }
        if page.action is None:
            operation["security"] = []
        else:
            operation["x-required-action"] = page.action
        problems = self._problems(codes_of(page))
        return {**operation, "responses": {**problems, **{str(status): self._good("The page", content) for status in page.statuses}}}

    def _query(self, kind: type[msgspec.Struct], prefix: str = "", *, required: bool = True) -> list[Json]:
        schema = _polished(kind.__name__, self._schemas[kind.__name__])
        return [
            {
                "name": name,
                "in": "query",
                "required": required and name in schema["required"],
                "description": prefix + field.pop("description", ""),
                "schema": _without_null(field),
            }
            for name, field in schema["properties"].items()
        ]

    def _good(self, description: str, content: Json, *more: str) -> Json:
        return {"description": description, "headers": _headers("X-Request-Id", *more), "content": content}

    def _problems(self, codes: Iterable[str]) -> Json:
        """References to one response for each status."""
        by_status: dict[int, list[str]] = {}
        for code in codes:
            by_status.setdefault(KINDS[code].status, []).append(code)
        return {str(status): {"$ref": f"#/components/responses/{self._problem(status, by_status[status])}"} for status in sorted(by_status)}

    def _problem(self, status: int, codes: list[str]) -> str:
        name = ".".join([str(status), *codes])
        said = {"properties": {"status": {"const": status}, "code": {"enum": codes}}}
        self._responses[name] = {
            "description": "\n".join(f"* `{code}`: {KINDS[code].title}" for code in codes),
            "headers": _headers("X-Request-Id", *(["Retry-After"] if status == 429 else ())),
            "content": {PROBLEM.decode(): {"schema": {"allOf": [self._made[Problem], said]}}},
        }
        return name


def _kinds(answer: Any) -> tuple[Any, ...]:
    """The types of an answer that may be of one or another, depending on what was asked."""
    return get_args(answer) if isinstance(answer, UnionType) else (answer,)


def tag_of(path: str) -> str:
    """The room of the API that a path belongs to: `queue`, `queues`, `keys` …; `server` for what is not under /v1."""
    return path.removeprefix("/v1/").partition(".")[0] if path.startswith("/v1/") else "server"


def _operation_id(path: str) -> str:
    return path.removeprefix("/v1").strip("/").replace(".", "_").replace("/", "_")


def _headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _polished(owner: str, schema: Mapping[str, Any]) -> Json:
    """A type's schema with every field explained."""
    polished = {name: value for name, value in schema.items() if name != "title"}
    if "description" in polished:
        polished["description"] = inspect.cleandoc(polished["description"])
    if "properties" in polished:
        polished["properties"] = {name: _explained(owner, name, field) for name, field in polished["properties"].items()}
    return polished


def _subclasses(kind: type[Answer]) -> Iterator[type[Answer]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _whole(kind: type, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer has all of its fields. The defaults that its type has are for clients of older servers."""
    if getattr(getattr(kind, "__struct_config__", None), "omit_defaults", False):
        return schema
    found: Json = schema.get("properties", {})
    names = kind.__annotations__ if kind in _TABLES else found  # msgspec sorts the optional keys of a TypedDict
    properties = {name: {key: value for key, value in found[name].items() if key != "default"} for name in names}
    return {**schema, "properties": properties, "required": list(properties)}


def _explained(owner: str, name: str, field: Mapping[str, Any]) -> Json:
    said = FIELDS.get(f"{owner}.{name}") or FIELDS.get(name)
    return {"description": said, **field} if said else dict(field)


def _without_null(field: Mapping[str, Any]) -> Json:
    """For a query string, which has no null."""
    rest = {name: value for name, value in field.items() if name not in ("anyOf", "default") or value is not None}
    branches = [branch for branch in rest.pop("anyOf", ()) if branch != {"type": "null"}]
    return rest | (branches[0] if len(branches) == 1 else {"anyOf": branches} if branches else {})


class Documentation:
    """`/openapi.json`, `/docs` and `/docs/errors` of these endpoints and pages, itself included; written when first asked for."""

    def __init__(self, endpoints: Sequence[Endpoint], pages: Sequence[Page]) -> None:
        self._endpoints = endpoints
        self._others = pages

    def pages(self) -> list[Page]:
        html = ("text/html",)
        return [
            Page("/openapi.json", None, self._openapi, "This API as an OpenAPI document"),
            Page("/docs", None, self._docs, "This API as a web page", content_types=html),
            Page("/docs/errors", None, self._errors, "All error codes with advice", content_types=html),
        ]

    @cached_property
    def document(self) -> Json:
        return describe(self._endpoints, [*self._others, *self.pages()])

    @cached_property
    def _text(self) -> bytes:
        return as_text(self.document)

    @cached_property
    def _html(self) -> bytes:
        return api_page(self.document)

    async def _openapi(self, request: Request) -> Reply:
        return Reply(self._text)

    async def _docs(self, request: Request) -> Reply:
        return Reply(self._html, _HTML, headers=HEADERS)

    async def _errors(self, request: Request) -> Reply:
        return Reply(errors_page(), _HTML, headers=HEADERS)
