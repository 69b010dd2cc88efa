"""Attacks on the place where the instances of a cluster ask one another: by strangers, and with the cluster's secret."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache

import msgspec

from sluiceway.kernel.compatibility import NEWEST
from sluiceway.kernel.limits import MAX_PEER_BYTES
from sluiceway.model.inspection import Browse, ListItems
from sluiceway.model.items import batch_from_rows
from sluiceway.model.peers import Ask, Explain, Learn, PeerRequest, Poll
from sluiceway.model.requests import DONE, Extend, Lease, Peek, Produce, Selection, Settle
from sluiceway.wire import peer
from tests.hostile.arena import MIB, QUEUE, Answer, Arena, answer, pour, send

FAR = (1 << 62, (1 << 63) - 1, -1, -(1 << 63))
ROWS = batch_from_rows([{"payload": b"one", "kind": "k"}, {"payload": b"two", "kind": None}])
NOBODY = "slwc_nobody"


def head(secret: str, length: int | None, **headers: str) -> bytes:
    """Request line and headers; without a length there is no content-length."""
    lines = [f"POST {peer.PATH} HTTP/1.1", "host: localhost", f"authorization: Bearer {secret}", f"content-type: {peer.CONTENT_TYPE}"]
    if length is not None:
        lines.append(f"content-length: {length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def ask(arena: Arena, body: bytes, secret: str | None = None) -> Answer:
    return arena.ask(head(arena.secret if secret is None else secret, len(body)) + body)


def incarnation(arena: Arena) -> str:
    return str(arena.call("queues.info", queue_name=QUEUE)["incarnation"])


def strangers_that_ask(arena: Arena) -> None:
    """Who does not know the secret is refused before the body is read, whatever else is right."""
    body = peer.encode_request(Ask(incarnation(arena), Produce(ROWS, 5_000)))
    secret = arena.secret
    for wrong in ("", NOBODY, secret[:-1], secret + "x", secret.upper(), f"{secret} {secret}", secret.removeprefix("slwc_")):
        given = ask(arena, body, wrong)
        assert (given.status, given.code) == (401, "unauthenticated"), (wrong, given)
        assert secret.encode() not in given.body
    for length in (MAX_PEER_BYTES, 10_000_000_000):
        assert answer(arena.connect(head(NOBODY, length))).status == 401
    for data in (
        head(NOBODY, None, transfer_encoding="chunked"),
        head(secret, len(body)).replace(b"authorization", b"authorisation") + body,
        head(secret, len(body)).replace(b"Bearer ", b"Basic ") + body,
    ):
        assert answer(arena.connect(data)).status == 401, data
    for method in ("GET", "PUT", "DELETE"):
        assert answer(arena.connect(head(secret, 0).replace(b"POST", method.encode(), 1))).status == 405
    assert arena.total() == 0


def floods_of_wrong_secrets(arena: Arena) -> None:
    """Each another one: they leave nothing behind, and few lines in the log."""
    before = arena.logged()
    for number in range(2_000):
        assert ask(arena, b"", f"slwc_{number:040d}").status == 401
        arena.hang_up()
    assert arena.logged() - before < 100_000


def good(arena: Arena) -> bytes:
    return peer.encode_request(Ask(incarnation(arena), Produce(ROWS, 5_000)))


@cache
def bombs() -> list[bytes]:
    """Few bytes that say that they are many, or that lie deep."""

    def message(content: bytes, masks: bytes = b"\x90", length: int | None = None) -> bytes:
        inside = b"\x95\xa7Produce" + content + masks + b"\xa8k7f3q2ma\xc3"
        return struct.pack("<3sBI", b"slw", NEWEST, len(inside) if length is None else length) + inside

    # An array, a map, a text, bytes and an extension, of four thousand million each.
    sizes = [kind + b"\xff\xff\xff\xff\x01" for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")]
    nested = [b"\x91" * 100_000, b"\x81\xa1x" * 100_000, b"\x91" * 3_000_000, b"\xc1" * 100]
    return [
        *(message(size) for size in sizes),
        *(message(content + b"\xc0") for content in nested),
        *(message(b"\xc0", masks=size) for size in sizes),
        message(b"\xc0", masks=msgspec.msgpack.encode([0x7FFF] * 1_000_000)),
        message(b"\xc0", masks=msgspec.msgpack.encode([-1, 1 << 63])),
        *(message(b"\xc0", length=length) for length in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFF9)),
        b"",
        b"slw",
        b"slw" + bytes([NEWEST]),
        struct.pack("<3sBI", b"slw", NEWEST + 1, 5) + b"\x95",
        b"\0" * MIB,
    ]


def bombs_with_the_secret(arena: Arena) -> None:
    """Messages that say they are larger than they are, or nested without end, are refused as what they are."""
    for body in bombs():
        given = ask(arena, body)
        assert (given.status, given.code) in ((400, "invalid_body"), (413, "body_too_large")), (body[:40], given)
    said = answer(arena.connect(head(arena.secret, MAX_PEER_BYTES + 1)))
    assert (said.status, said.code) == (413, "body_too_large")
    endless = arena.connect(head(arena.secret, None, transfer_encoding="chunked"))
    assert pour(endless, b"100000\r\n" + b"x" * MIB + b"\r\n", 1_024 * MIB) < 1_024 * MIB
    assert arena.total() == 0


def far_numbers_with_the_secret(arena: Arena) -> None:
    """Numbers that nobody means. A peer that says them has an answer, or waits, and does no harm."""
    name = incarnation(arena)
    for number in FAR:
        waiting: list[PeerRequest] = [Learn(number), Poll((name,) * 1_000, number), Ask(name, Lease("c", number, number, number, number))]
        for request in waiting:
            body = peer.encode_request(request)
            arena.connect(head(arena.secret, len(body)) + body)
        answered = [
            Ask(name, Produce(ROWS, number)),
            Ask(name, Lease("c", 1, 0, number)),
            Ask(name, Peek(number)),
            Ask("\0" * 10_000, Peek(1)),
        ]
        for partition in (0, number):
            answered += [
                Ask(name, Explain(partition, number)),
                Ask(name, ListItems(partition, number, number)),
                Ask(name, Browse(partition, ("leased", "ready", "scheduled"), number)),
                Ask(name, Browse(partition, (), number, "0a" * 24, number)),
                Ask(name, Extend([(partition, number)], number, number)),
                Ask(name, Settle({partition: [Selection(DONE, lease=number)]}, number)),
            ]
        for request in answered:
            given = ask(arena, peer.encode_request(request))
            # 409: nobody has such a snapshot.
            assert given.status in (200, 409, 421, 503), (request, given)


def lying_messages_with_the_secret(arena: Arena) -> None:
    """A good message in which one number after the other is another one: refused, or harmless."""
    connection = arena.connect()
    for body in lies(good(arena)):
        send(connection, head(arena.secret, len(body)) + body)
        given = answer(connection)
        assert given.status in (200, 400, 404, 409, 421, 503), (body, given)


def lies(whole: bytes) -> Iterator[bytes]:
    values = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0xFFFFFFF8)
    for place in range(0, len(whole) - 4, 4):
        for value in values:
            yield whole[:place] + struct.pack("<I", value) + whole[place + 4 :]
    yield from (whole[:length] for length in range(0, len(whole), 8))


def waiting_with_the_secret(arena: Arena) -> None:
    """Hundreds of polls and leases that wait, half of them of peers that are gone already."""
    name = incarnation(arena)
    for number in range(400):
        request = Poll((name,), 60_000) if number % 2 else Ask(name, Lease(f"c{number}", 10, 60_000))
        body = peer.encode_request(request)
        connection = arena.connect(head(arena.secret, len(body)) + body)
        if number % 4 < 2:
            connection.close()
