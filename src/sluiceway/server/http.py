"""HTTP exchange over ASGI: relevant headers, the body within its limits, and the answer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qsl

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import BODIES_SHARE, BODY_TIMEOUT, MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_TEXT_BYTES
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.access import ANYBODY, Action, Actor
from sluiceway.wire import protobuf

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Body = bytes | memoryview

JSON: Final = b"application/json"
ARROW: Final = b"application/vnd.apache.arrow.stream"
PROBLEM: Final = b"application/problem+json"
PROTOBUF: Final = protobuf.CONTENT_TYPE
PACKED: Final = b"application/vnd.msgpack"

CUT_OFF: Final = "sluiceway.cut_off"
"""Key of the scope with a function that ends the connection in the middle of an answer, where there is one."""

_TRACEPARENT = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,64}")
_SHOWN: Final = 80


class DisconnectedError(Exception):
    """The client went away, so there is no one to answer."""


class BodyMemory:
    """Memory budget of all request bodies together, and of those of one API key."""

    def __init__(self, most: int = MAX_BODIES_BYTES) -> None:
        self.left = most
        self._share = most // BODIES_SHARE
        self._held: Counter[str] = Counter()

    def take(self, size: int, key_id: str = "") -> None:
        """Reserve `size` bytes. Raises `too_many_requests`."""
        if size > self.left:
            raise SluicewayError("too_many_requests", "the server has reached its limit of buffered request bodies; try again later")
        if key_id:
            if self._held[key_id] + size > self._share:
                raise SluicewayError("too_many_requests", "this API key has reached its limit of buffered request bodies; try again later")
            self._held[key_id] += size
        self.left -= size

    def give_back(self, size: int, key_id: str = "") -> None:
        """Release reserved bytes."""
        self.left += size
        if key_id and size:
            self._held[key_id] -= size
            if not self._held[key_id]:
                del self._held[key_id]


class Request:
    """A request with parsed headers. `arrow`, `wants_arrow`: whether the body is, and the answer should be, an Arrow stream.

    `protobuf`: both are protobuf messages, also errors. `redirects`: the client prefers a redirect to another instance over forwarding.
    `caller` and `action`, the right that the endpoint needs, are set on admission. `queue_name`: the last queue permitted.
    `traceparent`: the client's place in a trace; empty: none.
    """

    __slots__ = (
        "_encoding",
        "_held",
        "_keys",
        "_length",
        "_memory",
        "_scope",
        "_type",
        "action",
        "arrow",
        "authorization",
        "body",
        "caller",
        "host",
        "last_event_id",
        "protobuf",
        "queue_name",
        "receive",
        "redirects",
        "request_id",
        "traceparent",
        "wants_arrow",
        "whole",
    )

    def __init__(self, scope: Scope, receive: Receive, memory: BodyMemory) -> None:
        self._scope = scope
        self._memory = memory
        self._held = 0
        self._keys: list[bytes] = []
        self.whole = False
        self.receive = receive
        self._type = self._encoding = b""
        self._length: bytes | None = None
        self.request_id = b""
        self.authorization = b""
        self.host = b""
        self.last_event_id = b""
        self.traceparent = ""
        self.queue_name = ""
        self.caller = ANYBODY
        self.action: Action = "admin"
        self.wants_arrow = self.redirects = False
        self.body = b""
        for name, value in scope["headers"]:
            if name == b"content-type":
                self._type = value.partition(b";")[0].strip().lower()
            elif name == b"content-length":
                self._length = value
            elif name == b"accept":
                self.wants_arrow = ARROW in value.lower()
            elif name == b"content-encoding":
                self._encoding = value.strip().lower()
            elif name == b"authorization":
                self.authorization = value
            elif name == b"host":
                self.host = value
            elif name == b"last-event-id":
                self.last_event_id = value
            elif name == b"x-sluiceway-redirect":
                self.redirects = value == b"1"
            elif name == b"traceparent" and _TRACEPARENT.fullmatch(value):
                self.traceparent = value.decode()
            elif name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                self.request_id = value
            elif name == b"idempotency-key":
                self._keys.append(value)
        self.arrow = self._type == ARROW
        self.protobuf = self._type == PROTOBUF
        # Such a call is then made in JSON on the client's behalf.
        self.wants_arrow = self.wants_arrow and not self.protobuf

    @property
    def scope(self) -> Scope:
        """The ASGI scope."""
        return self._scope

    @property
    def target(self) -> bytes:
        """The path with the query string."""
        query: bytes = self._scope["query_string"]
        path: str = self._scope["path"]
        return path.encode() + (b"?" + query if query else b"")

    @property
    def peer(self) -> str:
        """Address of the remote end: that of a proxy, if there is one."""
        client = self._scope.get("client")
        return client[0] if client else "unknown"

    def check_type(self, takes_arrow: bool, takes_protobuf: bool = False) -> None:
        """Check the content type. Raises `unsupported_media_type`, and `invalid_request` for fields in the query string of a JSON call.

        The type is required: a web page can send other types, and none, to a server on this machine without a preflight request.
        """
        if self._encoding not in (b"", b"identity"):
            raise SluicewayError("unsupported_media_type", "the body must not be compressed: leave out content-encoding")
        if self._type != JSON and not (self.arrow and takes_arrow) and not (self.protobuf and takes_protobuf):
            taken = [JSON] + [ARROW] * takes_arrow + [PROTOBUF] * takes_protobuf
            wanted = " or ".join(each.decode() for each in taken)
            shown = self._type.decode("latin-1")[:_SHOWN] or "none"
            raise SluicewayError("unsupported_media_type", f"this call accepts {wanted}; the request's content-type is {shown}")
        if not self.arrow and self._scope["query_string"]:
            raise SluicewayError("invalid_request", "put the fields of this call into its body, not into the query string")

    @property
    def actor(self) -> Actor:
        """Author of the request's changes, for the audit trail."""
        return Actor(self.caller.name, self.request_id.decode())

    def permit(self, queue_name: str, field: str = "queue_name") -> str:
        """Return the name if it is valid and the caller has the right on that queue. Raises `invalid_request`, `forbidden`."""
        check_queue_name(queue_name, field)
        self.caller.require(self.action, queue_name)
        self.queue_name = queue_name
        return queue_name

    def keyed(self, given: str | None, field: str) -> str | None:
        """Return the idempotency key from the field, or from the header Idempotency-Key. Raises `invalid_request`."""
        keys = {value.strip().decode("latin-1") for value in self._keys}
        if not keys:
            return given
        key = keys.pop()
        if len(key) > 1 and key[0] == key[-1] == '"':
            # Quoted, as the standard writes it.
            key = key[1:-1]
        if keys or not key or len(key) > MAX_TEXT_BYTES or not (key.isascii() and key.isprintable()):
            raise invalid("Idempotency-Key", f"the header must be one key of 1 to {MAX_TEXT_BYTES:,} printable ASCII characters")
        if given is not None and given != key:
            raise invalid(field, "differs from the header Idempotency-Key; send only one of them")
        return key

    def flag(self, name: str) -> bool:
        """Whether the query string has the name, alone or with a value other than `false` or `0`."""
        pairs = dict(parse_qsl(self._scope["query_string"].decode("latin-1"), keep_blank_values=True))
        return pairs.get(name, "false") not in ("false", "0")

    def query(self) -> dict[str, str]:
        """Parse the query string. Raises `invalid_request` for a repeated parameter, or if it cannot be read."""
        try:
            pairs = parse_qsl(self._scope["query_string"].decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict")
        except ValueError:
            raise SluicewayError("invalid_request", "the query string cannot be read; queue_name is required in it") from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name in found:
                raise invalid(name[:_SHOWN], "is given twice in the query string")
            found[name] = value
        return found

    async def read_body(self, most: int = MAX_BODY_BYTES, body_timeout: Millis = BODY_TIMEOUT) -> None:
        """Read the whole body; `let_go` releases its memory.

        Raises `body_too_large`, `too_many_requests`, `invalid_body` if it does not arrive within `body_timeout` ms, DisconnectedError.
        """
        if self._length is not None and int(self._length) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(body_timeout / 1000):
                await self._read(most)
        except TimeoutError:
            raise SluicewayError("invalid_body", f"the body did not arrive within {format_duration(body_timeout)}") from None

    async def _read(self, most: int) -> None:
        parts: list[bytes] = []
        while not self.whole:
            message = await self._message()
            part = message.get("body", b"")
            self._hold(len(part), most)
            parts.append(part)
            self.whole = not message.get("more_body", False)
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, size: int, most: int) -> None:
        self._memory.take(size, self.caller.key_id)
        self._held += size
        if self._held > most:
            raise _too_large(most)

    @property
    def received(self) -> int:
        """Number of bytes of the body received."""
        return self._held

    def let_go(self) -> None:
        """Release the body's memory."""
        self._memory.give_back(self._held, self.caller.key_id)
        self._held, self.body = 0, b""

    async def _message(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        return message

    async def disconnected(self) -> None:
        """Wait until the client goes away."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def watch(self, gone: Callable[[], None]) -> Callable[[], object]:
        """Call `gone` when the client goes away, until the returned function is called. For a request whose body was read.

        Raises DisconnectedError if it is known to have gone.
        """
        watching = asyncio.ensure_future(self.disconnected())

        def ended(_: object) -> None:
            if not watching.cancelled():
                gone()

        watching.add_done_callback(ended)
        return watching.cancel


def _too_large(most: int) -> SluicewayError:
    return SluicewayError("body_too_large", f"the body is larger than {most} bytes")


def headers_of(content_type: bytes, body: Body, request_id: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer with that body."""
    return [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), (b"x-request-id", request_id), *more]


async def respond(send: Send, status: int, content_type: bytes, body: Body, request_id: bytes, *more: tuple[bytes, bytes]) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": headers_of(content_type, body, request_id, *more)})
    await send({"type": "http.response.body", "body": body})
