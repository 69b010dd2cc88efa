"""Cloud Spanner change stream as a ChangeStream. **Tested only against a fake of its API**, in `tests/capture/spanner_fake.py`.

Requires a `ChangeReader`, which runs the queries; `docs/guides/capture.md` shows one with the real client. None is shipped.

* **Positions** are commit timestamps: everything up to one has been read. A batch has whole timestamps, so it exceeds its limit only where
  one timestamp has more. A position that the service can no longer read from is an UnknownPositionError.
* **Immutable key ranges** (the default of a stream): a partition ends with its `child_partitions_record`s; a child has one or more parents.
* **Mutable key ranges**: a partition continues when others start from it, and keys move between partitions. Here a partition is
  `TOKEN@START`: it ends at each `partition_start_record`, and its children are the started partitions, and its own continuation. So a
  started partition comes after the earlier records of its origin. A move between existing partitions (`partition_event_record`) is a
  barrier in both, after all records up to its timestamp. With `moves` "unordered" there are no barriers: partitions do not wait, and keys
  that moved have no order.
* **The last seconds are asked for twice.** A query may end at its own `end_timestamp` before the service tells that the partition has
  ended; a position beyond the end could not be read from (apache/beam#40232). So after an empty answer the position moves up to `SETTLE`
  ago only.

A record's payload is a JSON object: `table`, `op` (`insert`, `update`, `delete`), `key`, `new`, `old` (as in the stream's value capture
type, or null), `committed_at`, `transaction` (the server's id), `sequence` and `mod`: the index of the change within the record, from 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.ports.change_stream import CHANGES, AnnouncedPartition, Barrier, Batch, BrokenOffError, End, SeedsUpto, UnknownPositionError

Nanos = int
"""Nanoseconds since 1970, the precision of the service's timestamps."""

MARK_EVERY: Nanos = 60 * 10**9
"""Interval at which the position of an idle partition moves on, so that it does not exceed the service's retention."""

SETTLE: Nanos = 5 * 10**9
"""How late the service may tell that a partition has ended."""

_MALFORMED = (KeyError, TypeError, ValueError, msgspec.DecodeError)
"""What becomes of a record that is not as the service's documentation has it."""
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?Z")
_TOKEN = re.compile(r"(.+?)(?:@([^@]+))?")
_SECOND = 10**9

ChangeRecord = Mapping[str, Any]
"""A row's ChangeRecord. Each kind of record, under its API name, is an object, null, missing, or a list of objects (ARRAY of STRUCTs).

Timestamps are texts as the service writes them (`2026-05-01T12:00:03.120456Z`); JSON values are texts or objects.
"""


class ChangeReader(Protocol):
    """Access to one change stream, through any client. Its methods raise BrokenOffError for transient faults; UnknownPositionError where
    the service refuses a timestamp that is too old, or not the partition's; SluicewayError for lasting faults."""

    def query(
        self, partition_token: str | None, start_timestamp: str, end_timestamp: str | None, heartbeat_milliseconds: int
    ) -> AsyncGenerator[ChangeRecord]:
        """Run `SELECT ChangeRecord FROM READ_<stream>(…)` with these arguments, yielding records as they come; None is NULL. May be closed
        before its end."""
        ...

    async def now(self) -> str:
        """A timestamp not before any transaction committed before the call, such as that of a strong read."""
        ...

    async def close(self) -> None: ...


def parse_time(text: str) -> Nanos:
    """Parse a timestamp. Raises ValueError."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:60]!r} is not a timestamp such as 2026-05-01T12:00:03.120456Z")
    seconds = round(datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp())
    return seconds * _SECOND + int((found[2] or "0").ljust(9, "0"))


def format_time(at: Nanos) -> str:
    seconds, nanos = divmod(at, _SECOND)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanos:09}Z"


class _Place(NamedTuple):
    """Everything up to `at` has been read. `ended`: the partition ended there, which is still to be reported. `barred`: there is a barrier,
    which is still to be crossed; whether the partition ended there, too, is seen then."""

    at: Nanos
    ended: bool = False
    barred: bool = False

    def __str__(self) -> str:
        return format_time(self.at) + ("~" if self.barred else "!" if self.ended else "")


def _parse_place(text: str) -> _Place:
    try:
        return _Place(parse_time(text.rstrip("!~")), text.endswith("!"), text.endswith("~"))
    except ValueError as error:
        raise UnknownPositionError(str(error)) from None


class _Row(NamedTuple):
    at: Nanos
    order: tuple[str, str, int]
    """Order within a timestamp."""
    kind: str
    key: str
    payload: bytes


@dataclass
class _Scan:
    """Result of querying a partition up to a timestamp."""

    rows: list[_Row] = field(default_factory=list)
    cut: bool = False
    """There is more."""
    ended_at: Nanos | None = None
    over: bool = False
    """The partition does not continue as its own child: there is an end record."""
    children: dict[str, AnnouncedPartition] = field(default_factory=dict)
    barred_at: Nanos | None = None
    """Keys move at that timestamp, in or out: `takes` and `gives`."""
    gives: set[str] = field(default_factory=set)
    takes: set[str] = field(default_factory=set)


class SpannerStream:
    """One change stream, read from the timestamp `start` on, the same for all members. Use from one event loop."""

    def __init__(self, reader: ChangeReader, start: str, *, moves: str = "", wait: float = 1.0, heartbeat: Millis = 1_000) -> None:
        """`wait`: seconds that a read waits for records. Raises `invalid_request`."""
        try:
            self._start = parse_time(start)
        except ValueError as error:
            raise invalid("start", str(error)) from None
        if moves not in ("", "unordered"):
            raise invalid("moves", f"expected unordered, or nothing, not {moves[:40]!r}")
        self._reader, self._unordered, self._wait, self._heartbeat = reader, bool(moves), wait, heartbeat
        self._quiet: dict[str, tuple[Nanos, Nanos]] = {}
        """Range of timestamps known to be empty, by partition."""

    async def close(self) -> None:
        await self._reader.close()

    async def kept(self, partition: str, position: str) -> None:
        """Nothing to do: the service keeps records for the stream's retention."""

    def left(self, partition: str) -> None:
        self._quiet.pop(partition, None)

    async def seeds(self, after: str) -> SeedsUpto:
        """The partitions at `start`. All others descend from these."""
        upto = format_time(self._start)
        if after:
            if after != upto:
                raise invalid("start", f"this capture was started at {after}; start another capture to begin at {upto}")
            return SeedsUpto(after, ())
        found: dict[str, AnnouncedPartition] = {}
        try:
            async with aclosing(self._reader.query(None, upto, None, self._heartbeat)) as records:
                async for record in records:
                    for each in _all(record, "child_partitions_record"):
                        at = parse_time(each["start_timestamp"])
                        found |= {child["token"]: _born(child["token"], (), at) for child in each["child_partitions"]}
                    for each in _all(record, "partition_start_record"):
                        at = parse_time(each["start_timestamp"])
                        found |= {_epoch(token, at): _born(_epoch(token, at), (), at) for token in each["partition_tokens"]}
        except UnknownPositionError as error:
            raise invalid(
                "start", f"the change stream cannot be read from {upto}: {error}. Start another capture with a later time"
            ) from error
        except _MALFORMED as error:
            raise _not_understood(error) from error
        if not found:
            raise BrokenOffError(f"the change stream named no partition at {upto}")
        return SeedsUpto(upto, tuple(found[token] for token in sorted(found)))

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        place, token = _parse_place(position), _token(partition)
        if upto is not None:
            return await self._again(partition, token, place, _parse_place(upto), upto)
        if place.ended or place.barred:
            return await self._halt(partition, token, place, limit)
        batch = await self._next(partition, token, place, limit)
        if batch.records.num_rows == 0 and batch.end is None and batch.barrier is None:
            await asyncio.sleep(self._wait)
            batch = await self._next(partition, token, place, limit)
        return batch

    async def _halt(self, partition: str, token: str, place: _Place, limit: int) -> Batch:
        """Find the end, or the barrier, at that place again."""
        scan = await self._scan(partition, token, place.at - 1, place.at, limit)
        if place.barred:
            if scan.barred_at != place.at:
                raise UnknownPositionError(f"no keys of partition {partition} moved at {format_time(place.at)}")
            return _batch([], None, at=place.at, behind=None, barrier=_barrier(scan))
        if scan.ended_at != place.at:
            raise UnknownPositionError(f"partition {partition} did not end at {format_time(place.at)}")
        return _batch([], None, at=place.at, behind=None, end=_end(scan))

    async def _next(self, partition: str, token: str, place: _Place, limit: int) -> Batch:
        now = parse_time(await self._reader.now())
        after = place.at
        if (quiet := self._quiet.get(partition)) is not None and quiet[0] == after:
            after = quiet[1]
        if place.at > now:
            raise UnknownPositionError(f"{format_time(place.at)} is later than the database's time, {format_time(now)}")
        scan = await self._scan(partition, token, after, now, limit) if now > after else _Scan()
        barrier = None if scan.cut else _barrier(scan)
        end = None if scan.cut or barrier is not None else _end(scan)
        if scan.rows:
            last = scan.rows[-1].at
            # An end, or a barrier, at the last record's own timestamp would not be found again from there.
            upto = _Place(last, end is not None and scan.ended_at == last, barrier is not None and scan.barred_at == last)
            behind = (now - last) // 1_000_000 + 1 if scan.cut or barrier is not None else 0
            return _batch(scan.rows, str(upto), at=last, behind=behind, end=end, barrier=barrier)
        if barrier is not None:
            assert scan.barred_at is not None
            upto, behind = _Place(scan.barred_at, barred=True), (now - scan.barred_at) // 1_000_000 + 1
            return _batch([], str(upto), at=scan.barred_at, behind=behind, barrier=barrier)
        if scan.ended_at is not None:
            return _batch([], None, at=scan.ended_at - 1, behind=0, end=end)
        settled = max(now - SETTLE, after)
        self._quiet[partition] = place.at, settled
        return _batch([], format_time(settled) if settled - place.at >= MARK_EVERY else None, at=settled, behind=0)

    async def _again(self, partition: str, token: str, place: _Place, until: _Place, text: str) -> Batch:
        """Re-read exactly what lies between the two places."""
        if until.at < place.at or place.ended:
            raise UnknownPositionError(f"{text} is not after {place}")
        scan = await self._scan(partition, token, place.at, until.at, None)
        if until.ended and scan.ended_at != until.at:
            raise UnknownPositionError(f"partition {partition} did not end at {format_time(until.at)}")
        return _batch(scan.rows, text, at=until.at, behind=None, end=_end(scan) if until.ended else None)

    # ---- queries --------------------------------------------------------------------------------------------------------

    async def _scan(self, partition: str, token: str, after: Nanos, until: Nanos, limit: int | None) -> _Scan:
        """Query everything after that, up to `until`, the first timestamp that fills the limit, or the partition's end."""
        scan = _Scan()
        try:
            async with aclosing(self._reader.query(token, format_time(after + 1), format_time(until), self._heartbeat)) as records:
                async for record in records:
                    if not self._take(scan, partition, record, limit):
                        break
            if scan.ended_at is not None and not scan.cut and "@" not in partition:
                await self._all_children(scan, token)
        except _MALFORMED as error:
            raise _not_understood(error) from error
        scan.rows.sort(key=lambda row: (row.at, row.order))
        return scan

    async def _all_children(self, scan: _Scan, token: str) -> None:
        """Collect a partition's children with immutable key ranges: the service lists them until the query ends, at once."""
        assert scan.ended_at is not None
        async with aclosing(self._reader.query(token, format_time(scan.ended_at), None, self._heartbeat)) as records:
            async for record in records:
                for each in _all(record, "child_partitions_record"):
                    self._take_children(scan, each)

    def _take(self, scan: _Scan, partition: str, record: ChangeRecord, limit: int | None) -> bool:
        """Add a record to the scan. Returns whether to continue."""
        for each in _all(record, "data_change_record"):
            at = parse_time(each["commit_timestamp"])
            if _is_beyond(scan, at, limit):
                return False
            scan.rows += _rows(each, at)
        for each in _all(record, "child_partitions_record"):
            if _is_beyond(scan, parse_time(each["start_timestamp"]), limit):
                return False
            self._take_children(scan, each)
        for each in _all(record, "partition_start_record"):
            at = parse_time(each["start_timestamp"])
            if _is_beyond(scan, at, limit):
                return False
            scan.ended_at = at
            for token in each["partition_tokens"]:
                scan.children[_epoch(token, at)] = _born(_epoch(token, at), (partition,), at)
            if not scan.over:
                own = _epoch(_token(partition), at)
                # It continues after that timestamp.
                scan.children[own] = AnnouncedPartition(own, (partition,), str(_Place(at)), at // 1_000_000)
        for each in _all(record, "partition_end_record"):
            at = parse_time(each["end_timestamp"])
            if _is_beyond(scan, at, limit):
                return False
            scan.ended_at, scan.over = at, True
            scan.children.pop(_epoch(_token(partition), at), None)
        for each in _all(record, "partition_event_record"):
            at = parse_time(each["commit_timestamp"])
            if _is_beyond(scan, at, limit):
                return False
            if not self._unordered:
                _take_moves(scan, _token(partition), at, each)
        return True

    def _take_children(self, scan: _Scan, record: ChangeRecord) -> None:
        at = parse_time(record["start_timestamp"])
        scan.ended_at = at if scan.ended_at is None else min(at, scan.ended_at)
        for child in record["child_partitions"]:
            scan.children[child["token"]] = _born(child["token"], tuple(sorted(child["parent_partition_tokens"])), at)


def _take_moves(scan: _Scan, token: str, at: Nanos, record: ChangeRecord) -> None:
    """Note the handoffs of a partition event. Both ends have the same source, target and timestamp."""
    gives = {f"{token}>{each['destination_partition_token']}@{format_time(at)}" for each in record.get("move_out_events") or ()}
    takes = {f"{each['source_partition_token']}>{token}@{format_time(at)}" for each in record.get("move_in_events") or ()}
    if gives or takes:
        scan.barred_at = at
        scan.gives |= gives
        scan.takes |= takes


def _is_beyond(scan: _Scan, at: Nanos, limit: int | None) -> bool:
    """Whether that timestamp belongs to another batch, or lies after the end or a barrier."""
    if scan.ended_at is not None and at > scan.ended_at:
        return True
    if scan.barred_at is not None and at > scan.barred_at:
        return True
    if limit is not None and len(scan.rows) >= limit and at > scan.rows[-1].at:
        scan.cut = True
        return True
    return False


def _all(record: ChangeRecord, kind: str) -> list[ChangeRecord]:
    found = record.get(kind)
    return [] if not found else [found] if isinstance(found, Mapping) else list(found)


def _rows(record: ChangeRecord, at: Nanos) -> list[_Row]:
    op, table = str(record["mod_type"]).lower(), str(record["table_name"])
    transaction, sequence = str(record["server_transaction_id"]), str(record["record_sequence"])
    rows = []
    for number, mod in enumerate(record["mods"]):
        key = _json(mod["keys"])
        payload = msgspec.json.encode(
            {
                "table": table,
                "op": op,
                "key": key,
                "new": _json(mod.get("new_values")),
                "old": _json(mod.get("old_values")),
                "committed_at": format_time(at),
                "transaction": transaction,
                "sequence": sequence,
                "mod": number,
            }
        )
        name = f"{table}:{msgspec.json.encode(key, order='sorted').decode()}"
        rows.append(_Row(at, (transaction, sequence, number), op, name, payload))
    return rows


def _json(value: Any) -> Any:
    """An object, from text or as is; null for an empty one, which stands for values not captured."""
    decoded = msgspec.json.decode(value) if isinstance(value, str) else None if value is None else dict(value)
    return decoded or None


def _token(partition: str) -> str:
    found = _TOKEN.fullmatch(partition)
    if found is None:
        raise UnknownPositionError("a partition without a token")
    return found[1]


def _epoch(token: str, at: Nanos) -> str:
    return f"{token}@{format_time(at)}"


def _born(token: Any, parents: tuple[Any, ...], at: Nanos) -> AnnouncedPartition:
    """A partition that begins with that timestamp. Raises TypeError."""
    if not isinstance(token, str) or not all(isinstance(each, str) for each in parents):
        raise TypeError("a partition's token is not a text")
    return AnnouncedPartition(token, parents, str(_Place(at - 1)), at // 1_000_000)


def _end(scan: _Scan) -> End | None:
    if scan.ended_at is None:
        return None
    return End(tuple(scan.children[token] for token in sorted(scan.children)), scan.ended_at // 1_000_000)


def _barrier(scan: _Scan) -> Barrier | None:
    if scan.barred_at is None:
        return None
    after = _Place(scan.barred_at, scan.ended_at == scan.barred_at)
    return Barrier(scan.barred_at, tuple(sorted(scan.gives)), tuple(sorted(scan.takes)), str(after))


def _not_understood(error: Exception) -> SluicewayError:
    said = f"the change stream sent a message that cannot be decoded: {type(error).__name__}: {error}. Nothing is skipped; please report it"
    return SluicewayError("internal", said)


def _batch(
    rows: list[_Row], upto: str | None, *, at: Nanos, behind: Millis | None, end: End | None = None, barrier: Barrier | None = None
) -> Batch:
    columns = [
        pa.array([f"{format_time(row.at)}/{'/'.join(map(str, row.order))}" for row in rows], pa.utf8()),
        pa.array([row.at // 1_000_000 for row in rows], pa.int64()).cast(CHANGES.field("at").type),
        pa.array([row.kind for row in rows], pa.utf8()),
        pa.array([row.key for row in rows], pa.utf8()),
        pa.array([row.payload for row in rows], pa.binary()),
    ]
    return Batch(pa.record_batch(columns, schema=CHANGES), upto, at // 1_000_000, behind, (), end, barrier)
