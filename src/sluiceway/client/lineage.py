"""A queue as a change stream. Its partitions have children: rebalances make them, in the stead of others that are drained and removed.

Reading consumes. A batch is a lease on items of exactly one partition, under a key made from the position that it begins at, so that
whoever reads from there again finds the same lease; its end names the lease, and all before it that nobody has said to be kept. `kept`
completes them. Leases live for `hold_for`, and those that this process knows are extended as long as it runs.

* A capture that stands still for longer than that loses its leases: their items are back in the queue. Reading ends then, with
  UnknownPositionError, for what was handed on and not completed would come twice.
* Whoever reads from a position that others have left behind gets nothing: the server refuses it (`after_lease`).
* Moved items keep their origin. What is leased is finished where it is, so each is read once.
* Items that come back (their lease by somebody else ran out, they are due, they were moved) are as old as they were. So there is no
  heartbeat: no time is told before which nothing is to come.

Records are items: `position` is the id, `at` when it was produced, `key` its reference; kind and payload are its own. Encoding and headers
are not carried. The API key needs the scopes `consume` and `read`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.adapters import system
from sluiceway.adapters.secrets import read_secret
from sluiceway.client import partition_lineage
from sluiceway.client._async.client import AsyncClient
from sluiceway.client.answers import Ignored, QueueInfo
from sluiceway.client.arrow import LeasedTable
from sluiceway.client.errors import CallError
from sluiceway.contract.rebalances import Rebalance
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import parse_lease_id
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_LEASE_TIMEOUT
from sluiceway.kernel.names import check_queue_name, check_text
from sluiceway.kernel.options import duration, named, required
from sluiceway.model.task_records import Born
from sluiceway.ports.change_stream import CHANGES, Batch, BrokenOffError, End, SeedsUpto, UnknownPositionError

log = logging.getLogger(__name__)

OPTIONS = ("url", "queue", "consumer", "apiKey", "caFile", "holdFor")
RETRY_FOR = "3s"
"""For so long a call is repeated: who reads is told soon, and repeats it then."""
WAIT = "800ms"
"""How long a read waits for a first item, at the server."""
TOLD_FOR = 1.0
"""Seconds for which what is known of the queue's rebalances is not asked again, while nothing depends on it."""
MAX_OPEN = 50
"""Leases that may wait to be kept, in one partition: a position names them all. With more, reading waits."""
FULL_PAUSE = 0.2
MAX_EXTENDED = 1_000
"""Leases in one call."""
PAGE = 100
HOLD_FOR: Millis = 86_400_000
MIN_HOLD: Millis = 1_000
_GIVES = ("available", "draining")
"""States of a partition in which its items are given out."""
_FINE = ("completed", "settled")
"""What a lease id may be told to be that is over as it should be."""
_PLACE = re.compile(r"([1-9][0-9]{0,16})x([1-9][0-9]{0,4})(?:\+([1-9][0-9]{0,16}(?:,[1-9][0-9]{0,16})*))?")
_TOKEN = re.compile(r"([^.:/]+)\.(0|[1-9][0-9]{0,8})")


class Place(NamedTuple):
    """A position: behind the lease of that number (0: before everything), which had so many items. `before`: earlier ones, not kept yet."""

    lease: int = 0
    items: int = 0
    before: tuple[int, ...] = ()

    def __str__(self) -> str:
        before = "+" + ",".join(map(str, self.before)) if self.before else ""
        return f"{self.lease}x{self.items}{before}" if self.lease else partition_lineage.START

    @property
    def leases(self) -> tuple[int, ...]:
        return (*self.before, self.lease) if self.lease else ()


def _place(position: str) -> Place:
    if position == partition_lineage.START:
        return Place()
    found = _PLACE.fullmatch(position)
    if found is None:
        raise UnknownPositionError(f"{position[:100]!r} is no position in a partition of a queue")
    lease, items, before = found.groups()
    return Place(int(lease), int(items), tuple(map(int, before.split(","))) if before else ())


@dataclass
class _Partition:
    """What this process knows of one. `kept`: leases up to that number are completed, as far as they are of this capture."""

    incarnation: str
    number: int
    kept: int = 0
    known: set[int] = field(default_factory=set)
    """Leases that surely were this capture's, and not lost."""
    unsaid: str | None = None
    """A position that was said to be kept, and could not be told."""
    lost: str = ""
    """Why reading cannot go on, ever."""

    def lease_id(self, number: int) -> str:
        return f"{self.incarnation}.{self.number}.L{number}"

    def open(self, place: Place) -> tuple[int, ...]:
        """The leases that are to be kept with that position."""
        return tuple(number for number in place.leases if number > self.kept)


class QueueLineage:
    """The change stream of a queue. The client must have a `client_id` that all members of the capture have, and nobody else.

    `hold_for`: how long leases live. `wait`: how long a read waits for something. The client is closed with the stream.
    """

    def __init__(self, client: AsyncClient, queue: str, hold_for: Millis = HOLD_FOR, wait: str = WAIT) -> None:
        self._client = client
        self._queue = queue
        self._hold_for = hold_for
        self._wait = wait
        self._partitions: dict[str, _Partition] = {}
        self._held: set[str] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._told: tuple[float, QueueInfo, list[Rebalance]] | None = None
        self._paused = False

    async def close(self) -> None:
        """Leases stay: who reads on finds them, or they run out."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self._client.close()

    # ---- which partitions there are ---------------------------------------------------------------------------

    async def seeds(self, after: str) -> SeedsUpto:
        async with _reached():
            info = await self._client.queue_info(self._queue)
            if not partition_lineage.is_news(after, info):
                return SeedsUpto(after, ())
            return partition_lineage.seeds(after, info, [each async for each in self._rebalances(info.incarnation)])

    async def _rebalances(self, incarnation: str) -> AsyncIterator[Rebalance]:
        """All that are remembered of the queue, newest first."""
        pivot = None
        while True:
            page = await self._client.list_rebalances(queue_name=self._queue, limit=PAGE, pivot=pivot)
            for each in page.items:
                if each.incarnation == incarnation:
                    yield each
            pivot = page.next
            if pivot is None:
                return

    async def _empty(self, partition: _Partition, asked_at: float) -> Batch:
        """A lease that was asked for then had nothing. The children that are certain though the partition has not ended are told with it.

        That there is nothing is said only if the queue was seen to give out items since: one that is paused has nothing for anybody.
        """
        now = asyncio.get_running_loop().time()
        if self._told is None or now - self._told[0] > TOLD_FOR:
            info = await self._client.queue_info(self._queue)
            rebalances = [await self._client.get_rebalance(info.rebalance.id)] if info.rebalance is not None else []
            self._told = (now, info, [each for each in rebalances if each.incarnation == info.incarnation])
            self._note_pause("lease" in info.paused)
        told_at, info, rebalances = self._told
        if info.incarnation != partition.incarnation:
            return _nothing()
        gives = not self._paused and any(each.partition == partition.number and each.state in _GIVES for each in info.partitions)
        children = partition_lineage.heirs(rebalances, info.incarnation, partition.number)
        return _nothing(0 if gives and told_at >= asked_at else None, children)

    def _note_pause(self, paused: bool) -> None:
        if paused and not self._paused:
            log.warning("the queue %s is paused: nothing can be read until leases are resumed", self._queue)
        self._paused = paused

    async def _gone(self, partition: _Partition, refused: CallError) -> Batch:
        """The server has no such partition (any more)."""
        info = await self._client.queue_info(self._queue)
        if info.incarnation != partition.incarnation:
            raise UnknownPositionError(f"the queue {self._queue} was deleted, and made anew: what was in it is gone")
        async for each in self._rebalances(info.incarnation):
            if partition_lineage.removal_of([each], partition.number) is not None:
                children = partition_lineage.children_of(each, info.incarnation, partition.number)
                # What was moved to the children is as old as it was.
                return _nothing(0, end=End(children, 0))
        if _may_be_new(info, partition.number):
            raise BrokenOffError(f"the server does not know partition {partition.number} of the queue {self._queue} yet: {refused}")
        raise UnknownPositionError(
            f"partition {partition.number} of the queue {self._queue} was removed by a rebalance that is not remembered any more, "
            "so what came after it is not known"
        )

    # ---- reading ----------------------------------------------------------------------------------------------

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = MAX_ITEMS_ARROW) -> Batch:
        this, place = self._partition(partition), _place(position)
        async with _reached():
            if upto is not None:
                return await self._again(this, _place(upto), upto)
            await self._say_again(partition, this)
            await self._check(this, place)
            if this.lost:
                raise UnknownPositionError(this.lost)
            if len(this.open(place)) >= MAX_OPEN:
                await asyncio.sleep(FULL_PAUSE)
                return _nothing()
            asked_at = asyncio.get_running_loop().time()
            try:
                leased = await self._lease(this, place, limit)
            except CallError as error:
                if error.code == "invalid_request" and error.field == "partition":
                    return await self._gone(this, error)
                raise
            if not leased.leases:
                return await self._empty(this, asked_at)
            return self._batch(this, place, leased)

    def _partition(self, token: str) -> _Partition:
        found = _TOKEN.fullmatch(token)
        if found is None:
            raise UnknownPositionError(f"{token[:100]!r} is no partition of a queue")
        return self._partitions.setdefault(token, _Partition(found[1], int(found[2])))

    async def _lease(self, this: _Partition, place: Place, limit: int) -> LeasedTable:
        try:
            return await self._client.lease_arrow(
                self._queue,
                batch_size=min(limit, MAX_ITEMS_ARROW),
                request_timeout=self._wait,
                lease_timeout=format_duration(self._hold_for),
                lease_key=f"{this.incarnation}.{this.number}/{place.lease}",
                partition=this.number,
                after_lease=this.lease_id(place.lease),
            )
        except CallError as error:
            if error.code == "stale_ids":
                raise UnknownPositionError(f"what came after lease {this.lease_id(place.lease)} was read and completed already") from error
            if error.code == "invalid_request" and error.field == "after_lease":
                raise UnknownPositionError(f"the queue {self._queue} was deleted, and made anew: what was in it is gone") from error
            raise

    def _batch(self, this: _Partition, place: Place, leased: LeasedTable) -> Batch:
        lease = leased.leases[0]
        number = parse_lease_id(lease.lease_id).number
        records = _records(leased)
        this.known.add(number)
        self._hold([lease.lease_id])
        newest = pc.max(records.column("at").cast(pa.int64())).as_py()
        # By two clocks. If the server's is ahead of ours, it is not known. And 0 would say that nothing is left.
        age = -1 if newest is None else system.now() - newest
        behind = None if age < 0 else age + 1
        return Batch(records, str(Place(number, lease.count, this.open(place))), behind=behind)

    async def _again(self, this: _Partition, place: Place, upto: str) -> Batch:
        """The batch that ends there, as it was."""
        lease_id = this.lease_id(place.lease)
        try:
            found = await self._client.peek_arrow(self._queue, lease_id, limit=MAX_ITEMS_ARROW)
        except CallError as error:
            if error.code == "lease_not_found":
                raise UnknownPositionError(f"lease {lease_id} is over, so its items cannot be read again") from error
            raise
        if len(found) != place.items:
            raise UnknownPositionError(f"lease {lease_id} had {place.items} items, and has {len(found)}: somebody else has settled some")
        this.known.add(place.lease)
        await self._extend([lease_id])
        self._hold([lease_id])
        return Batch(_records(found), upto)

    async def _check(self, this: _Partition, place: Place) -> None:
        """That the leases of a position which somebody else has read were this capture's, and are not lost."""
        asked = [this.lease_id(number) for number in this.open(place) if number not in this.known]
        if not asked:
            return
        over = {each.id: each.reason for each in await self._extend(asked)}
        for lease_id, reason in over.items():
            if reason == "unknown":
                raise UnknownPositionError(f"lease {lease_id} was never given")
            if reason not in _FINE:
                raise UnknownPositionError(_lost(lease_id, reason))
        self._hold(lease_id for lease_id in asked if lease_id not in over)
        this.known.update(this.open(place))

    # ---- keeping ----------------------------------------------------------------------------------------------

    async def kept(self, partition: str, position: str) -> None:
        this, place = self._partition(partition), _place(position)
        this.unsaid = position
        try:
            await self._complete(this, place)
        except CallError as error:
            # Whatever it is, it is a hint; reading says what can be repaired.
            raise BrokenOffError(str(error)) from error

    def left(self, partition: str) -> None:
        """What is leased there runs out, unless whoever reads on finds it before and extends it."""
        this = self._partitions.pop(partition, None)
        if this is not None:
            own = this.lease_id(0)[:-1]
            self._held = {lease_id for lease_id in self._held if not lease_id.startswith(own)}

    async def _say_again(self, token: str, this: _Partition) -> None:
        """What could not be said when it was kept."""
        if this.unsaid is not None:
            with contextlib.suppress(CallError):
                await self._complete(this, _place(this.unsaid))

    async def _complete(self, this: _Partition, place: Place) -> None:
        numbers = this.open(place)
        if numbers:
            lease_ids = [this.lease_id(number) for number in numbers]
            done = await self._client.complete(self._queue, lease_ids=lease_ids, client_id=self._client.client_id)
            for each in done.ignored:
                if each.reason not in _FINE:
                    this.lost = _lost(each.id, each.reason)
                    log.error("%s", this.lost)
            self._held.difference_update(lease_ids)
            this.kept = max(this.kept, place.lease)
            this.known = {number for number in this.known if number > this.kept}
        this.unsaid = None

    def _hold(self, lease_ids: Iterable[str]) -> None:
        self._held.update(lease_ids)
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        """Extend what is read and not kept, for as long as that takes."""
        while True:
            await asyncio.sleep(self._hold_for / 3_000)
            try:
                held = sorted(self._held)
                for start in range(0, len(held), MAX_EXTENDED):
                    over = await self._extend(held[start : start + MAX_EXTENDED])
                    self._held.difference_update(each.id for each in over)
            except SluicewayError as error:
                log.warning("leases on items of the queue %s were not extended, will try again: %s", self._queue, error)

    async def _extend(self, lease_ids: Collection[str]) -> list[Ignored]:
        """Those that are over, and how."""
        hold = format_duration(self._hold_for)
        return (await self._client.extend(self._queue, lease_ids, lease_timeout=hold, client_id=self._client.client_id)).ignored


@contextlib.asynccontextmanager
async def _reached() -> AsyncIterator[None]:
    """What the server does not do or answer now is no end. What it will always refuse is the caller's error as it is."""
    try:
        yield
    except CallError as error:
        if not error.retryable:
            raise
        raise BrokenOffError(str(error)) from error


def _may_be_new(info: QueueInfo, number: int) -> bool:
    """Whether it is there after all, or may be: numbers rise, so one beyond those that a server knows may have been given since."""
    there = {each.partition for each in info.partitions}
    return number in there or number > max(there)


def _lost(lease_id: str, reason: str) -> str:
    return (
        f"lease {lease_id} is not this capture's any more ({reason}): its items are back in the queue, and what was handed on of them "
        "would be read twice. Leases must live longer (option holdFor) than a capture stands still"
    )


_EMPTY = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in CHANGES], schema=CHANGES)


def _nothing(behind: Millis | None = None, children: tuple[Born, ...] = (), end: End | None = None) -> Batch:
    return Batch(_EMPTY, None, behind=behind, children=children, end=end)


def _records(leased: LeasedTable) -> pa.RecordBatch:
    """Items as records."""
    table, nulls = leased.table, pa.chunked_array([pa.nulls(len(leased), pa.utf8())])
    given = set(table.column_names)
    columns = (
        leased.ids(),
        table["enqueued_at"],
        table["kind"] if "kind" in given else nulls,
        table["reference"] if "reference" in given else nulls,
        table["payload"],
    )
    arrays = [pa.concat_arrays(each.cast(to.type).chunks) for each, to in zip(columns, CHANGES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGES)


def from_options(name: str, options: Mapping[str, str]) -> QueueLineage:
    """The stream of the queue that the options name, for the capture of that name. Raises `invalid_request` that names the option."""
    said = named(options, OPTIONS)
    url = required(said, "url", "the server, such as http://127.0.0.1:2319")
    queue = required(said, "queue", "the name of a queue")
    hold_for = duration(said, "holdFor", format_duration(HOLD_FOR), MIN_HOLD, MAX_LEASE_TIMEOUT)
    consumer = check_text(said.get("consumer") or "capture", "consumer")
    api_key = None
    if said.get("apiKey"):
        api_key = read_secret(said["apiKey"], "apiKey", os.environ)
        if api_key is None:
            raise invalid("apiKey", "a key does not stand here itself; say where it is: env:NAME or file:PATH")
    client = AsyncClient(
        url,
        # Of this capture alone: others that had the same would be taken for it.
        client_id=check_text(f"{consumer}/{name}", "consumer"),
        retry_for=RETRY_FOR,
        api_key=api_key,
        ca_file=said.get("caFile") or None,
    )
    return QueueLineage(client, check_queue_name(queue, "queue"), hold_for)
