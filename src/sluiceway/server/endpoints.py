"""What the server answers: one table, from which requests are served, scopes are checked, and OpenAPI is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sluiceway.model.access import Action
from sluiceway.server.http import JSON, Body, Request, Send
from sluiceway.wire import protobuf

Handler = Callable[[Request], Awaitable[Body]]
Stream = Callable[[Request, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A call: `POST` with a JSON object of type `call`, answered with JSON of type `answer`.

    With `query` the body may be an Arrow stream instead, and the other fields are in the query string, as that type. With `gives_arrow` the
    answer may be one. An answer of one type or another, as was asked, has a union of them. `action` is what a key must be allowed to do;
    the handler checks it for each queue that the call names, by `request.permit`, before it looks for the queue. None: any key will do, for
    a call on no queue. `errors` are the codes that this call may answer with beside those of every call. With `redirects` it answers with
    where else to go, if it is asked to.
    """

    path: str
    action: Action | None
    handle: Handler
    call: type[msgspec.Struct]
    answer: Any
    summary: str
    errors: tuple[str, ...] = ()
    query: type[msgspec.Struct] | None = None
    gives_arrow: bool = False
    redirects: bool = False

    @property
    def takes_arrow(self) -> bool:
        return self.query is not None

    @property
    def takes_protobuf(self) -> bool:
        """A call that Querator has; the answer is a protobuf message then, too."""
        return self.path in protobuf.CALLS


class Reply:
    """The answer to a `GET`."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(self, body: Body, content_type: bytes = JSON, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.body, self.content_type, self.status, self.headers = body, content_type, status, headers


@dataclass(frozen=True, slots=True)
class Page:
    """Something to `GET`. `action` None: for everybody, without a key. A `stream` sends its answer by itself, for as long as it takes.

    For OpenAPI: the answer comes with one of `statuses`, JSON is of the type `answer`, `query` is the type of the query string, and
    `errors` are the codes beside those of every page.
    """

    path: str
    action: Action | None
    handle: Callable[[Request], Awaitable[Reply]] | None
    summary: str
    stream: Stream | None = None
    content_types: tuple[str, ...] = ("application/json",)
    answer: Any = dict
    query: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (200,)
    errors: tuple[str, ...] = ()
