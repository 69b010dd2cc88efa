"""Values of another form than Kinesis gives break a call off: they would be handed on, or written into positions that nothing can read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from sluiceway.capture.streams import kinesis_calls
from sluiceway.capture.streams.kinesis_calls import Calls, Record, Shard
from sluiceway.ports.change_stream import BrokenOffError
from sluiceway.testing.drive import driven

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
RECORD = {"SequenceNumber": "496", "ApproximateArrivalTimestamp": AT, "PartitionKey": "k", "Data": b"x"}
PAGE = {"Records": [RECORD], "NextShardIterator": "next", "MillisBehindLatest": 0}
RANGES = {
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1", "EndingSequenceNumber": "9"},
}
SHARD = {"ShardId": "shardId-000000000001", "ParentShardId": "shardId-000000000000", **RANGES}
SUMMARY = {"StreamStatus": "ACTIVE", "RetentionPeriodHours": 24, "StreamCreationTimestamp": AT}


def in_record(**changed: object) -> dict[str, Any]:
    return {**PAGE, "Records": [RECORD | changed]}


def in_shard(**changed: object) -> dict[str, Any]:
    return {"Shards": [SHARD | changed]}


def in_summary(**changed: object) -> dict[str, Any]:
    return {"StreamDescriptionSummary": SUMMARY | changed}


def test_answers_of_the_service_are_understood() -> None:
    page = kinesis_calls._page(PAGE)
    assert page[:3] == ([Record("496", 1777636800000, "k", b"x")], "next", 0)
    shards, token, _ = kinesis_calls._shards(in_shard() | {"NextToken": "t"})
    name, parent = SHARD["ShardId"], SHARD["ParentShardId"]
    assert (shards, token) == ({name: Shard(str(name), (str(parent),), 0, 2**128 - 1, 9)}, "t")
    assert kinesis_calls._summary(in_summary()) == ("ACTIVE", 24 * 3_600_000, 1777636800000)


WRONG: list[tuple[Callable[[dict[str, Any]], object], dict[str, Any]]] = [
    (kinesis_calls._page, in_record(SequenceNumber=5)),
    (kinesis_calls._page, in_record(SequenceNumber="-5")),
    (kinesis_calls._page, in_record(SequenceNumber="5x")),
    (kinesis_calls._page, in_record(SequenceNumber="٣")),
    (kinesis_calls._page, in_record(SequenceNumber="1" * 129)),
    (kinesis_calls._page, in_record(PartitionKey=["k"])),
    (kinesis_calls._page, in_record(PartitionKey="\ud800")),
    (kinesis_calls._page, in_record(ApproximateArrivalTimestamp=datetime(1950, 1, 1, tzinfo=UTC))),
    (kinesis_calls._page, {**PAGE, "NextShardIterator": 7}),
    (kinesis_calls._page, {**PAGE, "MillisBehindLatest": "soon"}),
    (kinesis_calls._page, {**PAGE, "MillisBehindLatest": -1}),
    (kinesis_calls._page, {**PAGE, "MillisBehindLatest": 10**20}),
    (kinesis_calls._shards, in_shard(ShardId="")),
    (kinesis_calls._shards, in_shard(ShardId="a b")),
    (kinesis_calls._shards, in_shard(ParentShardId="\ud800")),
    (kinesis_calls._shards, in_shard(HashKeyRange={"StartingHashKey": "-1", "EndingHashKey": "5"})),
    (kinesis_calls._shards, in_shard(SequenceNumberRange={"EndingSequenceNumber": "end"})),
    (kinesis_calls._shards, in_shard() | {"NextToken": {"a": 1}}),
    # A text as often as there are milliseconds in an hour would be 7 MB.
    (kinesis_calls._summary, in_summary(RetentionPeriodHours="24")),
    (kinesis_calls._summary, in_summary(RetentionPeriodHours=10**9)),
    (kinesis_calls._summary, in_summary(StreamStatus=None)),
    (kinesis_calls._iterator, {"ShardIterator": None}),
]


@pytest.mark.parametrize(("understood", "answer"), WRONG, ids=range(len(WRONG)))
def test_a_value_of_another_form_is_refused(understood: Callable[[dict[str, Any]], object], answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"form|number|surrogates"):
        understood(answer)


@driven
async def test_a_call_with_such_an_answer_breaks_off() -> None:
    class Session:
        def client(self, *_: object, **__: object) -> Any:
            return self

        def get_records(self, **_: object) -> dict[str, Any]:
            return in_record(SequenceNumber="5x")

        def close(self) -> None: ...

    calls = Calls("s", None, None, Session())
    with pytest.raises(BrokenOffError, match="5x"):
        await calls.records("i", 10)
    await calls.close()
