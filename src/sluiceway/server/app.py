"""The API as an ASGI application: a path names a handler, a handler turns bytes into a model request and an answer into bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec

from sluiceway.adapters.system import new_incarnation, now
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_BODY_BYTES, MAX_CALL_BYTES
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import DONE, RELEASE, Lease, Leased
from sluiceway.server.http import ARROW, JSON, PROBLEM, Body, BodyMemory, DisconnectedError, Receive, Request, Scope, Send, respond
from sluiceway.server.service import QueueService
from sluiceway.wire import answers, arrow_codec, json_items, json_queues, json_settling
from sluiceway.wire.decoding import from_query
from sluiceway.wire.settling import belongs

log = logging.getLogger("sluiceway.server")

Handler = Callable[[Request], Awaitable[Body]]


class App:
    """An ASGI application over one service. Serves on one event loop; raises nothing at its caller but cancellation."""

    def __init__(self, service: QueueService) -> None:
        self._service = service
        self._request_ids = count(1)
        self._process = new_incarnation()
        self._waiting: set[asyncio.Task[Leased]] = set()
        self._stopping = False
        self._calls: dict[str, Handler] = {
            "/v1/queue.produce": self._produce,
            "/v1/queue.lease": self._lease,
            "/v1/queue.complete": self._complete,
            "/v1/queue.retry": self._retry,
            "/v1/queue.release": self._release,
            "/v1/queue.settle": self._settle,
            "/v1/queue.extend": self._extend,
            "/v1/queue.peek": self._peek,
            "/v1/queue.explain": self._explain,
            "/v1/queue.stats": self._stats,
            "/v1/queue.clear": self._clear,
            "/v1/queue.redrive": self._redrive,
            "/v1/queue.pause": self._pause,
            "/v1/queue.resume": self._resume,
            "/v1/queues.create": self._create,
            "/v1/queues.update": self._update,
            "/v1/queues.list": self._list,
            "/v1/queues.info": self._info,
            "/v1/queues.delete": self._delete,
        }
        self._bodies = BodyMemory()
        self._takes_arrow = {"/v1/queue.produce", "/v1/queue.settle"}
        self._gives_arrow = {"/v1/queue.lease", "/v1/queue.peek"}

    def stop_waiting(self) -> None:
        """End every long poll with `unavailable`, now and from now on. Calls that do not wait go on."""
        self._stopping = True
        for task in self._waiting:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, self._bodies)
        request_id = request.request_id or f"{self._process}-{next(self._request_ids)}".encode()
        path: str = scope["path"]
        handler = self._calls.get(path)
        try:
            if handler is None:
                await self._other(path, scope["method"], send, request_id)
                return
            if scope["method"] != "POST":
                raise _wrong_method("POST")
            takes_arrow = path in self._takes_arrow
            request.check_type(takes_arrow)
            await request.read_body(MAX_BODY_BYTES if takes_arrow else MAX_CALL_BYTES)
            body = await handler(request)
        except DisconnectedError:
            return
        except SluicewayError as error:
            await _refuse(send, error, request_id, request.whole)
            return
        except Exception:
            log.exception("%s failed, request_id %s", path, request_id.decode())
            unexpected = SluicewayError("internal", "an unexpected error; the server's log has it under this request_id")
            await _refuse(send, unexpected, request_id, request.whole)
            return
        finally:
            request.let_go()
        arrow = request.wants_arrow and path in self._gives_arrow
        await respond(send, 200, ARROW if arrow else JSON, body, request_id)

    async def _other(self, path: str, method: str, send: Send, request_id: bytes) -> None:
        if path not in ("/livez", "/readyz"):
            raise SluicewayError("not_found", f"there is no endpoint {path[:80]!r}")
        if method not in ("GET", "HEAD"):
            raise _wrong_method("GET, HEAD")
        if path == "/livez":
            await respond(send, 200, JSON, b'{"alive":true}', request_id)
            return
        problems = self._service.problems() + (["the server is stopping"] if self._stopping else [])
        body = msgspec.json.encode({"ready": not problems, "problems": problems})
        await respond(send, 503 if problems else 200, JSON, body, request_id)

    def _queue(self, queue_name: str) -> QueueRecord:
        return self._service.queue(check_queue_name(queue_name))

    # -- items ------------------------------------------------------------------------------------

    async def _produce(self, request: Request) -> Body:
        if request.arrow:
            query = from_query(request.query(), json_items.ProduceFields)
            record = self._queue(query.queue_name)
            wanted = arrow_codec.produce_request(query, request.body, record, now())
        else:
            call = json_items.decode_produce(request.body)
            record = self._queue(call.queue_name)
            wanted = call.request(record, now())
        return answers.produced(record, await self._service.produce(record.queue_name, wanted))

    async def _lease(self, request: Request) -> Body:
        call = json_items.decode_lease(request.body)
        record = self._queue(call.queue_name)
        wanted = call.request(record)
        if wanted.request_timeout:
            leased = await self._wait(request, call.queue_name, wanted, call.payload)
        else:
            leased = await self._service.lease(call.queue_name, wanted, call.payload)
        return answers.leased(record, leased, arrow=request.wants_arrow)

    async def _wait(self, request: Request, queue_name: str, wanted: Lease, payload: bool) -> Leased:
        """A lease that may wait: given up when the client goes away or the server stops."""
        if self._stopping:
            raise _stopping()
        work = asyncio.ensure_future(self._service.lease(queue_name, wanted, payload))
        gone = asyncio.ensure_future(request.disconnected())
        self._waiting.add(work)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        finally:
            self._waiting.discard(work)
            work.cancel()
            gone.cancel()
        if work.cancelled():
            raise self._given_up()
        return work.result()

    def _given_up(self) -> Exception:
        return _stopping() if self._stopping else DisconnectedError()

    async def _complete(self, request: Request) -> Body:
        call = json_settling.decode_select(request.body)
        wanted = call.request(self._queue(call.queue_name), DONE)
        return answers.completed(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _release(self, request: Request) -> Body:
        call = json_settling.decode_select(request.body)
        wanted = call.request(self._queue(call.queue_name), RELEASE)
        return answers.released(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _retry(self, request: Request) -> Body:
        call = json_settling.decode_retry(request.body)
        wanted = call.request(self._queue(call.queue_name), now())
        return answers.retried(await self._service.settle(call.queue_name, wanted), call.strict)

    async def _settle(self, request: Request) -> Body:
        if request.arrow:
            query = from_query(request.query(), json_settling.SettleQuery)
            record = self._queue(query.queue_name)
            wanted = arrow_codec.settle_request(query, request.body, record)
        else:
            call = json_settling.decode_settle(request.body)
            record = self._queue(call.queue_name)
            wanted = call.request(record)
        return answers.staged(await self._service.settle(record.queue_name, wanted))

    async def _extend(self, request: Request) -> Body:
        call = json_settling.decode_extend(request.body)
        record = self._queue(call.queue_name)
        return answers.extended(record, await self._service.extend(call.queue_name, call.request(record)), call.strict)

    async def _peek(self, request: Request) -> Body:
        call = json_items.decode_peek(request.body)
        record = self._queue(call.queue_name)
        batches = await self._service.peek(call.queue_name, call.request(record))
        return answers.peeked(record, batches, arrow=request.wants_arrow)

    async def _explain(self, request: Request) -> Body:
        call = json_items.decode_explain(request.body)
        record, item = self._queue(call.queue_name), call.item()
        if not belongs(item, record):
            return answers.explained(item, answers.FOREIGN)
        return answers.explained(item, await self._service.explain(call.queue_name, item.partition, item.offset))

    # -- queues -----------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Body:
        record = await self._service.create_queue(json_queues.decode_create(request.body).spec())
        return answers.encode(answers.queue_info(record))

    async def _update(self, request: Request) -> Body:
        call = json_queues.decode_update(request.body)
        record = await self._service.update_queue(call.queue_name, call.patch())
        return answers.encode(answers.queue_info(record))

    async def _list(self, request: Request) -> Body:
        call = json_queues.decode_list(request.body)
        pivot = check_queue_name(call.pivot, "pivot") if call.pivot else ""
        page = [record for record in self._service.queues() if record.queue_name > pivot]
        following = page[call.limit - 1].queue_name if len(page) > call.limit else None
        return answers.encode({"items": [answers.queue_info(record) for record in page[: call.limit]], "next": following})

    async def _info(self, request: Request) -> Body:
        return answers.encode(answers.queue_info(self._queue(json_queues.decode_queue_call(request.body).queue_name)))

    async def _delete(self, request: Request) -> Body:
        call = json_queues.decode_delete(request.body)
        await self._service.delete_queue(check_queue_name(call.queue_name), call.force)
        return b"{}"

    async def _stats(self, request: Request) -> Body:
        queue_name = check_queue_name(json_queues.decode_queue_call(request.body).queue_name)
        return answers.stats(queue_name, self._service.stats(queue_name))

    async def _pause(self, request: Request) -> Body:
        return await self._set_paused(request, True)

    async def _resume(self, request: Request) -> Body:
        return await self._set_paused(request, False)

    async def _set_paused(self, request: Request, paused: bool) -> Body:
        call = json_queues.decode_pause(request.body)
        record = await self._service.pause(check_queue_name(call.queue_name), call.wanted(), paused)
        return answers.encode(answers.queue_info(record))

    async def _clear(self, request: Request) -> Body:
        call = json_queues.decode_clear(request.body)
        return answers.cleared(await self._service.clear(check_queue_name(call.queue_name), call.request()))

    async def _redrive(self, request: Request) -> Body:
        call = json_queues.decode_redrive(request.body)
        return answers.redriven(await self._service.redrive(check_queue_name(call.queue_name), call.request()))


def create_app(service: QueueService) -> App:
    """The API over that service, which the caller starts and stops."""
    return App(service)


class _MethodError(SluicewayError):
    def __init__(self, allow: str) -> None:
        super().__init__("method_not_allowed", f"this endpoint takes {allow}")
        self.allow = allow


def _wrong_method(allow: str) -> SluicewayError:
    return _MethodError(allow)


def _stopping() -> SluicewayError:
    return SluicewayError("unavailable", "the server is stopping")


async def _refuse(send: Send, error: SluicewayError, request_id: bytes, whole: bool) -> None:
    more: list[tuple[bytes, bytes]] = []
    if isinstance(error, _MethodError):
        more.append((b"allow", error.allow.encode()))
    if error.code in ("body_too_large", "too_many_requests") and not whole:
        # What is left of the body is not read, so the connection cannot serve another request.
        more.append((b"connection", b"close"))
    await respond(send, error.kind.status, PROBLEM, answers.problem(error, request_id.decode()), request_id, *more)
