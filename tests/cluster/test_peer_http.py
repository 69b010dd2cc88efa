"""One instance asks another, over real connections: what comes over, and who is let in."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from sluiceway.cluster.peer_http import HttpTransport
from sluiceway.kernel.compatibility import NEWEST
from sluiceway.kernel.errors import OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_PEER_BYTES
from sluiceway.model.leased_items import Slice, served
from sluiceway.model.peers import Ask, Learn, Load, PeerRequest, Poll, Polled
from sluiceway.model.requests import DONE, Lease, Leased, LeaseInfo, Produce, Produced, Selection, Settle, Settled
from sluiceway.ports.transport import PeerRefusedError
from sluiceway.wire import peer
from tests.cluster.peer_rig import LEARNT, LONG, ROWS, SECRET, Instance, announce, ask, run
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance().serving() as running:
        yield running


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


# ---- who does not wait any more ---------------------------------------------------------------------------------------


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
    assert "refused without a valid cluster secret: 1 requests" in caplog.text
    assert "slwc_0123" not in caplog.text + refused.text


def test_an_instance_of_another_cluster_is_told_that_it_is_no_peer(instance: Instance) -> None:
    with pytest.raises(
        PeerRefusedError, match="refused the request: this endpoint is only for the other instances of this cluster"
    ) as caught:
        ask(instance.url, Learn(5), secret="slwc_another")
    assert "slwc_" not in str(caught.value)


def test_a_peer_of_an_unknown_level_surely_did_nothing(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    body = peer.encode_request(Learn(5), NEWEST + 1)
    monkeypatch.setattr(peer, "encode_request", lambda *_: body)
    with pytest.raises(PeerRefusedError, match=f"compatibility level {NEWEST + 1}"):
        ask(instance.url, Learn(5))
    assert instance.asked == []


def test_a_message_is_of_the_level_in_use(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the newest: an instance of the release before could not read it."""
    monkeypatch.setattr(peer, "NEWEST", NEWEST + 1)
    instance.reply = lambda _: True
    sent: list[int] = []

    def noted(name: str, encode: Callable[..., Any]) -> None:
        def noting(*message: Any) -> Any:
            sent.append(message[-1])
            return encode(*message)

        monkeypatch.setattr(peer, name, noting)

    noted("encode_request", peer.encode_request)
    noted("encode_answer", peer.encode_answer)
    assert ask(instance.url, Learn(5), level=lambda: NEWEST) is True
    assert ask(instance.url, Learn(5), level=lambda: NEWEST + 1) is True
    assert sent == [NEWEST, NEWEST, NEWEST + 1, NEWEST + 1]


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


def everything(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65_536):
        answer += part
    return answer


def test_a_stranger_s_body_is_not_waited_for(instance: Instance) -> None:
    with announce(instance.url, MAX_PEER_BYTES, "slwc_wrong") as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


def test_a_body_that_says_it_is_too_large_is_refused_unread(instance: Instance) -> None:
    with announce(instance.url, MAX_PEER_BYTES + 1, SECRET) as connection:
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_a_body_that_does_not_arrive_holds_up_nobody(instance: Instance) -> None:
    instance.reply = lambda _: True
    with ExitStack() as held:
        for _ in range(50):
            held.enter_context(announce(instance.url, 100, SECRET, b"slw"))
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
