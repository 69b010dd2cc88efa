"""The API as an ASGI application: a path finds an endpoint, a guard lets the caller in, the endpoint's handler answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from sluiceway.adapters.system import new_incarnation, stopwatch
from sluiceway.kernel.errors import RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_BODY_BYTES, MAX_CALL_BYTES
from sluiceway.model.access import ANYBODY, Caller
from sluiceway.server.endpoints import Endpoint, Page, Reply
from sluiceway.server.http import ARROW, JSON, PROBLEM, BodyMemory, DisconnectedError, Message, Receive, Request, Scope, Send, respond
from sluiceway.server.item_calls import ItemCalls
from sluiceway.server.queue_calls import QueueCalls
from sluiceway.server.service import QueueService
from sluiceway.wire import answers

log = logging.getLogger("sluiceway.server")


class Guard(Protocol):
    """Lets requests in."""

    async def admit(self, request: Request) -> Caller:
        """Who sent the request. Before its body is read: raises `unauthenticated`, `rate_limited`."""
        ...

    def charge(self, caller: Caller, size: int) -> None:
        """Count a body of that many bytes towards the caller's rate. Raises `rate_limited`."""
        ...


class OpenDoor:
    """Lets everybody in, to do everything."""

    async def admit(self, request: Request) -> Caller:
        return ANYBODY

    def charge(self, caller: Caller, size: int) -> None: ...


class Meter(Protocol):
    """Is told of every request that was answered."""

    def answered(self, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        """`path` is an endpoint's, or empty for what is none; bytes are those of the bodies."""
        ...


@dataclass(frozen=True)
class Fittings:
    """What an application has beside the calls on queues. `endpoints` and `pages` are served together with its own."""

    guard: Guard = field(default_factory=OpenDoor)
    meters: Sequence[Meter] = ()
    endpoints: Sequence[Endpoint] = ()
    pages: Sequence[Page] = ()


class App:
    """An ASGI application over one service. Serves on one event loop; raises nothing at its caller but cancellation."""

    def __init__(self, service: QueueService, fittings: Fittings) -> None:
        self._service = service
        self._guard = fittings.guard
        self._meters = fittings.meters
        self._request_ids = count(1)
        self._process = new_incarnation()
        self._stopping = False
        self._bodies = BodyMemory()
        self._items = ItemCalls(service)
        self.endpoints = [*self._items.endpoints(), *QueueCalls(service).endpoints(), *fittings.endpoints]
        self.pages = [*self._own_pages(), *fittings.pages]
        self._calls = {endpoint.path: endpoint for endpoint in self.endpoints}
        self._gets = {page.path: page for page in self.pages}

    def stop_waiting(self) -> None:
        """End every long poll with `unavailable`, now and from now on. Calls that do not wait go on."""
        self._stopping = True
        self._items.stop_waiting()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        request = Request(scope, receive, self._bodies)
        request.request_id = request.request_id or f"{self._process}-{next(self._request_ids)}".encode()
        began = stopwatch()
        sent = _Sent(send)
        try:
            await self._answer(path, scope["method"], request, sent)
        except DisconnectedError:
            pass
        except SluicewayError as error:
            await _refuse(sent, error, request)
        except Exception:
            log.exception("%s failed, request_id %s", path[:80], request.request_id.decode())
            unexpected = SluicewayError("internal", "an unexpected error; the server's log has it under this request_id")
            await _refuse(sent, unexpected, request)
        finally:
            received = request.received
            request.let_go()
            for meter in self._meters:
                known = path if path in self._calls or path in self._gets else ""
                meter.answered(known, sent.status, stopwatch() - began, received, sent.size)

    async def _answer(self, path: str, method: str, request: Request, send: Send) -> None:
        endpoint = self._calls.get(path)
        if endpoint is not None:
            if method != "POST":
                raise _wrong_method("POST")
            await self._call(endpoint, request, send)
            return
        page = self._gets.get(path)
        if page is None:
            raise SluicewayError("not_found", f"there is no endpoint {path[:80]!r}")
        if method not in ("GET", "HEAD"):
            raise _wrong_method("GET, HEAD")
        await self._get(page, request, send)

    async def _call(self, endpoint: Endpoint, request: Request, send: Send) -> None:
        request.caller, request.action = await self._guard.admit(request), endpoint.action
        if endpoint.action == "admin":
            request.caller.require("admin")
        request.check_type(endpoint.takes_arrow)
        await request.read_body(MAX_BODY_BYTES if endpoint.takes_arrow else MAX_CALL_BYTES)
        self._guard.charge(request.caller, request.received)
        body = await endpoint.handle(request)
        await respond(send, 200, ARROW if request.wants_arrow and endpoint.gives_arrow else JSON, body, request.request_id)

    async def _get(self, page: Page, request: Request, send: Send) -> None:
        if page.action is not None:
            request.caller, request.action = await self._guard.admit(request), page.action
            if page.action == "admin":
                request.caller.require("admin")
        if page.stream is not None:
            await page.stream(request, send)
            return
        assert page.handle is not None
        reply = await page.handle(request)
        await respond(send, reply.status, reply.content_type, reply.body, request.request_id)

    def _own_pages(self) -> list[Page]:
        return [
            Page("/livez", None, self._livez, "Whether the process answers"),
            Page("/readyz", None, self._readyz, "Whether every partition serves, and if not, why"),
        ]

    async def _livez(self, request: Request) -> Reply:
        return Reply(b'{"alive":true}')

    async def _readyz(self, request: Request) -> Reply:
        problems = self._service.problems() + (["the server is stopping"] if self._stopping else [])
        return Reply(msgspec.json.encode({"ready": not problems, "problems": problems}), status=503 if problems else 200)


def create_app(service: QueueService, fittings: Fittings | None = None) -> App:
    """The API over that service, which the caller starts and stops. Without fittings it is open to everybody."""
    return App(service, fittings or Fittings())


class _Sent:
    """Passes on what is sent, and remembers what it was. Status 0: nothing was, as the client had gone."""

    __slots__ = ("_send", "size", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = self.size = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


class _MethodError(SluicewayError):
    def __init__(self, allow: str) -> None:
        super().__init__("method_not_allowed", f"this endpoint takes {allow}")
        self.allow = allow


def _wrong_method(allow: str) -> SluicewayError:
    return _MethodError(allow)


async def _refuse(send: _Sent, error: SluicewayError, request: Request) -> None:
    if send.status:
        # A stream that broke off: there is no second answer to give.
        return
    more: list[tuple[bytes, bytes]] = []
    if isinstance(error, _MethodError):
        more.append((b"allow", error.allow.encode()))
    if isinstance(error, RateLimitedError):
        more.append((b"retry-after", b"%d" % -(-error.retry_after // 1000)))
    if error.code == "unauthenticated":
        more.append((b"www-authenticate", b'Bearer realm="sluiceway"'))
    if error.kind.status in (401, 413, 429) and not request.whole:
        # What is left of the body is not read, so the connection cannot serve another request.
        more.append((b"connection", b"close"))
    await respond(send, error.kind.status, PROBLEM, answers.problem(error, request.request_id.decode()), request.request_id, *more)
