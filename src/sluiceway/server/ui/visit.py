"""A request for a page, its reader and their credentials."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from sluiceway.model.access import ANYBODY, Action, Caller, parse_scope
from sluiceway.server.http import Request
from sluiceway.server.http import Scope as HttpScope
from sluiceway.server.ui.api import Api, Asgi, Facts
from sluiceway.server.ui.counts import Counts

_PORT: Final = re.compile(rb":([0-9]{1,5})$")


@dataclass(slots=True)
class Visit:
    """A request for a page. `path` begins with /ui, `query` has the last value of each name, `parts` the segments of the page's pattern.

    `partial`: the request is for a part of a loaded page. `me` is the reader as the API sees them.
    """

    api: Api
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    me: Caller = field(default_factory=lambda: Caller("", ()))
    counts: Counts = field(default_factory=Counts)
    """Shared by all pages of the reader, once it is known who that is."""
    live: bool = False
    """Whether the request is for the live part rather than the whole page."""
    asks_keys: bool = False
    """Whether the server asks for API keys, so that the reader can sign out."""
    key_id: str = ""
    """Of the reader's API key; empty: none that is stored."""
    kept: dict[str, Any] = field(default_factory=dict)
    """State that a live page keeps between renders."""

    def may(self, action: Action, queue_name: str = "") -> bool:
        return self.me.may(action, queue_name)

    def may_somewhere(self, action: Action) -> bool:
        """Whether the reader may do this on any queue, existing or not."""
        return self.me.scopes is None or any(scope.action == action for scope in self.me.scopes)

    async def meet(self) -> None:
        """Read the reader's name and scopes from the API. Raises ProblemError."""
        own = await self.api.call("keys.self")
        self.me = Caller(own["name"], tuple(parse_scope(text, "scopes") for text in own["scopes"]))
        # The presence of a key says nothing: a server without authentication accepts any text.
        self.key_id = own["key_id"] or ""
        self.asks_keys = own["key_id"] is not None or own["name"] != ANYBODY.name


def api_of(app: Asgi, scope: HttpScope, request: Request) -> Api:
    """The API with the key that the reader signed in with, if any."""
    key = signed(request)
    return Api(app, scope, request.host, b"Bearer " + key if key else b"")


def signed(request: Request) -> bytes:
    """The API key in the reader's cookie; empty if it is absent or unreadable."""
    for name, value in request.scope["headers"]:
        if name == b"cookie":
            try:
                cookie = SimpleCookie(value.decode("latin-1")).get(_cookie(request))
                if cookie is not None:
                    return base64.urlsafe_b64decode(cookie.value.encode())
            except (CookieError, binascii.Error, ValueError):
                continue
    return b""


def cookie_for(key: str, request: Request) -> bytes:
    """The value of a `Set-Cookie` header: a session cookie that scripts cannot read, and that other sites' links but not forms send.

    An empty key deletes the cookie.
    """
    value = base64.urlsafe_b64encode(key.encode()).decode()
    secure = "; Secure" if request.scope.get("scheme") == "https" else ""
    end = "" if key else "; Max-Age=0"
    return f"{_cookie(request)}={value}; Path=/ui; HttpOnly; SameSite=Lax{secure}{end}".encode()


def _cookie(request: Request) -> str:
    """The cookie's name. It includes the port, because browsers send a cookie to all ports of a host."""
    port = _PORT.search(request.host)
    return f"sluiceway-{port[1].decode()}" if port else "sluiceway"


def is_own(request: Request, scope: HttpScope) -> bool:
    """Whether the request comes from a page of this server (CSRF protection).

    Browsers send Sec-Fetch-Site on trusted connections and Origin otherwise; pages cannot set either. A request with neither is refused
    as well: programs use the API.
    """
    found = {name: value for name, value in scope["headers"] if name in (b"sec-fetch-site", b"origin")}
    if b"sec-fetch-site" in found:
        return found[b"sec-fetch-site"] in (b"same-origin", b"none")
    origin = found.get(b"origin", b"")
    return bool(request.host) and origin in (b"http://" + request.host, b"https://" + request.host)


def facts_of(query: Mapping[str, str], names: Iterable[str]) -> Facts:
    """The named values that are present and not empty."""
    return {name: query[name] for name in names if query.get(name)}
