"""The API as an ASGI application: the path selects an endpoint, a guard authenticates the caller, the endpoint's handler answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import msgspec

from sluiceway import __version__
from sluiceway.adapters.system import new_incarnation, stopwatch
from sluiceway.cluster.request_context import REQUEST_ID, SERVED_BY, only_other
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_BODY_BYTES, MAX_CALL_BYTES
from sluiceway.model.access import Caller
from sluiceway.server.backup_calls import BackupCalls
from sluiceway.server.bundle_calls import BundleCalls
from sluiceway.server.endpoints import Endpoint, Page
from sluiceway.server.fast_path import Direct, WholeRequest
from sluiceway.server.guard import OpenDoor
from sluiceway.server.health_probes import Health
from sluiceway.server.http import (
    ARROW,
    CUT_OFF,
    JSON,
    PACKED,
    PROBLEM,
    PROTOBUF,
    Body,
    BodyMemory,
    DisconnectedError,
    Message,
    Receive,
    Request,
    Scope,
    Send,
    headers_of,
    respond,
)
from sluiceway.server.inspection_calls import InspectionCalls
from sluiceway.server.instance_calls import ElsewhereError, InstanceCalls
from sluiceway.server.item_calls import ItemCalls
from sluiceway.server.openapi import Documentation
from sluiceway.server.peer_calls import PeerCalls
from sluiceway.server.queue_calls import QueueCalls
from sluiceway.server.rebalance_calls import RebalanceCalls
from sluiceway.server.response_buffer import BUILT_ALONE, PIECE, AnswerMemory
from sluiceway.server.schedule_calls import ScheduleCalls
from sluiceway.server.ui import site as ui
from sluiceway.server.upgrade_calls import UpgradeCalls
from sluiceway.wire import answers, peer, protobuf

log = logging.getLogger("sluiceway.server")


class Guard(Protocol):
    """Authentication and rate limits of requests."""

    async def admit(self, request: Request) -> Caller:
        """Authenticate the request, before its body is read. Raises `unauthenticated`, `rate_limited`, `forbidden`, `unavailable`."""
        ...

    async def recheck(self, request: Request) -> Caller:
        """Return the request's caller if it is still valid; called repeatedly during a stream. Raises `unauthenticated`."""
        ...

    def charge(self, caller: Caller, size: int) -> None:
        """Count a body of `size` bytes towards the caller's rate."""
        ...


class Meter(Protocol):
    """Observer of answered requests."""

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        """`path`: the endpoint's, or empty if there is none; `status` 0: the client had gone; `received`, `sent`: bytes of the bodies."""
        ...


@dataclass(frozen=True)
class Fittings:
    """Optional parts of an application. `endpoints` and `pages` are served together with its own."""

    guard: Guard = field(default_factory=OpenDoor)
    meters: Sequence[Meter] = ()
    endpoints: Sequence[Endpoint] = ()
    pages: Sequence[Page] = ()
    on_stop: Sequence[Callable[[], None]] = ()
    """Callbacks that end streams, which would last as long as their readers stay."""
    admin_port: int | None = None
    """The only port that serves administrators' calls and /metrics. None: all ports do."""
    peers: PeerCalls | None = None
    """Requests of other instances; None: there are none."""
    safe_queues: bool = False
    """Whether new queues get a limit of attempts, a back-off and a dead queue by themselves."""
    dashboard: bool = False
    """Whether to serve the dashboard at /ui, which needs all calls of the API."""


class App:
    """ASGI application over one service. Runs on one event loop; raises only cancellation.

    Answers every request it gets. Once it stops, answers carry `connection: close`, so that no request is sent into a closing connection.
    """

    def __init__(self, service: Service, fittings: Fittings) -> None:
        self._service = service
        self._guard = fittings.guard
        self._meters = fittings.meters
        self._on_stop = fittings.on_stop
        self._peers = fittings.peers
        self._request_ids = count(1)
        self._process = new_incarnation().encode()
        self._stopping = self._given_up = False
        self._running: set[asyncio.Task[object]] = set()
        self._bodies = BodyMemory()
        self.answer_memory = AnswerMemory()
        self._items = ItemCalls(service, self.answer_memory)
        queues = QueueCalls(service, fittings.safe_queues)
        rooms = (
            self._items,
            queues,
            InspectionCalls(service, self.answer_memory),
            RebalanceCalls(service),
            ScheduleCalls(service),
            BundleCalls(service),
            BackupCalls(service),
            InstanceCalls(service),
            UpgradeCalls(service),
        )
        self.endpoints = [*(endpoint for room in rooms for endpoint in room.endpoints()), *fittings.endpoints]
        pages = [*Health(service, fittings.guard, lambda: self.is_stopping).pages(), *queues.pages(), *fittings.pages]
        self.pages = [*pages, *Documentation(self.endpoints, pages).pages()]
        self._calls = {endpoint.path: endpoint for endpoint in self.endpoints}
        self.calls = {path.encode(): path for path in self._calls}
        """Targets of requests that may take the direct path."""
        self._gets = {page.path: page for page in self.pages}
        self._site = ui.Site(self) if fittings.dashboard else None
        self._admin_port = fittings.admin_port
        tables: list[Endpoint | Page] = [*self.endpoints, *self.pages]
        self._for_admins = {"/metrics", *(each.path for each in tables if each.action == "admin")}

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop_waiting(self) -> None:
        """End every long poll and stream with `unavailable`, now and from now on. Calls that do not wait continue."""
        self._stopping = True
        for stop in self._on_stop:
            stop()
        if self._site is not None:
            self._site.stop()
        self._items.stop_waiting()
        if self._peers is not None:
            self._peers.stop_waiting()

    def give_up(self) -> None:
        """Answer all requests in flight at once: `unavailable` if the body is incomplete, else `outcome_unknown`."""
        self._given_up = True
        for task in self._running:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, Request(scope, receive, self._bodies), _Sent(send, self), asyncio.current_task())

    async def answer(self, direct: Direct) -> None:
        """Serve a complete call over the direct path."""
        await self._serve(direct.scope, WholeRequest(direct, self._bodies), _Sent(direct.send, self, direct), direct.task)

    async def _serve(self, scope: Scope, request: Request, sent: _Sent, task: asyncio.Task[Any] | None) -> None:
        """Serve one request. `task`: the task that runs this."""
        path: str = scope["path"]
        if not request.request_id:
            request.request_id = b"%b-%d" % (self._process, next(self._request_ids))
        if self._peers is not None:
            REQUEST_ID.set(request.request_id.decode())
        began = stopwatch()
        assert task is not None
        self._running.add(task)
        try:
            if self._admin_port is not None and path in self._for_admins and scope["server"][1] != self._admin_port:
                raise _no_endpoint(path)
            await self._answer(path, scope["method"], request, sent)
        except DisconnectedError:
            if (cut_off := scope.get(CUT_OFF)) is not None:
                cut_off()
        except ElsewhereError as error:
            location = (b"location", error.address.rstrip("/").encode() + request.target)
            await sent.respond(307, JSON, b"{}", request.request_id, location)
        except OtherQueueError as error:
            await _refuse(sent, error if request.caller.may("read", error.other) else error.anonymous(), request)
        except SluicewayError as error:
            await _refuse(sent, error, request)
        except asyncio.CancelledError:
            if not self._given_up:
                raise
            await _refuse(sent, _cut_off(request), request)
        except Exception:
            log.exception("%r failed", path[:80], extra={"request_id": request.request_id.decode()})
            unexpected = SluicewayError("internal", "unexpected error; search the server's log for this request_id")
            await _refuse(sent, unexpected, request)
        finally:
            self._running.discard(task)
            received = request.received
            request.let_go()
            for meter in self._meters:
                meter.answered(request, self._known(path), sent.status, stopwatch() - began, received, sent.size)

    def _known(self, path: str) -> str:
        """Label of the path in metrics. Dashboard paths, which may contain any name, share one."""
        if path in self._calls or path in self._gets or path == peer.PATH:
            return path
        return "" if self._site is None else ui.known(path)

    async def _answer(self, path: str, method: str, request: Request, send: _Sent) -> None:
        endpoint = self._calls.get(path)
        if endpoint is not None:
            if method != "POST":
                raise _wrong_method("POST")
            await self._call(endpoint, request, send)
            return
        if self._peers is not None and path == peer.PATH:
            if method != "POST":
                raise _wrong_method("POST")
            await self._peers.serve(request, send, self.answer_memory)
            return
        if path == ui.ROOT or path.startswith(f"{ui.ROOT}/"):
            if self._site is None:
                raise _no_endpoint(path)
            await self._site.serve(path, method, request, send)
            return
        if path == "/" and method in ("GET", "HEAD"):
            await self._begin(request, send)
            return
        page = self._gets.get(path)
        if page is None:
            raise _no_endpoint(path)
        # A stream has no end, so a HEAD could not be answered.
        allowed = ("GET",) if page.stream else ("GET", "HEAD")
        if method not in allowed:
            raise _wrong_method(", ".join(allowed))
        await self._get(page, request, send)

    async def _begin(self, request: Request, send: _Sent) -> None:
        """Answer the root path: redirect browsers to the dashboard, list the entry points for other clients."""
        accepts = any(name == b"accept" and b"text/html" in value for name, value in request.scope["headers"])
        if self._site is not None and accepts:
            await send.respond(302, JSON, b"{}", request.request_id, (b"location", ui.ROOT.encode()))
            return
        places = {"docs": "/docs", "openapi": "/openapi.json", "ready": "/readyz"} | ({"dashboard": ui.ROOT} if self._site else {})
        await send.respond(200, JSON, msgspec.json.encode({"name": "sluiceway", "version": __version__, **places}), request.request_id)

    async def _call(self, endpoint: Endpoint, request: Request, send: _Sent) -> None:
        request.caller = await self._guard.admit(request)
        if endpoint.action is not None:
            request.action = endpoint.action
        if endpoint.action == "admin":
            request.caller.require("admin")
        request.check_type(endpoint.takes_arrow, endpoint.takes_protobuf)
        try:
            await request.read_body(MAX_BODY_BYTES if endpoint.takes_arrow else MAX_CALL_BYTES)
        finally:
            # Also for a body that breaks off: its bytes have used the connection.
            self._guard.charge(request.caller, request.received)
        if request.protobuf:
            form = protobuf.CALLS[endpoint.path]
            message, request.body = form.read(request.body)
            answer = bytes(await endpoint.handle(request))
            # Translating a page of 65,536 items takes seconds, during which other calls must be served.
            is_long = len(answer) > BUILT_ALONE
            status, said = await asyncio.to_thread(form.write, message, answer) if is_long else form.write(message, answer)
            await send.respond(status, PROTOBUF, said, request.request_id)
            return
        served_by: set[str] = set()
        if self._peers is not None:
            SERVED_BY.set(served_by)
        body = await endpoint.handle(request)
        other = only_other(served_by)
        hint = [] if other is None else [(b"x-sluiceway-served-by", other.encode())]
        kind = PACKED if endpoint.gives_packed else ARROW if request.wants_arrow and endpoint.gives_arrow else JSON
        await send.respond(200, kind, body, request.request_id, *hint)

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
        await respond(send, reply.status, reply.content_type, reply.body, request.request_id, *reply.headers)


def create_app(service: Service, fittings: Fittings | None = None) -> App:
    """Create the API over a service, which the caller starts and stops. Without fittings it is open to every caller."""
    return App(service, fittings or Fittings())


class _Sent:
    """Sends an answer, and records its status and size. Status 0: no answer, as the client had gone."""

    __slots__ = ("_app", "_direct", "_send", "size", "status")

    def __init__(self, send: Send, app: App, direct: Direct | None = None) -> None:
        self._send = send
        self._app = app
        self._direct = direct
        self.status = self.size = 0

    async def respond(self, status: int, content_type: bytes, body: Body, request_id: bytes, *more: tuple[bytes, bytes]) -> None:
        """Send a whole answer as `http.respond` does; on the direct path, in one write."""
        if self._direct is None or len(body) > PIECE:
            await respond(self, status, content_type, body, request_id, *more)
            return
        self.status, self.size = status, len(body)
        if not more and self._direct.keep_alive and not self._app.is_stopping:
            await self._direct.answer_plainly(status, content_type, body, request_id)
            return
        headers = headers_of(content_type, body, request_id, *more)
        if self._app.is_stopping:
            headers.append((b"connection", b"close"))
        await self._direct.answer(status, headers, body)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._app.is_stopping:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await self._send(message)
        elif message.get("more_body"):
            self.size += len(message["body"])
            await self._send(message)
        else:
            self.size += len(message["body"])
            if len(message["body"]) <= PIECE:
                await self._send(message)
            else:
                await self._app.answer_memory.send(self._send, message["body"])


class _MethodError(SluicewayError):
    def __init__(self, allow: str) -> None:
        super().__init__("method_not_allowed", f"this endpoint accepts {allow}")
        self.allow = allow


def _no_endpoint(path: str) -> SluicewayError:
    return SluicewayError("not_found", f"there is no endpoint {path[:80]!r}; /docs lists the endpoints")


def _cut_off(request: Request) -> SluicewayError:
    if request.whole:
        return SluicewayError("outcome_unknown", "the server stopped before the call ended; repeat it with the same idempotency key")
    return SluicewayError("unavailable", "the server stopped before the body arrived; nothing was done, send the call again")


def _wrong_method(allow: str) -> SluicewayError:
    return _MethodError(allow)


async def _refuse(send: _Sent, error: SluicewayError, request: Request) -> None:
    if send.status:
        # A broken stream: its answer has begun.
        return
    more: list[tuple[bytes, bytes]] = []
    if isinstance(error, _MethodError):
        more.append((b"allow", error.allow.encode()))
    if isinstance(error, RateLimitedError):
        more.append((b"retry-after", b"%d" % -(-error.retry_after // 1000)))
    if error.code == "unauthenticated":
        more.append((b"www-authenticate", b'Bearer realm="sluiceway"'))
    if error.kind.status in (401, 413, 429) and not request.whole:
        # The rest of the body is not read, so the connection cannot serve another request.
        more.append((b"connection", b"close"))
    if request.protobuf:
        status, said = protobuf.refusal(error, request.request_id.decode())
        await send.respond(status, PROTOBUF, said, request.request_id, *more)
    else:
        await send.respond(error.kind.status, PROBLEM, answers.problem(error, request.request_id.decode()), request.request_id, *more)
