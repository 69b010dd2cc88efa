"""An Amazon Kinesis data stream as a ChangeStream: its shards split and merge, and each is a partition.

It needs `kinesis:ListShards`, `GetShardIterator`, `GetRecords` and `DescribeStreamSummary`, and finds its credentials as boto3 does.
Records that the Kinesis Producer Library has aggregated are handed on as they come, many of its user's records in one.
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
from sluiceway.ports.change_stream import CHANGES, Batch, Born, BrokenOffError, End, SeedsUpto, UnknownPositionError

OPTIONS = ("stream", "region", "endpoint", "from")
MOST = 10_000
"""Records that one GetRecords gives."""

MIN_RETENTION: Millis = 24 * 3_600_000
"""No stream keeps records for less long."""
NEAR: Millis = 3_600_000
"""Whoever reads records that are less than this from the least retention looks whether they can have been dropped."""
MARK_EVERY: Millis = 3_600_000
"""So often the position of a shard that has no new records says anew up to when there were none."""
ITERATOR_LIVES: Millis = 280_000
"""The service forgets an iterator after five minutes."""
LISTED_EVERY: Millis = 5_000
SUMMARY_LIVES: Millis = 60_000
SECOND: Millis = 1_000
PATIENCE: Millis = 30_000
"""So long a batch is read again before that counts as broken off."""


@dataclass(frozen=True)
class Pace:
    """The service takes five GetRecords a second of a shard, from all that read it: `calls` apart. `idle`: so long after one that had
    nothing. `wait`: so long a reading waits for records.
    """

    calls: Millis = 210
    idle: Millis = 1_000
    wait: Millis = 1_000


def from_options(name: str, options: Mapping[str, str]) -> KinesisStream:
    """Options: `stream`, `region`, `endpoint` (a URL, if it is not the region's own), `from` (`beginning` or `latest`).

    Their names without regard to case. Raises `invalid_request` for others. `name` of the capture is not needed: nothing is kept at the
    service.
    """
    given = named(options, OPTIONS)
    stream, begin = given.get("stream", ""), given.get("from", "beginning")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", stream):
        raise invalid("stream", "name the Kinesis stream to read: letters, digits and _.-")
    if begin not in ("beginning", "latest"):
        raise invalid("from", f"expected beginning or latest, not {begin[:40]!r}")
    endpoint = given.get("endpoint")
    if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        raise invalid("endpoint", "expected a URL such as http://127.0.0.1:5000")
    return KinesisStream(stream, region=given.get("region"), endpoint=endpoint, latest=begin == "latest")


@dataclass
class _Reader:
    """A place in a shard, and the iterator for what comes next; an empty one is to be had anew."""

    place: Position
    text: str
    """The position from which whoever reads will go on."""
    iterator: str = ""
    iterator_at: Millis = 0
    sure: bool = False
    """Whether the record at `place` was seen to be there, or need not be, since this was opened."""
    closed: bool = False
    """Everything was read."""
    again_at: Millis = 0
    """When the service may be asked again."""
    throttled: int = 0
    nothing: int = 0
    """How often in a row it said that there is nothing more."""

    @property
    def over(self) -> bool:
        """Only the end is left to be told."""
        return self.closed or self.place.origin == GONE

    def advance(self, page: Page, limit: int) -> Page:
        """Stand after the page, or after so many records of it. In one step: a reading may be given up wherever it waits."""
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
    """The shards of one stream. `latest`: begin with what arrives from now on, not with the oldest record that there is.

    **Seeds** are the shards whose parents' records are all gone, or, for `latest`, those that are open. A shard of whose two parents only
    one is gone has both nevertheless; the one that is gone is a seed without records. Shards that come later are children, or belong
    to a part of the tree whose beginning was dropped unread. A point is the highest name of a shard: names rise.

    **Lost records.** The service drops old records without a word to whoever reads on. So a position says when it was known that nothing
    after it had been dropped, and where that is longer ago than the stream keeps records, reading goes on only if the record at the
    position is still there; otherwise it is an UnknownPositionError. A shard without new records has its position renewed each hour.
    (So whoever is as far behind as records are kept may be stopped when nothing was lost yet.)

    **The end** of a shard is what GetRecords says by giving no way on, and its children are those that name it, once they have all of its
    hashes among them. (Of an emulator, which may always give a way on, it is also that the last number of the closed shard has been read.
    The real service's is above those of all records, so where `endpoint` is the real service, that never counts.)

    `records` have the number as `position`, the key of the partition as `key` and no `kind`. Use from one event loop.
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
        """`session` is where credentials come from, if not from where boto3 finds them. Raises `invalid_request` if there is no region."""
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
        """The stream keeps its records for as long as it is set to, whoever has read them."""

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
                f"Kinesis stream {self._stream} has no shard {after} any more: it was deleted, and made anew. Another capture can read it",
            )
        if self._latest and not after:
            start = str(Position(AT_TIMESTAMP, listing.now))
            found = [Born(each.token, each.parents, start, listing.now - SLACK) for each in listing.shards.values() if each.closed is None]
        else:
            since = 0 if after else created_at
            found = [Born(token, parents, start, since) for token, parents, start in _roots(listing, after)]
        return SeedsUpto(upto, tuple(sorted(found, key=lambda born: born.token)))

    async def _check_whole(self, listing: Listing) -> Millis:
        """The first seeds are all there are, so all open shards must be listed. Since when the stream has records."""
        summary = await self._describe()
        whole = covered(0, HASHES - 1, [shard for shard in listing.shards.values() if shard.closed is None])
        if summary.status not in ("ACTIVE", "UPDATING") or not whole:
            raise BrokenOffError(f"Kinesis stream {self._stream} is {summary.status}, and not all of its shards are there yet")
        return max(summary.created_at, listing.now - summary.retention) - SLACK

    async def _list(self, recent: Millis | None = None) -> Listing:
        """The shards; as they were so long ago, if that is known."""
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
            # Taken out, so that another one who reads the same shard at the same time begins anew.
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
        """The service does not know a shard, or the stream."""
        try:
            listing = await self._list()
        except ThrottledError:
            return BrokenOffError(str(error))
        except NotFoundError as missing:
            return self._no_stream(missing)
        if shard in listing.shards:
            return BrokenOffError(str(error))
        return UnknownPositionError(f"Kinesis stream {self._stream} has no shard {shard} any more: {error}")

    def _no_stream(self, error: Exception) -> SluicewayError:
        return invalid("stream", f"there is no such stream: {error}; check its name and its region, or create it")

    async def _next(self, shard: str, reader: _Reader, limit: int) -> Batch:
        """The next records, or nothing after a while."""
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
                # It says so a few times before it is believed that the position's record is not there: that is worth the wait.
                give_up_at = system.steady() + self._pace.wait
            # Nothing, though there is more: the records lie further on. Or this was the end.
        end = await self._end(shard, reader)
        if end is None:
            # The service has closed the shard, and does not show all of its children yet.
            await asyncio.sleep(self._pace.wait / 1_000)
        return _batch((), end=end)

    async def _page(self, shard: str, reader: _Reader, limit: int, give_up_at: Millis) -> Page | None:
        """What the service gives next, but for what was read before; None: not now. The reader stands after it."""
        refused = 0
        while await self._may_ask(reader, give_up_at):
            try:
                if not reader.iterator or system.steady() - reader.iterator_at > ITERATOR_LIVES:
                    reader.sure = not reader.place.is_record
                    reader.iterator = await self._open(shard, reader.place, "AT_SEQUENCE_NUMBER")
                    reader.iterator_at = system.steady()
                # One more, if the first is the one that was read last.
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
        """Wait until the service may be asked about this shard; False: not before it is time to answer."""
        pause = min(reader.again_at, give_up_at) - system.steady()
        if pause > 0:
            await asyncio.sleep(pause / 1_000)
        if reader.again_at > give_up_at:
            return False
        reader.again_at = system.steady() + self._pace.calls
        return True

    async def _open(self, shard: str, place: Position, kind: str) -> str:
        """An iterator for what comes with, or after, that place."""
        if place.is_record:
            try:
                return await self._calls.iterator(shard, kind, number=place.origin)
            except RefusedError:
                # The record has been dropped. Whether more was will be seen by its not being there.
                return await self._calls.iterator(shard, TRIM_HORIZON)
        return await self._calls.iterator(shard, place.origin, at=place.at or 0 if place.origin == AT_TIMESTAMP else 0)

    # ---- what may have been dropped --------------------------------------------------------------------------------------

    async def _checked(self, shard: str, reader: _Reader, page: Page) -> Sequence[Record]:
        """The records after the reader's place, if nothing between was dropped unread; UnknownPositionError if that may be."""
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
                raise UnknownPositionError(f"{shard} of Kinesis stream {self._stream}: what came after {place} may have been dropped")
        return records

    async def _excuse(self, shard: str, place: Position, now: Millis) -> None:
        """The record of a position is not there. That is well if it is old, and yet it is known that nothing after it is."""
        retention = (await self._describe()).retention
        if place.at is None or now - place.at < retention - SLACK or place.since is None or now - place.since >= retention:
            raise UnknownPositionError(f"{shard} of Kinesis stream {self._stream} has no record {place.origin} (any more): {place}")

    async def _is_there(self, shard: str, place: Position) -> bool:
        """Whether the record at that place is still to be had: then nothing after it was dropped."""
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

    # ---- where there is nothing more ---------------------------------------------------------------------------------------

    async def _caught_up(self, shard: str, reader: _Reader, page: Page) -> Batch:
        """All that has arrived was read."""
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
        """Whether the last number of a closed shard has been read. That of the real service is above those of all records."""
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
            # What was read is handed on now, and the end another time.
            return None

    async def _end(self, shard: str, reader: _Reader) -> End | None:
        """With all children, once all of them are listed."""
        listing = await self._list()
        own, children = listing.shards.get(shard), listing.children(shard)
        if not children or (own is not None and not covered(own.low, own.high, children)):
            return None
        # They have only what arrived after all that this one has.
        since = reader.place.since
        start = str(Position(TRIM_HORIZON, seen=since))
        return End(tuple(Born(each.token, each.parents, start) for each in sorted(children, key=lambda each: each.token)), since or 0)

    # ---- again ---------------------------------------------------------------------------------------------------------

    async def _again(self, shard: str, place: Position, upto: Position, text: str) -> Batch:
        """The records of a batch that was read before, or UnknownPositionError if they are not all there."""
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
    """The shards beyond that point whose parents are all gone: their name, parents, and where to begin."""
    roots: list[tuple[str, tuple[str, ...], str]] = []
    for shard in listing.shards.values():
        gone = [parent for parent in shard.parents if parent not in listing.shards]
        if shard.token > after and len(gone) == len(shard.parents):
            roots.append((shard.token, shard.parents, TRIM_HORIZON))
        elif shard.token > after:
            # One of two: the child waits for both, so this one must be there, to end at once.
            roots += [(parent, (), GONE) for parent in gone if parent > after]
    return roots


def _behind(page: Page, limit: int) -> Millis | None:
    """How long a page of records is behind the end of the stream, by the clock; as long as its last record is old, if that is longer.

    `MillisBehindLatest` may count from the newest record, which an emulator does, so that records which came close together are 0 apart;
    hence the 0 of a full page, too, is not believed. The service's clock tells whole seconds.
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
