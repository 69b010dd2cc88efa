"""An object store with the interface of S3, in memory, as a process of its own: with the latencies of a real one, and a count of what it
would cost.

`python -m bench.bucket_server --median 60 --p99 200` prints its URL. GET /-/counts answers the number of requests by kind as JSON, and GET
/-/latency/60/200 changes the latencies. It knows what obstore asks of it: PUT with conditions, GET with ranges, lists, deletions.
Signatures are not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from html import escape, unescape
from http import HTTPStatus
from re import findall
from statistics import NormalDist
from typing import Any
from urllib.parse import parse_qs, unquote

import httptools
import uvloop

PAGE = 1_000
"""Names in one answer to a list, as S3."""


class Objects:
    """The objects, and the requests that there were."""

    def __init__(self) -> None:
        self.data: dict[str, tuple[bytes, str]] = {}
        self.names: list[str] = []
        self.counts: Counter[str] = Counter()

    def put(self, name: str, body: bytes, none_match: bool, match: str | None) -> tuple[int, dict[str, str]]:
        self.counts["put"] += 1
        self.counts["bytes_put"] += len(body)
        before = self.data.get(name)
        if (none_match and before is not None) or (match is not None and (before is None or before[1] != match)):
            return 412, {}
        tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        if before is None:
            insort(self.names, name)
        self.data[name] = body, tag
        return 200, {"etag": tag}

    def list(self, prefix: str, after: str) -> tuple[list[str], bool]:
        self.counts["list"] += 1
        found: list[str] = []
        at = bisect_right(self.names, after) if after >= prefix else bisect_left(self.names, prefix)
        while at < len(self.names) and self.names[at].startswith(prefix):
            if len(found) == PAGE:
                return found, True
            found.append(self.names[at])
            at += 1
        return found, False

    def delete(self, name: str) -> None:
        self.counts["delete"] += 1
        if self.data.pop(name, None) is not None:
            self.names.pop(bisect_right(self.names, name) - 1)


class Latency:
    """Log-normal, with that median and 99th percentile in milliseconds; 0: none."""

    def __init__(self, median: float, p99: float) -> None:
        self.become(median, p99)

    def become(self, median: float, p99: float) -> None:
        """Change it."""
        self._median = median
        self._sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99) if median else 0.0

    def seconds(self) -> float:
        return self._median * math.exp(random.gauss(0, self._sigma)) / 1000 if self._median else 0.0


class Connection(asyncio.Protocol):
    """One connection. Half of the latency comes before a request takes effect, and half after."""

    def __init__(self, objects: Objects, latency: Latency) -> None:
        self._objects, self._latency = objects, latency
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers, self._body = b"", {}, []  # type: ignore[var-annotated]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method, url, headers, body = self._parser.get_method().decode(), self._url.decode(), self._headers, b"".join(self._body)
        loop, half = asyncio.get_running_loop(), self._latency.seconds() / 2
        if url.startswith("/-/"):
            self._say(200, {}, json.dumps(self._control(url.removeprefix("/-/"))).encode())
        elif not half:
            self._say(*self._act(method, url, headers, body))
        else:
            loop.call_later(half, lambda: loop.call_later(half, self._say, *self._act(method, url, headers, body)))

    def _control(self, call: str) -> Any:
        """The answer to what a benchmark asks of the server itself."""
        what, *given = call.split("/")
        if what == "latency":
            self._latency.become(*map(float, given))
        return self._objects.counts

    def _act(self, method: str, url: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        path, _, query = url.partition("?")
        _, _, name = unquote(path).lstrip("/").partition("/")
        options = parse_qs(query, keep_blank_values=True)
        if method == "PUT":
            return *self._objects.put(name, body, headers.get("if-none-match") == "*", headers.get("if-match")), b""
        if method == "POST" and "delete" in options:
            keys: list[str] = findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self._objects.delete(unescape(key))
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, {"content-type": "application/xml"}, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        if method == "DELETE":
            self._objects.delete(name)
            return 204, {}, b""
        if "list-type" in options:
            after = options.get("continuation-token", options.get("start-after", [""]))[0]
            found, more = self._objects.list(options.get("prefix", [""])[0], after)
            return 200, {"content-type": "application/xml"}, self._listed(found, more)
        return self._got(name, headers.get("range"))

    def _listed(self, found: list[str], more: bool) -> bytes:
        when = "2026-01-01T00:00:00.000Z"
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified><ETag>{escape(self._objects.data[name][1])}</ETag>"
            f"<Size>{len(self._objects.data[name][0])}</Size></Contents>"
            for name in found
        )
        token = f"<NextContinuationToken>{escape(found[-1])}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>".encode()

    def _got(self, name: str, wanted: str | None) -> tuple[int, dict[str, str], bytes]:
        self._objects.counts["get"] += 1
        found = self._objects.data.get(name)
        if found is None:
            return 404, {"content-type": "application/xml"}, b"<Error><Code>NoSuchKey</Code></Error>"
        data, tag = found
        headers = {"etag": tag, "last-modified": formatdate(0, usegmt=True)}
        if wanted is None:
            self._objects.counts["bytes_got"] += len(data)
            return 200, headers, data
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1 if last else None]
        self._objects.counts["bytes_got"] += len(piece)
        return 206, headers | {"content-range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"}, piece

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(head(status, headers, len(body)) + body)


def head(status: int, headers: dict[str, str], length: int) -> bytes:
    """An answer up to its body."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}content-length: {length}\r\n\r\n".encode()


def run(about: str | None, connection: Callable[[Objects, Latency], Connection]) -> None:
    """Serve on a free port until the process ends, with the latencies that the command line asks for."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--median", type=float, default=0.0, help="of a request's latency, in milliseconds")
    parser.add_argument("--p99", type=float, default=0.0)
    given = parser.parse_args()
    objects, latency = Objects(), Latency(given.median, given.p99)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(lambda: connection(objects, latency)))


async def _serve(connection: Callable[[], Connection]) -> None:
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    run(__doc__, Connection)
