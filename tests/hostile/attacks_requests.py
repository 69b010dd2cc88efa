"""Attacks with what HTTP says about a request: its line, its headers, and where its body ends."""

from __future__ import annotations

import itertools
import json

from tests.hostile.arena import MIB, QUEUE, Arena, answer, answer_or_end, head, pour, send, stats_call

PRODUCE = json.dumps({"queue_name": QUEUE, "items": [{"utf8": "smuggled"}]}).encode()
LINE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"


def huge_header(arena: Arena) -> None:
    """One header without an end, and a request line without one."""
    for beginning in (LINE + b"x: ", b"GET /", b"GET /livez HTTP/1.1\r\n", LINE + b"x" * 100 + b": ", b"G"):
        connection = arena.connect(beginning)
        assert pour(connection, b"a" * 65_536, 64 * MIB) < 64 * MIB
        given = answer_or_end(connection)
        assert given is None or given.status in (400, 431), given


def many_headers(arena: Arena) -> None:
    """A hundred thousand of them, also after a body in chunks."""
    headers = b"".join(b"x-%d: y\r\n" % number for number in range(100_000))
    for data in (LINE + headers + b"\r\n", head("queue.stats", None, transfer_encoding="chunked") + b"0\r\n" + headers + b"\r\n"):
        given = answer_or_end(arena.connect(data))
        assert given is None or given.status in (400, 431), given


def wrong_lengths(arena: Arena) -> None:
    """Content-lengths that are none, or two."""
    wrong = ["-1", "+5", "5, 5", "0x10", "1e3", "5 5", "", " ", "９", "9" * 30, "18446744073709551616", "NaN"]
    for length in wrong:
        data = head("queue.produce", None)[:-2] + f"content-length: {length}\r\n\r\n".encode()
        given = answer_or_end(arena.connect(data + PRODUCE))
        assert given is None or given.status in (400, 413), (length, given)
    twice = head("queue.produce", len(PRODUCE))[:-2] + b"content-length: 5\r\n\r\n"
    given = answer_or_end(arena.connect(twice + PRODUCE))
    assert given is None or given.status == 400, given
    assert arena.total() == 0


def smuggling(arena: Arena) -> None:
    """A request hidden in another one's body, behind two ways of saying where that ends, is never carried out."""
    hidden = head("queue.produce", len(PRODUCE)) + PRODUCE
    body = b"0\r\n\r\n" + hidden
    codings = [
        "chunked",
        "Chunked",
        " chunked",
        "chunked, identity",
        "identity, chunked",
        "xchunked",
        "chunked\r\ntransfer-encoding: x",
        "\x0bchunked",
    ]
    for coding, first in itertools.product(codings, (True, False)):
        length, te = f"content-length: {len(body)}", f"transfer-encoding: {coding}"
        both = "\r\n".join([length, te] if first else [te, length])
        data = head("queue.stats", None)[:-2] + f"{both}\r\n\r\n".encode("latin-1") + body
        connection = arena.connect(data + stats_call())
        given = answer_or_end(connection)
        assert given is None or given.status == 400, (coding, first, given)
    for offer in (b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: close, upgrade\r\nupgrade: websocket\r\n"):
        connection = arena.connect(head("queue.stats", len(hidden))[:-2] + offer + b"\r\n")
        assert send(connection, hidden)
        assert answer(connection).status == 400, offer
    for fold in (b"x: y\r\n content-length: 0\r\n", b"content-length : 5\r\n", b"\r\ncontent-length: 5\r\n", b"x\0: y\r\n", b"x: a\rb\r\n"):
        given = answer_or_end(arena.connect(head("queue.stats", len(body))[:-2] + fold + b"\r\n" + body))
        assert given is None or given.status in (400, 404), (fold, given)
    assert arena.total() == 0


def huge_bodies(arena: Arena) -> None:
    """Bodies beyond the limit: refused at once where their length is said, and before they are in memory where it is not."""
    said = answer(arena.connect(head("queue.produce", 10_000_000_000)))
    assert (said.status, said.code) == (413, "body_too_large")
    chunk = b"100000\r\n" + b"x" * MIB + b"\r\n"
    for _ in range(8):
        connection = arena.connect(head("queue.produce", None, transfer_encoding="chunked"))
        assert pour(connection, chunk, 1_024 * MIB) < 1_024 * MIB
        given = answer_or_end(connection)
        assert given is None or given.code == "body_too_large", given


def chunked_bombs(arena: Arena) -> None:
    """Chunks of one byte, with long extensions, of absurd lengths, and none that are well-formed."""
    start = head("queue.stats", None, transfer_encoding="chunked")
    small = arena.connect(start + b"1\r\n \r\n" * 500_000 + b"0\r\n\r\n")
    given = answer_or_end(small)
    assert given is None or given.status == 400, given
    extension = arena.connect(start)
    send(extension, b"1;")
    assert pour(extension, b"x" * 65_536, 64 * MIB) < 64 * MIB
    for size in (b"FFFFFFFFFFFFFFFF", b"FFFFFFFFFFFFFFFFF", b"-1", b"0x5", b"", b"7fffffffffffffff", b"zz"):
        given = answer_or_end(arena.connect(start + size + b"\r\n" + b"x" * 1_000 + b"\r\n0\r\n\r\n"))
        assert given is None or given.status in (400, 413), (size, given)
    assert arena.total() == 0


def bodies_that_are_held(arena: Arena) -> None:
    """More bodies than the server has memory for, all but whole: those beyond are refused, and small ones still are not."""
    part = b" " * (31 * MIB)
    refused = 0
    for _ in range(40):
        connection = arena.connect(head("queue.produce", 32 * MIB))
        if not send(connection, part):
            given = answer_or_end(connection)
            refused += given is None or given.code == "too_many_requests"
    # Refusals may still be on their way: it is enough that not all were taken.
    for connection in arena.sockets:
        connection.settimeout(0.2)
        try:
            found = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            found = b"HTTP/1.1 429"
        refused += found.startswith(b"HTTP/1.1 429")
    assert refused >= 20, refused


def injected_headers(arena: Arena) -> None:
    """Nothing that a client sends comes back as a header of the answer, or as a second answer."""
    evil = "x%0d%0aset-cookie:%20a=b"
    for path in (f"/v1/{evil}", f"/v1/queue.stats?queue_name={evil}", f"/docs/errors/{evil}", f"/v1/events?types={evil}"):
        given = arena.ask(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert "set-cookie" not in given.headers
        assert given.status in (400, 404, 405), given
    for request_id in (b"a\nset-cookie: a=b", b"a b", b"\xff" * 10, b"x" * 65, b"a\x0bset-cookie: x"):
        echoed = answer_or_end(arena.connect(LINE + b"x-request-id: " + request_id + b"\r\n\r\n"))
        if echoed is not None:
            assert "set-cookie" not in echoed.headers
            assert echoed.headers.get("x-request-id", "").encode("latin-1") != request_id
    name = json.dumps({"queue_name": "x\r\nset-cookie: a=b", "client_id": "c"}).encode()
    refused = arena.post("queue.lease", name)
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "set-cookie" not in refused.headers


def odd_paths_and_methods(arena: Arena) -> None:
    """Paths that mean another one, and methods that no endpoint has."""
    paths = [
        "/v1/../livez",
        "/v1//queue.stats",
        "//livez",
        "/%2e%2e/etc/passwd",
        "/livez%00",
        "/livez/",
        "/LIVEZ",
        "*",
        "http://other/nothing",
        "/" + "a/" * 10_000,
    ]
    for path in paths:
        given = answer_or_end(arena.connect(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()))
        assert given is None or given.status in (400, 404), (path, given)
    for method in ("TRACE", "CONNECT", "DELETE", "PUT", "PATCH", "OPTIONS", "PROPFIND", "BREW", "get", "G\0ET"):
        given = answer_or_end(arena.connect(f"{method} /livez HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()))
        assert given is None or given.status in (400, 405), (method, given)


def floods_of_strangers(arena: Arena) -> None:
    """API keys, request ids and queues that nobody has ever seen leave nothing behind."""
    connection = arena.connect()
    body = b'{"queue_name": "none-%08d"}'
    for number in range(3_000):
        sent = body % number
        send(
            connection,
            head("queue.stats", len(sent), authorization=f"Bearer slw_{number:08d}_{'x' * 32}", x_request_id=f"r-{number}") + sent,
        )
        assert answer(connection).status in (401, 404)


def floods_of_keys(arena: Arena) -> None:
    """Idempotency keys, client ids and lease keys of the largest size, each another one."""
    connection = arena.connect()
    for number in range(1_500):
        key = f"{number:06d}" + "k" * 1_018
        for call, fields in (
            ("queue.produce", {"items": [{"utf8": ""}], "idempotency_key": key}),
            ("queue.lease", {"client_id": key, "lease_key": key}),
        ):
            sent = json.dumps({"queue_name": QUEUE, **fields}).encode()
            send(connection, head(call, len(sent)) + sent)
            assert answer(connection).status == 200


def bombs_in_the_query(arena: Arena) -> None:
    """A query string with everything that the head has room for."""
    for query in (
        "?" + "&".join(f"a{n}=1" for n in range(5_000)),
        "?queue_name=" + "%41" * 15_000,
        "?" + "=" * 30_000,
        "?queue_name=%ff%fe&%00=1",
    ):
        given = answer_or_end(arena.connect(head("queue.produce", 4, "application/vnd.apache.arrow.stream", query) + b"xxxx"))
        assert given is None or given.status in (400, 404, 431), (query[:40], given)
