"""The stream of events from a real server, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from sluiceway.instance.event_feed import Watch
from sluiceway.instance.service import Service
from sluiceway.server import events
from sluiceway.server.app import Fittings
from sluiceway.server.events import EventStreams
from sluiceway.server.guard import OpenDoor
from tests.server.server_process import PATIENCE
from tests.server.server_running import Running, eventually, running


def fit(service: Service) -> Fittings:
    guard = OpenDoor()
    streams = EventStreams(Watch(service), guard.recheck)
    return Fittings(guard, pages=streams.pages(), on_stop=[streams.stop])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "data", fit) as server:
        yield server


class Following:
    """A stream that is read line by line. The server has begun to look once it has sent the first counts."""

    def __init__(self, server: Running, queue_name: str, resume: str = "") -> None:
        headers = {"last-event-id": resume} if resume else {}
        self._context = server.http.stream("GET", "/v1/events", headers=headers, timeout=PATIENCE)
        self.response = self._context.__enter__()
        self._lines = self.response.iter_lines()
        self.queue_name = queue_name
        self.last_id = ""

    def until(self, wanted: str) -> dict[str, object]:
        """The data of the next event of that type about the queue."""
        kind = ""
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "event":
                kind = value
            elif name == "data" and kind == wanted:
                data: dict[str, object] = msgspec.json.decode(value)
                if data.get("queue_name", self.queue_name) == self.queue_name:
                    return data
        raise AssertionError(f"the stream ended before {wanted}")

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def test_a_reader_follows_what_happens(server: Running) -> None:
    name = server.queue()
    following = Following(server, name)
    assert following.response.headers["content-type"] == "text/event-stream"
    assert following.until("stats")["ready"] == 0
    server.produce(name, "a", "b")
    assert following.until("stats")["ready"] == 2
    server.ask("queue.pause", queue_name=name, verbs=["lease"])
    assert following.until("queue.paused")["paused"] == ["lease"]
    server.ask("queues.delete", queue_name=name, force=True)
    following.until("queue.deleted")
    following.close()


def test_a_reader_that_was_away_is_told_what_it_missed(server: Running) -> None:
    name = server.queue()
    following = Following(server, name)
    following.until("stats")
    following.close()
    server.ask("queues.update", queue_name=name, reference="r")
    again = Following(server, name, following.last_id)
    assert again.until("queue.updated")["changed"] == ["reference"]
    again.close()


def test_a_reader_of_another_process_is_told_to_read_the_state_again(server: Running) -> None:
    following = Following(server, server.queue(), "abcdefgh-7")
    following.until("reset")
    following.close()


def test_streams_end_when_the_server_stops(server: Running) -> None:
    following = Following(server, server.queue())
    following.until("stats")
    server.stop()
    with pytest.raises(AssertionError, match="the stream ended"):
        following.until("nothing")
    following.close()


def test_a_reader_that_takes_nothing_is_cut_off_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "STREAM_SEND_TIMEOUT", 20)
    watches: list[Watch] = []

    def watched(service: Service) -> Fittings:
        watches.append(Watch(service))
        streams = EventStreams(watches[0], OpenDoor().recheck)
        return Fittings(pages=streams.pages(), on_stop=[streams.stop])

    with running(tmp_path / "data", watched) as server:
        connection = server.raw(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
        connection.recv(1_000)
        # More than the system takes for a client that does not read.
        for _ in range(200):
            watches[0].ring.add("queue.created", "q", text="x" * 100_000)
        eventually(lambda: not server._server.server_state.connections)
        connection.close()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_stream_can_only_be_read(server: Running) -> None:
    for method in ("HEAD", "POST"):
        answer = server.http.request(method, "/v1/events")
        assert (answer.status_code, answer.headers["allow"]) == (httpx.codes.METHOD_NOT_ALLOWED, "GET")
