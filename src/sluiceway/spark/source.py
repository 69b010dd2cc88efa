"""Stream source: the driver leases a batch, tasks read the leased items, and the next trigger closes the leases.

Exact replay: the offset that Spark logs before a batch runs names the batch's leases, and a lease always reads the same. Harmless crashes:
leases are taken under a key made from the start offset, so a driver that died before Spark logged the batch finds them again. Leases are
closed in the next `latestOffset`, whose `start` is in Spark's commit log by then; Spark's own `commit` comes a batch later and is not
needed. One call closes a batch and leases the next one (ADR 75). What cannot be leased or closed because a partition is away is in the next
offset, and is made up for when it is back.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON
from sluiceway.spark.backlog import Backlog
from sluiceway.spark.batch_leases import IDLE_WAIT, PATIENCE, BatchLeases, Limits, close, portions
from sluiceway.spark.collector import spare_collector
from sluiceway.spark.columns import Columns, ItemColumns
from sluiceway.spark.offsets import HeldLease, Offset, Part, Slice
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.rows import SCHEMA, to_rows
from sluiceway.spark.server_calls import Client
from sluiceway.spark.task_clients import client_of_task
from sluiceway.spark.worker_errors import plain_errors

log = logging.getLogger("sluiceway.spark")

_UNLOGGED_HOLD: Millis = 5 * 60_000
"""Lease timeout of a checkpoint's first batch until Spark has logged it: before that, its nonce is stored nowhere."""

_EXTEND_AGAIN: Millis = 1_000
"""Pause before leases that could not be extended are tried again."""

_DONE = ("completed", "settled")
"""Reasons of leases that this query closed itself. The server says `settled` once it has forgotten the details."""

_GONE = {
    "expired": "ran out",
    "released": "was released",
    "not_yours": "is leased by another consumer",
    "unknown": "is not known to the server: the queue was deleted and created again, or restored from a backup",
}
"""Texts for the server's reasons why a lease is gone. With any other reason it was closed by another client."""

_NAMED = 5
"""Maximum leases named in a message."""

_NO_ASYNC = (
    "asynchronous progress tracking cannot be used with this source: leave out asyncProgressTrackingEnabled, and start the query again "
    "from its checkpoint"
)


class Task(InputPartition):
    """Work of one Spark task."""

    def __init__(self, slices: tuple[Slice, ...]) -> None:
        super().__init__(slices)
        self.slices = slices


class LeaseStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query's reader. Spark keeps one in its own process beside the driver, and copies for tasks.

    Rows have the `columns` (None: all of an item's).
    """

    def __init__(self, options: SourceOptions, columns: Columns | None = None) -> None:
        self._options = options
        self._columns = columns or ItemColumns(SCHEMA, SCHEMA)
        self._nonce = uuid.uuid4().hex[:12]
        self._client: Client | None = None
        self._keeper: LeaseKeeper | None = None
        self._leases: BatchLeases | None = None
        self._backlog: Backlog | None = None
        self._closed_sequence = 0
        self._unclosed: tuple[HeldLease, ...] = ()
        """Of the batches up to `_closed_sequence`: leases in partitions that are away."""
        self._leased_sequence = 0
        self._held_until = 0.0
        """Until when (monotonic) the leases of the batch `_leased_sequence` need not be extended."""
        self._committed_sequence = 0
        self._partitions_checked = False
        self._available_now = False
        self._tails: dict[str, dict[str, int]] = {}
        """End offset at the beginning of an `availableNow` run, by queue and partition."""

    def initialOffset(self) -> dict[str, Any]:
        return self._named(Offset(self._nonce))

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark carries a single limit, so the byte limit is looked up where needed.
        return ReadMaxRows(self._options.max_items_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._available_now = True

    @plain_errors()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Close the batch that ends at `start`, and lease the next one. Returns `start` itself if there is nothing to lease."""
        at = Offset.parse(start)
        if self._backlog is None:
            self._backlog = Backlog(self._options)
        self._backlog.refresh()
        by_part = self._close_and_lease(at, limit) if self._may_lease_first(at) else None
        if by_part is None:
            self._close(at)
            # After closing: items put back by an earlier run belong to this one.
            self._note_tails()
            by_part = self._lease(at, limit)
        several = len(self._options.queues) > 1
        leases = [replace(lease, queue=part.queue if several else "") for part, some in by_part.items() for lease in some]
        if not leases or self._leases is None:
            return start
        self._leased_sequence = at.sequence + 1
        following = at.following(leases, self._options.min_partitions, self._options.runs)
        return self._named(replace(following, unanswered=self._leases.unanswered, unclosed=self._unclosed))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The backlog by queue, for the query's progress: see `Backlog.latest`. Spark asks after each `latestOffset`."""
        return None if self._backlog is None else self._backlog.latest()

    def commit(self, end: dict[str, Any]) -> None:
        """Note that the batch ending at `end` is in Spark's logs. Its leases are closed in `latestOffset`; see `_check_logged`."""
        self._committed_sequence = Offset.parse(end).sequence

    @plain_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`. Its offset is logged, so its leases are held from now on."""
        before, batch = Offset.parse(start), Offset.parse(end)
        if batch.sequence == before.sequence:
            # An empty batch. Spark logs one at the start, with the nonce of the start that did so.
            return []
        if batch.sequence != before.sequence + 1:
            what = f"Spark asks for batches {before.sequence + 1} to {batch.sequence} at once"
            raise invalid("asyncProgressTrackingEnabled", f"{what}, and the checkpoint names the leases of the last one only; {_NO_ASYNC}")
        self._check_logged(before, batch)
        # After a restart, a re-run batch: what it puts back is for the next run.
        self._note_tails()
        if self._keeper is None:
            self._checked()
            self._keeper = LeaseKeeper(self._options)
        is_held = batch.sequence == self._leased_sequence and time.monotonic() < self._held_until
        gone = self._keeper.hold(batch.leases, batch.unclosed, extended=is_held)
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
        """Stop, keeping the leases: a restart from the checkpoint finds them, or they expire."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._client is not None:
            self._client.close()

    def _named(self, offset: Offset) -> dict[str, Any]:
        """The offset with its consumer, queue and URL, for people and listeners. A replay ignores these."""
        about = {"consumer": self._options.consumer, "queue": ",".join(self._options.queues), "url": _shown(self._options.server.url)}
        return dict(sorted({**offset.to_dict(), **about}.items()))

    def _check_logged(self, before: Offset, batch: Offset) -> None:
        """Raises `invalid_request` if Spark writes its logs asynchronously behind the batches it runs.

        Otherwise Spark has committed the previous batch by now: it does so after logging this one, before asking for its tasks. Re-run
        batches are exempt.
        """
        if batch.sequence == self._leased_sequence and self._committed_sequence < before.sequence:
            what = f"batch {batch.batch_id} is about to run, but Spark has not reported that batch {before.batch_id} is in its logs"
            raise invalid("asyncProgressTrackingEnabled", f"{what}; {_NO_ASYNC}")

    def _checked(self) -> Client:
        if self._client is None:
            client = Client(self._options.server)
            # Leasing requires the scope `consume`, reading `read`. A key without `read` must not take items first.
            most = [client.call("/v1/queues.info", {"queue_name": queue})["max_lease_timeout"] for queue in self._options.queues]
            if self._options.hold_for_is_default:
                allowed = min(parse_duration(each, "max_lease_timeout") for each in most)
                self._options = replace(self._options, hold_for=min(self._options.hold_for, allowed))
            self._client = client
        return self._client

    def _may_lease_first(self, at: Offset) -> bool:
        """Whether one call can close the batch that ends at `at`, which this driver has run, and lease the next one.

        It cannot while anything is left of earlier batches. After a restart, closing decides whether anything is leased at all.
        """
        options = self._options
        has_run = self._keeper is not None and self._leases is not None and self._closed_sequence < at.sequence
        is_one_queue = len(options.queues) == 1 and {each.queue for each in at.leases} <= {"", *options.queues}
        is_left = at.unclosed or at.unanswered
        # What a run of `availableNow` may take is known once it has begun.
        is_bounded = not self._available_now or bool(self._tails)
        is_whole = options.partitions is None and 0 < len(at.leases) <= MAX_ITEMS_JSON
        return has_run and is_one_queue and is_whole and is_bounded and not is_left

    def _close_and_lease(self, at: Offset, limit: ReadLimit) -> dict[Part, list[HeldLease]] | None:
        """Lease the next batch by calls of which the first closes the batch that ends at `at`. None: nothing was leased, and it is not
        certain that it is closed."""
        assert self._keeper is not None
        self._keeper.release()
        by_part = self._lease(at, limit, at.lease_ids)
        assert self._leases is not None
        if self._leases.closed is not None:
            self._closed(at, at.leases, self._leases.closed)
        elif any(by_part.values()):
            self._close(at)
        else:
            return None
        return by_part

    def _close(self, at: Offset) -> None:
        """Close the leases of the batch that ends at `at`, which Spark has committed, and those that earlier batches have left.

        Leases in partitions that are away are closed by a later call. The items of leases that ran out before are served again, although
        the batch is done. After a restart that raises `lease_not_found`, unless `fail_on_lease_loss` is off; for a batch of this run it is
        only a warning, since its query continues.
        """
        if self._closed_sequence < at.sequence:
            leases, were_away = (*at.unclosed, *at.leases), bool(at.unclosed)
            if self._keeper is not None:
                self._keeper.release()
        else:
            leases, were_away = self._unclosed, True
        if not leases:
            self._closed_sequence, self._unclosed = max(self._closed_sequence, at.sequence), ()
            return
        # A repeated call, or a restart, finds leases that this query has closed before.
        gone, left = close(self._checked(), leases, self._options, were_away=were_away)
        self._closed(at, leases, gone, left)
        if left and not were_away:
            log.warning("batch %d is done; %d of its leases are closed when their partitions are back", at.batch_id, len(left))

    def _closed(self, at: Offset, leases: Sequence[HeldLease], gone: Mapping[str, str], left: tuple[HeldLease, ...] = ()) -> None:
        """Note what became of these leases, which were to be closed. Raises `lease_not_found` as `_close` does."""
        lost = {lease_id: reason for lease_id, reason in gone.items() if reason not in _DONE}
        if lost:
            what = _not_closed(at, leases, lost, self._options)
            if self._keeper is None and self._options.fail_on_lease_loss:
                raise SluicewayError("lease_not_found", f"{what}. {_DONE_AGAIN}")
            log.warning("%s", what)
        self._closed_sequence, self._unclosed = max(self._closed_sequence, at.sequence), left

    def _parts(self) -> list[Part]:
        """The sources to lease from. Skips partitions that the queue no longer has: their items are elsewhere."""
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
        """Raises `invalid_request` for a partition that never existed; warns about those that a rebalance has removed."""
        missing = [number for number in chosen if number not in there]
        if not missing:
            return
        # For a missing partition, this call only tells whether it ever existed.
        body = {"queue_name": self._options.queues[0], "lease_ids": [f"{incarnation}.{number}.L1" for number in missing]}
        ignored = self._checked().call("/v1/queue.extend", body)["ignored"]
        never = [entry["id"].split(".")[1] for entry in ignored if entry["reason"] == "unknown"]
        has = f"it has {', '.join(map(str, sorted(there)))}"
        if never:
            raise invalid("partitions", f"the queue {self._options.queues[0]} has no partition {', '.join(never)}; {has}")
        gone = ", ".join(map(str, missing))
        log.warning("a rebalance has removed partitions %s of %s, so nothing is read from them; %s", gone, self._options.queues[0], has)

    def _lease(self, at: Offset, limit: ReadLimit, closes: Sequence[str] = ()) -> dict[Part, list[HeldLease]]:
        """Lease the next batch, by part, and complete the leases `closes` by the way.

        The limits are divided equally, independent of the other parts' items, so that a restarted driver finds the same leases again,
        whatever has arrived meanwhile. Exception: with `partitions=draining`, if other partitions drain by then, earlier leases are found
        partly or not at all, and stay leased for `hold_for`.
        """
        parts, options = self._parts(), self._options
        if not parts:
            if not self._available_now:
                # Spark asks again at once.
                time.sleep(IDLE_WAIT / 1000)
            return {}
        if self._leases is None:
            self._leases = BatchLeases(self._checked(), options, self._nonce)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sys.maxsize
        nbytes = None if isinstance(limit, ReadAllAvailable) else options.max_bytes_per_trigger
        lease_timeout = options.hold_for if at.sequence else min(_UNLOGGED_HOLD, options.hold_for)
        limits = Limits(most, nbytes, lease_timeout, not self._available_now, self._tails)
        began = time.monotonic()
        taken = self._leases.take(at, parts, limits.divided(len(parts)), closes)
        self._held_until = began + options.hold_for / 3000 if self._leases.is_fresh and lease_timeout == options.hold_for else 0.0
        return taken

    def _note_tails(self) -> None:
        """Record each partition's end when an `availableNow` run begins: items that arrive or return later are for the next run."""
        if not self._available_now or self._tails:
            return
        for queue in self._options.queues:
            answer = self._checked().call("/v1/queue.stats", {"queue_name": queue})
            found = {each["partition"]: each["next_offset"] for logical in answer["logical_queues"] for each in logical["partitions"]}
            away = sorted(number for number, tail in found.items() if tail is None)
            if away:
                log.warning("partitions %s of %s are not open: their items are left for the next run", ", ".join(map(str, away)), queue)
            self._tails[queue] = {str(number): tail for number, tail in found.items() if tail is not None}


class RefusedReader(LeaseStreamReader):
    """Stand-in for a reader that cannot be created: raises the error as soon as Spark asks it for an offset."""

    def __init__(self, error: SluicewayError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, Any]:
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:
        self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._refuse()

    @plain_errors()
    def _refuse(self) -> NoReturn:
        raise self._error

    def stop(self) -> None:
        """Nothing to release."""


class LeaseKeeper:
    """Holds the leases of the batch in flight: a thread extends them at once and then every third of `holdFor`. So it does with those of
    earlier batches that could not be closed, as far as their partitions are open."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._held: tuple[HeldLease, ...] = ()
        self._unclosed: tuple[HeldLease, ...] = ()
        self._client = Client(options.server)
        threading.Thread(target=self._run, name="sluiceway-lease-keeper", daemon=True).start()

    def hold(self, leases: tuple[HeldLease, ...], unclosed: tuple[HeldLease, ...] = (), *, extended: bool = False) -> dict[str, str]:
        """Hold these leases. Returns those of `leases` that are gone, with the reasons: their items cannot be read as logged.

        `extended`: they were taken for `hold_for` less than a third of it ago, so the thread's next extension is in time.
        """
        with self._lock:
            self._held, self._unclosed = leases, unclosed
            return {} if extended else self._extend()

    def release(self) -> None:
        with self._lock:
            self._held = self._unclosed = ()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        usual = pause = self._options.hold_for / 3000
        while not self._stopped.wait(pause):
            # One at a time: the driver must not wait for the lock as long as a partition is away.
            done = [self._try(partial(self._extend, PATIENCE)), self._try(self._extend_unclosed)]
            pause = usual if all(done) else min(usual, _EXTEND_AGAIN / 1000)
        self._client.close()

    def _try(self, extends: Callable[[], dict[str, str]]) -> bool:
        """Extend leases; log what is lost. False: some were not extended."""
        try:
            with self._lock:
                gone = extends()
        except SluicewayError as error:
            log.warning("leases were not extended, will retry: %s", error)
            return False
        except Exception:
            # This thread keeps all leases, and nobody would see it end.
            log.exception("leases were not extended, will retry")
            return False
        if gone:
            log.warning("leases lost while their batch runs, so their items are served again: %s", ", ".join(gone))
        return True

    def _extend(self, patience: Millis | None = None) -> dict[str, str]:
        """Extend the held leases; drop and return the ones that are gone, with the reasons."""
        gone = extend(self._client, self._held, self._options, patience)
        self._held = tuple(lease for lease in self._held if lease.lease_id not in gone)
        return gone

    def _extend_unclosed(self) -> dict[str, str]:
        """The same with those of earlier batches."""
        gone = extend(self._client, self._unclosed, self._options, PATIENCE)
        self._unclosed = tuple(lease for lease in self._unclosed if lease.lease_id not in gone)
        return gone


def extend(client: Client, leases: Collection[HeldLease], options: SourceOptions, patience: Millis | None = None) -> dict[str, str]:
    """Extend leases to `hold_for` from now; returns the ones that are gone, with the server's reasons.

    With `patience`, as many as possible, before it raises an error of the others.
    """
    gone: dict[str, str] = {}
    failed: SluicewayError | None = None
    for queue, some in portions(leases, options):
        until = {"lease_timeout": format_duration(options.hold_for), "request_timeout": client.server_wait}
        body = {"queue_name": queue, "lease_ids": [lease.lease_id for lease in some], **until}
        try:
            answer = client.call("/v1/queue.extend", body, patience)
        except SluicewayError as error:
            if patience is None:
                raise
            failed = error
            continue
        gone |= {entry["id"]: entry["reason"] for entry in answer["ignored"]}
    if failed is not None:
        raise failed
    return gone


def _leave_out(batch: Offset, gone: Mapping[str, str]) -> Offset:
    """The batch without the leases that are gone; logs how much that is."""
    left = batch.without(gone)
    items, still = (sum(lease.count for lease in some.leases) for some in (batch, left))
    what = f"batch {batch.batch_id} is read without {items - still} of its {items} items"
    why = f"{len(gone)} of its {len(batch.leases)} leases are gone"
    log.warning("%s: %s (failOnLeaseLoss=false): %s", what, why, _told(batch.leases, gone))
    return left


def read_slices(slices: Sequence[Slice], options: SourceOptions, columns: Columns) -> Iterator[pa.RecordBatch]:
    """The items of these slices, in order, as rows of these columns."""
    schema = to_arrow_schema(columns.read, timezone="UTC")
    pieces = [piece for part in slices for piece in part.pieces(MAX_ITEMS_ARROW)]
    with plain_errors(), client_of_task(options.server) as client:
        read = (columns.make(rows) for piece in pieces for rows in _read_slice(client, options, piece, schema))
        yield from read if len(pieces) == 1 else _one_ahead(read)


def _one_ahead(read: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same, with a thread that reads the next one while Spark takes the last."""
    with ThreadPoolExecutor(1, "sluiceway-read-ahead") as thread:
        following = thread.submit(next, read, None)
        while (rows := following.result()) is not None:
            following = thread.submit(next, read, None)
            yield rows


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
        # Only an extend call tells why. It extends nothing: the lease is gone.
        answer = client.call("/v1/queue.extend", {"queue_name": queue, "lease_ids": [part.lease_id], "request_timeout": client.server_wait})
        _miss(options, part, part.count, answer["ignored"][0]["reason"] if answer["ignored"] else "expired")
        return
    # Items produced one by one arrive in batches of one, and each batch costs Spark about as much as a thousand rows.
    items = answer.read_all().combine_chunks()
    if short := part.count - items.num_rows:
        _miss(options, part, short, "short")
    for batch in items.to_batches():
        yield to_rows(batch, queue, part.lease_id, schema)


def _miss(options: SourceOptions, part: Slice, items: int, reason: str) -> None:
    """Handle unreadable items of a running batch. Raises `lease_not_found`, unless the query is to continue without them."""
    if reason == "short":
        how = f"is short of {items} items that another client settled"
    else:
        how = _GONE.get(reason, "was closed by another client")
    if options.fail_on_lease_loss:
        raise SluicewayError("lease_not_found", _lost(part.lease_id, reason, how))
    log.warning("%d items are left out of their batch, because lease %s %s (failOnLeaseLoss=false)", items, part.lease_id, how)


def _lost(lease_id: str, reason: str, how: str | None = None) -> str:
    """Message for a lease of a batch that can no longer be read as it was."""
    if reason == "unknown":
        where = "Its items were deleted with the queue, unless a backup has brought them back"
    else:
        where = "Its items that were not completed are not lost: they are back in the queue"
    return (
        f"lease {lease_id} of this batch {how or _GONE.get(reason, 'was closed by another client')}, so the batch cannot be read again as "
        f"it was. {where}. Start the query with a new checkpoint, or with failOnLeaseLoss=false to continue without these rows. Raise the "
        "option holdFor if the query may be stopped for longer"
    )


def _told(leases: Collection[HeldLease], gone: Mapping[str, str]) -> str:
    """Message that lists the leases that are gone, with their item counts and reasons."""
    held = _those(leases, gone)
    some = [
        f"lease {lease.lease_id}{f' of {lease.queue}' if lease.queue else ''} with {lease.count} items "
        f"{_GONE.get(gone[lease.lease_id], 'was closed by another client')}"
        for lease in held[:_NAMED]
    ]
    return "; ".join(some) + (f"; and {len(held) - _NAMED} more" if len(held) > _NAMED else "")


def _not_closed(batch: Offset, leases: Collection[HeldLease], lost: Mapping[str, str], options: SourceOptions) -> str:
    """Message for a finished batch whose items are served again. `leases`: its own, and those that earlier ones have left."""
    items, again = (sum(lease.count for lease in some) for some in (leases, _those(leases, lost)))
    return (
        f"batch {batch.batch_id} of consumer {options.consumer!r} on {', '.join(options.queues)} is done, but {again} of its {items} items "
        f"were not completed, because {len(lost)} of its {len(leases)} leases were gone before they were closed: "
        f"{_told(leases, lost)}. Their open items are served again, under new ids, with the same origin and, unless they were released, "
        "one attempt more; outcomes (retry, dead) that were stated for them have no effect"
    )


def _those(leases: Collection[HeldLease], some: Collection[str]) -> list[HeldLease]:
    return [lease for lease in leases if lease.lease_id in some]


_DONE_AGAIN = (
    "Nothing has been leased in this run. To process these items again, start the query once with failOnLeaseLoss=false; otherwise "
    "complete them in the queue first. Raise the option holdFor if the query may be stopped for longer"
)


def _shown(url: str) -> str:
    """The URL without credentials."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
