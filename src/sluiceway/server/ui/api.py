"""In-process calls of the server's own API on behalf of a page's reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec

from sluiceway.server.http import JSON, Message, Receive, Scope, Send

Facts = dict[str, Any]
"""A JSON object of the API, or the variables of a template."""
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

_SHOWN: Final = 300


class ProblemError(Exception):
    """A refusal by the API. `code`, `detail` and `field` are those of its answer."""

    def __init__(self, status: int, code: str, detail: str, field: str = "", request_id: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.status, self.code, self.detail, self.field, self.request_id = status, code, detail, field, request_id

    @property
    def is_stranger(self) -> bool:
        """Whether the reader has to sign in."""
        return self.code == "unauthenticated"


class Api:
    """Calls pass through the whole application: keys, scopes, rates, limits and audit entries apply as if the reader had sent them.

    `scope` is the ASGI scope of the page's request; calls inherit its host and addresses. `authorization` is a header's value, or empty.
    """

    def __init__(self, app: Asgi, scope: Scope, host: bytes, authorization: bytes = b"") -> None:
        self._app = app
        self._authorization = authorization
        self._headers = [(b"content-type", JSON), (b"host", host)]
        if authorization:
            self._headers.append((b"authorization", authorization))
        self._scope = {key: scope.get(key) for key in ("type", "http_version", "scheme", "server", "client")}
        self.reader = (authorization, host, scope["server"])
        """Readers with equal values get equal answers, so they share feeds and counts."""

    def signed_as(self, key: str) -> Api:
        """The same API with this API key."""
        return Api(self._app, self._scope, self._headers[1][1], b"Bearer " + key.encode("utf-8", "replace"))

    async def call(self, name: str, /, **fields: object) -> Facts:
        """The answer of `POST /v1/NAME`. Raises ProblemError."""
        return dict(await self.send(name, {key: value for key, value in fields.items() if value is not None}))

    async def send(self, name: str, fields: Facts) -> Any:
        """As `call`, with fields that may be null. Raises ProblemError."""
        body = msgspec.json.encode(fields)
        # A separate task: the application tracks the tasks that answer requests.
        status, answer = await asyncio.create_task(self._exchange("POST", f"/v1/{name}", b"", body))
        return _checked(status, answer)

    async def events(self, types: str) -> AsyncIterator[tuple[str, Facts]]:
        """The events of `GET /v1/events` until the stream ends. Raises ProblemError if it is refused."""
        parts: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def follow() -> None:
            try:
                await self._app(self._request("GET", "/v1/events", b"types=" + types.encode()), receive, parts.put)
            finally:
                await parts.put(None)

        task = asyncio.create_task(follow())
        try:
            first = await parts.get()
            if first is None or first["status"] != 200:
                body = None if first is None else await parts.get()
                _checked(503 if first is None else first["status"], b"{}" if body is None else body["body"])
            async for event in _events(parts):
                yield event
        finally:
            gone.set()
            task.cancel()
            await asyncio.wait((task,))

    async def _exchange(self, method: str, path: str, query: bytes, body: bytes) -> tuple[int, bytes]:
        given = False
        # Without an answer the outcome is unknown.
        status, answer = 504, bytearray()

        async def receive() -> Message:
            nonlocal given
            if given:
                # The caller stays connected until the answer is complete.
                await asyncio.Event().wait()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                answer.extend(message.get("body", b""))

        await self._app(self._request(method, path, query), receive, send)
        return status, bytes(answer)

    def _request(self, method: str, path: str, query: bytes) -> Scope:
        return {**self._scope, "method": method, "path": path, "query_string": query, "headers": list(self._headers)}


async def _events(parts: asyncio.Queue[Message | None]) -> AsyncIterator[tuple[str, Facts]]:
    text = b""
    while (part := await parts.get()) is not None:
        text += part.get("body", b"")
        *whole, text = text.split(b"\n\n")
        for each in whole:
            fields = dict(line.split(b": ", 1) for line in each.split(b"\n") if b": " in line)
            if b"event" in fields:
                yield fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])
        if not part.get("more_body", False):
            return


def _checked(status: int, answer: bytes) -> Any:
    found = msgspec.json.decode(answer or b"{}")
    if status == 200:
        return found
    detail = str(found.get("detail", "no answer from the server: the change may or may not have been made"))[:_SHOWN]
    raise ProblemError(status, found.get("code", "outcome_unknown"), detail, found.get("field") or "", found.get("request_id", ""))
