"""The client for ordinary, blocking code."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import httpx

from sluiceway.client import answers, protocol
from sluiceway.client.errors import CallError
from sluiceway.client.http import DEFAULT_URL, LIMITS, Endpoint, generated_key, new_key, read_answer, seconds
from sluiceway.client.protocol import Call, Duration, Item, Repeats, Retry, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

    from sluiceway.client.arrow import LeasedTable

T = TypeVar("T")


class Client:
    """Talks to one server. Safe to share between threads, not between processes.

    A call returns when the server has done it, durably, or raises `SluicewayError`: `invalid_request` from here, else a `CallError`.

    An attempt that surely did nothing but may succeed later (`unavailable`, `too_many_requests`, no connection) is repeated, with
    growing, jittered pauses, until `retry_for` has passed since the call began. So is an attempt whose outcome is unknown, if a
    repetition is safe: for every call but `create_queue`, `delete_queue`, a `lease` without a `lease_key` and a produce without a
    key. For these, and when `retry_for` is over, `outcome_unknown` is raised. An attempt itself takes at most `request_timeout` and
    a few seconds. `retry_for="0s"` never repeats.

    With `generate_keys` a produce without a key gets one of its own, so that repeating it never stores an item twice; the server
    remembers it for ten minutes (longer where the call may take longer), and a million keys a partition at once. Keyed items
    are spread over the partitions by their key, not by backlog. `client_id` names this consumer in leases; by default it is new
    for each client.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        client_id: str | None = None,
        retry_for: Duration = "30s",
        generate_keys: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._endpoint = Endpoint(url)
        self._retry_for = seconds(retry_for, "retry_for")
        self._generate_keys = generate_keys
        self.client_id = client_id or new_key()
        # Reading the certificates takes longer than many calls, so only where they are needed.
        self._transport = transport or httpx.HTTPTransport(verify=self._endpoint.url.scheme == "https", limits=LIMITS)

    def close(self) -> None:
        """Close the connections. A call in another thread that is still running then fails."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        repeats = Repeats(call, self._retry_for, time.monotonic())
        while True:
            try:
                return self._attempt(call)
            except CallError as error:
                time.sleep(repeats.pause(error, time.monotonic(), random.random()))

    def _attempt(self, call: Call[T]) -> T:
        try:
            response = self._transport.handle_request(self._endpoint.request(call))
            try:
                body = response.read()
            finally:
                response.close()
        except httpx.RequestError as error:
            raise self._endpoint.broken(error) from error
        return read_answer(call, response.status_code, body)

    def _key(self, given: protocol.Key, request_timeout: Duration | None) -> protocol.Key:
        if given.key is None and given.group is None and self._generate_keys and self._retry_for:
            return generated_key(self._retry_for, request_timeout)
        return given

    # -- queues -------------------------------------------------------------------------------------------------------

    def create_queue(
        self,
        queue_name: str,
        *,
        requested_partitions: int | None = None,
        lease_timeout: Duration | None = None,
        max_attempts: int | None = None,
        dead_queue: str | None = None,
        reference: str | None = None,
    ) -> answers.QueueInfo:
        """Create a queue; what is not given is the server's default. Raises `queue_exists` if the name is taken."""
        return self._run(protocol.create_queue(queue_name, requested_partitions, lease_timeout, max_attempts, dead_queue, reference))

    def list_queues(self, *, pivot: str | None = None, limit: int | None = None) -> answers.QueuePage:
        """Queues by name, beginning after `pivot`; pass `next` of the page as the pivot of the following one."""
        return self._run(protocol.list_queues(pivot, limit))

    def queue_info(self, queue_name: str) -> answers.QueueInfo:
        """Raises `queue_not_found`, as every call on a queue does."""
        return self._run(protocol.queue_info(queue_name))

    def delete_queue(self, queue_name: str, *, force: bool = False) -> None:
        """Delete a queue with all that is in it. Raises `queue_not_empty` unless it is empty or `force` is given."""
        self._run(protocol.delete_queue(queue_name, force))

    # -- items --------------------------------------------------------------------------------------------------------

    def produce(
        self,
        queue_name: str,
        items: Iterable[Item | bytes | str],
        *,
        request_timeout: Duration | None = None,
        idempotency_key: str | None = None,
        idempotency_group: str | None = None,
        idempotency_sequence: int | None = None,
        idempotency_window: Duration | None = None,
    ) -> answers.Produced:
        """Store up to 1,000 items in one partition: all of them durably, or none.

        A repetition with the same key stores nothing and answers as the first call did; with another body it raises `key_conflict`.
        A key is kept for the window (24 hours), or with a group until the group's sequence rises (`stale_sequence` for a lower one).
        """
        given = protocol.Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        return self._run(protocol.produce(queue_name, items, request_timeout, self._key(given, request_timeout)))

    def produce_arrow(
        self,
        queue_name: str,
        rows: pa.RecordBatch | pa.Table,
        *,
        request_timeout: Duration | None = None,
        idempotency_key: str | None = None,
        idempotency_group: str | None = None,
        idempotency_sequence: int | None = None,
        idempotency_window: Duration | None = None,
    ) -> answers.Produced:
        """As `produce`, for up to 10,000 rows with the column `payload` and any of kind, encoding, reference, headers, enqueue_at."""
        from sluiceway.client.arrow import write_stream

        given = protocol.Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        stream = write_stream(rows)
        return self._run(protocol.produce_stream(queue_name, stream, request_timeout, self._key(given, request_timeout)))

    def lease(
        self,
        queue_name: str,
        *,
        batch_size: int = 1,
        request_timeout: Duration = "0s",
        lease_timeout: Duration | None = None,
        max_partitions: int | None = None,
        lease_key: str | None = None,
    ) -> answers.Leased:
        """Take up to `batch_size` items, waiting up to `request_timeout` for the first; none in that time is an empty answer.

        Nobody else is served them until the lease's deadline. A repeated `lease_key` gives the live leases of its first use again.
        """
        return self._run(protocol.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key))

    def lease_arrow(
        self,
        queue_name: str,
        *,
        batch_size: int = 1_000,
        request_timeout: Duration = "0s",
        lease_timeout: Duration | None = None,
        max_partitions: int | None = None,
        lease_key: str | None = None,
    ) -> LeasedTable:
        """As `lease`, with the items as one Arrow table."""
        from sluiceway.client.arrow import read_leased

        call = protocol.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key)
        return self._run(call.as_arrow(read_leased))

    def complete(
        self,
        queue_name: str,
        ids: Iterable[str] = (),
        *,
        lease_ids: Iterable[str] = (),
        request_timeout: Duration | None = None,
    ) -> answers.Completed:
        """Settle items for good, by id or whole leases. Returns only if all are settled; ids with nothing to do are listed as ignored."""
        return self._run(protocol.complete(queue_name, ids, lease_ids, request_timeout))

    def retry(self, queue_name: str, items: Iterable[Retry | str], *, request_timeout: Duration | None = None) -> answers.Retried:
        """Put leased items back, under new ids: now (a plain id), later, or into the dead queue. Ids with nothing to do are ignored."""
        return self._run(protocol.retry(queue_name, items, request_timeout))

    def extend(
        self,
        queue_name: str,
        lease_ids: Iterable[str],
        *,
        lease_timeout: Duration | None = None,
        request_timeout: Duration | None = None,
    ) -> answers.Extended:
        """Move the deadline of leases to `lease_timeout` (the queue's) from now. A lease that is gone is listed as ignored."""
        return self._run(protocol.extend(queue_name, lease_ids, lease_timeout, request_timeout))

    def settle(self, queue_name: str, verdicts: Iterable[Verdict], *, request_timeout: Duration | None = None) -> answers.Staged:
        """State the outcome of leased items; it takes effect when the lease is completed, and is forgotten if the lease expires."""
        return self._run(protocol.settle(queue_name, verdicts, request_timeout))

    def peek(
        self,
        queue_name: str,
        *,
        limit: int = 10,
        partition: int | None = None,
        lease_id: str | None = None,
        start: int | None = None,
    ) -> list[answers.LeasedItem]:
        """Look at what will be served next, or at a lease's open items, without taking. Raises `lease_not_found`."""
        return self._run(protocol.peek(queue_name, limit, partition, lease_id, start)).items

    def stats(self, queue_name: str) -> answers.QueueStats:
        """Counts of items, per partition."""
        return self._run(protocol.stats(queue_name))
