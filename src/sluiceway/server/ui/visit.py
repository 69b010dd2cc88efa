"""Who looks at a page, and at which."""

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
    """A request for a page. `path` begins with /ui; `query` has the last value of each name; `parts` is what the page's pattern found.

    `partial`: it is asked for a part of the page that is there already. `me` is who the API takes the reader for.
    """

    api: Api
    counts: Counts
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    me: Caller = field(default_factory=lambda: Caller("", ()))
    live: bool = False
    """What is asked for is the part that goes on, and not the whole page."""
    asks_keys: bool = False
    """The server asks for API keys, so that the reader can sign out."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a page that goes on remembers from one look to the next."""

    def may(self, action: Action, queue_name: str = "") -> bool:
        return self.me.may(action, queue_name)

    def may_somewhere(self, action: Action) -> bool:
        """On some queue, perhaps one that there is not yet."""
        return self.me.scopes is None or any(scope.action == action for scope in self.me.scopes)

    async def meet(self) -> None:
        """Ask the API who the reader is. Raises ProblemError."""
        own = await self.api.call("keys.self")
        self.me = Caller(own["name"], tuple(parse_scope(text, "scopes") for text in own["scopes"]))
        # Not whether the reader has sent a key: where none is asked for, any text would do.
        self.asks_keys = own["key_id"] is not None or own["name"] != ANYBODY.name


def api_of(app: Asgi, scope: HttpScope, request: Request) -> Api:
    """The API as the reader may use it: with the key that they signed in with, if they have."""
    key = signed(request)
    return Api(app, scope, request.host, b"Bearer " + key if key else b"")


def signed(request: Request) -> bytes:
    """The API key in the reader's cookie; empty if there is none that can be read."""
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
    """A header's value: until the browser is closed, for no script to read, and sent with nothing that another site has begun but links.

    An empty key takes the cookie away.
    """
    value = base64.urlsafe_b64encode(key.encode()).decode()
    secure = "; Secure" if request.scope.get("scheme") == "https" else ""
    end = "" if key else "; Max-Age=0"
    return f"{_cookie(request)}={value}; Path=/ui; HttpOnly; SameSite=Lax{secure}{end}".encode()


def _cookie(request: Request) -> str:
    """Its name. Browsers send a cookie to all ports of a host, and each server there has keys of its own."""
    port = _PORT.search(request.host)
    return f"sluiceway-{port[1].decode()}" if port else "sluiceway"


def is_own(request: Request, scope: HttpScope) -> bool:
    """Whether a page of this server has sent that request, and not one of another site in the reader's browser.

    Browsers say so in Sec-Fetch-Site where the connection is to be trusted, and elsewhere by Origin; neither can be set by a page. Who
    sends none of them is no browser that could be misled, but it is refused, too: there is the API for that.
    """
    found = {name: value for name, value in scope["headers"] if name in (b"sec-fetch-site", b"origin")}
    if b"sec-fetch-site" in found:
        return found[b"sec-fetch-site"] in (b"same-origin", b"none")
    origin = found.get(b"origin", b"")
    return bool(request.host) and origin in (b"http://" + request.host, b"https://" + request.host)


def facts_of(query: Mapping[str, str], names: Iterable[str]) -> Facts:
    """Those of these that are given, and not empty."""
    return {name: query[name] for name in names if query.get(name)}
