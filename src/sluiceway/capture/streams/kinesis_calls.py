"""Amazon Kinesis calls from an event loop, and the classification of their errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    UnauthorizedSSOTokenError,
)

from sluiceway.adapters import system
from sluiceway.capture.streams.kinesis_positions import NUMBER
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.ports.change_stream import BrokenOffError

THREADS = 32
"""Concurrent calls; each mostly waits for the service."""

_THROTTLED = {
    "KMSThrottlingException",
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_REFUSED = {"InvalidArgumentException", "TrimmedDataAccessException"}
_FORBIDDEN = {
    "AccessDeniedException",
    "ExpiredTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "KMSAccessDeniedException",
    "KMSDisabledException",
    "KMSInvalidStateException",
    "KMSNotFoundException",
    "KMSOptInRequired",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "NotAuthorized",
    "OptInRequired",
    "UnrecognizedClientException",
}
_NEEDS = (
    "the credentials that boto3 finds need the permissions kinesis:ListShards, GetShardIterator, GetRecords and DescribeStreamSummary on "
    "the stream, and kms:Decrypt if it is encrypted"
)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, UnauthorizedSSOTokenError)

_NUMBER = re.compile(NUMBER)
_SHARD = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HASH = re.compile("[0-9]{1,39}")
_ANY = re.compile(".*", re.DOTALL)
_MOST_HOURS = 1_000_000
_MOST_MILLIS: Millis = 10**15
"""Beyond what any clock shows, and with few enough digits for a position."""

T = TypeVar("T")

HASHES = 2**128
"""Size of the hash-key space, divided among a stream's open shards."""


class ThrottledError(Exception):
    """Too many calls, or bytes, for now."""


class ExpiredError(Exception):
    """The iterator was unused for five minutes."""


class RefusedError(Exception):
    """The service rejects the place named in the call."""


class NotFoundError(Exception):
    """The shard or the stream does not exist."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as in ListShards. `closed`: its last number, if it has been split or merged."""

    token: str
    parents: tuple[str, ...]
    low: int
    high: int
    closed: int | None


class Listing(NamedTuple):
    """All shards with records, by name; `asked_at` by the steady clock, `now` by the service's."""

    shards: dict[str, Shard]
    asked_at: Millis
    now: Millis

    def children(self, token: str) -> list[Shard]:
        return [shard for shard in self.shards.values() if token in shard.parents]


class Summary(NamedTuple):
    """The stream's `status`, retention, and creation time."""

    status: str
    retention: Millis
    created_at: Millis


class Record(NamedTuple):
    number: str
    at: Millis | None
    key: str
    data: bytes


class Page(NamedTuple):
    """The answer of GetRecords. `following`: the next iterator; empty: the shard is closed and exhausted. `now`: by the service's clock."""

    records: Sequence[Record]
    following: str
    behind: Millis
    now: Millis


def covered(low: int, high: int, shards: Sequence[Shard]) -> bool:
    """Whether these shards cover all hashes from `low` to `high`."""
    for shard in sorted(shards, key=lambda each: each.low):
        if shard.low > low:
            return False
        low = max(low, shard.high + 1)
    return low > high


class Calls:
    """The calls for one stream, each in a thread of an own pool.

    An abandoned call continues in its thread; no call changes anything at the service. Each may raise BrokenOffError, ThrottledError,
    NotFoundError, and SluicewayError for a lack of rights, besides its own.
    """

    def __init__(self, stream: str, region: str | None, endpoint: str | None, session: boto3.session.Session | None) -> None:
        """Raises `invalid_request` if no region is given, neither here nor to boto3."""
        self.stream = stream
        # The caller retries at its own pace: the library's retries would count against the limits unseen.
        config = Config(
            connect_timeout=5,
            read_timeout=15,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=THREADS,
            tcp_keepalive=True,
        )
        try:
            session = session or boto3.session.Session()
            self._client: Any = session.client("kinesis", region_name=region, endpoint_url=endpoint, config=config)
        except NoRegionError:
            raise invalid("region", "name the region of the stream, such as eu-central-1, or set AWS_DEFAULT_REGION") from None
        except (BotoCoreError, ValueError) as error:
            raise invalid("endpoint" if endpoint else "stream", f"cannot create a client: {error}") from None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kinesis")
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False)
        self._client.close()

    async def listing(self) -> Listing:
        """All pages of ListShards, or an error."""
        shards: dict[str, Shard] = {}
        asked_at, wanted = system.steady(), {"StreamName": self.stream}
        while True:
            page, token, now = await self._call("list_shards", wanted, _shards)
            shards |= page
            if not token:
                return Listing(shards, asked_at, now)
            wanted = {"NextToken": token}

    async def summary(self) -> Summary:
        return await self._call("describe_stream_summary", {"StreamName": self.stream}, _summary)

    async def iterator(self, shard: str, kind: str, number: str = "", at: Millis = 0) -> str:
        """An iterator of that kind. Raises RefusedError."""
        wanted: dict[str, object] = {"StreamName": self.stream, "ShardId": shard, "ShardIteratorType": kind}
        if number:
            wanted["StartingSequenceNumber"] = number
        if at:
            wanted["Timestamp"] = at / 1_000
        return await self._call("get_shard_iterator", wanted, _iterator)

    async def records(self, iterator: str, limit: int) -> Page:
        """At most `limit` records; the service gives up to 10,000 and 10 MB. Raises RefusedError, ExpiredError."""
        return await self._call("get_records", {"ShardIterator": iterator, "Limit": limit}, _page)

    async def _call(self, name: str, wanted: dict[str, Any], understood: Callable[[dict[str, Any]], T]) -> T:
        call = getattr(self._client, name)

        def ask() -> T:
            if self._closed:
                raise BrokenOffError(f"Kinesis stream {self.stream} was closed")
            return understood(call(**wanted))

        if self._closed:
            raise BrokenOffError(f"Kinesis stream {self.stream} was closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except BrokenOffError:
            raise
        except ClientError as error:
            raise _meaning(error, self.stream) from error
        except _NO_CREDENTIALS as error:
            raise SluicewayError("unauthenticated", f"Kinesis stream {self.stream}: {error}; {_NEEDS}") from error
        except BotoCoreError as error:
            # No connection, no answer in time, or a partial one.
            raise BrokenOffError(f"Kinesis stream {self.stream}: {error}") from error
        except Exception as error:
            # A malformed answer, such as a proxy's: any error of `understood` or the library.
            raise BrokenOffError(f"Kinesis stream {self.stream}: {type(error).__name__}: {error}") from error


def _meaning(error: ClientError, stream: str) -> Exception:
    told = error.response.get("Error", {})
    code, text = str(told.get("Code", "")), f"Kinesis stream {stream}: {error}"
    if code in _THROTTLED:
        return ThrottledError(text)
    if code == "ExpiredIteratorException":
        return ExpiredError(text)
    if code in _REFUSED:
        return RefusedError(text)
    if code == "ResourceNotFoundException":
        return NotFoundError(text)
    if code in _FORBIDDEN:
        return SluicewayError("forbidden", f"{text}; {_NEEDS}")
    return BrokenOffError(text)


# The SDK checks the names in an answer, and no values. What is not of its form raises ValueError here, and the call breaks off.


def _text(value: Any, form: re.Pattern[str] = _ANY) -> str:
    """The value, a text of that form that can be stored as UTF-8."""
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError(f"{str(value)[:100]!r} does not have the form {form.pattern}")
    value.encode()
    return value


def _whole(value: Any, most: int) -> int:
    """The value, a whole number up to `most`."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:100]!r} is not a number from 0 to {most}")
    return value


def _shards(answer: dict[str, Any]) -> tuple[dict[str, Shard], str, Millis]:
    shards = [_shard(told) for told in answer["Shards"]]
    return {shard.token: shard for shard in shards}, _text(answer.get("NextToken") or ""), _now(answer)


def _shard(told: dict[str, Any]) -> Shard:
    # Sorted, so that both parents name a child alike.
    parents = sorted(_text(told[field], _SHARD) for field in ("ParentShardId", "AdjacentParentShardId") if told.get(field))
    hashes, closed = told["HashKeyRange"], told["SequenceNumberRange"].get("EndingSequenceNumber")
    low, high = (int(_text(hashes[field], _HASH)) for field in ("StartingHashKey", "EndingHashKey"))
    return Shard(_text(told["ShardId"], _SHARD), tuple(parents), low, high, None if closed is None else int(_text(closed, _NUMBER)))


def _summary(answer: dict[str, Any]) -> Summary:
    told = answer["StreamDescriptionSummary"]
    retention = _whole(told["RetentionPeriodHours"], _MOST_HOURS) * 3_600_000
    return Summary(_text(told["StreamStatus"]), retention, _millis(told["StreamCreationTimestamp"]) or 0)


def _iterator(answer: dict[str, Any]) -> str:
    return _text(answer["ShardIterator"])


def _page(answer: dict[str, Any]) -> Page:
    records = [
        Record(
            _text(told["SequenceNumber"], _NUMBER),
            _millis(told.get("ApproximateArrivalTimestamp")),
            _text(told["PartitionKey"]),
            bytes(told["Data"]),
        )
        for told in answer["Records"]
    ]
    behind = _whole(answer.get("MillisBehindLatest") or 0, _MOST_MILLIS)
    return Page(records, _text(answer.get("NextShardIterator") or ""), behind, _now(answer))


def _millis(at: Any) -> Millis | None:
    return None if at is None else _whole(round(at.timestamp() * 1_000), _MOST_MILLIS)


def _now(answer: dict[str, Any]) -> Millis:
    """The service's clock, which arrival times follow; the local one may differ."""
    stated = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return round(parsedate_to_datetime(stated).timestamp() * 1_000)
    except (TypeError, ValueError):
        return system.now()
