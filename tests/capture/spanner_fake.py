"""A change stream of Cloud Spanner as its API answers, in memory: both partition modes, and what a query of it may and may not be asked.

What is kept of the API: a query with no token answers with the partitions at its start, and ends; one of a partition has what was committed
from its start on, both ends included, in the order of commit timestamps; it ends at `end_timestamp`, or where the partition does; it says
heartbeats where nothing else comes; it refuses starts that are older than the retention or the partition, and those of the future. Several
transactions may have one commit timestamp, whose records are told in no particular order; one transaction may have several records, and
one record several changes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from sluiceway.capture.streams.spanner import Nanos, format_time, parse_time
from sluiceway.ports.change_stream import BrokenOffError, UnknownPositionError

START = parse_time("2026-05-01T12:00:00Z")
MICROSECOND = 1_000
Told = dict[str, Any]


@dataclass
class FakePartition:
    token: str
    start: Nanos
    end: Nanos | None = None
    """Nothing is committed there from then on."""
    records: list[tuple[Nanos, Told]] = field(default_factory=list)


class FakeSpanner:
    """A database with one change stream, `mutable` or not, which began with those partitions at START."""

    def __init__(self, *tokens: str, mutable: bool = False) -> None:
        self.mutable, self.cut = mutable, False
        self.partitions = {token: FakePartition(token, START) for token in tokens}
        self._begun, self._ticked = monotonic_ns(), START
        self.withheld = False
        """Queries that have an end do not tell of the children of a partition that has ended."""
        self.kept_from = START
        """What is older has been dropped."""
        self.queries: list[tuple[str | None, str, str | None]] = []
        self._random = random.Random(7)
        self._transactions = itertools.count(10**6)
        self._changed = asyncio.Event()

    # ---- what happens in the database --------------------------------------------------------------------------------------

    @property
    def time(self) -> Nanos:
        """Of the database, in microseconds; it goes as fast as ours, but for what `tick` has added."""
        gone = monotonic_ns() - self._begun
        return max(self._ticked, START + gone // MICROSECOND * MICROSECOND)

    def tick(self, by: Nanos = MICROSECOND) -> Nanos:
        """The next commit timestamp."""
        before = self.time
        self._ticked = before + by
        if by > MICROSECOND:
            self._begun -= by
        self._changed.set()
        self._changed = asyncio.Event()
        return self._ticked

    @property
    def open(self) -> list[FakePartition]:
        return [each for each in self.partitions.values() if each.end is None]

    def commit(self, changes: dict[str, list[list[str]]], at: Nanos | None = None) -> Nanos:
        """One transaction: by token, the records of which each has these names as rows that are inserted."""
        at = at or self.tick()
        transaction = str(next(self._transactions))
        for token, records in changes.items():
            for sequence, names in enumerate(records):
                self._append(token, at, {"data_change_record": self._change(at, transaction, sequence, names, len(records), len(changes))})
        return at

    def split(self, token: str, *into: str, apart: Nanos = 0) -> Nanos:
        """Immutable: the partition ends, and has these children, which begin so long after one another. When the first of them begins."""
        at = self.tick()
        for number, child in enumerate(into):
            start = at + number * apart
            self.partitions[child] = FakePartition(child, start)
            self._end(token, start, {child: [token]})
        self.tick(len(into) * apart + MICROSECOND)
        return at

    def merge(self, tokens: list[str], into: str) -> Nanos:
        """Immutable: these end, and have one child."""
        at = self.tick()
        self.partitions[into] = FakePartition(into, at)
        for token in tokens:
            self._end(token, at, {into: tokens})
        return at

    def grow(self, token: str, new: str) -> Nanos:
        """Mutable: a partition starts, and takes some keys of one that goes on."""
        at = self.tick()
        self.partitions[new] = FakePartition(new, at)
        start = {"start_timestamp": format_time(at), "record_sequence": "00000001", "partition_tokens": [new]}
        self._append(token, at, {"partition_start_record": start})
        return at

    def move(self, source: str, target: str, at: Nanos | None = None) -> Nanos:
        """Mutable: keys move between two partitions that are there."""
        at = at or self.tick()
        told = {"commit_timestamp": format_time(at), "record_sequence": "00000002"}
        moves_out = {"partition_token": source, "move_in_events": [], "move_out_events": [{"destination_partition_token": target}]}
        moves_in = {"partition_token": target, "move_in_events": [{"source_partition_token": source}], "move_out_events": []}
        self._append(source, at, {"partition_event_record": told | moves_out})
        self._append(target, at, {"partition_event_record": told | moves_in})
        return at

    def finish(self, token: str) -> Nanos:
        """Mutable: the partition ends; its keys have moved before."""
        at = self.tick()
        self.partitions[token].end = at
        end = {"end_timestamp": format_time(at), "record_sequence": "00000003", "partition_token": token}
        self._append(token, at, {"partition_end_record": end})
        return at

    def _append(self, token: str, at: Nanos, record: Told) -> None:
        self.partitions[token].records.append((at, record))
        self._changed.set()
        self._changed = asyncio.Event()

    def _end(self, token: str, at: Nanos, children: dict[str, list[str]]) -> None:
        """Its children, a record each."""
        self.partitions[token].end = at
        for sequence, (child, parents) in enumerate(children.items()):
            told = {"token": child, "parent_partition_tokens": self._random.sample(parents, len(parents))}
            record = {"start_timestamp": format_time(at), "record_sequence": f"{sequence:08}", "child_partitions": [told]}
            self._append(token, at, {"child_partitions_record": record})

    def _change(self, at: Nanos, transaction: str, sequence: int, names: list[str], records: int, partitions: int) -> Told:
        return {
            "commit_timestamp": format_time(at),
            "record_sequence": f"{sequence:08}",
            "server_transaction_id": transaction,
            "is_last_record_in_transaction_in_partition": sequence == records - 1,
            "table_name": "Names",
            "value_capture_type": "OLD_AND_NEW_VALUES",
            "column_types": [
                {"name": "name", "type": '{"code":"STRING"}', "is_primary_key": True, "ordinal_position": 1},
                {"name": "size", "type": '{"code":"INT64"}', "is_primary_key": False, "ordinal_position": 2},
            ],
            "mods": [_inserted(name) for name in names],
            "mod_type": "INSERT",
            "number_of_records_in_transaction": records * partitions,
            "number_of_partitions_in_transaction": partitions,
            "transaction_tag": "",
            "is_system_transaction": False,
        }

    # ---- the API -----------------------------------------------------------------------------------------------------------

    def shaped(self, record: Told) -> Told:
        """As the mode's function gives it: an object of one kind, or a struct with an array for each kind."""
        if self.mutable:
            return record
        kinds = ("data_change_record", "heartbeat_record", "child_partitions_record")
        return {kind: [record[kind]] if kind in record else [] for kind in kinds}

    async def query(self, token: str | None, start: str, end: str | None, heartbeat: int) -> AsyncGenerator[Told]:
        self.queries.append((token, start, end))
        self.check()
        if not 1_000 <= heartbeat <= 300_000:
            raise AssertionError("heartbeat_milliseconds must be from 1,000 to 300,000")
        begin, last = parse_time(start), None if end is None else parse_time(end)
        if begin < self.kept_from or begin > self.time + 10**9 or (last is not None and last < begin):
            raise UnknownPositionError(f"OUT_OF_RANGE: start_timestamp {start} is not within the retention, or after end_timestamp")
        if token is None:
            for each in self._at(begin):
                yield self.shaped(each)
            return
        partition = self.partitions.get(token)
        if partition is None or begin < partition.start or (partition.end is not None and begin > partition.end):
            raise UnknownPositionError(f"OUT_OF_RANGE: partition {token} has nothing at {start}")
        async for each in self._records(partition, begin, last):
            yield self.shaped(each)

    def _at(self, begin: Nanos) -> list[Told]:
        tokens = [each.token for each in self.partitions.values() if each.start <= begin and (each.end is None or each.end > begin)]
        about = {"start_timestamp": format_time(begin), "record_sequence": "00000000"}
        if self.mutable:
            return [{"partition_start_record": about | {"partition_tokens": tokens}}]
        return [
            {"child_partitions_record": about | {"child_partitions": [{"token": token, "parent_partition_tokens": []}]}} for token in tokens
        ]

    async def _records(self, partition: FakePartition, begin: Nanos, last: Nanos | None) -> AsyncGenerator[Told]:
        told = 0
        while True:
            changed, now = self._changed, self.time
            there = sorted((each for each in partition.records[told:]), key=lambda each: each[0])
            if self.withheld and last is not None:
                there = [each for each in there if "child_partitions_record" not in each[1]]
            for _, together in itertools.groupby(there, key=lambda each: each[0]):
                several = list(together)
                told += len(several)
                # Of transactions with one timestamp; what ends a partition is the last of it.
                several.sort(key=lambda each: ("data_change_record" not in each[1], self._random.random()))
                for at, record in several:
                    if begin <= at and (last is None or at <= last):
                        yield record
                        await asyncio.sleep(0)
                        self.check()
            if (partition.end is not None and partition.end <= now) or (last is not None and last <= now):
                return
            yield {"heartbeat_record": {"timestamp": format_time(now)}}
            await changed.wait()

    async def now(self) -> str:
        self.check()
        return format_time(self.time)

    def check(self) -> None:
        if self.cut:
            raise BrokenOffError("UNAVAILABLE: the line is cut")

    async def close(self) -> None:
        """There is nothing to release."""


def _inserted(name: str) -> Told:
    return {"keys": json.dumps({"name": name}), "new_values": json.dumps({"size": str(len(name))}), "old_values": "{}"}
