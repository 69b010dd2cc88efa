"""Amazon Kinesis data stream as a ChangeStream: each shard is a partition, and shards split and merge.

Requires `kinesis:ListShards`, `GetShardIterator`, `GetRecords` and `DescribeStreamSummary`; credentials are found as boto3 does. Records
aggregated by the Kinesis Producer Library are handed on as they come, several user records in one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import boto3
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.capture.streams.kinesis_calls import (
    HASHES,
    Calls,
    ExpiredError,
    Listing,
    NotFoundError,
    Page,
    Record,
    RefusedError,
    Summary,
    ThrottledError,
    covered,
)
from sluiceway.capture.streams.kinesis_positions import AT_TIMESTAMP, GONE, SLACK, TRIM_HORIZON, Position, parse_position
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.options import named
from sluiceway.ports.change_stream import CHANGES, AnnouncedPartition, Batch, BrokenOffError, End, SeedsUpto, UnknownPositionError

OPTIONS = ("stream", "region", "endpoint", "from")
MOST = 10_000
"""Maximum records per GetRecords."""

MIN_RETENTION: Millis = 24 * 3_600_000
"""Minimum retention of any stream."""
NEAR: Millis = 3_600_000
"""Within this margin of the minimum retention, a read checks whether records may have been dropped."""
MARK_EVERY: Millis = 3_600_000
"""Interval at which the position of an idle shard is renewed to record that nothing came."""
ITERATOR_LIVES: Millis = 280_000
"""Lifetime of an iterator, which the service forgets after five minutes."""
LISTED_EVERY: Millis = 5_000
SUMMARY_LIVES: Millis = 60_000
SECOND: Millis = 1_000
PATIENCE: Millis = 30_000
"""Time limit for re-reading a batch, after which it counts as broken off."""


@dataclass(frozen=True)
class Pace:
    """Request pacing in ms. The service takes five GetRecords per second and shard, over all readers: `calls` apart. `idle`: pause after an
    empty one. `wait`: how long a read waits for records."""

    calls: Millis = 210
    idle: Millis = 1_000
    wait: Millis = 1_000


def from_options(name: str, options: Mapping[str, str]) -> KinesisStream:
    """Options: `stream`, `region`, `endpoint` (a URL, if not the region's own), `from` (`beginning` or `latest`).

    Option names are case-insensitive. Raises `invalid_request` for others. The capture's `name` is unused: nothing is stored at the
    service.
    """
    given = named(options, OPTIONS)
    stream, begin = given.get("stream", ""), given.get("from", "beginning")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", stream):
        raise invalid("stream", "expected the name of a Kinesis stream: letters, digits and _.-")
    if begin not in ("beginning", "latest"):
        raise invalid("from", f"expected beginning or latest, not {begin[:40]!r}")
    endpoint = given.get("endpoint")
    if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        raise invalid("endpoint", "expected a URL such as http://127.0.0.1:5000")
    return KinesisStream(stream, region=given.get("region"), endpoint=endpoint, latest=begin == "latest")


@dataclass
class _Reader:
    """A place in a shard, and the iterator for what follows; an empty one must be requested anew."""

    place: Position
    text: str
    """The position from which the caller will continue."""
    iterator: str = ""
    iterator_at: Millis = 0
    sure: bool = False
    """Whether the record at `place` has been seen to exist since this was opened, or need not exist."""
    closed: bool = False
    """Whether everything was read."""
    again_at: Millis = 0
    """Earliest time of the next request."""
    throttled: int = 0
    nothing: int = 0
    """Consecutive answers that there is nothing more."""

    @property
    def over(self) -> bool:
        """Whether only the end is left to report."""
        return self.closed or self.place.origin == GONE

    def advance(self, page: Page, limit: int) -> Page:
        """Move behind the page, or behind its first `limit` records. Atomic, since a read may be abandoned wherever it waits."""
        self.throttled = 0
        self.iterator, self.iterator_at, self.closed = page.following, system.steady(), not page.following
        if len(page.records) > limit:
            page = page._replace(records=page.records[:limit])
            self.iterator, self.closed = "", False
        if page.records:
            first, last, before = page.records[0], page.records[-1], self.place.since
            self.place = Position(last.number, last.at)
            if before is not None and before > (self.place.since or 0):
                self.place = self.place._replace(seen=before)
            self.text = str(self.place._replace(first=first.number))
        self.nothing = self.nothing + 1 if not page.records and page.behind == 0 else 0
        return page


class KinesisStream:
    """The shards of one stream. `latest`: start with records arriving from now on, not with the oldest available.

    **Seeds** are the shards whose parents' records are all gone, or, with `latest`, the open shards. A shard with two parents of which one
    is gone still has both; the missing one is a seed without records. Later shards are children, or belong to a part of the tree whose
    beginning was dropped unread. A point is the highest shard name: names rise.

    **Lost records.** The service silently drops old records, even from a shard being read. So a position records when it was known that
    nothing after it had been dropped. If that is longer ago than the stream's retention, reading continues only if the record at the
    position still exists; otherwise it is an UnknownPositionError. The position of an idle shard is renewed every hour. (So a reader a full
    retention behind may be stopped although nothing was lost yet.)

    **The end** of a shard is a GetRecords answer without a next iterator; its children are the shards that name it as a parent, once they
    cover all of its hashes. (With an emulator, which may always give a next iterator, reading the last number of a closed shard also
    counts. The real service's last number is above those of all records, so there this never applies, even with `endpoint`.)

    `records` have the sequence number as `position`, the partition key as `key`, and no `kind`. Use from one event loop.
    """

    def __init__(
        self,
        stream: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        latest: bool = False,
        pace: Pace | None = None,
        session: boto3.session.Session | None = None,
    ) -> None:
        """`session`: source of credentials instead of boto3's default. Raises `invalid_request` if there is no region."""
        self._calls = Calls(stream, region, endpoint, session)
        self._stream, self._latest, self._pace = stream, latest, pace or Pace()
        self._emulated = endpoint is not None
        self._readers: dict[str, _Reader] = {}
        self._listing: Listing | None = None
        self._summary: tuple[Millis, Summary] | None = None
        self._listed = asyncio.Lock()

    async def close(self) -> None:
        self._readers.clear()
        await self._calls.close()

    async def kept(self, partition: str, position: str) -> None:
        """Nothing to do: the stream keeps its records for its retention."""

    def left(self, partition: str) -> None:
        self._readers.pop(partition, None)

    # ---- seeds ---------------------------------------------------------------------------------------------------------

    async def seeds(self, after: str) -> SeedsUpto:
        try:
            listing = await self._list()
            if not after:
                created_at = await self._check_whole(listing)
        except ThrottledError as error:
            raise BrokenOffError(str(error)) from error
        except NotFoundError as error:
            raise self._no_stream(error) from error
        upto = max(listing.shards, default="")
        if upto < after:
            raise invalid(
                "stream",
                f"Kinesis stream {self._stream} no longer has shard {after}: it was deleted and created again; start another capture",
            )
        if self._latest and not after:
            start = str(Position(AT_TIMESTAMP, listing.now))
            found = [
                AnnouncedPartition(each.token, each.parents, start, listing.now - SLACK)
                for each in listing.shards.values()
                if each.closed is None
            ]
        else:
            since = 0 if after else created_at
            found = [AnnouncedPartition(token, parents, start, since) for token, parents, start in _roots(listing, after)]
        return SeedsUpto(upto, tuple(sorted(found, key=lambda born: born.token)))

    async def _check_whole(self, listing: Listing) -> Millis:
        """Check that all open shards are listed, since the first seeds must be complete. Returns since when the stream has records."""
        summary = await self._describe()
        whole = covered(0, HASHES - 1, [shard for shard in listing.shards.values() if shard.closed is None])
        if summary.status not in ("ACTIVE", "UPDATING") or not whole:
            raise BrokenOffError(f"Kinesis stream {self._stream} is {summary.status}, and not all of its shards exist yet")
        return max(summary.created_at, listing.now - summary.retention) - SLACK

    async def _list(self, recent: Millis | None = None) -> Listing:
        """The shards; a cached list up to `recent` ms old will do."""
        async with self._listed:
            if recent is None or self._listing is None or system.steady() - self._listing.asked_at > recent:
                self._listing = await self._calls.listing()
            return self._listing

    async def _describe(self) -> Summary:
        if self._summary is None or system.steady() - self._summary[0] > SUMMARY_LIVES:
            self._summary = system.steady(), await self._calls.summary()
        return self._summary[1]

    # ---- reading -------------------------------------------------------------------------------------------------------

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = MOST) -> Batch:
        place = parse_position(position)
        try:
            if upto is not None:
                return await self._again(partition, place, parse_position(upto), upto)
            # Taken out, so that a concurrent read of the same shard starts its own.
            reader = self._readers.pop(partition, None)
            if reader is None or reader.text != position:
                reader = _Reader(place._replace(first=""), position, again_at=0 if reader is None else reader.again_at)
            try:
                return await self._next(partition, reader, max(1, min(limit, MOST)))
            finally:
                self._readers[partition] = reader
        except NotFoundError as error:
            raise await self._missing(partition, error) from error
        except ThrottledError as error:
            raise BrokenOffError(str(error)) from error

    async def _missing(self, shard: str, error: Exception) -> Exception:
        """The error for a shard, or stream, that the service does not know."""
        try:
            listing = await self._list()
        except ThrottledError:
            return BrokenOffError(str(error))
        except NotFoundError as missing:
            return self._no_stream(missing)
        if shard in listing.shards:
            return BrokenOffError(str(error))
        return UnknownPositionError(f"Kinesis stream {self._stream} no longer has shard {shard}: {error}")

    def _no_stream(self, error: Exception) -> SluicewayError:
        return invalid("stream", f"there is no such stream: {error}; check its name and its region, or create it")

    async def _next(self, shard: str, reader: _Reader, limit: int) -> Batch:
        """The next records, or an empty batch after a while."""
        give_up_at = system.steady() + self._pace.wait
        while not reader.over:
            page = await self._page(shard, reader, limit, give_up_at)
            if page is None:
                return _batch(())
            if page.records:
                place = reader.place
                end = await self._end_if_told(shard, reader) if reader.closed else None
                return _batch(page.records, reader.text, at=place.since, behind=_behind(page, limit), end=end)
            if page.following and page.behind == 0 and reader.sure:
                return await self._caught_up(shard, reader, page)
            if page.behind == 0:
                # Only after several such answers is the position's record believed to be missing: worth the wait.
                give_up_at = system.steady() + self._pace.wait
            # Empty, although there is more: the records lie further on. Or this was the end.
        end = await self._end(shard, reader)
        if end is None:
            # The service has closed the shard, but does not list all of its children yet.
            await asyncio.sleep(self._pace.wait / 1_000)
        return _batch((), end=end)

    async def _page(self, shard: str, reader: _Reader, limit: int, give_up_at: Millis) -> Page | None:
        """The service's next page without records already read, behind which the reader then stands; None: not now."""
        refused = 0
        while await self._may_ask(reader, give_up_at):
            try:
                if not reader.iterator or system.steady() - reader.iterator_at > ITERATOR_LIVES:
                    reader.sure = not reader.place.is_record
                    reader.iterator = await self._open(shard, reader.place, "AT_SEQUENCE_NUMBER")
                    reader.iterator_at = system.steady()
                # One more, if the first is the last one already read.
                page = await self._calls.records(reader.iterator, min(limit + (not reader.sure), MOST))
            except ThrottledError:
                reader.again_at = system.steady() + self._pace.calls * 2 ** min(reader.throttled, 5)
                reader.throttled += 1
            except (ExpiredError, RefusedError) as error:
                reader.iterator = ""
                refused += 1
                if refused == 3:
                    raise BrokenOffError(f"{shard} of Kinesis stream {self._stream}: {error}") from error
            else:
                page = page._replace(records=await self._checked(shard, reader, page))
                return reader.advance(page, limit)
        return None

    async def _may_ask(self, reader: _Reader, give_up_at: Millis) -> bool:
        """Wait until the service may be asked about this shard; False: not before `give_up_at`."""
        pause = min(reader.again_at, give_up_at) - system.steady()
        if pause > 0:
            await asyncio.sleep(pause / 1_000)
        if reader.again_at > give_up_at:
            return False
        reader.again_at = system.steady() + self._pace.calls
        return True

    async def _open(self, shard: str, place: Position, kind: str) -> str:
        """An iterator at, or after, that place."""
        if place.is_record:
            try:
                return await self._calls.iterator(shard, kind, number=place.origin)
            except RefusedError:
                # The record has been dropped. Its absence will show whether more was.
                return await self._calls.iterator(shard, TRIM_HORIZON)
        return await self._calls.iterator(shard, place.origin, at=place.at or 0 if place.origin == AT_TIMESTAMP else 0)

    # ---- dropped records ---------------------------------------------------------------------------------------------------

    async def _checked(self, shard: str, reader: _Reader, page: Page) -> Sequence[Record]:
        """The records after the reader's place. Raises UnknownPositionError if some in between may have been dropped unread."""
        place, records = reader.place, page.records
        if not reader.sure:
            reader.sure = any(record.number == place.origin for record in records[:1])
            records = [record for record in records if int(record.number) > place.number]
            quiet = page.behind == 0 and reader.nothing >= 2
            if not reader.sure and (records or not page.following or quiet):
                await self._excuse(shard, place, page.now)
                reader.sure = True
        elif place.since is not None and page.now - place.since >= MIN_RETENTION - NEAR:
            retention = (await self._describe()).retention
            if page.now - place.since >= retention and not await self._is_there(shard, place):
                raise UnknownPositionError(f"{shard} of Kinesis stream {self._stream}: records after {place} may have expired")
        return records

    async def _excuse(self, shard: str, place: Position, now: Millis) -> None:
        """Accept a position's missing record if it is old enough to be dropped, and nothing after it can have been; else raise
        UnknownPositionError."""
        retention = (await self._describe()).retention
        if place.at is None or now - place.at < retention - SLACK or place.since is None or now - place.since >= retention:
            raise UnknownPositionError(f"{shard} of Kinesis stream {self._stream} has no record {place.origin} (any more): {place}")

    async def _is_there(self, shard: str, place: Position) -> bool:
        """Whether the record at that place still exists: then nothing after it was dropped."""
        if not place.is_record:
            return False
        try:
            iterator = await self._calls.iterator(shard, "AT_SEQUENCE_NUMBER", number=place.origin)
            while True:
                page = await self._calls.records(iterator, 1)
                if page.records or not page.following or page.behind == 0:
                    return bool(page.records) and page.records[0].number == place.origin
                iterator = page.following
                await asyncio.sleep(self._pace.calls / 1_000)
        except RefusedError:
            return False
        except ExpiredError as error:
            raise BrokenOffError(str(error)) from error

    # ---- end of the records ------------------------------------------------------------------------------------------------

    async def _caught_up(self, shard: str, reader: _Reader, page: Page) -> Batch:
        """The batch for a reader that has read everything that has arrived."""
        reader.again_at = system.steady() + self._pace.idle
        seen = page.now - SLACK
        since = parse_position(reader.text).since
        marked = since is None or seen - since >= MARK_EVERY
        reader.place = reader.place._replace(seen=seen)
        if marked:
            reader.text = str(reader.place)
        text = reader.text if marked else None
        end = await self._end_if_told(shard, reader) if await self._ends_here(shard, reader.place) else None
        return _batch((), text, at=seen, behind=0, end=end)

    async def _ends_here(self, shard: str, place: Position) -> bool:
        """Whether the last number of a closed shard has been read. The real service's is above those of all records."""
        if not self._emulated:
            return False
        try:
            known = (await self._list(LISTED_EVERY)).shards.get(shard)
        except (BrokenOffError, ThrottledError, NotFoundError, SluicewayError):
            return False
        return known is not None and known.closed is not None and known.closed <= place.number

    async def _end_if_told(self, shard: str, reader: _Reader) -> End | None:
        try:
            return await self._end(shard, reader)
        except (BrokenOffError, ThrottledError, NotFoundError, SluicewayError):
            # Hand on what was read now, and report the end later.
            return None

    async def _end(self, shard: str, reader: _Reader) -> End | None:
        """The end with all children, or None until all of them are listed."""
        listing = await self._list()
        own, children = listing.shards.get(shard), listing.children(shard)
        if not children or (own is not None and not covered(own.low, own.high, children)):
            return None
        # They contain only what arrived after everything in this shard.
        since = reader.place.since
        start = str(Position(TRIM_HORIZON, seen=since))
        return End(
            tuple(AnnouncedPartition(each.token, each.parents, start) for each in sorted(children, key=lambda each: each.token)), since or 0
        )

    # ---- re-reading --------------------------------------------------------------------------------------------------------

    async def _again(self, shard: str, place: Position, upto: Position, text: str) -> Batch:
        """Re-read the records of an earlier batch. Raises UnknownPositionError if they are incomplete."""
        if upto.origin == place.origin:
            return _batch((), text, at=upto.since)
        missing = UnknownPositionError(f"{shard} of Kinesis stream {self._stream} has not all records from {place} up to {upto} (any more)")
        if not upto.is_record or upto.number < place.number or GONE in (upto.origin, place.origin):
            raise missing
        records: list[Record] = []
        iterator, nothing, give_up_at = "", 0, system.steady() + PATIENCE
        while not records or records[-1].number != upto.origin:
            if system.steady() > give_up_at:
                raise BrokenOffError(f"{shard} of Kinesis stream {self._stream}: a batch could not be read again in time")
            try:
                iterator = iterator or await self._open(shard, place, "AFTER_SEQUENCE_NUMBER")
                page = await self._calls.records(iterator, MOST)
            except ThrottledError:
                await asyncio.sleep(2 * self._pace.calls / 1_000)
                continue
            except (ExpiredError, RefusedError):
                iterator, records = "", []
                await asyncio.sleep(2 * self._pace.calls / 1_000)
                continue
            found = [record for record in page.records if place.number < int(record.number) <= upto.number]
            records += found
            nothing = nothing + 1 if not page.records and page.behind == 0 else 0
            beyond = bool(page.records) and int(page.records[-1].number) > upto.number
            wrong = bool(records) and upto.first not in ("", records[0].number)
            if wrong or ((beyond or not page.following or nothing >= 3) and (not records or records[-1].number != upto.origin)):
                raise missing
            iterator = page.following
            if not found:
                await asyncio.sleep(self._pace.calls / 1_000)
        return _batch(records, text, at=upto.since)


def _roots(listing: Listing, after: str) -> list[tuple[str, tuple[str, ...], str]]:
    """The shards beyond that point whose parents are all gone: name, parents, and starting point."""
    roots: list[tuple[str, tuple[str, ...], str]] = []
    for shard in listing.shards.values():
        gone = [parent for parent in shard.parents if parent not in listing.shards]
        if shard.token > after and len(gone) == len(shard.parents):
            roots.append((shard.token, shard.parents, TRIM_HORIZON))
        elif shard.token > after:
            # One of two: the child waits for both parents, so the missing one must exist, to end at once.
            roots += [(parent, (), GONE) for parent in gone if parent > after]
    return roots


def _behind(page: Page, limit: int) -> Millis | None:
    """Lag of a page behind the end of the stream, in ms of wall time; at least the age of its last record.

    `MillisBehindLatest` may count from the newest record, as in an emulator, so that records arriving close together are 0 apart; hence the
    0 of a full page is not trusted either. The service's clock has whole seconds.
    """
    if page.behind == 0 and len(page.records) < limit:
        return 0
    at = page.records[-1].at
    return None if at is None else max(page.behind, page.now - at + SECOND)


def _batch(
    records: Sequence[Record], upto: str | None = None, *, at: Millis | None = None, behind: Millis | None = None, end: End | None = None
) -> Batch:
    columns = [
        pa.array([record.number for record in records], pa.utf8()),
        pa.array([record.at for record in records], pa.int64()).cast(CHANGES.field("at").type),
        pa.nulls(len(records), pa.utf8()),
        pa.array([record.key for record in records], pa.utf8()),
        pa.array([record.data for record in records], pa.binary()),
    ]
    return Batch(pa.record_batch(columns, schema=CHANGES), upto, at, behind, (), end)
