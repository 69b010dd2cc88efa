"""What the server logs: one stream, nothing forged, nothing secret, and which requests are worth a line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from sluiceway.model.access import Caller
from sluiceway.server.app import Fittings
from sluiceway.server.http import BodyMemory, Request
from sluiceway.server.logs import RequestLog, configure
from tests.server.server_running import eventually, running

SECRET = "slw_k7f3q2ma_" + "5ecre7" * 8


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What was written to it. The logging of the process is as before afterwards."""
    names = ["", "uvicorn", "httpx", "httpcore", "urllib3"]
    levels = {name: logging.getLogger(name).level for name in names}
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield io.StringIO()
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_ours_and_the_libraries_lines_are_one_stream(stream: io.StringIO) -> None:
    configure("json", "info", stream)
    logging.getLogger("sluiceway.instance").info("queue %s created", "q", extra={"request_id": "r-1"})
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.", extra={"color_message": "\x1b[31mred"})
    logging.getLogger("uvicorn.error").info("not worth a line")
    ours, theirs = lines(stream)
    assert ours.pop("timestamp").endswith("Z")
    assert ours == {"event": "queue q created", "level": "info", "logger": "sluiceway.instance", "request_id": "r-1"}
    assert (theirs["logger"], theirs["level"], "color_message" in theirs) == ("uvicorn.error", "warning", False)


def configure_alone(format: Any, stream: io.StringIO) -> None:
    """What is logged then is in no report of the tests, of which it cannot be a part: it is not UTF-8."""
    logging.getLogger().handlers.clear()
    configure(format, "info", stream)


FORGED = "x\n2026-01-31T08:00:00Z [info     ] queue q deleted\r\x1b[2J\u2028\x85\u202e\udcff"


@pytest.mark.parametrize("format", ["text", "json"])
def test_nothing_that_is_logged_looks_like_another_line(stream: io.StringIO, format: Any) -> None:
    configure_alone(format, stream)
    logging.getLogger("sluiceway").info("refused %s", FORGED, extra={"queue": FORGED})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert "x\\n2026" in (json.loads(line)["event"] if format == "json" else line)


@pytest.mark.parametrize("format", ["text", "json"])
def test_nor_does_a_line_of_an_exception(stream: io.StringIO, format: Any) -> None:
    configure_alone(format, stream)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("sluiceway").exception("failed")
    first, *others = stream.getvalue().split("\n")[:-1]
    assert "ValueError" in stream.getvalue()
    assert all(line.startswith("  | ") and line.isprintable() for line in others)
    assert first.isprintable()
    assert bool(others) == (format == "text")


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"Authorization: Bearer {SECRET}",
        "authorization=b'bearer 5ecre7.5ecre7'",
        "postgresql://user:5ecre7@host/db is not reachable",
        "host=db password=5ecre7 user=u",
        "password='5ecre7 5ecre7' host=db",
    ],
)
def test_no_secret_is_logged(stream: io.StringIO, format: Any, text: str) -> None:
    configure(format, "debug", stream)
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("sluiceway").exception("it says %s", text, extra={"detail": text, "listed": [text]})
    assert "***" in stream.getvalue()
    assert "5ecre7" not in stream.getvalue()


def test_values_of_variables_are_not_logged(stream: io.StringIO) -> None:
    configure("text", "debug", stream)
    payload = "pay" + "load"
    try:
        raise ValueError(len(payload))
    except ValueError:
        logging.getLogger("sluiceway").exception("failed")
    assert "payload" not in stream.getvalue().replace("len(payload)", "")


def test_it_can_be_configured_again(stream: io.StringIO) -> None:
    handlers = len(logging.getLogger().handlers)
    configure("text", "info", stream)
    logging.getLogger("sluiceway").debug("one")
    configure("json", "debug", stream)
    logging.getLogger("sluiceway").debug("two")
    configure("json", "error", stream)
    logging.getLogger("sluiceway").warning("three")
    assert [line["event"] for line in lines(stream)] == ["two"]
    assert len(logging.getLogger().handlers) == handlers + 1


# Requests


class Lines(logging.Handler):
    """The fields of the request lines, each with its level."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(vars(record))


@pytest.fixture
def written() -> Iterator[list[dict[str, Any]]]:
    handler, log = Lines(), logging.getLogger("sluiceway.requests")
    log.addHandler(handler)
    before, log.level = log.level, logging.INFO
    # The level is asked for each line, and remembered.
    log.setLevel(logging.INFO)
    yield handler.seen
    log.removeHandler(handler)
    log.setLevel(before)


def request(headers: Sequence[tuple[bytes, bytes]] = ()) -> Request:
    made = Request({"headers": headers, "query_string": b""}, cast(Any, None), BodyMemory())
    made.caller, made.request_id, made.queue_name = Caller("billing"), b"r-1", "orders"
    return made


def test_a_request_that_failed_or_was_slow_is_worth_a_line(written: list[dict[str, Any]]) -> None:
    requests = RequestLog()
    for path, status, seconds in (
        ("/v1/queue.produce", 200, 0.9),
        ("/v1/queue.produce", 200, 1.5),
        ("/v1/queue.produce", 503, 0.1),
        ("/v1/queue.produce", 404, 0.1),
        ("/v1/queue.lease", 200, 30.0),
        ("/v1/events", 200, 3600.0),
        ("/v1/queue.lease", 500, 0.1),
        ("", 500, 0.1),
    ):
        requests.answered(request(), path, status, seconds, 10, 20)
    found = [(line["endpoint"], line["status"], line["ms"]) for line in written]
    assert found == [
        ("/v1/queue.produce", 200, 1500.0),
        ("/v1/queue.produce", 503, 100.0),
        ("/v1/queue.lease", 500, 100.0),
        ("other", 500, 100.0),
    ]
    line = written[0]
    assert (line["received"], line["sent"], line["caller"], line["queue"], line["request_id"]) == (10, 20, "billing", "orders", "r-1")


def test_at_debug_every_request_has_one(written: list[dict[str, Any]]) -> None:
    logging.getLogger("sluiceway.requests").setLevel(logging.DEBUG)
    RequestLog().answered(request(), "/v1/queue.produce", 200, 0.001, 10, 20)
    assert [(line["levelname"], line["status"]) for line in written] == [("DEBUG", 200)]


def test_when_everything_fails_the_lines_are_counted_instead(written: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    second = 7.0
    monkeypatch.setattr("sluiceway.server.logs.stopwatch", lambda: second)
    requests = RequestLog()
    for _ in range(100):
        requests.answered(request(), "/v1/queue.produce", 503, 0.001, 10, 20)
    assert len(written) == 20
    second = 8.0
    requests.answered(request(), "/v1/queue.produce", 503, 0.001, 10, 20)
    requests.answered(request(), "/v1/queue.produce", 503, 0.001, 10, 20)
    assert [line.get("omitted") for line in written[19:]] == [None, 80, None]


def test_a_change_of_a_queue_names_its_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sluiceway"), running(tmp_path) as server:
        server.http.post("/v1/queues.create", json={"queue_name": "orders"}, headers={"x-request-id": "from-me"})
        server.http.post("/v1/queues.update", json={"queue_name": "orders", "reference": "x"}, headers={"x-request-id": "from-me-2"})
        server.http.post("/v1/queues.delete", json={"queue_name": "orders"}, headers={"x-request-id": "from-me-3"})
    found = [
        (record.getMessage().split()[2], vars(record)["request_id"]) for record in caplog.records if "queue orders" in record.getMessage()
    ]
    assert found == [("created", "from-me"), ("changed:", "from-me-2"), ("deleted", "from-me-3")]
    assert {vars(record).get("caller") for record in caplog.records} == {"anybody"}


def test_a_line_of_a_real_request(tmp_path: Path, written: list[dict[str, Any]]) -> None:
    logging.getLogger("sluiceway.requests").setLevel(logging.DEBUG)
    with running(tmp_path, lambda _: Fittings(meters=[RequestLog()])) as server:
        server.ask("queues.create", queue_name="orders")
        body = {"queue_name": "orders", "items": [{"utf8": "the payload"}]}
        headers = {"x-request-id": "from-me", "authorization": f"Bearer {SECRET}"}
        answer = server.http.post("/v1/queue.produce", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "from-me"
        eventually(lambda: len(written) == 2)
    line = written[1]
    assert (line["endpoint"], line["status"], line["queue"], line["request_id"]) == ("/v1/queue.produce", 200, "orders", "from-me")
    assert line["received"] == len(answer.request.content)
    assert line["sent"] == len(answer.content)
    assert not any("the payload" in str(value) or SECRET in str(value) for value in line.values())
