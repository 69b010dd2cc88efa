"""The table of endpoints, from which requests are served, scopes are checked, and OpenAPI is written."""

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

    `query`: the body may be an Arrow stream instead, with the other fields in the query string, as that type. `gives_arrow`: the answer may
    be one. An answer of several types, depending on the call, is a union. `action`: the right that a key needs; the handler checks it for
    each queue that the call names, by `request.permit`, before it looks up the queue. None: any key may call; the call concerns no queue.
    `errors`: its error codes beside those of every call. `redirects`: it answers with the address of another instance if the request allows
    that. `gives_packed`: the answer, of that type, is in MessagePack.
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
    gives_packed: bool = False

    @property
    def takes_arrow(self) -> bool:
        return self.query is not None

    @property
    def takes_protobuf(self) -> bool:
        """Whether Querator has this call; then the answer to a protobuf message is one, too."""
        return self.path in protobuf.CALLS


class Reply:
    """Answer to a `GET`."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(self, body: Body, content_type: bytes = JSON, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.body, self.content_type, self.status, self.headers = body, content_type, status, headers


@dataclass(frozen=True, slots=True)
class Page:
    """A resource to `GET`. `action` None: public, without a key. A `stream` sends its own answer, for as long as it takes.

    For OpenAPI: `statuses`: possible statuses; `answer`: type of the JSON; `query`: type of the query string; `errors`: its codes beside
    those of every page.
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
