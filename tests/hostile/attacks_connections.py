"""Attacks with connections: too many, too slow, cut off, or not HTTP at all."""

from __future__ import annotations

import json
import socket
import threading

from tests.hostile.arena import MIB, QUEUE, Arena, answer, answer_or_end, ended, head, pour, reset, send, stats_call
from tests.server.server_process import PATIENCE, wait_until

BIG = 24


def silent_connections(arena: Arena) -> None:
    """A thousand that never say anything: each is dropped in the end."""
    for _ in range(1_000):
        arena.connect()
    assert ended(arena.sockets[0]) == b""
    assert ended(arena.sockets[-1]) == b""


def idle_connections(arena: Arena) -> None:
    """A thousand that were served once and stay."""
    for _ in range(1_000):
        assert arena.ask(stats_call()).status == 200


def slow_headers(arena: Arena) -> None:
    """Headers that arrive byte by byte are not waited for without end."""
    connections = [arena.connect(b"POST /v1/queue.stats HTTP/1.1\r\nhost: localhost\r\n") for _ in range(200)]
    left = set(connections)

    def all_dropped() -> bool:
        for connection in list(left):
            if not send(connection, b"x"):
                left.discard(connection)
        return not left

    wait_until(all_dropped, "the end of slow headers")


def slow_bodies(arena: Arena) -> None:
    """Bodies that do not arrive are refused in the end, and said to be."""
    for _ in range(200):
        arena.connect(head("queue.produce", 1_000) + b'{"queue_name"')
    found = [answer(connection) for connection in arena.sockets]
    assert {(each.status, each.code) for each in found} == {(400, "invalid_body")}


def slow_readers_of_small_answers(arena: Arena) -> None:
    """Who sends request after request and reads no answer is cut off."""
    for _ in range(20):
        connection = arena.connect()
        assert pour(connection, stats_call(), 64 * MIB) < 64 * MIB


def slow_readers_of_large_answers(arena: Arena) -> None:
    """Who asks for all there is, over and over, and reads nothing of it."""
    filled(arena)
    body = b'{"queue_name": "%s", "limit": 10000}' % QUEUE.encode()
    for _ in range(100):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.settimeout(PATIENCE)
        connection.connect(arena.address)
        arena.sockets.append(connection)
        send(connection, head("queue.peek", len(body), accept="application/vnd.apache.arrow.stream") + body)
    for connection in arena.sockets:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def filled(arena: Arena) -> None:
    """Some MiB in the attacked queue."""
    for _ in range(BIG):
        arena.call("queue.produce", queue_name=QUEUE, items=[{"utf8": "x" * MIB}])


def readers_of_events_that_do_not_read(arena: Arena) -> None:
    """A thousand streams of events are the most; a further one is told so."""
    for _ in range(1_000):
        arena.connect(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    refused = arena.ask(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (refused.status, refused.code) == (429, "too_many_requests")


def half_closed(arena: Arena) -> None:
    """Who has nothing more to say after the request still gets an answer; who stops within it gets an end."""
    for _ in range(50):
        whole = arena.connect(stats_call())
        whole.shutdown(socket.SHUT_WR)
        given = answer_or_end(whole)
        assert given is None or given.status == 200
        part = arena.connect(stats_call()[:-5])
        part.shutdown(socket.SHUT_WR)
        assert answer_or_end(part) is None
    assert arena.total() == 0


def cut_off(arena: Arena) -> None:
    """Connections that are reset: within the headers, the body, the wait for an answer, and a long poll."""
    poll = b'{"queue_name": "%s", "client_id": "c", "request_timeout": "10m"}' % QUEUE.encode()
    beginnings = [b"POST /v1/q", head("queue.produce", MIB) + b"x" * 1_000, stats_call(), head("queue.lease", len(poll)) + poll]
    for number in range(1_000):
        reset(arena.connect(beginnings[number % len(beginnings)]))
    waiting = arena.call("queue.stats", queue_name=QUEUE)["logical_queues"]
    wait_until(lambda: arena.call("queue.stats", queue_name=QUEUE)["logical_queues"][0]["lease_waiting"] == 0, f"the end of {waiting}")


def churn(arena: Arena) -> None:
    """Connections that are made and closed as fast as they can be."""

    def connect() -> None:
        for _ in range(1_500):
            with socket.create_connection(arena.address, timeout=PATIENCE) as connection:
                send(connection, b"G")

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pipelined(arena: Arena) -> None:
    """Some requests ahead are answered in their order; very many are not held in memory behind one that waits."""
    last = stats_call().replace(b"host:", b"connection: close\r\nhost:")
    assert ended(arena.connect(stats_call() * 9 + last)).count(b"HTTP/1.1 200 OK") == 10
    poll = json.dumps({"queue_name": QUEUE, "client_id": "c", "request_timeout": "10m"}).encode()
    for _ in range(200):
        arena.connect(head("queue.lease", len(poll)) + poll + b"GET / HTTP/1.1\r\n\r\n" * 10_000)
    assert ended(arena.sockets[-1]) == b""


def long_polls(arena: Arena) -> None:
    """Thousands that wait for an item that never comes."""
    poll = b'{"queue_name": "%s", "client_id": "c", "request_timeout": "10m"}' % QUEUE.encode()
    for _ in range(4_000):
        arena.connect(head("queue.lease", len(poll)) + poll)
    wait_until(lambda: arena.call("queue.stats", queue_name=QUEUE)["logical_queues"][0]["lease_waiting"] == 4_000, "waiting")
    arena.hang_up()
    wait_until(lambda: arena.call("queue.stats", queue_name=QUEUE)["logical_queues"][0]["lease_waiting"] == 0, "hanging up")


def other_protocols(arena: Arena) -> None:
    """TLS, HTTP/2, HTTP/0.9 and 1.0, SSH, an upgrade, and bytes without a meaning."""
    hello = bytes.fromhex("16030100a5010000a10303") + bytes(range(32)) + bytes(130)
    for data in (hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40), b"SSH-2.0-x\r\n", bytes(range(256)) * 40):
        given = answer_or_end(arena.connect(data))
        assert given is None or given.status == 400, given
    ancient = answer_or_end(arena.connect(b"GET /livez\r\n\r\n"))
    assert ancient is None or ancient.status in (200, 400), ancient
    old = arena.ask(b"GET /livez HTTP/1.0\r\n\r\n")
    assert (old.status, old.body) == (200, b'{"alive":true}')
    upgrade = arena.ask(
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n\r\n"
    )
    assert (upgrade.status, upgrade.body) == (200, b'{"alive":true}')
