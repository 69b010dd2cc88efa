"""The client that Spark's processes use: what it repeats, for how long, and what it says in the end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.client._sync import channel
from sluiceway.client.direct import AGAIN
from sluiceway.client.protocol import Call
from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.spark import server_calls
from sluiceway.spark.options import Server
from sluiceway.spark.server_calls import Client, about, arrow_call
from tests.server.server_process import closed_port
from tests.spark.spark_world import until


def client_of(url: str, request_timeout: int = 60_000, **options: Any) -> Client:
    return Client(Server(url, "q", request_timeout, **options))


Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


def problem(status: int, code: str) -> tuple[int, bytes]:
    return status, json.dumps({"code": code, "detail": f"about {code}", "retryable": KINDS[code].retryable}).encode()


def set_clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Gives the client this clock, and no others: the server of the test needs the real one."""
    for module in (server_calls, channel):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now, sleep=sleep))


def fail_to_wait(seconds: float) -> None:
    pytest.fail("it tried again")


class Script:
    """A server that gives the answers of a script, one a request, and keeps what it was sent. An empty answer drops the connection.

    A third part of an answer are more of its headers.
    """

    def __init__(self, answers: list[Answer]) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self.keys: list[str | None] = []
        self.answers = answers
        """Those that were not given yet."""
        script, seen, keys = answers, self.seen, self.keys

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                keys.append(self.headers["authorization"])
                status, body, *more = script.pop(0)
                if not status:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(status)
                for name, value in more[0].items() if more else ():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    script = Script(list(answers))
    thread = threading.Thread(target=script.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join()


OK = (200, b'{"fine": true}')
DROPPED = (0, b"")


@pytest.mark.parametrize(
    "fault",
    [problem(503, "unavailable"), problem(504, "outcome_unknown"), problem(429, "too_many_requests"), (503, b"<html>"), DROPPED],
)
def test_a_passing_fault_is_repeated_with_the_same_body(fault: tuple[int, bytes]) -> None:
    with scripted(fault, fault, OK) as script:
        client = client_of(script.url)
        assert client.call("/v1/queue.stats", {"queue_name": "q"}) == {"fine": True}
        client.close()
        assert script.seen == [("/v1/queue.stats", b'{"queue_name":"q"}')] * 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem(404, "queue_not_found"), "queue_not_found"),
        (problem(503, "partition_damaged"), "partition_damaged"),
        (problem(500, "internal"), "internal"),
        ((400, b"what"), "not_found"),
    ],
)
def test_a_lasting_refusal_is_raised_at_once(answer: tuple[int, bytes], code: str) -> None:
    with scripted(answer) as script:
        client = client_of(script.url)
        with pytest.raises(SluicewayError) as caught:
            client.call("/v1/queue.stats", {})
        client.close()
        assert caught.value.code == code
        assert len(script.seen) == 1


def test_the_last_error_is_raised_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = [0.0]
    set_clock(monkeypatch, lambda: sum(slept), slept.append)
    monkeypatch.setattr(server_calls, "_LEAST_ATTEMPT", 60.0)
    with scripted(*[problem(503, "unavailable")] * 1_000) as script:
        client = client_of(script.url, 30_000)
        with pytest.raises(SluicewayError, match=r"about unavailable .*tried for 30s; option requestTimeout"):
            client.call("/v1/queue.stats", {})
        client.close()
        assert 28 < sum(slept) < 30
        assert len(script.seen) == len(slept)  # one call before each pause, one after the last, and the first entry is no pause


@pytest.mark.parametrize(("said", "least"), [("7", 7), ("0", 0), ("soon", 0), ("-1", 0)])
def test_a_server_that_asks_to_wait_is_not_asked_before(said: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    set_clock(monkeypatch, lambda: sum(slept), slept.append)
    with scripted((*problem(429, "rate_limited"), {"retry-after": said}), OK) as script:
        client = client_of(script.url)
        client.call("/v1/queue.stats", {})
        client.close()
    assert len(slept) == 1
    assert least < slept[0] < least + 0.1


def test_https_to_a_server_without_tls_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda: 0.0, fail_to_wait)
    with scripted() as script:
        url = script.url.replace("http:", "https:")
        with pytest.raises(SluicewayError, match=f"{url} does not use TLS") as caught:
            client_of(url).call("/v1/queue.stats", {})
    assert caught.value.code == "unavailable"


def test_a_server_that_is_not_there_is_named() -> None:
    with closed_port() as port, pytest.raises(SluicewayError, match=f"http://127.0.0.1:{port}") as caught:
        client_of(f"http://127.0.0.1:{port}", 100).call("/v1/queue.stats", {})
    assert caught.value.retryable


def test_a_call_that_broke_off_may_have_happened_even_if_the_server_is_gone_now() -> None:
    with scripted(OK, DROPPED) as script:
        client = client_of(script.url, 100)
        client.call("/v1/queue.stats", {})
        script.server.shutdown()
        script.server.server_close()
        with pytest.raises(SluicewayError) as caught:
            client.call("/v1/queue.stats", {})
        client.close()
    assert caught.value.code == "outcome_unknown"
    assert len(script.seen) == 2, "it was sent over the connection that was still open"


def test_arrow_is_sent_and_fetched() -> None:
    batch = pa.record_batch({"payload": pa.array([b"x", b"y"], pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with scripted(OK, (200, sink.getvalue().to_pybytes())) as script:
        client = client_of(script.url)
        client.send_arrow("/v1/queue.produce", {"idempotency_key": "a/b c"}, batch)
        assert client.fetch_arrow("/v1/queue.peek", {}).read_all().to_batches() == [batch]
        client.close()
        path, body = script.seen[0]
        assert path == "/v1/queue.produce?idempotency_key=a%2Fb+c"
        assert pa.ipc.open_stream(body).read_all().to_batches() == [batch]


# ---- calls that are started, and finished later -----------------------------------------------------------------


def produce_of(*payloads: bytes) -> Call[dict[str, Any]]:
    batch = pa.record_batch({"payload": pa.array(payloads, pa.binary())})
    return arrow_call("/v1/queue.produce", {"idempotency_key": payloads[0].decode()}, batch)


def test_a_call_that_is_started_is_made_before_it_is_finished() -> None:
    with scripted(OK, OK) as script:
        client = client_of(script.url)
        client.start(call := produce_of(b"a"))
        until("the server has the call", lambda: len(script.seen) == 1)
        assert client.finish(call) == {"fine": True}
        client.start(call := produce_of(b"b"))
        until("the server has the second call", lambda: len(script.seen) == 2)
        assert client.finish(call) == {"fine": True}
        client.close()
        assert [path[-1] for path, _ in script.seen] == ["a", "b"]


@pytest.mark.parametrize(
    "fault",
    [problem(503, "unavailable"), problem(504, "outcome_unknown"), problem(429, "too_many_requests"), (503, b"<html>"), DROPPED],
)
def test_a_call_that_was_started_is_repeated_as_it_was(fault: tuple[int, bytes]) -> None:
    with scripted(OK, fault, fault, OK) as script:
        client = client_of(script.url)
        client.call("/v1/queue.stats", {})
        client.start(call := produce_of(b"a", b"b"))
        assert client.finish(call) == {"fine": True}
        client.close()
        assert script.seen[1:] == [(call.path, bytes(call.body))] * 3


def test_a_started_call_waits_as_long_as_the_server_asks_and_counts_its_time_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = [0.0]
    set_clock(monkeypatch, lambda: sum(slept), slept.append)
    with scripted((*problem(429, "rate_limited"), {"retry-after": "7"}), OK) as script:
        client = client_of(script.url, 10_000)
        client.start(call := produce_of(b"a"))
        # As long as Spark takes to make the next rows.
        slept.append(300.0)
        client.finish(call)
        client.close()
    assert 307 < sum(slept) < 308


def test_a_call_that_cannot_be_started_fails_when_it_is_finished() -> None:
    with closed_port() as port:
        client = client_of(f"http://127.0.0.1:{port}", 100)
        client.start(call := produce_of(b"a"))
        with pytest.raises(SluicewayError, match="cannot reach") as caught:
            client.finish(call)
    assert caught.value.code == "unavailable"


def test_a_started_call_that_broke_off_may_have_happened_even_if_the_server_is_gone_now() -> None:
    with scripted(OK, DROPPED) as script:
        client = client_of(script.url, 100)
        client.call("/v1/queue.stats", {})
        client.start(call := produce_of(b"a"))
        until("the server has the call", lambda: len(script.seen) == 2)
        script.server.shutdown()
        script.server.server_close()
        with pytest.raises(SluicewayError) as caught:
            client.finish(call)
        client.close()
    assert caught.value.code == "outcome_unknown"


def test_the_answer_to_a_started_call_goes_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "slw_one")
    with scripted((200, b'{"of": 1}'), (200, b'{"of": 2}'), (200, b'{"of": 3}'), (200, b'{"of": 4}')) as script:
        client = client_of(script.url, api_key="env:KEY")
        client.start(call := produce_of(b"a"))
        until("the server has the call", lambda: len(script.seen) == 1)
        assert client.call("/v1/queue.stats", {}) == {"of": 2}
        client.start(call)
        until("the server has the call", lambda: len(script.seen) == 3)
        monkeypatch.setenv("KEY", "slw_two")
        assert client.finish(call) == {"of": 4}
        client.close()
    assert script.keys == ["Bearer slw_one"] * 3 + ["Bearer slw_two"]


# ---- direct -----------------------------------------------------------------------------------------------------


TIME = "2026-11-22T00:00:00Z"


def owned(*addresses: str | None) -> tuple[int, bytes]:
    """What `queues.info` says of partitions 0, 1, …"""
    parts = [{"partition": n, "backend": "main", "state": "available", "address": each} for n, each in enumerate(addresses)]
    info = {"queue_name": "q", "incarnation": "k7f3q2ma", "created_at": TIME, "updated_at": TIME, "lease_timeout": "1m", "max_attempts": 0}
    return 200, json.dumps(info | {"requested_partitions": len(parts), "partitions": parts}).encode()


def paths(script: Script) -> list[str]:
    return [path.rpartition("/")[2] for path, _ in script.seen]


PEEK = {"queue_name": "q", "lease_id": "k7f3q2ma.1.L4"}


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"lease_id": "k.1.L4"}, {1}),
        ({"partition": 0, "cursor": "x"}, {0}),
        ({"lease_ids": ["k.1.L4", "k.20.L1"]}, {1, 20}),
        ({"ids": ["k.1.4"], "lease_ids": []}, {1}),
        ({"lease_id": "nonsense"}, {None}),
        ({"lease_id": "k.x.1"}, {None}),
        ({"lease_id": None, "partition": None}, None),
        ({"lease_ids": []}, None),
        ({"batch_size": 3}, None),
    ],
)
def test_what_a_call_is_about_is_told_by_its_body(body: dict[str, object], numbers: set[int | None] | None) -> None:
    found = about({"queue_name": "q", **body})
    assert (found and (found.queue_name, found.partitions())) == (numbers and ("q", numbers))


@pytest.mark.parametrize("address", ["https://one:1", "ftp://one:1", "one:1", "nonsense", "http://", "http://one:x", ""])
def test_no_key_goes_to_an_address_of_another_scheme(address: str) -> None:
    with scripted(owned(None, address), OK) as base:
        client = client_of(base.url, direct=True)
        assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        client.close()
        assert paths(base) == ["queues.info", "queue.extend"]


def test_a_direct_call_goes_to_the_owner_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "slw_k7f3q2ma_secret")
    with scripted(OK, OK, OK) as owner, scripted(owned(None, owner.url, owner.url), OK) as base:
        client = client_of(base.url, api_key="env:KEY", direct=True)
        assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        outcomes = pa.record_batch({"partition": pa.array([1, 2, 1], pa.int32())})
        client.send_arrow("/v1/queue.settle", {"queue_name": "q"}, outcomes)
        client.call("/v1/queue.browse", {"queue_name": "q", "partition": 2})
        client.call("/v1/queue.lease", {"queue_name": "q"})
        client.close()
        assert (paths(base), paths(owner)) == (
            ["queues.info", "queue.lease"],
            ["queue.extend", "queue.settle?queue_name=q", "queue.browse"],
        )
        assert base.keys + owner.keys == ["Bearer slw_k7f3q2ma_secret"] * 5


def test_a_client_that_is_not_direct_asks_its_server_only() -> None:
    with scripted((*OK, {"x-sluiceway-served-by": "http://127.0.0.1:1"}), OK) as base:
        client = client_of(base.url)
        client.call("/v1/queue.extend", PEEK)
        client.call("/v1/queue.extend", PEEK)
        client.close()
        assert paths(base) == ["queue.extend"] * 2


AWAY = (307, b"{}", {"location": "http://127.0.0.1:1/"})


@pytest.mark.parametrize("fault", [DROPPED, problem(503, "unavailable"), problem(404, "lease_not_found"), AWAY])
def test_whatever_an_owner_does_but_succeed_the_server_is_asked(fault: Answer) -> None:
    with scripted(fault) as owner, scripted(owned(None, owner.url), OK) as base:
        client = client_of(base.url, direct=True)
        assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        client.close()
        assert (paths(owner), paths(base)) == (["queue.extend"], ["queues.info", "queue.extend"])


def test_an_owner_that_closed_an_idle_connection_is_asked_on_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    with scripted(OK, DROPPED, OK) as owner, scripted(owned(None, owner.url)) as base:
        client = client_of(base.url, direct=True)
        for _ in range(2):
            assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        client.close()
        assert (paths(owner), paths(base)) == (["queue.extend"] * 3, ["queues.info"])
    assert caplog.records == []


def test_owners_are_looked_for_on_a_new_connection_where_the_old_one_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    set_clock(monkeypatch, lambda: clock[0], lambda _: None)
    with scripted(problem(503, "unavailable"), OK) as owner, scripted(owned(None, owner.url), OK, DROPPED, owned(None, owner.url)) as base:
        client = client_of(base.url, direct=True)
        client.call("/v1/queue.extend", PEEK)
        clock[0] += AGAIN
        client.call("/v1/queue.extend", PEEK)
        client.close()
        assert (len(owner.seen), paths(base)) == (2, ["queues.info", "queue.extend", "queues.info", "queues.info"])


def test_an_owner_that_asks_to_wait_is_given_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    set_clock(monkeypatch, lambda: sum(slept), slept.append)
    with scripted((*problem(429, "rate_limited"), {"retry-after": "7"}), OK, OK) as owner, scripted(owned(None, owner.url)) as base:
        client = client_of(base.url, direct=True)
        client.call("/v1/queue.extend", PEEK)
        assert [7 < each < 7.1 for each in slept] == [True]
        client.call("/v1/queue.extend", PEEK)
        client.close()
        assert (paths(owner), paths(base)) == (["queue.extend"] * 3, ["queues.info"]), "it is the owner still"


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_an_address_that_no_host_can_have_costs_nothing(name: str) -> None:
    with scripted(owned(None, f"http://{name}:1"), OK) as base:
        client = client_of(base.url, direct=True)
        assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        client.close()


def test_an_owner_that_is_gone_costs_no_pause_and_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    set_clock(monkeypatch, lambda: 0.0, fail_to_wait)
    with closed_port() as port, scripted(owned(None, f"http://127.0.0.1:{port}"), OK, OK) as base:
        client = client_of(base.url, direct=True)
        client.call("/v1/queue.extend", PEEK)
        client.call("/v1/queue.extend", PEEK)
        client.close()
        assert paths(base) == ["queues.info", "queue.extend", "queue.extend"], "who has it is not asked again within a second"
        assert [f"127.0.0.1:{port}" in record.message for record in caplog.records] == [True]


def test_owners_are_asked_for_again_when_one_had_to_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    set_clock(monkeypatch, lambda: clock[0], lambda _: None)
    with scripted() as new, scripted((*OK, {"x-sluiceway-served-by": new.url})) as old, scripted(owned(None, old.url)) as base:
        client = client_of(base.url, direct=True)
        client.call("/v1/queue.extend", PEEK)
        clock[0] += AGAIN
        base.answers.append(owned(None, new.url))
        new.answers.append(OK)
        client.call("/v1/queue.extend", PEEK)
        client.close()
        assert (paths(base), paths(old), paths(new)) == (["queues.info"] * 2, ["queue.extend"], ["queue.extend"])


@pytest.mark.parametrize(
    "told",
    [
        problem(403, "forbidden"),
        problem(503, "unavailable"),
        (200, b"<html>"),
        (200, b"{}"),
        (200, b"[]"),
        (200, b'{"partitions": 3}'),
        owned(None, None),
    ],
)
def test_a_server_that_does_not_tell_the_owners_is_asked_for_everything(told: Answer) -> None:
    with scripted(told, OK) as base:
        client = client_of(base.url, direct=True)
        assert client.call("/v1/queue.extend", PEEK) == {"fine": True}
        client.close()
        assert paths(base) == ["queues.info", "queue.extend"]


@pytest.mark.parametrize("direct", [False, True])
def test_no_redirect_is_followed(direct: bool) -> None:
    with scripted() as elsewhere, scripted((307, b"{}", {"location": f"{elsewhere.url}/v1/queue.lease"})) as base:
        client = client_of(base.url, direct=direct)
        with pytest.raises(SluicewayError, match="HTTP 307"):
            client.call("/v1/queue.lease", {"queue_name": "q"})
        client.close()
        assert elsewhere.seen == []
