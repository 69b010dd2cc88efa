"""The client for ordinary, blocking code."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import httpx

from sluiceway.client import admin_calls, answers, consumer_common, item_calls, producer_common, queue_calls
from sluiceway.client.connections import Connections
from sluiceway.client.direct import Direct
from sluiceway.client.errors import CallError
from sluiceway.client.events import Following, ended, read_blocking
from sluiceway.client.http_exchange import DEFAULT_URL, Endpoint, generated_key, generated_name, new_key, read_answer, seconds
from sluiceway.client.item_calls import Check, Item, Key, Retry, Verdict
from sluiceway.client.protocol import Call, Duration, Repeats
from sluiceway.client.queue_calls import Settings, Verb
from sluiceway.client.sync_producer import Producer
from sluiceway.client.sync_rebalances import Rebalances
from sluiceway.kernel.errors import invalid

if TYPE_CHECKING:
    from sluiceway.client.aio import AsyncClient
    from sluiceway.client.aio_consumer import AsyncConsumer
    from sluiceway.client.arrow import LeasedTable
    from sluiceway.client.sync_consumer import Consumer

T = TypeVar("T")


class Client(Rebalances):
    """Talks to one server. Safe to share between threads, not between processes.

    A call returns when the server has done it, durably, or raises `SluicewayError`: `invalid_request` from here, else a `CallError`.

    An attempt that surely did nothing but may succeed later (`unavailable`, `storage_full`, `queue_paused`, `too_many_requests`, no
    connection) is repeated, with growing, jittered pauses, until `retry_for` has passed since the call began. So is one whose outcome is
    unknown, if a repetition is safe: for every call but `create_queue`, `delete_queue`, `redrive`, `rebalance`, `rebalance_many`,
    `cancel_rebalance`, an `update_queue` with a `version`, a `lease` without a `lease_key` and a produce without a key. For these, and when
    `retry_for` is over, `outcome_unknown` is raised. An attempt itself takes at most `request_timeout` and a few seconds. `retry_for="0s"`
    never repeats.

    With `generate_keys` a produce without a key gets one of its own, so that repeating it never stores an item twice; the server
    remembers it for ten minutes (longer where the call may take longer), and a million keys a partition at once. Keyed items
    are spread over the partitions by their key, not by backlog. `client_id` names this consumer in leases; by default it is new
    for each client.

    `api_key` says who calls, where the server asks: by default the environment's `SLUICEWAY_API_KEY`; an empty one is none. `ca_file`
    has the certificates (PEM) by which an `https` server is known, where these are not public ones.

    With `direct`, calls on what one instance of a cluster has go straight to that instance, and to `url` where that fails. Their addresses
    must be reachable from here, which behind a load balancer they often are not, so it is off by default.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        client_id: str | None = None,
        retry_for: Duration = "30s",
        generate_keys: bool = True,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        direct: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._endpoint = Endpoint(url, api_key)
        self._direct = Direct(self._endpoint) if direct else None
        self._ca_file = ca_file
        self._retry_for = seconds(retry_for, "retry_for")
        self._generate_keys = generate_keys
        self.client_id = client_id or new_key()
        self._transport = transport or Connections(self._endpoint.verify(ca_file))

    def close(self) -> None:
        """Close the connections. A call in another thread that is still running then fails."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, call: Call[T], retry_for: float | None = None) -> T:
        repeats = Repeats(call, self._retry_for if retry_for is None else retry_for, time.monotonic())
        while True:
            try:
                return self._attempt(call)
            except CallError as error:
                time.sleep(repeats.pause(error, time.monotonic(), random.random()))
                call = repeats.next(call, generated_name)

    def _attempt(self, call: Call[T]) -> T:
        direct = self._direct
        if direct is None or call.about is None:
            return self._exchange(self._endpoint, call)
        queue_name = direct.to_look_up(call, time.monotonic())
        if queue_name is not None:
            try:
                direct.learn(queue_name, self._exchange(self._endpoint, queue_calls.queue_info(queue_name)))
            except CallError as error:
                direct.not_told(queue_name, error, time.monotonic())
        owner = direct.endpoint(call, time.monotonic())
        if owner is not None:
            try:
                return self._exchange(owner, call)
            except CallError as error:
                direct.failed(call, owner, error, time.monotonic())
        return self._exchange(self._endpoint, call)

    def _exchange(self, endpoint: Endpoint, call: Call[T]) -> T:
        try:
            response = self._transport.handle_request(endpoint.request(call))
            try:
                body = response.read()
            finally:
                response.close()
        except httpx.RequestError as error:
            raise endpoint.broken(error) from error
        if self._direct is not None and response.status_code == 200:
            self._direct.heard(call, response.headers.get("x-sluiceway-served-by"))
        return read_answer(call, response, body)

    def _key(self, given: Key, request_timeout: Duration | None) -> Key:
        if given.key is None and given.group is None and self._generate_keys and self._retry_for:
            return generated_key(self._retry_for, request_timeout)
        return given

    def _twin(self) -> AsyncClient:
        """A client of the same server for an event loop."""
        if not isinstance(self._transport, Connections | httpx.HTTPTransport | httpx.AsyncBaseTransport):
            raise invalid("transport", "a consumer needs one that is also an httpx.AsyncBaseTransport, or none; or use AsyncClient")
        from sluiceway.client.aio import AsyncClient

        transport = self._transport if isinstance(self._transport, httpx.AsyncBaseTransport) else None
        url, key = str(self._endpoint.url), self._endpoint.api_key
        direct = self._direct is not None
        return AsyncClient(url, client_id=self.client_id, api_key=key, ca_file=self._ca_file, direct=direct, transport=transport)

    # -- queues -------------------------------------------------------------------------------------------------------

    def create_queue(self, queue_name: str, *, requested_partitions: int | None = None, **settings: Unpack[Settings]) -> answers.QueueInfo:
        """Create a queue; a setting that is not given, or None, is the server's default. Raises `queue_exists` if the name is taken."""
        return self._run(queue_calls.create_queue(queue_name, requested_partitions, settings))

    def update_queue(self, queue_name: str, *, version: int | None = None, **settings: Unpack[Settings]) -> answers.QueueInfo:
        """Change these settings and no others, at once; None takes the default.

        With a `version`, raises `version_conflict` unless the queue still has that one.
        """
        return self._run(queue_calls.update_queue(queue_name, version, settings))

    def list_queues(self, *, pivot: str | None = None, limit: int | None = None) -> answers.QueuePage:
        """Queues by name, beginning after `pivot`; pass `next` of the page as the pivot of the following one."""
        return self._run(queue_calls.list_queues(pivot, limit))

    def queue_info(self, queue_name: str) -> answers.QueueInfo:
        """Raises `queue_not_found`, as every call on a queue does."""
        return self._run(queue_calls.queue_info(queue_name))

    def delete_queue(self, queue_name: str, *, force: bool = False) -> None:
        """Delete a queue with all that is in it. Raises `queue_not_empty` unless it is empty or `force` is given."""
        self._run(queue_calls.delete_queue(queue_name, force))

    def pause(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """Stop `produce`, `lease` or (by default) both, until `resume`; also over restarts.

        A produce then raises `queue_paused`, a lease waits in vain. What is leased can still be settled.
        """
        return self._run(queue_calls.pause(queue_name, verbs, True))

    def resume(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """Allow these verbs again; by default both."""
        return self._run(queue_calls.pause(queue_name, verbs, False))

    def clear(
        self, queue_name: str, *, ready: bool = True, scheduled: bool = False, request_timeout: Duration | None = None
    ) -> answers.Cleared:
        """Drop for good what waits: ready items, and with `scheduled` those that are not due yet. Leased items stay.

        When an attempt had to be repeated, the answer counts what the last one dropped.
        """
        return self._run(queue_calls.clear(queue_name, ready, scheduled, request_timeout))

    def redrive(
        self,
        queue_name: str,
        *,
        target: str | None = None,
        limit: int | None = None,
        reason: str | None = None,
        source: str | None = None,
        dry_run: bool = False,
        request_timeout: Duration | None = None,
    ) -> answers.Redriven:
        """Send up to `limit` (1,000) items of a dead queue back to `target` (the queue that each came from), with no attempts.

        Only those whose reason contains `reason`, and that came from the queue `source`. `dry_run` counts and moves nothing. Each item is
        moved once, whatever happens in between; what is on its way when the call ends arrives later.
        """
        return self._run(queue_calls.redrive(queue_name, target, limit, reason, source, dry_run, request_timeout))

    def stats(self, queue_name: str) -> answers.QueueStats:
        """Counts of items, per partition."""
        return self._run(queue_calls.stats(queue_name))

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
        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        return self._run(item_calls.produce(queue_name, items, request_timeout, self._key(given, request_timeout)))

    def produce_arrow(
        self,
        queue_name: str,
        rows: object,
        *,
        request_timeout: Duration | None = None,
        idempotency_key: str | None = None,
        idempotency_group: str | None = None,
        idempotency_sequence: int | None = None,
        idempotency_window: Duration | None = None,
    ) -> answers.Produced:
        """As `produce`, for up to 10,000 rows with the column `payload` and any of kind, encoding, reference, headers, enqueue_at.

        `rows` is a pyarrow Table or RecordBatch, or a data frame that exports Arrow, such as one of Polars or pandas.
        """
        from sluiceway.client.arrow import write_stream

        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        stream = write_stream(rows)
        return self._run(item_calls.produce_stream(queue_name, stream, request_timeout, self._key(given, request_timeout)))

    def lease(
        self,
        queue_name: str,
        *,
        batch_size: int = 1,
        request_timeout: Duration = "0s",
        lease_timeout: Duration | None = None,
        max_partitions: int | None = None,
        lease_key: str | None = None,
        partition: int | None = None,
        after_lease: str | None = None,
    ) -> answers.Leased:
        """Take up to `batch_size` items, waiting up to `request_timeout` for the first; none in that time is an empty answer.

        Nobody else is served them until the lease's deadline. A repeated `lease_key` gives the live leases of its first use again.
        With a `partition` they come from there only; with `after_lease`, one of its leases, `stale_ids` is raised if a later lease of this
        client was completed there.
        """
        one = (partition, after_lease)
        return self._run(
            item_calls.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key, *one)
        )

    def lease_arrow(
        self,
        queue_name: str,
        *,
        batch_size: int = 1_000,
        request_timeout: Duration = "0s",
        lease_timeout: Duration | None = None,
        max_partitions: int | None = None,
        lease_key: str | None = None,
        partition: int | None = None,
        after_lease: str | None = None,
    ) -> LeasedTable:
        """As `lease`, with the items as one Arrow table."""
        from sluiceway.client.arrow import read_leased

        one = (partition, after_lease)
        call = item_calls.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key, *one)
        return self._run(call.as_arrow(read_leased))

    def complete(
        self,
        queue_name: str,
        ids: Iterable[str] = (),
        *,
        lease_ids: Iterable[str] = (),
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Completed:
        """Settle items for good, by id or whole leases. Returns only if all are settled; ids with nothing to do are listed as ignored.

        With a `client_id`, what another client has leased is ignored. `strict` raises `stale_ids` if anything was ignored; the rest is
        done all the same. Both hold for `release`, `retry` and `extend`, too.
        """
        return self._run(item_calls.complete(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

    def release(
        self,
        queue_name: str,
        ids: Iterable[str] = (),
        *,
        lease_ids: Iterable[str] = (),
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Released:
        """Give back items that were not touched: they are offered again, under new ids, and the attempt is not counted."""
        return self._run(item_calls.release(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

    def retry(
        self,
        queue_name: str,
        items: Iterable[Retry | str],
        *,
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Retried:
        """Put leased items back, under new ids: as the queue's back-off says (a plain id), at a time, or into the dead queue."""
        return self._run(item_calls.retry(queue_name, items, request_timeout, Check(client_id, strict)))

    def extend(
        self,
        queue_name: str,
        lease_ids: Iterable[str] = (),
        *,
        ids: Iterable[str] = (),
        lease_timeout: Duration | None = None,
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Extended:
        """Move the deadline of leases, or of the leases that `ids` are in, to `lease_timeout` (the queue's) from now."""
        check = Check(client_id, strict)
        return self._run(item_calls.extend(queue_name, lease_ids, ids, lease_timeout, request_timeout, check))

    def settle(self, queue_name: str, verdicts: Iterable[Verdict], *, request_timeout: Duration | None = None) -> answers.Staged:
        """State the outcome of leased items; it takes effect when the lease is completed, and is forgotten if the lease expires."""
        return self._run(item_calls.settle(queue_name, verdicts, request_timeout))

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
        return self._run(item_calls.peek(queue_name, limit, partition, lease_id, start)).items

    def peek_arrow(self, queue_name: str, lease_id: str, *, limit: int = 10_000, start: int | None = None) -> LeasedTable:
        """The items that are still open in a lease, from position `start` on, as one Arrow table. Raises `lease_not_found`."""
        from sluiceway.client.arrow import read_leased

        return self._run(item_calls.peek(queue_name, limit, None, lease_id, start).as_arrow(read_leased))

    def explain(self, queue_name: str, item_id: str) -> answers.Explanation:
        """Where an item is, and why it is not being served."""
        return self._run(item_calls.explain(queue_name, item_id))

    def explain_partition(self, queue_name: str, partition: int) -> answers.PartitionExplanation:
        """Which instance has that partition, why, and whether it serves."""
        return self._run(item_calls.explain_partition(queue_name, partition))

    def producer(
        self,
        queue_name: str,
        *,
        linger: Duration = "5ms",
        max_batch: int = 1_000,
        max_bytes: int = 1 << 20,
        max_in_flight: int = 4,
        max_buffered: int = 16 << 20,
        request_timeout: Duration | None = None,
        retry_for: Duration | None = None,
    ) -> Producer:
        """Sends items one by one and stores them many at a time; use it in a `with` block. Times and sizes: see `Producer`."""
        patience = producer_common.patience(retry_for, producer_common.DELIVERY_RETRIES * self._retry_for)
        posting = producer_common.Posting(queue_name, request_timeout, patience)
        limits = producer_common.limits(linger, max_batch, max_bytes, max_in_flight, max_buffered)
        return Producer(self._run, posting, limits)

    def consumer(
        self,
        queue_name: str,
        *,
        prefetch: int = 100,
        lease_timeout: Duration = "1m",
        linger: Duration = "20ms",
        retry_for: Duration | None = None,
    ) -> Consumer:
        """Takes items and settles them, with leases kept alive: `run` a handler, or go over it in a `with` block. See `Consumer`."""
        from sluiceway.client.aio_consumer import AsyncConsumer
        from sluiceway.client.sync_consumer import Consumer

        kept = consumer_common.keeper(prefetch, lease_timeout, linger, producer_common.patience(retry_for, self._retry_for))

        def opened() -> tuple[AsyncConsumer, Callable[[], Awaitable[None]]]:
            twin = self._twin()
            return AsyncConsumer(twin._attempt, queue_name, self.client_id, kept, cancel_lost=False), twin.close

        return Consumer(opened)

    # -- for whoever runs the server --------------------------------------------------------------------------------------

    def create_key(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        expires_after: Duration | None = None,
        requests_per_second: int | None = None,
        bytes_per_second: int | None = None,
    ) -> answers.CreatedKey:
        """Make an API key. A scope is `ACTION:PATTERN` (`produce:orders-*`) or `admin`. The answer is the only one that has the key."""
        return self._run(admin_calls.create_key(name, scopes, expires_after, requests_per_second, bytes_per_second))

    def list_keys(self, *, pivot: str | None = None, limit: int | None = None) -> answers.KeyPage:
        """The keys, without their secrets; pass `next` of the page as the pivot of the following one."""
        return self._run(admin_calls.list_keys(pivot, limit))

    def revoke_key(self, key_id: str) -> None:
        """From now on the key is refused, everywhere within a second. Raises `key_not_found`."""
        self._run(admin_calls.revoke_key(key_id))

    def own_key(self) -> answers.OwnKey:
        """Who this client is to the server, and what it may do. Any key will do; a server that asks for none lets anybody do everything."""
        return self._run(admin_calls.own_key())

    def list_audit(
        self,
        *,
        pivot: str | None = None,
        limit: int | None = None,
        queue_name: str | None = None,
        action: str | None = None,
        actor: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> answers.AuditPage:
        """Who changed what, newest first; of one queue, of one action (`rebalance.`: of all that begin so), by one actor, in that time."""
        return self._run(admin_calls.list_audit(pivot, limit, queue_name, action, actor, since, until))

    def reload_config(self) -> answers.Reloaded:
        """Have the server read its configuration again. Raises `invalid_request` or `restart_required`; then nothing has changed."""
        return self._run(admin_calls.reload_config())

    def show_config(self) -> dict[str, object]:
        """The server's configuration in force, without secrets."""
        return self._run(admin_calls.show_config())

    def list_backends(self) -> list[dict[str, object]]:
        """The storage backends and how they are."""
        return self._run(admin_calls.list_backends()).items

    def list_instances(self) -> answers.InstanceList:
        """The instances of the cluster, how each is, and how they divide the partitions."""
        return self._run(admin_calls.list_instances())

    def update_instances(
        self,
        *,
        settle_timeout: Duration | None = None,
        round_interval: Duration | None = None,
        heartbeat_interval: Duration | None = None,
        beat_interval: Duration | None = None,
        lease_timeout: Duration | None = None,
        member_timeout: Duration | None = None,
        strategy: str | None = None,
    ) -> answers.InstanceList:
        """Change the times by which all instances go, and how they divide the partitions. What is not given stays; a round follows."""
        times = {
            "settle_timeout": settle_timeout,
            "round_interval": round_interval,
            "heartbeat_interval": heartbeat_interval,
            "beat_interval": beat_interval,
            "lease_timeout": lease_timeout,
            "member_timeout": member_timeout,
        }
        return self._run(admin_calls.update_instances(times, strategy))

    def list_rounds(self, *, limit: int | None = None) -> list[answers.Round]:
        """The last times that the instances divided the partitions, newest first."""
        return self._run(admin_calls.list_rounds(limit)).items

    def events(self, *, queue_name: str | None = None, types: Iterable[str] | None = None) -> Generator[answers.Event, None, None]:
        """What happens on the server, as it happens, without end: of one queue, of some types.

        A connection that breaks is made again, and what was missed comes later; where the server does not know it any more, an event of
        the type `reset` comes instead. Raises what the server refuses, and after `retry_for` without a sign of life `unavailable`.
        """
        following = Following(queue_name, types, self._retry_for, time.monotonic())
        while True:
            try:
                try:
                    request = self._endpoint.events(following.query, following.parser.last_id)
                    with contextlib.closing(read_blocking(self._transport.handle_request(request))) as parts:
                        for part in parts:
                            yield from following.heard(part, time.monotonic())
                except httpx.RequestError as error:
                    raise self._endpoint.broken(error) from error
                raise ended()
            except CallError as error:
                time.sleep(following.pause(error, time.monotonic(), random.random()))
