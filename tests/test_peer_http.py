"""One instance asks another, over real connections: what comes over, and what is known when nothing does."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fake_service import FakeService, serving
from server_guarded import certified
from server_process import PATIENCE, closed_port
from server_running import eventually
from sluiceway.kernel.errors import OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_PEER_BYTES
from sluiceway.model.items import batch_from_rows
from sluiceway.model.leased import Slice, served
from sluiceway.model.peers import Ask, Learn, Load, PeerRequest, Poll, Polled
from sluiceway.model.requests import DONE, Lease, Leased, LeaseInfo, Produce, Produced, Selection, Settle, Settled
from sluiceway.node import peer_connection, peer_http
from sluiceway.node.peer_http import HttpTransport
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.server.app import Fittings
from sluiceway.server.http import Request
from sluiceway.server.peer_calls import PeerCalls
from sluiceway.server.tls import TlsFiles
from sluiceway.wire import peer

SECRET = "slwc_0123456789abcdef"
ROWS = batch_from_rows([{"payload": b"one", "kind": "k"}, {"payload": b"two", "kind": None}])
LONG = 60_000


class Instance:
    """Gives each request to `reply`, or waits for ever without one. `given_up` is set when the asking side has gone."""

    def __init__(self, reply: Callable[[PeerRequest], Any] | None = None) -> None:
        self.reply = reply
        self.asked: list[PeerRequest] = []
        self.began = threading.Event()
        self.given_up = threading.Event()
        self.request_ids: list[bytes] = []
        self.statuses: list[tuple[str, int]] = []
        self.calls = PeerCalls(self, SECRET)
        self.url = ""

    async def answer(self, request: PeerRequest) -> Any:
        self.asked.append(request)
        self.began.set()
        if self.reply is not None:
            return self.reply(request)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.given_up.set()
            raise

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        self.request_ids.append(request.request_id)
        self.statuses.append((path, status))

    @contextmanager
    def serving(self, tls: TlsFiles | None = None) -> Iterator[Instance]:
        with serving(FakeService(), Fittings(peers=self.calls, meters=[self]), tls) as self.url:
            yield self


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance().serving() as running:
        yield running


def run(work: Callable[[HttpTransport], Coroutine[Any, Any, Any]], secret: str = SECRET, ca_file: Path | None = None) -> Any:
    async def life() -> Any:
        transport = HttpTransport(secret, ca_file)
        try:
            return await work(transport)
        finally:
            await transport.close()

    return asyncio.run(life())


def ask(address: str, request: PeerRequest, timeout: int = LONG, **options: Any) -> Any:
    return run(lambda transport: transport.ask(address, request, timeout, "r-1"), **options)


# ---- what comes over --------------------------------------------------------------------------------------------------


def test_two_instances_ask_one_another() -> None:
    leased = Leased([LeaseInfo(1, 4, 2, 99)], [served(1, 4, Slice(0, np.arange(2), np.arange(2), 1, 5), ROWS)])
    answers: dict[type, Any] = {Produce: Produced(2, 7, 2, False), Lease: leased, Settle: Settled(completed=2)}

    def reply(request: PeerRequest) -> Any:
        if isinstance(request, Ask):
            return answers[type(request.request)]
        return True if isinstance(request, Learn) else Polled({"k7f3q2ma": Load(3, None)})

    one, other = Instance(reply), Instance(reply)
    offsets = np.array([3, 9], np.int64)
    asked: list[PeerRequest] = [
        Ask("k7f3q2ma", Produce(ROWS, 5_000)),
        Ask("k7f3q2ma", Lease("c", 2), payload=False),
        Ask("k7f3q2ma", Settle({1: [Selection(DONE, offsets)]}, 5_000)),
        Learn(8),
        Poll(("k7f3q2ma",), 5_000),
    ]

    async def both(transport: HttpTransport) -> list[Any]:
        calls = [transport.ask(each.url, request, LONG, f"r-{n}") for n, request in enumerate(asked) for each in (one, other)]
        return await asyncio.gather(*calls)

    with one.serving(), other.serving():
        found = run(both)
        eventually(lambda: len(one.statuses) == len(other.statuses) == len(asked))
    for answer in (found[::2], found[1::2]):
        produced, lease, settled, learnt, polled = answer
        assert (produced, settled, learnt, polled) == (answers[Produce], answers[Settle], True, Polled({"k7f3q2ma": Load(3, None)}))
        assert lease.leases == leased.leases
        assert lease.batches[0].equals(leased.batches[0])
    for each in (one, other):
        said: dict[type, Any] = {type(request.request if isinstance(request, Ask) else request): request for request in each.asked}
        assert {kind.__name__ for kind in said} == {"Produce", "Lease", "Settle", "Learn", "Poll"}
        assert said[Produce].request.batch.equals(ROWS)
        assert said[Lease].payload is False
        assert said[Settle].request.selections[1][0].offsets.tolist() == [3, 9]
        assert sorted(each.request_ids) == [b"r-0", b"r-1", b"r-2", b"r-3", b"r-4"]
        assert set(each.statuses) == {(peer.PATH, 200)}


@pytest.mark.parametrize(
    "error",
    [
        SluicewayError("not_here", "partition 3 is another's"),
        SluicewayError("unavailable", "closed", "partition"),
        RateLimitedError("too fast", 250),
        OtherQueueError("queue_not_found", "the dead queue {other} is gone", "dead", "dead_queue"),
    ],
)
def test_an_error_is_raised_as_itself(error: SluicewayError) -> None:
    def reply(_: PeerRequest) -> None:
        raise error

    with Instance(reply).serving() as instance:
        with pytest.raises(SluicewayError) as caught:
            ask(instance.url, Learn(5))
        eventually(lambda: instance.statuses == [(peer.PATH, error.kind.status)])
    assert type(caught.value) is type(error)
    assert caught.value.__reduce__() == error.__reduce__()


def test_a_mistake_of_the_peer_is_found_in_its_log_by_the_request_s_id(caplog: pytest.LogCaptureFixture) -> None:
    def reply(_: PeerRequest) -> None:
        raise ZeroDivisionError

    with Instance(reply).serving() as instance, pytest.raises(SluicewayError) as caught:
        ask(instance.url, Learn(5))
    assert caught.value.code == "internal"
    assert "r-1" in {getattr(record, "request_id", None) for record in caplog.records if record.exc_info}


def test_over_tls_the_peer_is_known_by_its_certificate(tmp_path: Path) -> None:
    tls, ca_file = certified(tmp_path / "one")
    _, stranger = certified(tmp_path / "other")
    with Instance(lambda _: True).serving(tls) as instance:
        assert instance.url.startswith("https://")
        assert ask(instance.url, Learn(5), ca_file=Path(ca_file)) is True
        with pytest.raises(PeerRefusedError, match="certificate"):
            ask(instance.url, Learn(5), ca_file=Path(stranger))
        with pytest.raises(PeerRefusedError, match="certificate"):
            ask(instance.url, Learn(5))
    assert len(instance.asked) == 1
    with pytest.raises(FileNotFoundError):
        HttpTransport(SECRET, tmp_path / "none.pem")


# ---- who does not wait any more ---------------------------------------------------------------------------------------


def test_a_time_out_leaves_it_unknown_and_ends_the_work(instance: Instance) -> None:
    with pytest.raises(PeerUnknownError, match="did not answer within 300ms"):
        ask(instance.url, Ask("k7f3q2ma", Lease("c", 1, 5_000)), 300)
    assert not instance.began.is_set() or instance.given_up.wait(PATIENCE)


@pytest.mark.parametrize("request_", [Ask("k7f3q2ma", Lease("c", 1, 5_000)), Ask("k7f3q2ma", Produce(ROWS, 5_000)), Poll((), 5_000)])
def test_a_caller_that_is_cancelled_ends_the_work(instance: Instance, request_: PeerRequest) -> None:
    async def give_up(transport: HttpTransport) -> None:
        call = asyncio.ensure_future(transport.ask(instance.url, request_, LONG))
        assert await asyncio.to_thread(instance.began.wait, PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(instance.given_up.wait, PATIENCE)

    run(give_up)
    eventually(lambda: instance.statuses == [(peer.PATH, 0)])


def test_a_stop_ends_what_waits_and_nothing_else(instance: Instance) -> None:
    async def stop(transport: HttpTransport) -> None:
        waiting: list[PeerRequest] = [Poll((), 5_000), Ask("k7f3q2ma", Lease("c", 1, 5_000))]
        calls = [asyncio.ensure_future(transport.ask(instance.url, request, LONG)) for request in [*waiting, Learn(5)]]
        await asyncio.to_thread(eventually, lambda: len(instance.asked) == 3)
        instance.reply = lambda _: True
        instance.calls.stop_waiting()
        for call in calls[:2]:
            with pytest.raises(SluicewayError) as caught:
                await call
            assert caught.value.code == "unavailable"
        # Now, and from now on.
        with pytest.raises(SluicewayError):
            await transport.ask(instance.url, waiting[0], LONG)
        assert await transport.ask(instance.url, Learn(6), LONG) is True
        assert not calls[2].done()
        calls[2].cancel()

    run(stop)


# ---- what is known when no answer comes -------------------------------------------------------------------------------


def test_who_cannot_be_reached_surely_did_nothing() -> None:
    with closed_port() as port, pytest.raises(PeerRefusedError, match="cannot reach"):
        ask(f"http://127.0.0.1:{port}", Learn(5))
    for address in ("ftp://127.0.0.1", "127.0.0.1:5", "", "http://[::"):
        with pytest.raises(PeerRefusedError):
            ask(address, Learn(5))


def test_a_peer_that_takes_no_connection_surely_did_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_http, "_CONNECT_TIMEOUT", 50)
    with ExitStack() as open_, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        # What is beyond the backlog is left without an answer.
        for _ in range(4):
            connection = open_.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(address)
        with pytest.raises(PeerRefusedError, match="cannot reach"):
            ask(f"http://127.0.0.1:{address[1]}", Learn(5))


class Raw:
    """A server that does with its connections what the test says. `requests` counts those that came whole."""

    def __init__(self, *acts: Callable[[Raw, socket.socket], None]) -> None:
        self.requests = 0
        self._acts = acts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._work, name="raw server")

    def _work(self) -> None:
        for act in self._acts:
            connection, _ = self._server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                act(self, connection)

    def read(self, connection: socket.socket) -> None:
        """One whole request."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65_536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        while len(body) < length:
            body += connection.recv(65_536)
        self.requests += 1

    def __enter__(self) -> Raw:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)
        self._server.close()
        assert not self._thread.is_alive()


def said(body: bytes, status: int = 200, content_type: str = peer.CONTENT_TYPE, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n".encode() + body


LEARNT = peer.encode_answer(Learn(5), True)
RESET = struct.pack("ii", 1, 0)


def close_unread(raw: Raw, connection: socket.socket) -> None:
    connection.recv(1)


def reset_unread(raw: Raw, connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def close_after_reading(raw: Raw, connection: socket.socket) -> None:
    raw.read(connection)


def answering(data: bytes) -> Callable[[Raw, socket.socket], None]:
    def act(raw: Raw, connection: socket.socket) -> None:
        raw.read(connection)
        connection.sendall(data)

    return act


BROKEN = {
    "closed unread": close_unread,
    "reset unread": reset_unread,
    "closed after reading": close_after_reading,
    "cut off": answering(said(LEARNT, length=len(LEARNT) + 1)),
    "half a head": answering(b"HTTP/1.1 200 OK\r\ncontent-"),
    "not http": answering(b"no such thing\r\n\r\n"),
    "damaged": answering(said(LEARNT[:-1])),
    "to something else": answering(said(peer.encode_answer(Poll((), 0), Polled()))),
    "a page": answering(said(b"<html>", 200, "text/html")),
    "a gateway": answering(said(b"<html>", 502, "text/html")),
    "a gateway in json": answering(said(b'{"code": "queue_not_found"}', 502, "application/json")),
    "not an error": answering(said(LEARNT, 503)),
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=list(BROKEN))
def test_what_was_sent_and_not_answered_is_unknown(act: Callable[[Raw, socket.socket], None]) -> None:
    with Raw(act) as raw, pytest.raises(PeerUnknownError, match=raw.url):
        ask(raw.url, Learn(5))


def test_an_answer_that_is_too_large_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "MAX_ANSWERS_BYTES", 10)
    with Raw(answering(said(bytes(1_000)))) as raw, pytest.raises(PeerUnknownError, match="larger than 10 bytes"):
        ask(raw.url, Learn(5))


def test_a_connection_that_the_peer_closed_meanwhile_is_not_used() -> None:
    """Nothing was sent on it, so the call goes over another one."""
    closed = threading.Event()

    def answer_and_close(raw: Raw, connection: socket.socket) -> None:
        answering(said(LEARNT))(raw, connection)
        connection.close()
        closed.set()

    async def twice(transport: HttpTransport) -> list[Any]:
        first = await transport.ask(raw.url, Learn(5), LONG)
        assert await asyncio.to_thread(closed.wait, PATIENCE)
        return [first, await transport.ask(raw.url, Learn(5), LONG)]

    with Raw(answer_and_close, answering(said(LEARNT))) as raw:
        assert run(twice) == [True, True]
    assert raw.requests == 2


def test_a_connection_that_the_peer_closes_on_the_second_request_leaves_that_unknown() -> None:
    """The peer may have carried it out: it is not sent again."""

    def answer_once(raw: Raw, connection: socket.socket) -> None:
        answering(said(LEARNT))(raw, connection)
        raw.read(connection)

    async def twice(transport: HttpTransport) -> None:
        assert await transport.ask(raw.url, Learn(5), LONG) is True
        with pytest.raises(PeerUnknownError):
            await transport.ask(raw.url, Learn(5), LONG)

    with Raw(answer_once) as raw:
        run(twice)
    assert raw.requests == 2


# ---- who is let in ----------------------------------------------------------------------------------------------------


def post(url: str, body: bytes = peer.encode_request(Learn(5)), token: str | None = SECRET) -> httpx.Response:
    headers = {"content-type": peer.CONTENT_TYPE} | ({} if token is None else {"authorization": f"Bearer {token}"})
    return httpx.post(url + peer.PATH, content=body, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("token", [None, "x", "slwc_", SECRET[:-1], SECRET + "0", SECRET.upper(), "slw_k7f3q2ma_secret"])
def test_only_who_knows_the_secret_is_let_in(instance: Instance, token: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        refused = post(instance.url, token=token)
    assert refused.status_code == 401
    assert refused.json()["code"] == "unauthenticated"
    assert "other instances of this cluster" in refused.json()["detail"]
    assert instance.asked == []
    assert "refused without a good cluster secret: 1 requests" in caplog.text
    assert "slwc_0123" not in caplog.text + refused.text


def test_an_instance_of_another_cluster_is_told_that_it_is_no_peer(instance: Instance) -> None:
    with pytest.raises(PeerRefusedError, match="did not take the request: only the other instances of this cluster") as caught:
        ask(instance.url, Learn(5), secret="slwc_another")
    assert "slwc_" not in str(caught.value)


def test_a_peer_of_another_version_surely_did_nothing(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytearray(peer.encode_request(Learn(5)))
    body[3] = peer.VERSION + 1
    monkeypatch.setattr(peer, "encode_request", lambda _: bytes(body))
    with pytest.raises(PeerRefusedError, match="run the same release on all instances"):
        ask(instance.url, Learn(5))
    assert instance.asked == []


def test_who_has_no_peers_has_no_such_endpoint() -> None:
    with serving(FakeService()) as url:
        assert post(url).json()["code"] == "not_found"
        with pytest.raises(PeerRefusedError):
            ask(url, Learn(5))


def test_it_is_no_part_of_the_api(instance: Instance) -> None:
    assert httpx.get(instance.url + peer.PATH).headers["allow"] == "POST"
    for page in ("/openapi.json", "/docs"):
        assert "cluster/ask" not in httpx.get(instance.url + page).text


# ---- who means harm ---------------------------------------------------------------------------------------------------


def raw_post(url: str, length: int, token: str, body: bytes = b"") -> socket.socket:
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)
    head = f"POST {peer.PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: {length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def everything(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65_536):
        answer += part
    return answer


def test_a_stranger_s_body_is_not_waited_for(instance: Instance) -> None:
    with raw_post(instance.url, MAX_PEER_BYTES, "slwc_wrong") as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


def test_a_body_that_says_it_is_too_large_is_refused_unread(instance: Instance) -> None:
    with raw_post(instance.url, MAX_PEER_BYTES + 1, SECRET) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_a_body_that_does_not_arrive_holds_up_nobody(instance: Instance) -> None:
    instance.reply = lambda _: True
    with ExitStack() as held:
        for _ in range(50):
            held.enter_context(raw_post(instance.url, 100, SECRET, b"slw"))
        assert ask(instance.url, Learn(5)) is True
    eventually(lambda: sorted(instance.statuses) == [(peer.PATH, 0)] * 50 + [(peer.PATH, 200)])
    assert len(instance.asked) == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", LEARNT, b"slw\x01\xff\xff\xff\xff", b"slw\x01\x00\x00\x00\x40" + b"\x91" * 9_000, peer.encode_request(Learn(5)) + b"x"],
)
def test_a_damaged_body_is_refused_and_the_next_one_answered(instance: Instance, body: bytes) -> None:
    instance.reply = lambda _: True
    for damaged in (body, peer.encode_request(Ask("k7f3q2ma", Produce(ROWS, 5)))[: -len(body) - 1]):
        refused = post(instance.url, damaged)
        assert refused.status_code == 400
        assert refused.json()["code"] == "invalid_body"
    assert ask(instance.url, Learn(5)) is True
    assert len(instance.asked) == 1
