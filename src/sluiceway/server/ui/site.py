"""The dashboard as a part of the application: what is asked for at /ui, and answered with HTML."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from sluiceway import __version__
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.http import JSON, Request, Send, respond
from sluiceway.server.ui.api import Asgi, Facts, ProblemError
from sluiceway.server.ui.counts import Counts
from sluiceway.server.ui.live import Feeds, mark
from sluiceway.server.ui.render import Asset, Pages, assets
from sluiceway.server.ui.routes import COMMANDS, ROOMS, VIEWS
from sluiceway.server.ui.view import Command, View, problem_of
from sluiceway.server.ui.visit import Visit, api_of, cookie_for, is_own

log = logging.getLogger("sluiceway.server")

ROOT: Final = "/ui"
LIVE: Final = "/ui/live"
HTML: Final = b"text/html; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"
_WAS: Final = "was"
"""In the query of a stream: the mark of what its reader has already."""
_MOST: Final = 64 << 10
"""Bytes of a form."""

HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    # Not less: a form that is sent without any says that it comes from nowhere.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Sent with each page: a text that got into one by mistake could load and run nothing, nor could the page be shown within another."""


class Site:
    """Serves /ui over the application's own API. Knows nothing else of the server."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._pages = Pages()
        self._feeds = Feeds(self._live)
        self._counts: dict[object, Counts] = {}
        self._assets: dict[str, Asset] = {}
        self._commands = {command.name: command for command in COMMANDS}

    def stop(self) -> None:
        """End every stream, now and from now on."""
        self._feeds.stop()
        for counts in self._counts.values():
            counts.stop()

    async def serve(self, path: str, method: str, request: Request, send: Send) -> None:
        """Answer what is asked for at a path that begins with /ui. Raises SluicewayError for what is not there."""
        if path.startswith(f"{ROOT}/assets/"):
            await self._asset(path, request, send)
            return
        if method == "POST":
            if not is_own(request, request.scope):
                raise SluicewayError("forbidden", "this was not sent by a page of this server; go to /ui and try again")
            await self._post(path, request, send)
        elif method in ("GET", "HEAD"):
            await self._get(path, request, send)
        else:
            raise SluicewayError("method_not_allowed", "pages take GET, HEAD and POST")

    # ---- pages --------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, request: Request, send: Send) -> None:
        if _is_live(path) and request.scope["method"] != "GET":
            raise SluicewayError("method_not_allowed", "a stream takes GET")
        if path == f"{ROOT}/sign-in":
            await self._show(send, request, 200, self._sign_in(self._query(request)))
            return
        if path.startswith(f"{ROOT}/line/"):
            await self._line(path.removeprefix(f"{ROOT}/line/"), request, send)
            return
        visit = self._visit(path, request)
        try:
            await visit.meet()
            if _is_live(path):
                visit.path, visit.live = ROOT + path.removeprefix(LIVE), True
                await self._stream(visit, request, send)
            elif path.startswith(f"{ROOT}/ask/"):
                command = self._command(path.removeprefix(f"{ROOT}/ask/"))
                await self._show(send, request, 200, self._framed(visit, command.title, self._asked(command, visit)))
            else:
                async with visit.counts.following(visit.api):
                    await self._show(send, request, 200, await _made(visit, self._whole(visit)))
        except ProblemError as error:
            await self._refuse(send, request, visit, error)

    async def _line(self, name: str, request: Request, send: Send) -> None:
        """What does in a terminal what a form has, as it is filled in."""
        if name not in self._commands:
            raise SluicewayError("not_found", f"there is no command {name[:80]!r}")
        await self._show(send, request, 200, self._commands[name].line(self._query(request)), content_type=TEXT)

    def _visit(self, path: str, request: Request) -> Visit:
        api = api_of(self._app, request.scope, request)
        for key in [key for key, counts in self._counts.items() if counts.is_over]:
            del self._counts[key]
        counts = self._counts.setdefault(api.reader, Counts())
        return Visit(api, counts, path, self._query(request), partial=_is_partial(request))

    @staticmethod
    def _query(request: Request) -> dict[str, str]:
        return dict(parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def _view(self, visit: Visit) -> View:
        path = visit.path.rstrip("/") or ROOT
        for view in VIEWS:
            parts = view.match(path)
            if parts is not None:
                visit.parts = parts
                return view
        raise ProblemError(404, "not_found", f"there is no page {visit.path[:80]!r}")

    async def _whole(self, visit: Visit) -> str:
        view = self._view(visit)
        facts = {**self._common(visit), **await view.gather(visit)}
        live = self._pages.html(view.template, facts)
        still = self._pages.html(view.still, facts) if view.still else ""
        query = urlencode({**visit.query, _WAS: mark(live)})
        return self._pages.html(
            "base.html",
            {
                **self._common(visit),
                "title": view.title.format(**visit.parts),
                "room": view.room,
                "still": still,
                "live": live,
                "scripts": view.scripts,
                "live_url": f"{LIVE}{visit.path.removeprefix(ROOT)}?{query}" if view.refreshes else "",
            },
        )

    async def _live(self, visit: Visit) -> str:
        """What goes on of the page, or what is wrong with it. Raises ProblemError if the reader has to say who they are."""
        view = self._view(visit)
        try:
            text = self._pages.html(view.template, {**self._common(visit), **await view.gather(visit)})
        except ProblemError as error:
            if error.is_stranger:
                raise
            return self._problem(visit, error)
        except Exception:
            if "failed" not in visit.kept:
                log.exception("%s could not be made", visit.path)
            return self._problem(visit, _unexpected())
        visit.kept.pop("failed", None)
        return text

    def _problem(self, visit: Visit, error: ProblemError) -> str:
        """In place of what goes on. While it is the same problem its text is, so that nobody is told again each second."""
        code, text = visit.kept.get("failed", ("", ""))
        if code != error.code:
            text = self._pages.html("problem.html", {**self._common(visit), "problem": error})
            visit.kept["failed"] = (error.code, text)
        return str(text)

    async def _stream(self, visit: Visit, request: Request, send: Send) -> None:
        if not self._view(visit).refreshes:
            raise ProblemError(404, "not_found", "this page does not change by itself")
        # Who comes back has what was sent last, and not what the page was loaded with.
        was = request.last_event_id.decode("latin-1") or visit.query.get(_WAS, "")
        visit.query = {name: value for name, value in visit.query.items() if name != _WAS}
        await self._feeds.stream(visit, was, request, send)

    def _common(self, visit: Visit) -> Facts:
        return {"visit": visit, "rooms": ROOMS, "commands": self._commands, "version": __version__}

    def _framed(self, visit: Visit, title: str, content: str) -> str:
        """A part of a page by itself, or where there is no page around it, as one."""
        if visit.partial:
            return content
        facts = {"title": title, "room": "", "still": "", "live": content, "scripts": (), "live_url": ""}
        return self._pages.html("base.html", {**self._common(visit), **facts})

    # ---- what is done -------------------------------------------------------------------------------------------------

    async def _post(self, path: str, request: Request, send: Send) -> None:
        await request.read_body(_MOST)
        given = dict(parse_qsl(bytes(request.body).decode("utf-8", "replace"), keep_blank_values=True))
        if path == f"{ROOT}/sign-in":
            await self._sign(given, request, send)
            return
        if path == f"{ROOT}/sign-out":
            await self._go(send, request, f"{ROOT}/sign-in", (b"set-cookie", cookie_for("", request)))
            return
        visit = self._visit(path, request)
        visit.query = given
        try:
            await visit.meet()
            command = self._command(path.removeprefix(f"{ROOT}/do/"))
            if _is_script(request):
                await self._answer(send, request, command, visit)
                return
            await self._show(
                send,
                request,
                200,
                self._framed(visit, command.title, await _made(visit, self._do(command, visit), "; it may or may not have been done")),
            )
        except ProblemError as error:
            await self._refuse(send, request, visit, error)

    def _command(self, name: str) -> Command:
        if name not in self._commands:
            raise ProblemError(404, "not_found", f"there is no command {name[:80]!r}")
        return self._commands[name]

    def _asked(self, command: Command, visit: Visit, problem: ProblemError | None = None) -> str:
        facts = {"command": command, "given": visit.query, "line": command.line(visit.query), "problem": problem}
        return self._pages.html("ask.html", {**self._common(visit), **facts})

    async def _do(self, command: Command, visit: Visit) -> str:
        """Raises ProblemError only if the reader has to say who they are."""
        try:
            answer = await self._called(command, visit)
        except ProblemError as error:
            if error.is_stranger:
                raise
            return self._asked(command, visit, error)
        facts = {"command": command, "given": visit.query, "line": command.line(visit.query), "answer": answer}
        return self._pages.html("done.html", {**self._common(visit), **facts})

    async def _answer(self, send: Send, request: Request, command: Command, visit: Visit) -> None:
        """The same for a script of a page, which repeats it: what the API says, as it says it."""
        try:
            status, told = 200, await self._called(command, visit)
        except ProblemError as error:
            status, told = error.status, {"code": error.code, "detail": error.detail}
        await self._show(send, request, status, json.dumps(told), content_type=JSON)

    @staticmethod
    async def _called(command: Command, visit: Visit) -> Any:
        """The answer of the command's call. Raises ProblemError."""
        try:
            values = command.values(visit.query)
        except SluicewayError as error:
            raise problem_of(error) from None
        if command.destroys and visit.query.get("confirm", "").strip() != visit.query.get(command.on):
            raise ProblemError(
                400, "invalid_request", f"nothing was done: repeat {visit.query.get(command.on, '')!r} to confirm", "confirm"
            )
        return await visit.api.send(command.call, values)

    # ---- signing in ---------------------------------------------------------------------------------------------------

    def _sign_in(self, query: Mapping[str, str], problem: ProblemError | None = None) -> str:
        return self._pages.html("sign_in.html", {"next": _own_path(query.get("next", "")), "problem": problem, "version": __version__})

    async def _sign(self, given: Mapping[str, str], request: Request, send: Send) -> None:
        key = given.get("key", "").strip()
        visit = self._visit(ROOT, request)
        try:
            await visit.api.signed_as(key).call("keys.self")
        except ProblemError as error:
            await self._show(send, request, error.status, self._sign_in(given, error))
            return
        await self._go(send, request, _own_path(given.get("next", "")), (b"set-cookie", cookie_for(key, request)))

    # ---- answers ------------------------------------------------------------------------------------------------------

    async def _asset(self, path: str, request: Request, send: Send) -> None:
        if not self._assets:
            self._assets = {asset.path: asset for asset in assets().values()}
        asset = self._assets.get(path)
        if asset is None:
            raise SluicewayError("not_found", f"there is no asset {path[:80]!r}")
        packed = any(name == b"accept-encoding" and b"gzip" in value for name, value in request.scope["headers"])
        headers = [*HEADERS, (b"cache-control", b"public, max-age=31536000, immutable"), (b"vary", b"accept-encoding")]
        if packed:
            headers.append((b"content-encoding", b"gzip"))
        await respond(send, 200, asset.content_type, asset.packed if packed else asset.body, request.request_id, *headers)

    async def _show(
        self, send: Send, request: Request, status: int, text: str, *more: tuple[bytes, bytes], content_type: bytes = HTML
    ) -> None:
        await respond(send, status, content_type, text.encode(), request.request_id, *HEADERS, (b"cache-control", b"no-store"), *more)

    async def _go(self, send: Send, request: Request, where: str, *more: tuple[bytes, bytes]) -> None:
        await self._show(send, request, 303, "", (b"location", where.encode()), *more)

    async def _refuse(self, send: Send, request: Request, visit: Visit, error: ProblemError) -> None:
        if error.is_stranger:
            if visit.partial or _is_live(request.scope["path"]):
                await self._show(send, request, 401, "", (b"hx-redirect", f"{ROOT}/sign-in".encode()))
                return
            back = request.target.decode("latin-1") if request.scope["method"] == "GET" else ROOT
            await self._go(send, request, f"{ROOT}/sign-in?next={quote(back, safe='')}")
            return
        content = self._pages.html("problem.html", {**self._common(visit), "problem": error})
        if _is_live(request.scope["path"]):
            # What the page shows stays; a script says that it does not go on, and tries again.
            await self._show(send, request, error.status, content, (b"hx-reswap", b"none"))
            return
        await self._show(send, request, error.status, self._framed(visit, "Not shown", content))


def known(path: str) -> str:
    """LIVE, ROOT, or nothing for what is not of the dashboard: by these requests are counted."""
    if _is_live(path):
        return LIVE
    return ROOT if path == ROOT or path.startswith(f"{ROOT}/") else ""


async def _made(visit: Visit, making: Awaitable[str], outcome: str = "") -> str:
    """What comes of it. Raises ProblemError, also for what should not have happened: whoever asked for a page is answered with one.

    `outcome`: what is known then of what was to be done.
    """
    try:
        return await making
    except (ProblemError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("%s could not be made", visit.path)
        raise _unexpected(outcome) from None


def _unexpected(outcome: str = "") -> ProblemError:
    return ProblemError(500, "internal", f"an unexpected error; the server's log has it{outcome}")


def _is_live(path: str) -> bool:
    return path == LIVE or path.startswith(f"{LIVE}/")


def _is_partial(request: Request) -> bool:
    return any(name == b"hx-request" for name, _ in request.scope["headers"])


def _is_script(request: Request) -> bool:
    return (b"accept", JSON) in request.scope["headers"]


def _own_path(text: str) -> str:
    """A path of the dashboard, whatever it is that was asked for."""
    found = urlsplit(text)
    own = not found.scheme and not found.netloc and (found.path == ROOT or found.path.startswith(f"{ROOT}/"))
    if not own or not text.isascii() or not text.isprintable() or "\\" in text:
        return ROOT
    return text
