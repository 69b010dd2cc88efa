"""Client of etcd's JSON gateway: endpoints, authentication, time-outs, and the meaning of faults."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import msgspec

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.names import QUEUE_NAME
from sluiceway.ports.partition_store import StoreUnavailableError

T = TypeVar("T")

FORM = "etcd://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/NAME], or etcds://… for TLS, with / @ ? # in a password as %2F %40 %3F %23"
DEFAULT_NAME = "sluiceway"
FILES = ("ca_file", "cert_file", "key_file")

OUT_OF_RANGE = 11
"""etcd's code for a revision that has been compacted."""
_AILING = (None, 2, 4, 14)
"""Codes of a member whose call another may be able to serve: unknown, deadline exceeded, unavailable. None: no answer."""
_UNAUTHENTICATED = 16
_OLD_TOKEN = "revision of auth store is old"
_HINTS = {
    "too many operations": "Sluiceway needs the default --max-txn-ops (128), or more",
    "request is too large": "Sluiceway needs the default --max-request-bytes (1572864), or more",
    "database space exceeded": "have etcd compact it (--auto-compaction-retention), defragment it, and disarm the alarm",
    "user name is empty": "put the user and the password into the URL",
}
"""Advice for messages of etcd."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


class EtcdError(StoreUnavailableError):
    """The call was not done, or its outcome is unknown. `code` is etcd's, if the error came from etcd."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Address:
    """An etcd's endpoints, and the credentials there."""

    endpoints: tuple[httpx.URL, ...]
    name: str
    """Name of the deployment: all its keys begin with it and a slash."""
    login: Mapping[str, str] | None
    files: Mapping[str, str]


class _Token(msgspec.Struct):
    token: str = ""


class _Problem(msgspec.Struct):
    message: str = ""
    code: int | None = None


def parse_address(url: str) -> Address:
    """Parse a meta-store URL. Raises `invalid_request`, which quotes nothing: an unencoded password may have ended up anywhere."""
    try:
        parts = urlsplit(url)
        given = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise invalid("meta", f"expected {FORM}") from None
    user, _, hosts = parts.netloc.rpartition("@")
    if parts.scheme not in ("etcd", "etcds") or not hosts or parts.fragment:
        raise invalid("meta", f"expected {FORM}")
    if given.keys() - set(FILES):
        raise invalid("meta", f"after the ?, expected only {', '.join(FILES)}")
    if given and parts.scheme == "etcd":
        raise invalid("meta", f"{min(given)} needs TLS; use etcds://…")
    if not QUEUE_NAME.fullmatch(parts.path[1:] or DEFAULT_NAME):
        raise invalid("meta", "the name after the slash must be 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -")
    name, _, password = user.partition(":")
    return Address(
        tuple(_endpoint("https" if parts.scheme == "etcds" else "http", host) for host in hosts.split(",")),
        parts.path[1:] or DEFAULT_NAME,
        {"name": unquote(name), "password": unquote(password)} if user else None,
        {name: values[-1] for name, values in given.items()},
    )


def _endpoint(scheme: str, host: str) -> httpx.URL:
    try:
        url = httpx.URL(f"{scheme}://{host}")
    except httpx.InvalidURL:
        raise invalid("meta", f"expected {FORM}") from None
    if not url.host:
        raise invalid("meta", f"expected {FORM}")
    return url if url.port else url.copy_with(port=2379)


def _trust(files: Mapping[str, str]) -> ssl.SSLContext | bool:
    if not files:
        return True
    try:
        context = ssl.create_default_context(cafile=files.get("ca_file"))
        if "cert_file" in files:
            context.load_cert_chain(files["cert_file"], files.get("key_file"))
    except (OSError, ssl.SSLError) as error:
        raise invalid("meta", f"the files of the URL ({', '.join(files)}) cannot be read as PEM: {error}") from None
    return context


class EtcdGateway:
    """Any of the endpoints of one etcd. Each is given `request_timeout` for a call. Use from one event loop."""

    def __init__(self, address: Address, request_timeout: Millis) -> None:
        self._endpoints = list(address.endpoints)
        self._login = address.login
        self._token = ""
        self._request_timeout = request_timeout
        verify = _trust(address.files) if address.endpoints[0].scheme == "https" else False
        # A bare transport, not an httpx client: the environment's proxies are not for a meta store.
        self._transport = httpx.AsyncHTTPTransport(verify=verify, limits=httpx.Limits(max_connections=None, keepalive_expiry=30.0))

    async def ask(self, path: str, message: object, kind: type[T], *, repeatable: bool = True) -> T:
        """Return the answer. After a fault another endpoint is tried; unless `repeatable`, only as long as nothing was sent. Raises
        EtcdError."""
        body = msgspec.json.encode(message)
        for left in reversed(range(len(self._endpoints))):
            endpoint = self._endpoints[0]
            try:
                return await self._ask(endpoint, path, body, kind)
            except EtcdError as error:
                if error.code in _AILING and self._endpoints[0] is endpoint:
                    # Later calls try it last, too.
                    self._endpoints.append(self._endpoints.pop(0))
                if not left or error.code not in _AILING or not (repeatable or isinstance(error.__cause__, _NOT_SENT)):
                    raise
        raise AssertionError("an address has an endpoint")

    async def lines(self, path: str, message: object, kind: type[T], silence_timeout: Millis) -> AsyncIterator[T]:
        """Stream answers until `silence_timeout` passes without one. Raises EtcdError, also if none ever came, or if etcd ends the
        stream."""
        endpoint, silent = self._endpoints[0], True
        try:
            async with self._sent(endpoint, path, msgspec.json.encode(message), silence_timeout) as answer:
                rest = b""
                async for data in answer.aiter_raw():
                    silent = False
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield _decode(line, kind, endpoint)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ReadTimeout) and not silent:
                return
            raise _broken(endpoint, error) from error
        raise EtcdError(f"{_shown(endpoint)} ended a stream")

    async def close(self) -> None:
        await self._transport.aclose()

    async def _ask(self, endpoint: httpx.URL, path: str, body: bytes, kind: type[T]) -> T:
        try:
            async with self._sent(endpoint, path, body, self._request_timeout) as answer:
                return _decode(await answer.aread(), kind, endpoint)
        except httpx.HTTPError as error:
            raise _broken(endpoint, error) from error

    @contextlib.asynccontextmanager
    async def _sent(self, endpoint: httpx.URL, path: str, body: bytes, read_timeout: Millis) -> AsyncIterator[httpx.Response]:
        """Send an authenticated call and yield the answer. Raises EtcdError if etcd refuses, httpx.HTTPError."""
        token = await self._log_in(endpoint, "")
        try:
            answer = await self._post(endpoint, path, body, token, read_timeout)
        except EtcdError as error:
            # etcd checks the token before anything else, so the call was not carried out.
            if token and (error.code == _UNAUTHENTICATED or _OLD_TOKEN in str(error)):
                answer = await self._post(endpoint, path, body, await self._log_in(endpoint, token), read_timeout)
            else:
                raise
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _log_in(self, endpoint: httpx.URL, expired: str) -> str:
        """A token other than the expired one; "" if the URL names no user."""
        if self._login is None:
            return ""
        if self._token == expired:
            answer = await self._post(endpoint, "/v3/auth/authenticate", msgspec.json.encode(self._login), "", self._request_timeout)
            self._token = _decode(await _whole(answer), _Token, endpoint).token
        return self._token

    async def _post(self, endpoint: httpx.URL, path: str, body: bytes, token: str, read_timeout: Millis) -> httpx.Response:
        patience = self._request_timeout / 1000
        headers = {"Host": endpoint.netloc.decode(), "Content-Type": "application/json", "Content-Length": str(len(body))}
        if token:
            headers["Authorization"] = token
        timeout = {"connect": patience, "write": patience, "pool": patience, "read": read_timeout / 1000}
        request = httpx.Request(
            "POST", endpoint.join(path), headers=headers, stream=httpx.ByteStream(body), extensions={"timeout": timeout}
        )
        answer = await self._transport.handle_async_request(request)
        if answer.status_code != 200:
            raise _refused(endpoint, answer.status_code, await _whole(answer))
        return answer


async def _whole(answer: httpx.Response) -> bytes:
    try:
        return await answer.aread()
    finally:
        await answer.aclose()


def _decode(body: bytes, kind: type[T], endpoint: httpx.URL) -> T:
    try:
        # Its 64-bit numbers are strings.
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EtcdError(f"{_shown(endpoint)} did not answer like an etcd server: {error}") from None


def _refused(endpoint: httpx.URL, status: int, body: bytes) -> EtcdError:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = _Problem()
    if not problem.message:
        return EtcdError(f"{_shown(endpoint)} answered HTTP {status}; it is not etcd 3.4 or newer")
    hints = [f"; {hint}" for what, hint in _HINTS.items() if what in problem.message]
    return EtcdError(f"{_shown(endpoint)}: {problem.message}{''.join(hints)}", problem.code)


def _broken(endpoint: httpx.URL, error: httpx.HTTPError) -> EtcdError:
    return EtcdError(f"{_shown(endpoint)} does not answer: {str(error) or type(error).__name__}")


def _shown(endpoint: httpx.URL) -> str:
    return f"etcd {endpoint.netloc.decode()}"
