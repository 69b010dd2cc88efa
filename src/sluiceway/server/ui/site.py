"""The HTTP handler of /ui."""

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
from sluiceway.server.ui.pages.overview import own_problems
from sluiceway.server.ui.render import Asset, Pages, assets
from sluiceway.server.ui.routes import COMMANDS, MOVED, PARTS, ROOMS, VIEWS
from sluiceway.server.ui.view import Command, View, problem_of
from sluiceway.server.ui.visit import Visit, api_of, cookie_for, is_own

log = logging.getLogger("sluiceway.server")

ROOT: Final = "/ui"
LIVE: Final = "/ui/live"
HTML: Final = b"text/html; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"
_WAS: Final = "was"
"""Query parameter of a stream: the mark of the content that the reader has."""
_MOST: Final = 64 << 10
"""Maximum bytes of a form."""
_MOST_SIGNING_IN: Final = 4 << 10
"""Of the one form that is read without a key: a key, and the path to go on to."""

HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    # Not stricter: forms need an origin to pass the same-origin check.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
"""Sent with each page: injected text can load and run nothing, and other sites cannot frame the page."""


class Site:
    """Serves /ui on top of the application's own API; it has no other access to the server."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._pages = Pages()
        self._feeds = Feeds(self._live)
        self._counts: dict[object, Counts] = {}
        self._assets: dict[str, Asset] = {}
        self._commands = {command.name: command for command in COMMANDS}
        self._lists = {field.name for command in COMMANDS for field in command.fields if field.kind == "list"}

    def stop(self) -> None:
        """End every stream, now and from now on."""
        self._feeds.stop()
        for counts in self._counts.values():
            counts.stop()

    async def serve(self, path: str, method: str, request: Request, send: Send) -> None:
        """Answer a request whose path begins with /ui. Raises SluicewayError for unknown paths and methods."""
        if path.startswith(f"{ROOT}/assets/"):
            await self._asset(path, request, send)
            return
        if method == "POST":
            if not is_own(request, request.scope):
                raise SluicewayError(
                    "forbidden",
                    "cross-site request refused: open /ui and send the form from there; for API calls, use the server's URL without /ui",
                )
            await self._post(path, request, send)
        elif method in ("GET", "HEAD"):
            await self._get(path, request, send)
        else:
            raise SluicewayError("method_not_allowed", "pages accept GET, HEAD and POST only")

    # ---- pages --------------------------------------------------------------------------------------------------------

    async def _get(self, path: str, request: Request, send: Send) -> None:
        if _is_live(path) and request.scope["method"] != "GET":
            raise SluicewayError("method_not_allowed", "live updates accept GET only")
        if path == f"{ROOT}/sign-in":
            await self._show(send, request, 200, self._sign_in(self._query(request)))
            return
        if path.startswith(f"{ROOT}/line/"):
            await self._line(path.removeprefix(f"{ROOT}/line/"), request, send)
            return
        if (new := _moved(path)) is not None:
            query = request.scope["query_string"]
            await self._show(send, request, 308, "", (b"location", new.encode() + (b"?" + query if query else b"")))
            return
        visit = self._visit(path, request)
        try:
            await self._meet(visit)
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
        """Send the command line that is equivalent to a form's current values."""
        if name not in self._commands:
            raise SluicewayError("not_found", f"there is no command {name[:80]!r}")
        await self._show(send, request, 200, self._commands[name].line(self._query(request)), content_type=TEXT)

    def _visit(self, path: str, request: Request) -> Visit:
        return Visit(api_of(self._app, request.scope, request), path, self._query(request), partial=_is_partial(request))

    async def _meet(self, visit: Visit) -> None:
        """Find out who the reader is. Raises ProblemError for a stranger, of whom nothing is kept: they could fill the memory."""
        await visit.meet()
        for key in [key for key, counts in self._counts.items() if counts.is_over]:
            del self._counts[key]
        visit.counts = self._counts.setdefault(visit.api.reader, visit.counts)

    def _query(self, request: Request) -> dict[str, str]:
        return self._fields(request.scope["query_string"].decode("latin-1"))

    def _fields(self, text: str) -> dict[str, str]:
        """The last value of each name. Values of a list are joined: each may come from a check box of its own."""
        pairs = parse_qsl(text, keep_blank_values=True)
        return dict(pairs) | {name: " ".join(value for each, value in pairs if each == name) for name, _ in pairs if name in self._lists}

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
        facts, live = await self._gathered(view, visit)
        still = self._pages.html(view.still, facts) if view.still else ""
        query = urlencode({**visit.query, _WAS: mark(live)})
        return self._pages.html(
            "base.html",
            {
                **self._common(visit),
                "title": view.title.format(**visit.parts),
                "room": view.room,
                # A queue's pages have tabs of their own.
                "parts": () if view.is_of_queue else PARTS.get(view.room, ()),
                "still": still,
                "live": live,
                "scripts": view.scripts,
                "live_url": f"{LIVE}{visit.path.removeprefix(ROOT)}?{query}" if view.refreshes else "",
            },
        )

    async def _gathered(self, view: View, visit: Visit) -> tuple[Facts, str]:
        """The variables of the page's templates, and its live part. That of a queue's page begins with the queue's problems."""
        common = self._common(visit)
        facts, problems = await asyncio.gather(view.gather(visit), own_problems(visit) if view.is_of_queue else _none())
        banner = self._pages.html("queue_problems.html", {**common, "problems": problems}) if problems else ""
        return {**common, **facts}, banner + self._pages.html(view.template, {**common, **facts})

    async def _live(self, visit: Visit) -> str:
        """The live part of a page, or the problem in its place. Raises ProblemError if the reader has to sign in."""
        view = self._view(visit)
        try:
            _, text = await self._gathered(view, visit)
        except ProblemError as error:
            if error.is_stranger:
                raise
            return self._problem(visit, error)
        except Exception:
            if "failed" not in visit.kept:
                log.exception("page %s failed", visit.path)
            return self._problem(visit, _unexpected())
        visit.kept.pop("failed", None)
        return text

    def _problem(self, visit: Visit, error: ProblemError) -> str:
        """The problem in place of a live part. The same problem keeps its text, so screen readers announce it once."""
        code, text = visit.kept.get("failed", ("", ""))
        if code != error.code:
            text = self._pages.html("problem.html", {**self._common(visit), "problem": error})
            visit.kept["failed"] = (error.code, text)
        return str(text)

    async def _stream(self, visit: Visit, request: Request, send: Send) -> None:
        if not self._view(visit).refreshes:
            raise ProblemError(404, "not_found", "this page has no live updates")
        # A reconnecting reader has the last event, not the content that the page was loaded with.
        was = request.last_event_id.decode("latin-1") or visit.query.get(_WAS, "")
        visit.query = {name: value for name, value in visit.query.items() if name != _WAS}
        await self._feeds.stream(visit, was, request, send)

    def _common(self, visit: Visit) -> Facts:
        return {"visit": visit, "rooms": ROOMS, "commands": self._commands, "version": __version__}

    def _framed(self, visit: Visit, title: str, content: str) -> str:
        """The content alone for a partial request, otherwise within the page frame."""
        if visit.partial:
            return content
        facts = {"title": title, "room": "", "parts": (), "still": "", "live": content, "scripts": (), "live_url": ""}
        return self._pages.html("base.html", {**self._common(visit), **facts})

    # ---- commands -----------------------------------------------------------------------------------------------------

    async def _post(self, path: str, request: Request, send: Send) -> None:
        if path == f"{ROOT}/sign-in":
            await self._sign(await self._form(request, _MOST_SIGNING_IN), request, send)
            return
        if path == f"{ROOT}/sign-out":
            await self._go(send, request, f"{ROOT}/sign-in", (b"set-cookie", cookie_for("", request)))
            return
        visit = self._visit(path, request)
        try:
            # Before the form is read: a stranger's would take memory.
            await self._meet(visit)
            visit.query = await self._form(request, _MOST)
            command = self._command(path.removeprefix(f"{ROOT}/do/"))
            if _is_script(request):
                await self._answer(send, request, command, visit)
                return
            await self._show(
                send,
                request,
                200,
                self._framed(
                    visit, command.title, await _made(visit, self._do(command, visit), "; the change may or may not have been made")
                ),
            )
        except ProblemError as error:
            await self._refuse(send, request, visit, error)

    async def _form(self, request: Request, most: int) -> dict[str, str]:
        await request.read_body(most)
        return self._fields(bytes(request.body).decode("utf-8", "replace"))

    def _command(self, name: str) -> Command:
        if name not in self._commands:
            raise ProblemError(404, "not_found", f"there is no command {name[:80]!r}")
        return self._commands[name]

    def _asked(self, command: Command, visit: Visit, problem: ProblemError | None = None) -> str:
        facts = {"command": command, "given": visit.query, "line": command.line(visit.query), "problem": problem}
        return self._pages.html("ask.html", {**self._common(visit), **facts})

    async def _do(self, command: Command, visit: Visit) -> str:
        """Run a command: the result, or the form with its problem. Raises ProblemError only if the reader has to sign in."""
        try:
            answer = await self._called(command, visit)
        except ProblemError as error:
            if error.is_stranger:
                raise
            return self._asked(command, visit, error)
        facts = {"command": command, "given": visit.query, "line": command.line(visit.query), "answer": answer}
        return self._pages.html("done.html", {**self._common(visit), **facts})

    async def _answer(self, send: Send, request: Request, command: Command, visit: Visit) -> None:
        """Run a command for a script that repeats it, and pass on the API's answer as JSON."""
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
        wanted = command.confirmation(visit.query)
        if command.destroys and (not wanted or visit.query.get("confirm", "").strip() != wanted):
            raise ProblemError(400, "invalid_request", f"nothing changed: type {wanted!r} to confirm", "confirm")
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
            # The page keeps its content; a script reports the lost connection and reconnects.
            await self._show(send, request, error.status, content, (b"hx-reswap", b"none"))
            return
        await self._show(send, request, error.status, self._framed(visit, "Problem", content))


def _moved(path: str) -> str | None:
    """The present path of a page that has moved; None: it has not."""
    first = "/".join(path.split("/")[:3])
    # The path is decoded: quoted again, no line end of it gets into a header.
    return quote(MOVED[first] + path.removeprefix(first)) if first in MOVED else None


def known(path: str) -> str:
    """The label under which a request is counted: LIVE, ROOT, or empty for paths outside the dashboard."""
    if _is_live(path):
        return LIVE
    return ROOT if path == ROOT or path.startswith(f"{ROOT}/") else ""


async def _made(visit: Visit, making: Awaitable[str], outcome: str = "") -> str:
    """The awaited text. Raises ProblemError, also in place of unexpected errors, so that the reader gets a page.

    `outcome` is appended to the text of an unexpected error.
    """
    try:
        return await making
    except (ProblemError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("page %s failed", visit.path)
        raise _unexpected(outcome) from None


async def _none() -> list[Facts]:
    return []


def _unexpected(outcome: str = "") -> ProblemError:
    return ProblemError(500, "internal", f"unexpected error, see the server's log{outcome}")


def _is_live(path: str) -> bool:
    return path == LIVE or path.startswith(f"{LIVE}/")


def _is_partial(request: Request) -> bool:
    return any(name == b"hx-request" for name, _ in request.scope["headers"])


def _is_script(request: Request) -> bool:
    return (b"accept", JSON) in request.scope["headers"]


def _own_path(text: str) -> str:
    """The text if it is a path of the dashboard, otherwise ROOT. Prevents open redirects."""
    try:
        found = urlsplit(text)
    except ValueError:
        return ROOT
    own = not found.scheme and not found.netloc and (found.path == ROOT or found.path.startswith(f"{ROOT}/"))
    if not own or not text.isascii() or not text.isprintable() or "\\" in text:
        return ROOT
    return text
