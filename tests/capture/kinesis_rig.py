"""Kinesis streams of the tests' own, and a line to them that can be made to fail."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import boto3
import pyarrow as pa

from sluiceway.capture.streams.kinesis import KinesisStream, Pace
from sluiceway.capture.streams.kinesis_positions import parse_position
from tests.servers.moto_server import REGION, MotoServer, merge, open_shards, split

QUICK = Pace(calls=5, idle=5, wait=100)
"""moto has no limits."""

Message = dict[str, Any]


class Cut(Exception):
    """The line is cut."""


class Refused(Exception):
    """The service answers with an error."""

    def __init__(self, code: str, status: int = 400) -> None:
        super().__init__(code)
        self.code, self.status = code, status


def as_asked(call: str, asked: Message) -> None:
    """Nothing happens."""


def as_answered(call: str, asked: Message, answer: Message) -> Message:
    return answer


class KinesisProxy:
    """Stands before the server. `before` sees each call, may change it, and may raise Cut or Refused; `after` sees its answer as well, and
    gives what is answered. Both are called in threads, one at a time.

    `later`: the service's clock is so far ahead. `calls`: names of the calls, in order.
    """

    def __init__(self, port: int) -> None:
        self.before: Callable[[str, Message], None] = as_asked
        self.after: Callable[[str, Message, Message], Message] = as_answered
        self.later = timedelta()
        self.calls: list[str] = []
        self._mutex = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                proxy._answer(self, port)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> KinesisProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        call, asked = handler.headers["X-Amz-Target"].rpartition(".")[2], json.loads(body)
        try:
            with self._mutex:
                self.calls.append(call)
                self.before(call, asked)
            status, date, answer = self._forward(handler, json.dumps(asked).encode(), port)
            if status == 200:
                with self._mutex:
                    answer = json.dumps(self.after(call, asked, json.loads(answer))).encode()
        except Refused as refused:
            status, date, answer = refused.status, "", json.dumps({"__type": refused.code, "message": "by the test"}).encode()
        except Cut:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response_only(status)
        handler.send_header("Content-Type", "application/x-amz-json-1.1")
        handler.send_header("Content-Length", str(len(answer)))
        if date:
            handler.send_header("Date", format_datetime(parsedate_to_datetime(date) + self.later, usegmt=True))
        handler.end_headers()
        handler.wfile.write(answer)

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes, port: int) -> tuple[int, str, bytes]:
        line = http.client.HTTPConnection("127.0.0.1", port)
        try:
            headers = {name: value for name, value in handler.headers.items() if name not in ("Connection", "Content-Length")}
            line.request("POST", "/", body, headers)
            answer = line.getresponse()
            return answer.status, answer.headers["Date"], answer.read()
        finally:
            line.close()


class Dropped:
    """Makes a proxy's stream one that has dropped records, up to the number `upto` of each shard. `says`: it refuses a place that it has
    dropped; otherwise it begins with what is left, without a word.
    """

    def __init__(self, proxy: KinesisProxy, says: bool = False) -> None:
        self.upto: dict[str, int] = {}
        self._says = says
        self._shards: dict[str, str] = {}
        """By iterator."""
        proxy.before, proxy.after = self._before, self._after

    def _before(self, call: str, asked: Message) -> None:
        if (
            call == "GetShardIterator"
            and self._says
            and int(asked.get("StartingSequenceNumber", 10**60)) <= self.upto.get(asked["ShardId"], 0)
        ):
            raise Refused("InvalidArgumentException")

    def _after(self, call: str, asked: Message, answer: Message) -> Message:
        if call == "GetShardIterator":
            self._shards[answer["ShardIterator"]] = asked["ShardId"]
        elif call == "GetRecords":
            shard = self._shards[asked["ShardIterator"]]
            self._shards[answer.get("NextShardIterator") or ""] = shard
            answer["Records"] = [each for each in answer["Records"] if int(each["SequenceNumber"]) > self.upto.get(shard, 0)]
        return answer


numbers = itertools.count()


@functools.cache
def shared_session() -> boto3.session.Session:
    """To read all that boto3 knows of services takes longer than most tests."""
    return boto3.session.Session(aws_access_key_id="tests", aws_secret_access_key="tests")


@functools.cache
def client_of(server: MotoServer) -> Any:
    return shared_session().client("kinesis", region_name=REGION, endpoint_url=server.endpoint)


class KinesisWorld:
    """A stream of its own, for one test: a World of the conformance suite."""

    def __init__(self, server: MotoServer, proxy: KinesisProxy, shards: int = 2, pace: Pace = QUICK) -> None:
        self.proxy, self.client, self.stream, self._pace = proxy, client_of(server), f"stream-{next(numbers)}", pace
        self.client.create_stream(StreamName=self.stream, ShardCount=shards)
        self._written = itertools.count()

    async def open(self, latest: bool = False) -> KinesisStream:
        return KinesisStream(
            self.stream, region=REGION, endpoint=self.proxy.endpoint, latest=latest, pace=self._pace, session=shared_session()
        )

    async def write(self, count: int) -> list[str]:
        return self.put(count)

    def put(self, count: int) -> list[str]:
        names = [f"record-{next(self._written)}" for _ in range(count)]
        for first in range(0, count, 500):
            records = [{"Data": name.encode(), "PartitionKey": name} for name in names[first : first + 500]]
            answer = self.client.put_records(StreamName=self.stream, Records=records)
            assert not answer["FailedRecordCount"]
        return names

    def names(self, records: pa.RecordBatch) -> list[str]:
        return [payload.decode() for payload in records.column("payload").to_pylist()]

    async def branch(self) -> None:
        left, right = open_shards(self.client, self.stream)[:2]
        split(self.client, self.stream, left)
        middle = open_shards(self.client, self.stream)[1]
        merge(self.client, self.stream, middle, right)

    async def nowhere(self, position: str) -> str:
        place = parse_position(position)
        return str(place._replace(origin=str(place.number + 1)))

    async def interrupt(self) -> None:
        def cut(call: str, asked: Message) -> None:
            raise Cut

        self.proxy.before = cut

    async def restore(self) -> None:
        self.proxy.before = as_asked
