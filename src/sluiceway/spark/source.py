"""The stream source: the driver leases, tasks read what was leased, and the next trigger closes it.

What makes a replay exact: the offset that Spark logs before a batch runs names the batch's leases, and a lease always reads
the same. What makes a crash harmless: leases are taken under a key made from the start offset, so that a driver which died
before Spark logged the batch finds them again. Leases are closed in the next `latestOffset`, whose `start` is in Spark's
commit log by then; Spark's own `commit` comes a batch later and is not needed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.spark.admission import Admission
from sluiceway.spark.collector import spare_collector
from sluiceway.spark.columns import JsonColumns
from sluiceway.spark.offsets import HeldLease, Offset, Slice
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.rows import SCHEMA, to_rows
from sluiceway.spark.server_calls import Client

log = logging.getLogger("sluiceway.spark")

_UNLOGGED_HOLD: Millis = 5 * 60_000
"""Lease timeout of a checkpoint's first batch until Spark has logged it: before that, nothing remembers its nonce."""

_IDLE_WAIT: Millis = 500
"""How long a trigger waits at the server for a first item. Spark asks again 10 ms after an empty answer."""

_DONE = ("completed", "settled")
"""Why a lease is gone that this query closed itself. The second says so of what the server does not remember any more."""

_GONE = {
    "expired": "ran out",
    "released": "was released",
    "not_yours": "is leased by another consumer",
    "unknown": "is not known to the server: the queue was deleted and created anew, or restored from a backup",
}
"""Why a lease is gone, by the server's reason. Of the others it was closed by another client."""

_NAMED = 5
"""How many leases a message names."""

_NO_ASYNC = (
    "asynchronous progress tracking cannot be used with this source: leave out asyncProgressTrackingEnabled, and start the query again "
    "from its checkpoint"
)


class Task(InputPartition):
    """What one Spark task reads."""

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        super().__init__(slices)
        self.slices = slices


class Part(NamedTuple):
    """What an equal part of each batch comes from: a queue, or one partition of it."""

    queue: str
    partition: int | None = None


class LeaseStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query's side of the queues. Spark keeps one in a process of its own beside the driver, and copies for tasks.

    The rows are those of SCHEMA, unless `columns` make others of them.
    """

    def __init__(self, options: SourceOptions, columns: JsonColumns | None = None) -> None:
        self._options = options
        self._columns = columns
        self._nonce = uuid.uuid4().hex[:12]
        self._client: Client | None = None
        self._keeper: LeaseKeeper | None = None
        self._closed_sequence = 0
        self._leased_sequence = 0
        self._committed_sequence = 0
        self._partitions_checked = False
        self._available_now = False
        self._tails: dict[str, dict[str, int]] = {}
        """Of each queue, by partition, the offset at which it ended when an `availableNow` run began."""

    def initialOffset(self) -> dict[str, Any]:
        return self._named(Offset(self._nonce))

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark carries one limit only, so that of bytes is looked up where it is needed.
        return ReadMaxRows(self._options.max_items_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Close the batch that ends at `start`, lease the next one. Nothing to lease: `start` itself."""
        at = Offset.parse(start)
        self._close(at)
        # After that, for what a run before this one has put back is for this one.
        self._note_tails()
        by_part = self._lease(at, limit)
        several = len(self._options.queues) > 1
        leases = [replace(lease, queue=part.queue if several else "") for part, some in by_part.items() for lease in some]
        if not leases:
            return start
        self._leased_sequence = at.sequence + 1
        return self._named(at.following(leases, self._options.min_partitions))

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ends at `end` is in Spark's logs. Its leases are closed in `latestOffset` already; see `_check_logged`."""
        self._committed_sequence = Offset.parse(end).sequence

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`. Its offset is logged, so its leases are held from now on."""
        before, batch = Offset.parse(start), Offset.parse(end)
        if batch.sequence == before.sequence:
            # Nothing is in it. Spark logs such a batch when it begins, and the nonce in it is that of the start which did.
            return []
        if batch.sequence != before.sequence + 1:
            what = f"Spark asks for batches {before.sequence + 1} to {batch.sequence} at once"
            raise invalid("asyncProgressTrackingEnabled", f"{what}, and the checkpoint names the leases of the last one only; {_NO_ASYNC}")
        self._check_logged(before, batch)
        # A batch that is run again, after a restart: what it puts back is for the next run.
        self._note_tails()
        if self._keeper is None:
            self._checked()
            self._keeper = LeaseKeeper(self._options)
        gone = self._keeper.hold(batch.leases)
        if gone and self._options.fail_on_lease_loss:
            first, reason = next(iter(gone.items()))
            raise SluicewayError("lease_not_found", _lost(first, reason))
        if gone:
            batch = _leave_out(batch, gone)
        return [Task(slices) for slices in batch.tasks()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_slices(partition.slices, self._options, self._columns)

    def stop(self) -> None:
        """Leases stay: a restart from the checkpoint finds them, or they expire."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._client is not None:
            self._client.close()

    def _named(self, offset: Offset) -> dict[str, Any]:
        """The offset, and whose it is: for people, and for who listens to the query. A replay does not read that."""
        about = {"consumer": self._options.consumer, "queue": ",".join(self._options.queues), "url": _shown(self._options.server.url)}
        return dict(sorted({**offset.to_dict(), **about}.items()))

    def _check_logged(self, before: Offset, batch: Offset) -> None:
        """Raises `invalid_request` if Spark keeps its logs behind the batches that it runs.

        Otherwise it has told of the batch before by now: once it has logged this one, and before it asks for its tasks. It does not
        for a batch that it runs again.
        """
        if batch.sequence == self._leased_sequence and self._committed_sequence < before.sequence:
            what = f"batch {batch.batch_id} is about to run, and Spark has not told that batch {before.batch_id} is in its logs"
            raise invalid("asyncProgressTrackingEnabled", f"{what}; {_NO_ASYNC}")

    def _checked(self) -> Client:
        if self._client is None:
            client = Client(self._options.server)
            # To lease takes the scope `consume`, to read what was leased `read`. A key without that must not take items first.
            most = [client.call("/v1/queues.info", {"queue_name": queue})["max_lease_timeout"] for queue in self._options.queues]
            if self._options.hold_for_is_default:
                allowed = min(parse_duration(each, "max_lease_timeout") for each in most)
                self._options = replace(self._options, hold_for=min(self._options.hold_for, allowed))
            self._client = client
        return self._client

    def _close(self, at: Offset) -> None:
        """Close the leases of the batch that ends at `at`, which Spark has committed.

        Leases that ran out before are served again, although the batch is done. After a restart that raises `lease_not_found`, unless
        `fail_on_lease_loss` is off; a batch of this run is only warned about, because its query goes on.
        """
        if self._closed_sequence >= at.sequence:
            return
        if self._keeper is not None:
            self._keeper.release()
        lost: dict[str, str] = {}
        for queue, some in portions(at.leases, self._options):
            answer = self._checked().call("/v1/queue.complete", {"queue_name": queue, "lease_ids": some})
            # A call that is repeated, and a restart, find leases that this query has closed before.
            lost |= {entry["id"]: entry["reason"] for entry in answer["ignored"] if entry["reason"] not in _DONE}
        if lost:
            what = _not_closed(at, lost, self._options)
            if self._keeper is None and self._options.fail_on_lease_loss:
                raise SluicewayError("lease_not_found", f"{what}. {_DONE_AGAIN}")
            log.warning("%s", what)
        self._closed_sequence = at.sequence

    def _parts(self) -> list[Part]:
        """What is leased from. Partitions that the queue does not have any more are passed over: what was in them is elsewhere."""
        queues, chosen = self._options.queues, self._options.partitions
        if chosen is None:
            return [Part(queue) for queue in queues]
        info = self._checked().call("/v1/queues.info", {"queue_name": queues[0]})
        found = info["partitions"]
        if chosen != "draining" and not self._partitions_checked:
            self._check_partitions(chosen, [each["partition"] for each in found], str(info["incarnation"]))
            self._partitions_checked = True
        wanted = [each for each in found if (each["state"] == chosen if chosen == "draining" else each["partition"] in chosen)]
        return [Part(queues[0], each["partition"]) for each in wanted]

    def _check_partitions(self, chosen: Sequence[int], there: Sequence[int], incarnation: str) -> None:
        """Raises `invalid_request` for a partition that the queue never had; warns of those that a rebalance has removed."""
        missing = [number for number in chosen if number not in there]
        if not missing:
            return
        # Of a partition that is not there, this only tells whether it ever was.
        body = {"queue_name": self._options.queues[0], "lease_ids": [f"{incarnation}.{number}.L1" for number in missing]}
        ignored = self._checked().call("/v1/queue.extend", body)["ignored"]
        never = [entry["id"].split(".")[1] for entry in ignored if entry["reason"] == "unknown"]
        has = f"it has {', '.join(map(str, sorted(there)))}"
        if never:
            raise invalid("partitions", f"the queue {self._options.queues[0]} has no partition {', '.join(never)}; {has}")
        gone = ", ".join(map(str, missing))
        log.warning("a rebalance has removed partitions %s of %s, so nothing is read from them; %s", gone, self._options.queues[0], has)

    def _lease(self, at: Offset, limit: ReadLimit) -> dict[Part, list[HeldLease]]:
        """Lease the next batch, by part. Each has an equal part of the limits, which does not depend on what the others have: so a
        driver that died in between finds the same leases again, whatever has come in meanwhile. Unless with `partitions=draining` others
        drain by then: what it had leased is then partly found, or not, and stays leased for `hold_for`.
        """
        parts, options = self._parts(), self._options
        if not parts:
            if not self._available_now:
                # Spark asks again at once.
                time.sleep(_IDLE_WAIT / 1000)
            return {}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sys.maxsize
        nbytes = None if isinstance(limit, ReadAllAvailable) else options.max_bytes_per_trigger
        admission = Admission(self._checked(), options.consumer, None if nbytes is None else max(1, nbytes // len(parts)))
        lease_timeout = options.hold_for if at.sequence else min(_UNLOGGED_HOLD, options.hold_for)
        leases: dict[Part, list[HeldLease]] = {}
        for part in parts:
            share = max(1, most // len(parts))
            waits = not self._available_now and not any(leases.values())
            wait = _IDLE_WAIT // len(parts) if waits else 0
            key, tails = f"{at.nonce}/{at.sequence + 1}", self._tails.get(part.queue)
            try:
                leases[part] = admission.take(part.queue, key, share, lease_timeout, wait, part.partition, tails)
            except SluicewayError as error:
                if error.field != "partition":
                    raise
                # A rebalance has removed it since `_parts`. Nothing was leased in it, or it would still be there.
                leases[part] = []
        return leases

    def _note_tails(self) -> None:
        """Where each partition ends when an `availableNow` run begins: what comes later, or comes back, is for the next run."""
        if not self._available_now or self._tails:
            return
        for queue in self._options.queues:
            answer = self._checked().call("/v1/queue.stats", {"queue_name": queue})
            found = {each["partition"]: each["next_offset"] for logical in answer["logical_queues"] for each in logical["partitions"]}
            away = sorted(number for number, tail in found.items() if tail is None)
            if away:
                log.warning("partitions %s of %s are not open: what is in them is for the next run", ", ".join(map(str, away)), queue)
            self._tails[queue] = {str(number): tail for number, tail in found.items() if tail is not None}


class RefusedReader(LeaseStreamReader):
    """In the place of a reader that cannot be made: raises the error as soon as Spark asks it for an offset."""

    def __init__(self, error: SluicewayError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def stop(self) -> None:
        """It holds nothing."""


class LeaseKeeper:
    """Holds the leases of the batch in flight: extends them at once and then every third of `holdFor`, in a thread of its own."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._held: tuple[HeldLease, ...] = ()
        self._client = Client(options.server)
        threading.Thread(target=self._run, name="sluiceway-lease-keeper", daemon=True).start()

    def hold(self, leases: tuple[HeldLease, ...]) -> dict[str, str]:
        """Returns those that are gone, and why: what they held cannot be read as it was logged."""
        with self._lock:
            self._held = leases
            return self._extend()

    def release(self) -> None:
        with self._lock:
            self._held = ()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._options.hold_for / 3000):
            with self._lock:
                try:
                    if gone := self._extend():
                        log.warning("leases lost while their batch runs, so their items are served again: %s", ", ".join(gone))
                except SluicewayError as error:
                    log.warning("leases not extended, will try again: %s", error)
        self._client.close()

    def _extend(self) -> dict[str, str]:
        """Extend what is held; return those that are gone, which are held no more, and why."""
        gone = extend(self._client, self._held, self._options)
        self._held = tuple(lease for lease in self._held if lease.lease_id not in gone)
        return gone


def extend(client: Client, leases: Collection[HeldLease], options: SourceOptions) -> dict[str, str]:
    """Hold them for `hold_for` from now on; returns those that are gone, with the server's reason."""
    gone: dict[str, str] = {}
    for queue, some in portions(leases, options):
        until = {"lease_timeout": format_duration(options.hold_for), "request_timeout": client.server_wait}
        answer = client.call("/v1/queue.extend", {"queue_name": queue, "lease_ids": some, **until})
        gone |= {entry["id"]: entry["reason"] for entry in answer["ignored"]}
    return gone


def _leave_out(batch: Offset, gone: Mapping[str, str]) -> Offset:
    """What is left of a batch without the leases that are gone, with a warning of how much that is."""
    left = batch.without(gone)
    items, still = (sum(lease.count for lease in some.leases) for some in (batch, left))
    what = f"batch {batch.batch_id} is read without {items - still} of its {items} items"
    why = f"{len(gone)} of its {len(batch.leases)} leases are gone"
    log.warning("%s: %s (failOnLeaseLoss=false): %s", what, why, _told(batch, gone))
    return left


def read_slices(slices: Sequence[Slice], options: SourceOptions, columns: JsonColumns | None) -> Iterator[pa.RecordBatch]:
    """The items of these slices, in their order, as rows of SCHEMA or as `columns` make them."""
    schema = to_arrow_schema(columns.read if columns else SCHEMA, timezone="UTC")
    client = Client(options.server)
    try:
        for part in slices:
            for rows in _read_slice(client, options, part, schema):
                yield columns.make(rows) if columns else rows
    finally:
        client.close()


def _read_slice(client: Client, options: SourceOptions, part: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    spare_collector()
    queue = part.queue or options.server.queue
    try:
        answer = client.fetch_arrow(
            "/v1/queue.peek", {"queue_name": queue, "lease_id": part.lease_id, "start": part.start, "limit": part.count}
        )
    except SluicewayError as error:
        if error.code != "lease_not_found":
            raise
        # Only extending tells why. It extends nothing: the lease is gone.
        answer = client.call("/v1/queue.extend", {"queue_name": queue, "lease_ids": [part.lease_id], "request_timeout": client.server_wait})
        _miss(options, part, part.count, answer["ignored"][0]["reason"] if answer["ignored"] else "expired")
        return
    # Items that were produced one by one arrive in batches of one, and each batch costs Spark about as much as a thousand rows.
    items = answer.read_all().combine_chunks()
    if short := part.count - items.num_rows:
        _miss(options, part, short, "short")
    for batch in items.to_batches():
        yield to_rows(batch, queue, part.lease_id, schema)


def _miss(options: SourceOptions, part: Slice, items: int, reason: str) -> None:
    """Items of a running batch cannot be read. Raises `lease_not_found`, unless the query is to go on without them."""
    if reason == "short":
        how = f"is short of {items} items that another client settled"
    else:
        how = _GONE.get(reason, "was closed by another client")
    if options.fail_on_lease_loss:
        raise SluicewayError("lease_not_found", _lost(part.lease_id, reason, how))
    log.warning("%d items are left out of their batch, because lease %s %s (failOnLeaseLoss=false)", items, part.lease_id, how)


def _lost(lease_id: str, reason: str, how: str | None = None) -> str:
    """Of a lease whose batch is to be read, and cannot be any more as it was."""
    if reason == "unknown":
        where = "Its items went with the queue, unless they are there from a backup"
    else:
        where = "What was not completed in it is not lost: it is back in the queue"
    return (
        f"lease {lease_id} of this batch {how or _GONE.get(reason, 'was closed by another client')}, so the batch cannot be read again as "
        f"it was. {where}. Start the query with a new checkpoint, or with failOnLeaseLoss=false to go on without these rows; and raise the "
        "option holdFor if queries stand still for longer"
    )


def _told(batch: Offset, gone: Mapping[str, str]) -> str:
    """The leases that are gone, with what they held, and why."""
    held = _those(batch, gone)
    some = [
        f"lease {lease.lease_id}{f' of {lease.queue}' if lease.queue else ''} with {lease.count} items "
        f"{_GONE.get(gone[lease.lease_id], 'was closed by another client')}"
        for lease in held[:_NAMED]
    ]
    return "; ".join(some) + (f"; and {len(held) - _NAMED} more" if len(held) > _NAMED else "")


def _not_closed(batch: Offset, lost: Mapping[str, str], options: SourceOptions) -> str:
    """Of a batch that is done, and whose items are served again."""
    items, again = (sum(lease.count for lease in leases) for leases in (batch.leases, _those(batch, lost)))
    return (
        f"batch {batch.batch_id} of consumer {options.consumer!r} on {', '.join(options.queues)} is done, but {again} of its {items} items "
        f"were not completed, because {len(lost)} of its {len(batch.leases)} leases were gone before they were closed: "
        f"{_told(batch, lost)}. What was open in them is served again, under new ids, with the same origin and, unless it was "
        "released, one attempt more; outcomes (retry, dead) that were stated for it have no effect"
    )


def _those(batch: Offset, some: Collection[str]) -> list[HeldLease]:
    return [lease for lease in batch.leases if lease.lease_id in some]


_DONE_AGAIN = (
    "Nothing was leased now. To do these items again, start the query once with failOnLeaseLoss=false; not to, complete them in the queue "
    "by hand first. Raise the option holdFor if queries stand still for longer"
)


def _shown(url: str) -> str:
    """The address without who calls it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def portions(leases: Collection[HeldLease], options: SourceOptions) -> Iterator[tuple[str, list[str]]]:
    """Their ids, by queue, as many at a time as a call takes."""
    by_queue: dict[str, list[str]] = {}
    for lease in leases:
        by_queue.setdefault(lease.queue or options.server.queue, []).append(lease.lease_id)
    for queue, ids in by_queue.items():
        for start in range(0, len(ids), MAX_ITEMS_JSON):
            yield queue, ids[start : start + MAX_ITEMS_JSON]
