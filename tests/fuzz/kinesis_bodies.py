"""Bodies of Amazon Kinesis's answers: what the SDK and the stream make of them.

An input is a call, as one byte, and the answers to what the stream asks then: each after its length, and a byte that is even for a success.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any, Final, NamedTuple

import boto3
from botocore.exceptions import EndpointConnectionError
from botocore.model import OperationModel
from botocore.parsers import create_parser

from sluiceway.capture.streams.kinesis import KinesisStream, Pace
from sluiceway.capture.streams.kinesis_positions import parse_position
from sluiceway.core.group.task_state import Finish, Seeds, decode, encode
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import Batch, BrokenOffError, SeedsUpto, UnknownPositionError

SHARD: Final = "shardId-000000000000"
_CALLS: Final = 6
_HEADERS: Final = {"date": "Fri, 01 May 2026 12:00:10 GMT"}
_REFUSALS: Final = ("invalid_request", "forbidden", "unauthenticated")


class _Http(NamedTuple):
    """An answer's status, as the SDK looks at it."""

    status_code: int


class _Service:
    """Answers the SDK's calls with what it was given, then not at all."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self._parser = create_parser("json")
        self._client = boto3.session.Session("key", "secret", region_name="eu-central-1").client("kinesis")
        self._client.meta.events.register("before-call.kinesis", self._answer)

    def client(self, *_: object, **__: object) -> Any:
        """In place of a session's: to make one takes as long as a thousand inputs."""
        return self._client

    def _answer(self, model: OperationModel, **_: object) -> tuple[_Http, Any]:
        if not self.answers:
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
        status, body = self.answers[0][:1], self.answers.pop(0)[1:]
        http = _Http(400 if status and status[0] & 1 else 200)
        return http, self._parser.parse({"status_code": http.status_code, "headers": _HEADERS, "body": body}, model.output_shape)


@cache
def _service() -> _Service:
    return _Service()


def put(data: bytes) -> None:
    """Let a stream ask for what it needs, and have these answers. Raises only for a fault."""
    chosen, rest = (data[0] % _CALLS, data[1:]) if data else (0, b"")
    service = _service()
    service.answers = []
    while len(rest) >= 2:
        size = int.from_bytes(rest[:2])
        service.answers.append(rest[2 : 2 + size])
        rest = rest[2 + size :]
    asyncio.run(_ask(service, chosen))


async def _ask(service: _Service, chosen: int) -> None:
    stream = KinesisStream("s", latest=chosen == 1, pace=Pace(0, 0, 0), session=service)
    try:
        if chosen < 3:
            _check_seeds(await stream.seeds(SHARD if chosen == 2 else ""))
        elif chosen == 3:
            _check_batch(await stream.read(SHARD, "TRIM_HORIZON"))
        elif chosen == 4:
            _check_batch(await stream.read(SHARD, "5@1777636000000~1777636000000<4"))
        else:
            _check_batch(await stream.read(SHARD, "5@1777636000000", "7"))
    except SluicewayError as error:
        # A lack of rights, or another stream of that name: the capture stops with an alarm.
        assert error.code in _REFUSALS, error.code
    except (BrokenOffError, UnknownPositionError):
        return
    finally:
        await stream.close()


def _check_seeds(found: SeedsUpto) -> None:
    """They can be written to the log of the capture, and read from it."""
    upto, partitions = found
    seeds = Seeds(1, "", upto, partitions)
    assert decode(encode(seeds)) == seeds
    for each in partitions:
        parse_position(each.start)


def _check_batch(batch: Batch) -> None:
    batch.records.validate(full=True)
    if batch.upto is not None:
        parse_position(batch.upto)
    if batch.end is not None:
        finish = Finish(SHARD, 1, batch.end.children, batch.end.ended_at)
        assert decode(encode(finish)) == finish


# ---- bodies to begin from ---------------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    """Answers as the service gives them."""
    record = {"SequenceNumber": "6", "ApproximateArrivalTimestamp": 1777636001.5, "PartitionKey": "k", "Data": "eA=="}
    iterator, last = {"ShardIterator": "i"}, {"Records": [], "MillisBehindLatest": 0}
    page = {"Records": [record, {**record, "SequenceNumber": "7"}], "NextShardIterator": "j", "MillisBehindLatest": 5}
    old = {"Records": [{**record, "SequenceNumber": "5"}, record], "NextShardIterator": "j", "MillisBehindLatest": 0}
    summary = {"StreamStatus": "ACTIVE", "RetentionPeriodHours": 24, "StreamCreationTimestamp": 1777000000.0}
    description = {"StreamDescriptionSummary": summary}
    histories: list[tuple[int, list[dict[str, Any]]]] = [
        (0, [{**_listed(), "NextToken": "t"}, _listed(1), description]),
        (1, [_listed(), description]),
        (2, [_listed(), description]),
        (3, [iterator, page]),
        (3, [iterator, last, _listed()]),
        (3, [iterator, {"__type": "ExpiredIteratorException", "message": "old"}, iterator, page]),
        (4, [iterator, old, description]),
        (4, [{"__type": "InvalidArgumentException"}, iterator, page, description]),
        (4, [{"__type": "ResourceNotFoundException"}, _listed()]),
        (5, [iterator, {"__type": "ProvisionedThroughputExceededException"}, page]),
    ]
    return [bytes([chosen]) + b"".join(map(_packed, answers)) for chosen, answers in histories]


def _listed(first: int = 0) -> dict[str, Any]:
    """A shard that was split, and its children."""
    middle, end = 2**127, 2**128
    shards = [("0", 0, end, None, "9"), ("1", 0, middle, "0", None), ("2", middle, end, "0", None)]
    return {
        "Shards": [
            {
                "ShardId": f"shardId-{name:0>12}",
                "HashKeyRange": {"StartingHashKey": str(low), "EndingHashKey": str(high - 1)},
                "SequenceNumberRange": {"StartingSequenceNumber": "1"} | ({} if closed is None else {"EndingSequenceNumber": closed}),
            }
            | ({} if parent is None else {"ParentShardId": f"shardId-{parent:0>12}"})
            for name, low, high, parent, closed in shards[first:]
        ]
    }


def _packed(answer: dict[str, Any]) -> bytes:
    body = bytes(["__type" in answer]) + json.dumps(answer).encode()
    return len(body).to_bytes(2) + body
