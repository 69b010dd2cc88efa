"""A queue as a change stream. Rebalances make new partitions, which are the children of the drained and removed ones that they replace.

Reading consumes items. A batch is a lease on items of one partition. Its lease key is made from the batch's start position, so a second
read from there returns the same lease. A batch's end position names its lease and the earlier leases that are not kept yet. `kept`
completes them. Leases last `hold_for`, and this process extends the ones that it knows.

* A capture that stops for longer than `hold_for` loses its leases, and their items return to the queue. Reading then ends with
  UnknownPositionError, because items that were handed on and not completed would be read twice.
* The server refuses a read from a position that another reader has passed (`after_lease`).
* Moved items keep their origin. Leased items are settled in the partition where they are. So each item is read once.
* Items that return (another consumer's lease ran out, they became due, or they were moved) keep their age. So the stream has no heartbeat:
  there is no time before which no item can follow.

A record is an item: `position` is the item's id, `at` its production time, `key` its reference. Kind and payload are the item's. Encoding
and headers are dropped. The API key needs the scopes `consume` and `read`.
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
from sluiceway.capture import partition_lineage
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
from sluiceway.kernel.secrets import read_secret
from sluiceway.model.task_records import AnnouncedPartition
from sluiceway.ports.change_stream import CHANGES, Batch, BrokenOffError, End, SeedsUpto, UnknownPositionError

log = logging.getLogger(__name__)

OPTIONS = ("url", "queue", "consumer", "apiKey", "caFile", "holdFor")
RETRY_FOR = "3s"
"""How long a call is repeated. It is short, because the reader learns of the failure and repeats the read."""
WAIT = "800ms"
"""How long a read waits at the server for a first item."""
TOLD_FOR = 1.0
"""How many seconds the queue's partitions and rebalances are cached for empty reads."""
MAX_OPEN = 50
"""Maximum number of leases in one partition that are not kept yet. A position names them all. Reading waits until some are kept."""
FULL_PAUSE = 0.2
EXTEND_AGAIN = 1.0
"""How many seconds after a failure leases are extended again."""
MAX_EXTENDED = 1_000
"""Maximum number of leases in one extend call."""
PAGE = 100
HOLD_FOR: Millis = 86_400_000
MIN_HOLD: Millis = 1_000
_GIVES = ("available", "draining")
"""Partition states in which items can be leased."""
_FINE = ("completed", "settled")
"""Reasons for an ignored lease id that mean that the lease ended as it should."""
_PLACE = re.compile(r"([1-9][0-9]{0,16})x([1-9][0-9]{0,4})(?:\+([1-9][0-9]{0,16}(?:,[1-9][0-9]{0,16})*))?")
_TOKEN = re.compile(r"([^.:/]+)\.(0|[1-9][0-9]{0,8})")


class Place(NamedTuple):
    """A position: after lease number `lease` (0: the partition's start), which has `items` items. `before`: earlier leases not kept yet."""

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
        raise UnknownPositionError(f"{position[:100]!r} is not a position of a queue's partition")
    lease, items, before = found.groups()
    return Place(int(lease), int(items), tuple(map(int, before.split(","))) if before else ())


@dataclass
class _Partition:
    """The state of a partition in this process. `kept`: this capture's leases up to this number are completed."""

    incarnation: str
    number: int
    kept: int = 0
    known: set[int] = field(default_factory=set)
    """Leases that are known to belong to this capture and are not lost."""
    unsaid: str | None = None
    """A position whose leases still have to be completed, because the call failed."""
    lost: str = ""
    """Why reading can never continue; empty: it can."""

    def lease_id(self, number: int) -> str:
        return f"{self.incarnation}.{self.number}.L{number}"

    def open(self, place: Place) -> tuple[int, ...]:
        """The leases of the position that are not kept yet."""
        return tuple(number for number in place.leases if number > self.kept)


class QueueLineage:
    """The change stream of a queue. All members of a capture must share one `client_id` for `client`, and no other client may have it.

    `hold_for`: the leases' timeout in milliseconds. `wait`: how long a read waits for a first item. `close` closes the client, too.
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
        """Close the client. Leases stay: the next reader finds them, or they run out."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self._client.close()

    # ---- partitions -------------------------------------------------------------------------------------------

    async def seeds(self, after: str) -> SeedsUpto:
        async with _reached():
            info = await self._client.queue_info(self._queue)
            if not partition_lineage.is_news(after, info):
                return SeedsUpto(after, ())
            return partition_lineage.seeds(after, info, [each async for each in self._rebalances(info.incarnation)])

    async def _rebalances(self, incarnation: str) -> AsyncIterator[Rebalance]:
        """Yield the queue's rebalances that the server remembers, newest first."""
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
        """The batch for a lease call that was sent at `asked_at` and got no items, with the partition's children that are final already.

        It says that nothing is left only if leasing was seen to be possible after `asked_at`: a paused queue also answers with no items.
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
            log.warning("queue %s is paused: nothing can be read until leasing is resumed", self._queue)
        self._paused = paused

    async def _gone(self, partition: _Partition, refused: CallError) -> Batch:
        """The batch for a partition that the server does not have: the partition's end, if its removal is recorded.

        Raises BrokenOffError if the server may be outdated, and UnknownPositionError if the partition's items or children are unknown.
        """
        info = await self._client.queue_info(self._queue)
        if info.incarnation != partition.incarnation:
            raise UnknownPositionError(f"the queue {self._queue} was deleted and created again; its former items are gone")
        async for each in self._rebalances(info.incarnation):
            if partition_lineage.removal_of([each], partition.number) is not None:
                children = partition_lineage.children_of(each, info.incarnation, partition.number)
                # Items that were moved to the children keep their age.
                return _nothing(0, end=End(children, 0))
        if _may_be_new(info, partition.number):
            raise BrokenOffError(f"the server does not know partition {partition.number} of the queue {self._queue} yet: {refused}")
        raise UnknownPositionError(
            f"partition {partition.number} of the queue {self._queue} was removed by a rebalance whose record no longer exists, "
            "so its children are unknown"
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
            raise UnknownPositionError(f"{token[:100]!r} is not a partition of a queue")
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
                raise UnknownPositionError(f"the items after lease {this.lease_id(place.lease)} were already read and completed") from error
            if error.code == "invalid_request" and error.field == "after_lease":
                raise UnknownPositionError(f"the queue {self._queue} was deleted and created again; its former items are gone") from error
            raise

    def _batch(self, this: _Partition, place: Place, leased: LeasedTable) -> Batch:
        lease = leased.leases[0]
        number = parse_lease_id(lease.lease_id).number
        records = _records(leased)
        this.known.add(number)
        self._hold([lease.lease_id])
        newest = pc.max(records.column("at").cast(pa.int64())).as_py()
        # The times come from two clocks. If the server's is ahead, the age is unknown. 0 would mean that nothing is left, so 1 is added.
        age = -1 if newest is None else system.now() - newest
        behind = None if age < 0 else age + 1
        return Batch(records, str(Place(number, lease.count, this.open(place))), behind=behind)

    async def _again(self, this: _Partition, place: Place, upto: str) -> Batch:
        """Read the batch that ends at `upto` again. Raises UnknownPositionError if its lease is over or has lost items."""
        lease_id = this.lease_id(place.lease)
        try:
            found = await self._client.peek_arrow(self._queue, lease_id, limit=MAX_ITEMS_ARROW)
        except CallError as error:
            if error.code == "lease_not_found":
                raise UnknownPositionError(f"lease {lease_id} is over, so its items cannot be read again") from error
            raise
        if len(found) != place.items:
            raise UnknownPositionError(f"lease {lease_id} had {place.items} items, now {len(found)}: another consumer has settled some")
        this.known.add(place.lease)
        await self._extend([lease_id])
        self._hold([lease_id])
        return Batch(_records(found), upto)

    async def _check(self, this: _Partition, place: Place) -> None:
        """Check the leases of a position that another member has read. Raises UnknownPositionError if one is lost or not this capture's."""
        asked = [this.lease_id(number) for number in this.open(place) if number not in this.known]
        if not asked:
            return
        over = {each.id: each.reason for each in await self._extend(asked)}
        for lease_id, reason in over.items():
            if reason == "unknown":
                raise UnknownPositionError(f"lease {lease_id} was never assigned")
            if reason not in _FINE:
                raise UnknownPositionError(_lost(lease_id, reason))
        self._hold(lease_id for lease_id in asked if lease_id not in over)
        this.known.update(this.open(place))

    # ---- kept positions ---------------------------------------------------------------------------------------

    async def kept(self, partition: str, position: str) -> None:
        this, place = self._partition(partition), _place(position)
        this.unsaid = position
        try:
            await self._complete(this, place)
        except CallError as error:
            # `kept` is only a hint, so no failure of it is final. The next read completes the leases or raises the final error.
            raise BrokenOffError(str(error)) from error

    def left(self, partition: str) -> None:
        """Forget the partition. Its leases run out unless the next reader finds and extends them."""
        this = self._partitions.pop(partition, None)
        if this is not None:
            own = this.lease_id(0)[:-1]
            self._held = {lease_id for lease_id in self._held if not lease_id.startswith(own)}

    async def _say_again(self, token: str, this: _Partition) -> None:
        """Complete the leases of a kept position whose call failed."""
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
        """Extend the leases that are read and not kept, until cancelled."""
        usual = pause = self._hold_for / 3_000
        while True:
            await asyncio.sleep(pause)
            held = sorted(self._held)
            # One that fails, such as for a partition that is away, must not cost the others their leases.
            done = [await self._keep_some(held[start : start + MAX_EXTENDED]) for start in range(0, len(held), MAX_EXTENDED)]
            pause = usual if all(done) else min(usual, EXTEND_AGAIN)

    async def _keep_some(self, lease_ids: list[str]) -> bool:
        """Extend leases. False: it failed, and may succeed soon."""
        try:
            over = await self._extend(lease_ids)
        except SluicewayError as error:
            log.warning("queue %s: leases were not extended, will retry: %s", self._queue, error)
            return not error.retryable
        except Exception:
            # It must not end the extension: a capture whose leases run out stops for good.
            log.exception("queue %s: leases could not be extended, will retry", self._queue)
            return False
        self._held.difference_update(each.id for each in over)
        return True

    async def _extend(self, lease_ids: Collection[str]) -> list[Ignored]:
        """Extend leases. Returns the ones that are over, with the reasons."""
        hold = format_duration(self._hold_for)
        return (await self._client.extend(self._queue, lease_ids, lease_timeout=hold, client_id=self._client.client_id)).ignored


@contextlib.asynccontextmanager
async def _reached() -> AsyncIterator[None]:
    """Raises BrokenOffError for a call that may succeed later. Other errors pass through."""
    try:
        yield
    except CallError as error:
        if not error.retryable:
            raise
        raise BrokenOffError(str(error)) from error


def _may_be_new(info: QueueInfo, number: int) -> bool:
    """Whether the partition exists after all, or may be too new for the server's answer. Numbers rise, so a higher one may be new."""
    there = {each.partition for each in info.partitions}
    return number in there or number > max(there)


def _lost(lease_id: str, reason: str) -> str:
    return (
        f"lease {lease_id} no longer belongs to this capture ({reason}). Its items are back in the queue, and those already handed on "
        "would be read twice. Set the option holdFor to more than the longest pause of the capture"
    )


_EMPTY = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in CHANGES], schema=CHANGES)


def _nothing(behind: Millis | None = None, children: tuple[AnnouncedPartition, ...] = (), end: End | None = None) -> Batch:
    return Batch(_EMPTY, None, behind=behind, children=children, end=end)


def _records(leased: LeasedTable) -> pa.RecordBatch:
    """The leased items as records with the columns of CHANGES."""
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
    """The change stream of the queue in `options`, for the capture `name`. Raises `invalid_request`, which names the option."""
    said = named(options, OPTIONS)
    url = required(said, "url", "the server, such as http://127.0.0.1:2319")
    queue = required(said, "queue", "the name of a queue")
    hold_for = duration(said, "holdFor", format_duration(HOLD_FOR), MIN_HOLD, MAX_LEASE_TIMEOUT)
    consumer = check_text(said.get("consumer") or "capture", "consumer")
    api_key = None
    if said.get("apiKey"):
        api_key = read_secret(said["apiKey"], "apiKey", os.environ)
        if api_key is None:
            raise invalid("apiKey", "expected env:NAME or file:PATH that holds the key, not the key itself")
    client = AsyncClient(
        url,
        # The client id is this capture's alone. Leases of another client with the same id would be taken for the capture's.
        client_id=check_text(f"{consumer}/{name}", "consumer"),
        retry_for=RETRY_FOR,
        api_key=api_key,
        ca_file=said.get("caFile") or None,
    )
    return QueueLineage(client, check_queue_name(queue, "queue"), hold_for)
