"""Leased items as an Arrow stream, for whatever reads Arrow by its C interface: Polars, DuckDB, pandas, Daft and others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from sluiceway.client.arrow import ROWS, LeasedTable
from sluiceway.client.consumer_common import check_batch_size, put_back
from sluiceway.client.job_leases import PARTITIONS, lease_again
from sluiceway.client.lease_extender import LeaseExtender
from sluiceway.client.lease_manager import refused
from sluiceway.client.protocol import Duration, millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON

if TYPE_CHECKING:
    from sluiceway.client._sync.client import Client

log = logging.getLogger("sluiceway.client")


class LeaseStream:
    """Up to `max_items` items of a queue, as an Arrow stream of the columns `sluiceway.client.arrow.ROWS`. For a `with` block, once.

        with LeaseStream(client, "photos", max_items=100_000) as photos:
            frame = polars.DataFrame(photos)

    Items are leased as the stream is read, up to `batch_size` (10,000, the most) in a call, until there are `max_items`, or a call gets
    none. The first call waits up to `request_timeout` for an item. The stream may be read several times, also at once: each time it has
    the same items, but for those that were settled meanwhile. The second time, they are fetched anew; nothing is kept in memory.

    Leases last for `lease_timeout`, and are extended once a third of it has passed, for as long as the block runs.

    When the block ends, all leased items are completed, those that a query left out as well, but for those that were given another
    outcome by `settle`. So write results within the block. An exception puts all of them back, as that of a handler does: `RetryItem`
    after a time, `DeadItem` into the dead queue, any other as the queue's `retry_backoff` says. Ctrl-C and what else is no `Exception`
    releases them: the attempt does not count. In a process that dies, they run out after `lease_timeout`.

    Each item is offered at least once: if its lease was lost, because the server could not be reached in time, it is offered again. A call
    whose answer was lost is followed by another one, up to 4 times; what it took is offered again, too.

    With `runs`, a lease has several items of a key in a queue with `order` (see `Client.lease`).
    """

    def __init__(
        self,
        client: Client,
        queue_name: str,
        *,
        max_items: int = MAX_ITEMS_ARROW,
        batch_size: int = MAX_ITEMS_ARROW,
        lease_timeout: Duration = "1m",
        request_timeout: Duration = "0s",
        runs: bool = False,
    ) -> None:
        if max_items < 1:
            raise invalid("max_items", "expected at least 1")
        check_batch_size(batch_size)
        self._client, self._queue_name = client, queue_name
        self._left, self._batch_size = max_items, batch_size
        self._lease_timeout, self._wait, self._runs = lease_timeout, request_timeout, runs
        self._extender = LeaseExtender(client, queue_name, lease_timeout)
        self._lock = threading.Lock()
        self._held: list[tuple[str, int]] = []
        """Leases, each with its number of items."""
        self._state = "new"

    @property
    def count(self) -> int:
        """The number of items leased so far."""
        return sum(count for _, count in self._held)

    def reader(self) -> pa.RecordBatchReader:
        """The stream as a reader of record batches, one for each call that leases: for engines that take only pyarrow's own types."""
        if self._state == "new":
            raise invalid("stream", "read a lease stream in its `with` block, so that it can settle its items at the end")
        return pa.RecordBatchReader.from_batches(ROWS, self._batches())

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the items by Arrow's C stream interface."""
        return self.reader().__arrow_c_stream__(requested_schema)

    def settle(self, rows: object) -> None:
        """State outcomes of some of the items, by row: `done`, `retry` or `dead`. The others are done.

        `rows` is what `Client.settle_arrow` takes. The outcomes take effect when the block ends. A later one of an item replaces an earlier
        one. Raises `invalid_request` for an item that this queue has never had.
        """
        self._check_open()
        answer = self._client.settle_arrow(self._queue_name, rows)
        for each in answer.ignored:
            if each.reason == "unknown":
                raise invalid("id", f"{each.id} is not an item of the queue {self._queue_name!r}")
        if answer.ignored:
            log.warning("queue %s: %d items were no longer leased; they are served again", self._queue_name, len(answer.ignored))

    def __enter__(self) -> Self:
        if self._state != "new":
            raise invalid("stream", "it was already used; create another one")
        self._state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._state = "ended"
        try:
            if error is None:
                self._close_leases()
            elif isinstance(error, Exception):
                self._put_back(error)
            else:
                self._release()
        finally:
            self._extender.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise invalid("stream", "the `with` block of the lease stream has ended")

    # -- reading --------------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[pa.RecordBatch]:
        at = 0
        while (leased := self._at(at)) is not None:
            table, leases = leased
            at += leases
            if table is not None:
                yield from table.rows().to_batches()

    def _at(self, at: int) -> tuple[LeasedTable | None, int] | None:
        """The items from lease number `at` on, and the number of their leases. None: there are no more."""
        with self._lock:
            self._check_open()
            if at == len(self._held):
                leased = self._lease() if self._left else None
                return (leased, len(leased.leases)) if leased is not None and len(leased) else None
        return self._again(*self._held[at]), 1

    def _lease(self) -> LeasedTable:
        """Lease the next items; for the first ones it waits."""
        lease = partial(
            self._client.lease_arrow,
            self._queue_name,
            batch_size=min(self._batch_size, self._left),
            request_timeout="0s" if self._held else self._wait,
            lease_timeout=self._lease_timeout,
            max_partitions=PARTITIONS,
            runs=self._runs,
        )
        leased = lease_again(self._queue_name, lease)
        self._held += [(lease.lease_id, lease.count) for lease in leased.leases]
        self._extender.add(leased.lease_ids)
        # Each reading ends where the first one did.
        self._left = self._left - len(leased) if len(leased) else 0
        return leased

    def _again(self, lease_id: str, count: int) -> LeasedTable | None:
        try:
            return self._client.peek_arrow(self._queue_name, lease_id, limit=count)
        except SluicewayError as error:
            if error.code != "lease_not_found":
                raise
            log.warning("queue %s: lease %s has ended before it was read: its items are left out", self._queue_name, lease_id)
            return None

    # -- the end --------------------------------------------------------------------------------------------------------------

    def _portions(self) -> Iterator[list[str]]:
        lease_ids = [lease_id for lease_id, _ in self._held]
        for start in range(0, len(lease_ids), MAX_ITEMS_JSON):
            yield lease_ids[start : start + MAX_ITEMS_JSON]

    def _close_leases(self) -> None:
        for some in self._portions():
            lost = refused(self._client.complete(self._queue_name, lease_ids=some).ignored)
            if lost:
                log.warning("queue %s: %d leases had ended (%s): their items are served again", self._queue_name, len(lost), lost[0].reason)

    def _put_back(self, error: Exception) -> None:
        """Give all items the outcome of the exception, which goes on."""
        name, outcome = self._queue_name, put_back("", error)
        log.warning("queue %s: handling %d items failed: they are put back", name, self.count)
        after = None if outcome.retry_after is None else millis(outcome.retry_after, "retry_after")
        try:
            for lease_id, count in self._held:
                ids = self._open_ids(lease_id, count)
                same = {"outcome": "dead" if outcome.dead else "retry", "retry_after_ms": after, "reason": outcome.reason}
                columns = {each: pa.repeat(pa.scalar(value), len(ids)) for each, value in same.items()}
                if len(ids):
                    self._client.settle_arrow(name, {"id": ids, **columns})
            self._close_leases()
        except SluicewayError as failure:
            log.warning("queue %s: the items were not put back (%s). They are served again when their leases run out", name, failure)

    def _open_ids(self, lease_id: str, count: int) -> pa.ChunkedArray:
        try:
            return self._client.peek_arrow(self._queue_name, lease_id, limit=count).ids()
        except SluicewayError as error:
            if error.code != "lease_not_found":
                raise
            # One that has ended must not keep the others from being put back. Closing them tells of it.
            return pa.chunked_array([], pa.utf8())

    def _release(self) -> None:
        try:
            for some in self._portions():
                self._client.release(self._queue_name, lease_ids=some)
        except SluicewayError as failure:
            name = self._queue_name
            log.warning("queue %s: the items were not released (%s). They are served again when their leases run out", name, failure)
