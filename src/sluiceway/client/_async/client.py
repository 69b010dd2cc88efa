"""The calls of the client: each method of the class is one call of the HTTP API, or a helper that makes many calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from sluiceway.client import (
    admin_calls,
    answers,
    backup_calls,
    bundle_calls,
    consumer_common,
    item_calls,
    producer_common,
    queue_calls,
    rebalance_calls,
    schedule_calls,
)
from sluiceway.client._async.channel import AsyncChannel
from sluiceway.client._async.producer import AsyncProducer
from sluiceway.client.http_exchange import DEFAULT_URL, Endpoint, generated_key, new_key, seconds
from sluiceway.client.item_calls import Check, Key, Retry, State, Verdict
from sluiceway.client.protocol import Duration
from sluiceway.client.queue_calls import Settings, Verb
from sluiceway.client.rebalance_calls import Drain
from sluiceway.contract.backup_answers import BackupBegun, BlobsPart, RecordsPart
from sluiceway.contract.bundle_answers import BundleInfo, BundlePage
from sluiceway.contract.capture_answers import TaskGroup, TaskList
from sluiceway.contract.consumer_answers import ConsumerPage
from sluiceway.contract.history_answers import QueueHistory
from sluiceway.contract.problem_answers import ProblemList
from sluiceway.contract.rebalances import Rebalance, RebalanceBatch, RebalancePage, RebalancePlan
from sluiceway.contract.schedule_answers import CatchUp, ScheduleInfo, SchedulePage, ScheduleRun

if TYPE_CHECKING:
    from sluiceway.client._async.consumer import AsyncConsumer
    from sluiceway.client.arrow import BrowsedTable, LeasedTable


class AsyncClient:
    """A client of one server.

    A call returns once the server has carried it out, durably. Otherwise it raises `SluicewayError`: `invalid_request` if the client
    rejects an argument, else a `CallError`. A duration is a text such as `500ms`, `30s` or `1h30m`, or a timedelta; a time is a datetime
    with a time zone.

    The blocking client may be shared between threads, the asyncio client between the tasks of the event loop that first uses it. A forked
    process may go on using the blocking client of its parent: it opens connections of its own. A call whose task is cancelled, or whose
    client is closed, may still take effect if it was already sent.

    A failed attempt is repeated for `retry_for`, with growing, jittered pauses. An attempt that surely did nothing but may succeed later
    (`unavailable`, `storage_full`, `queue_paused`, `too_many_requests`, no connection) is repeated for every call. An attempt whose outcome
    is unknown is repeated only if that is safe: not for `create_queue`, `delete_queue`, `redrive` (but for a dry run), `rebalance`,
    `rebalance_many`, `cancel_rebalance`, `create_key`, `create_schedule`, `run_schedule`, `delete_schedule`, `create_bundle`,
    `begin_backup`, an `update_queue` with a `version`, a `lease` without a `lease_key`, and a produce without a key. A call that is not
    repeated again raises its last error, or `outcome_unknown` if an earlier attempt may have taken effect. A single attempt takes at most
    its `request_timeout` (30 s) and a few seconds. `retry_for="0s"` never repeats.

    With `generate_keys`, a produce without a key is given a generated one, so that repeating it never stores an item twice. The server
    remembers that key for ten minutes (longer if the call may take longer), and at most a million keys per partition.

    `client_id` names this client in leases; by default it is random. `api_key` authenticates the client; by default it is the environment's
    `SLUICEWAY_API_KEY`, and an empty one sends none. `ca_file` names the certificates (PEM) that verify an `https` server, in place of
    the system's. `transport` carries all calls, in place of connections of the client's own, and is closed by it: a transport of
    `sluiceway.client.transports`, or one of httpx, which works up to 0.3, with a DeprecationWarning.

    With `direct`, calls on one partition go straight to the instance that owns it, and to `url` if that fails. It is off by default, since
    the instances' addresses must be reachable from here, and behind a load balancer they often are not.
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
        transport: Any = None,
    ) -> None:
        self._channel = AsyncChannel(
            Endpoint(url, api_key), seconds(retry_for, "retry_for"), ca_file=ca_file, direct=direct, transport=transport
        )
        self._generate_keys = generate_keys
        self.client_id = client_id or new_key()

    async def close(self) -> None:
        """Close the connections. A call that is still running fails."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _key(self, given: Key, request_timeout: Duration | None) -> Key:
        if given.key is None and given.group is None and self._generate_keys and self._channel.retry_for:
            return generated_key(self._channel.retry_for, request_timeout)
        return given

    # -- queues --------------------------------------------------------------------------------------------------------

    async def create_queue(
        self, queue_name: str, *, requested_partitions: int | None = None, **settings: Unpack[Settings]
    ) -> answers.QueueInfo:
        """Create a queue with `requested_partitions` partitions (1), and return it.

        By default the server lets an item fail 20 times, with growing pauses, and then puts it into the queue NAME-dead, which it creates,
        too. A setting that is None is off: no limit of attempts, no pauses, no dead queue. Raises `queue_exists` if the name is taken.
        """
        return await self._channel.run(queue_calls.create_queue(queue_name, requested_partitions, settings))

    async def update_queue(self, queue_name: str, *, version: int | None = None, **settings: Unpack[Settings]) -> answers.QueueInfo:
        """Change the given settings, at once, and return the queue. Other settings stay; one that is None is off, or is its default.

        With a `version`, raises `version_conflict` unless the queue still has that version. Raises `queue_not_found`.
        """
        return await self._channel.run(queue_calls.update_queue(queue_name, version, settings))

    async def list_queues(self, *, pivot: str | None = None, limit: int | None = None) -> answers.QueuePage:
        """Return a page of up to `limit` queues (100; at most 65,536) by name, beginning after `pivot`.

        Pass the page's `next` as the `pivot` of the next page.
        """
        return await self._channel.run(queue_calls.list_queues(pivot, limit))

    async def queue_info(self, queue_name: str) -> answers.QueueInfo:
        """Return a queue with its settings and partitions. Raises `queue_not_found`, as every call on a queue does."""
        return await self._channel.run(queue_calls.queue_info(queue_name))

    async def delete_queue(self, queue_name: str, *, force: bool = False) -> None:
        """Delete a queue and all its items.

        Without `force`, raises `queue_not_empty` if the queue has items, and `queue_in_use` if items are on their way to it from another
        queue. With `force`, items on their way may be lost, or handled twice.
        """
        await self._channel.run(queue_calls.delete_queue(queue_name, force))

    async def pause(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """Stop `produce`, `lease` or both (the default) until `resume`, and return the queue. A pause survives restarts.

        A produce to a paused queue raises `queue_paused`; a lease waits for its `request_timeout` and returns no items. Leased items can
        still be completed, retried, released and extended.
        """
        return await self._channel.run(queue_calls.pause(queue_name, verbs, True))

    async def resume(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """Allow `produce`, `lease` or both (the default) again, and return the queue."""
        return await self._channel.run(queue_calls.pause(queue_name, verbs, False))

    async def clear(
        self, queue_name: str, *, ready: bool = True, scheduled: bool = False, request_timeout: Duration | None = None
    ) -> answers.Cleared:
        """Drop `ready` items, and with `scheduled` the items that are not due yet, without the dead queue. Leased items stay.

        Returns the number of dropped items. If an attempt was repeated, that is the number that the last attempt dropped.
        """
        return await self._channel.run(queue_calls.clear(queue_name, ready, scheduled, request_timeout))

    async def redrive(
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
        """Send up to `limit` items (1,000; at most 10,000) of a dead queue back to `target`, by default each to the queue it came from.

        `reason` selects the items whose reason contains that text, `source` those that came from that queue. A redriven item starts with no
        attempts. Returns the number of items found, and those redriven, by queue. With `dry_run` nothing is moved. Each item is moved once,
        whatever fails; an item that is not there yet when the call returns arrives later.
        """
        return await self._channel.run(queue_calls.redrive(queue_name, target, limit, reason, source, dry_run, request_timeout))

    async def stats(self, queue_name: str) -> answers.QueueStats:
        """Return the queue's item counts and counters, per instance and partition."""
        return await self._channel.run(queue_calls.stats(queue_name))

    async def queue_keys(self, queue_name: str, *, limit: int | None = None) -> answers.QueueKeys:
        """Return the queue's busiest keys and those that wait longest, up to `limit` of each (20; at most 100)."""
        return await self._channel.run(queue_calls.keys(queue_name, limit))

    async def history(self, queue_name: str, *, minutes: int | None = None) -> QueueHistory:
        """Return the queue's counts for each of the last `minutes` complete minutes (60; at most 1,440)."""
        return await self._channel.run(queue_calls.history(queue_name, minutes))

    async def list_problems(self, queue_name: str | None = None) -> ProblemList:
        """Return what is wrong now with the queue; without a name, with everything that the key may read. Most severe problems first."""
        return await self._channel.run(queue_calls.list_problems(queue_name))

    async def list_consumers(self, queue_name: str | None = None, *, pivot: str | None = None, limit: int | None = None) -> ConsumerPage:
        """Return the queue's consumers; without a name, a page of the queues that have consumers, by name, beginning after `pivot`.

        A page looks at up to `limit` queues (20, the most). Pass its `next` as the `pivot` of the next page.
        """
        return await self._channel.run(queue_calls.list_consumers(queue_name, pivot, limit))

    # -- items ---------------------------------------------------------------------------------------------------------

    async def produce(
        self,
        queue_name: str,
        items: Iterable[object],
        *,
        request_timeout: Duration | None = None,
        idempotency_key: str | None = None,
        idempotency_group: str | None = None,
        idempotency_sequence: int | None = None,
        idempotency_window: Duration | None = None,
        bundle: str | None = None,
    ) -> answers.Produced:
        """Store up to 1,000 items in one partition, all of them durably or none. Returns their ids. A queue that keeps the items of a key
        together divides them: `outcome_unknown` then says that some may be stored.

        Each is an `Item`, or only its payload: bytes, text, or a value that is sent as JSON, such as a dict or a dataclass (see `Item`).

        A repeat with the same `idempotency_key` stores nothing and returns the first call's answer; with other items it raises
        `key_conflict`. The server remembers the key for `idempotency_window` (the queue's: 24 hours by default). With an
        `idempotency_group` it remembers the key until the group's `idempotency_sequence` rises; a lower sequence raises `stale_sequence`.
        The items belong to the `bundle`, if it is given (`create_bundle`). Raises `queue_paused`, `bundle_closed`.
        """
        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        return await self._channel.run(item_calls.produce(queue_name, items, request_timeout, self._key(given, request_timeout), bundle))

    async def produce_arrow(
        self,
        queue_name: str,
        rows: object,
        *,
        request_timeout: Duration | None = None,
        idempotency_key: str | None = None,
        idempotency_group: str | None = None,
        idempotency_sequence: int | None = None,
        idempotency_window: Duration | None = None,
        bundle: str | None = None,
    ) -> answers.Produced:
        """Store up to 10,000 rows; otherwise as `produce`.

        `rows` is a pyarrow Table or RecordBatch, or a data frame that exports Arrow, such as one of Polars or pandas. The column `payload`
        is required; `kind`, `encoding`, `reference`, `key`, `priority`, `unique_key`, `headers` and `enqueue_at` are optional. Raises
        `invalid_request` for anything else.
        """
        from sluiceway.client.arrow import write_stream

        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        stream = write_stream(rows)
        call = item_calls.produce_stream(queue_name, stream, request_timeout, self._key(given, request_timeout), bundle)
        return await self._channel.run(call)

    async def lease(
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
        runs: bool = False,
        payload: bool = True,
        complete_ids: Iterable[str] = (),
        complete_lease_ids: Iterable[str] = (),
    ) -> answers.Leased:
        """Lease up to `batch_size` items (at most 10,000; without `payload` 100,000) from up to `max_partitions` partitions (1).

        Waits up to `request_timeout` for the first item, and returns an empty answer if none arrives. No other consumer is given the items
        until the lease deadline, which is `lease_timeout` (the queue's) from now. A repeated `lease_key` returns the live leases of its
        first use and takes no other items. With a `partition`, items come from that partition only; with `after_lease` as well, a lease of
        that partition, raises `stale_ids` if this client has completed a later lease of the partition.

        In a queue with `order`, a lease has one item of a key. With `runs` it may have several: handle them in the order of the answer, and
        none after one that you put back, since those behind it are released with it. Without `payload`, the answer has the leases alone:
        `peek` and `peek_arrow` read their items.

        The same call completes `complete_ids` and `complete_lease_ids`, items and leases that were handled. `completed` has the result, as
        `complete` returns it. If that is None, or the call fails, complete them again, which is safe.
        """
        call = item_calls.lease(
            queue_name,
            self.client_id,
            batch_size,
            request_timeout,
            lease_timeout,
            max_partitions,
            lease_key,
            partition,
            after_lease,
            complete_ids,
            complete_lease_ids,
            runs=runs,
            payload=payload,
        )
        return await self._channel.run(call)

    async def lease_arrow(
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
        runs: bool = False,
        complete_ids: Iterable[str] = (),
        complete_lease_ids: Iterable[str] = (),
    ) -> LeasedTable:
        """Lease up to `batch_size` items as one Arrow table; otherwise as `lease`."""
        from sluiceway.client.arrow import read_leased

        call = item_calls.lease(
            queue_name,
            self.client_id,
            batch_size,
            request_timeout,
            lease_timeout,
            max_partitions,
            lease_key,
            partition,
            after_lease,
            complete_ids,
            complete_lease_ids,
            runs=runs,
        )
        return await self._channel.run(call.as_arrow(read_leased))

    async def complete(
        self,
        queue_name: str,
        ids: Iterable[str] = (),
        *,
        lease_ids: Iterable[str] = (),
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Completed:
        """Complete up to 1,000 items or leases. Returns once all are settled, with the ids that were ignored and why.

        Completing a lease applies the outcomes that `settle` staged, and completes its other items. With a `client_id`, items that another
        client leases are ignored. With `strict`, raises `stale_ids` if anything was ignored; the rest is completed all the same. Both
        options work alike in `release`, `retry` and `extend`.
        """
        return await self._channel.run(item_calls.complete(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

    async def release(
        self,
        queue_name: str,
        ids: Iterable[str] = (),
        *,
        lease_ids: Iterable[str] = (),
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Released:
        """Give back unprocessed items, by id or by lease. Returns their number, and the ids that were ignored.

        The server offers them again under new ids, and does not count the attempt. `client_id` and `strict` as in `complete`.
        """
        return await self._channel.run(item_calls.release(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

    async def retry(
        self,
        queue_name: str,
        items: Iterable[Retry | str],
        *,
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Retried:
        """Put leased items back under new ids. Returns the numbers of retried and dead items, and the ids that were ignored.

        A plain id waits as the queue's `retry_backoff` says; a `Retry` names a time, or sends the item to the dead queue. `client_id` and
        `strict` as in `complete`.
        """
        return await self._channel.run(item_calls.retry(queue_name, items, request_timeout, Check(client_id, strict)))

    async def extend(
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
        """Move the deadline of leases to `lease_timeout` (the queue's) from now. An id in `ids` stands for the lease that it is in.

        Returns the extended leases, and the ids that were ignored. `client_id` and `strict` as in `complete`.
        """
        check = Check(client_id, strict)
        return await self._channel.run(item_calls.extend(queue_name, lease_ids, ids, lease_timeout, request_timeout, check))

    async def settle(self, queue_name: str, verdicts: Iterable[Verdict], *, request_timeout: Duration | None = None) -> answers.Staged:
        """Stage the outcomes of up to 10,000 leased items. Returns the number of staged outcomes, and the ids that were ignored.

        An outcome takes effect when its lease is completed, and is dropped if the lease expires or is released.
        """
        return await self._channel.run(item_calls.settle(queue_name, verdicts, request_timeout))

    async def settle_arrow(self, queue_name: str, rows: object, *, request_timeout: Duration | None = None) -> answers.Staged:
        """Stage the outcomes of leased items as `settle` does, by row and without a Python object for each.

        `rows` is a pyarrow table, a data frame that exports Arrow, or a dict of columns: `id`, or `partition` and `offset`; `outcome`
        (`done`, `retry` or `dead`); optionally `retry_after_ms` (milliseconds, with `retry`) and `reason`. Columns of the leased items may
        stay; any other is an error. There may be any number of rows: each call has up to 10,000, and `request_timeout` is that of a call.
        If it raises, some outcomes may be staged; staging them again is safe.
        """
        from sluiceway.client.outcome_rows import outcome_bodies, outcome_table

        staged, ignored, incarnation = 0, list[answers.Ignored](), ""
        for outcomes in outcome_bodies(outcome_table(rows)):
            if outcomes.incarnation is None and not incarnation:
                incarnation = (await self.queue_info(queue_name)).incarnation
            call = item_calls.settle_stream(queue_name, outcomes.incarnation or incarnation, outcomes, request_timeout)
            answer = await self._channel.run(call)
            staged += answer.staged
            ignored += answer.ignored
        return answers.Staged(staged=staged, ignored=ignored)

    async def peek(
        self,
        queue_name: str,
        *,
        limit: int = 10,
        partition: int | None = None,
        lease_id: str | None = None,
        start: int | None = None,
    ) -> list[answers.LeasedItem]:
        """Return up to `limit` items (at most 10,000) without leasing them: the next ones to be served, of `partition` if given.

        With a `lease_id`, returns the items still open in that lease, from position `start` (0) on; raises `lease_not_found` if it has
        ended.
        """
        peeked = await self._channel.run(item_calls.peek(queue_name, limit, partition, lease_id, start))
        return peeked.items

    async def peek_arrow(self, queue_name: str, lease_id: str, *, limit: int = 10_000, start: int | None = None) -> LeasedTable:
        """Return the items still open in a lease as one Arrow table, up to `limit` from position `start` (0) on.

        Raises `lease_not_found` if the lease has ended.
        """
        from sluiceway.client.arrow import read_leased

        return await self._channel.run(item_calls.peek(queue_name, limit, None, lease_id, start).as_arrow(read_leased))

    async def browse(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        payload: bool = True,
    ) -> answers.Browsed:
        """Return a page of a partition's items as they were at one moment, without leasing them.

        `states` selects `ready` (the default), `leased` and `scheduled` items. A page has up to `limit` items (1,000; at most 10,000),
        without payloads if `payload` is false. The next page takes the answer's `cursor`, and no `states`. Raises `snapshot_gone` if the
        pages are asked for too slowly (5 minutes between two, an hour for all), or if the partition was reopened or changed its owner:
        browse again from the start.
        """
        return await self._channel.run(item_calls.browse(queue_name, partition, states, cursor, limit, payload))

    async def browse_arrow(
        self,
        queue_name: str,
        partition: int,
        *,
        states: Iterable[State] | None = None,
        cursor: str | None = None,
        limit: int = 10_000,
        payload: bool = True,
    ) -> BrowsedTable:
        """Return a page of a partition's items as one Arrow table; otherwise as `browse`."""
        from sluiceway.client.arrow import read_browsed

        return await self._channel.run(item_calls.browse(queue_name, partition, states, cursor, limit, payload).as_arrow(read_browsed))

    async def search(
        self,
        queue_name: str,
        *,
        id: str | None = None,
        kind: str | None = None,
        reference: str | None = None,
        key: str | None = None,
        unique_key: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        contains: str | None = None,
        reason: str | None = None,
        states: Iterable[State] | None = None,
        next: str | None = None,
        limit: int | None = None,
        payload: bool = True,
        request_timeout: Duration | None = None,
    ) -> answers.Searched:
        """Find up to `limit` (100; at most 1,000) items of all partitions that match everything given, without leasing them.

        `id` is an id or an origin; a header's value may be None: any. `contains` is text in the payload, `reason` text in the reason of a
        dead item. One call compares up to 100,000 items, for up to `request_timeout` (5 s). Unless the answer's `next` is None there may
        be more: pass it to the next call, with the same search. The items are read as they stand: one that changes its place between two
        calls may be missed, or found twice.
        """
        texts = {"id": id, "kind": kind, "reference": reference, "key": key, "unique_key": unique_key}
        wanted = {**texts, "headers": headers, "contains": contains, "reason": reason}
        return await self._channel.run(item_calls.search(queue_name, wanted, states, next, limit, payload, request_timeout))

    async def reasons(self, queue_name: str) -> answers.Reasons:
        """Count all items of a dead queue by why they died, the most frequent reason first."""
        return await self._channel.run(item_calls.reasons(queue_name))

    async def run_now(self, queue_name: str, ids: Iterable[str], *, request_timeout: Duration | None = None) -> answers.MadeReady:
        """Make up to 1,000 scheduled items ready now, retries that wait for their back-off included. Returns their number.

        Each gets a new id and keeps its origin, attempts and expiry. Items in other states are listed as ignored.
        """
        return await self._channel.run(item_calls.run_now(queue_name, ids, request_timeout))

    async def move_items(
        self, queue_name: str, ids: Iterable[str], target: str | None = None, *, request_timeout: Duration | None = None
    ) -> answers.MovedItems:
        """Send up to 1,000 ready or scheduled items by id to the queue `target`; without one, dead items back to where they died.

        They are ready there at once, with new ids, their origins, and attempts reset. Leased items stay and are listed as ignored. So
        are items whose partition failed after others had moved, with the error's code: `outcome_unknown` items may have moved.
        """
        return await self._channel.run(item_calls.move_items(queue_name, ids, target, request_timeout))

    async def delete_items(self, queue_name: str, ids: Iterable[str], *, request_timeout: Duration | None = None) -> answers.Deleted:
        """Drop up to 1,000 ready or scheduled items by id, without the dead queue. Returns their number.

        Leased items stay; they and items that are gone are listed as ignored.
        """
        return await self._channel.run(item_calls.delete_items(queue_name, ids, request_timeout))

    async def explain(self, queue_name: str, item_id: str) -> answers.Explanation:
        """Return where an item is, and why it is not being served. `item_id` may also be the item's origin."""
        return await self._channel.run(item_calls.explain(queue_name, item_id))

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
        bundle: str | None = None,
    ) -> AsyncProducer:
        """Return a producer, which takes items one by one and stores them in batches. Use it as a context manager.

        Items are sent at once while no batch is in flight, and else wait up to `linger` for others. A batch has up to `max_batch` items and
        `max_bytes` bytes of payload. Up to `max_in_flight` batches are sent at once, and `send` waits while `max_buffered` bytes are
        buffered. Each call is repeated for `retry_for` (four times the client's). The items belong to the `bundle`, if it is given. Raises
        `invalid_request` for an option out of bounds.
        """
        patience = producer_common.patience(retry_for, producer_common.DELIVERY_RETRIES * self._channel.retry_for)
        posting = producer_common.Posting(queue_name, request_timeout, patience, bundle)
        limits = producer_common.limits(linger, max_batch, max_bytes, max_in_flight, max_buffered)
        return AsyncProducer(self._channel.run, posting, limits)

    def consumer(
        self,
        queue_name: str,
        *,
        prefetch: int = 100,
        lease_timeout: Duration = "1m",
        linger: Duration = "20ms",
        retry_for: Duration | None = None,
        error_messages: bool = True,
        wait_for_queue: bool = False,
        ordered: bool = False,
    ) -> AsyncConsumer:
        """Return a consumer, which leases items, keeps their leases alive, and settles them.

        `run` a handler, or enter it as a context manager and iterate over it. Up to `prefetch` items wait beside those being handled.
        Leases last `lease_timeout`, and are extended while their items are held. An outcome waits up to `linger` for others. When the
        consumer stops, it repeats unsent outcomes for `retry_for` (the client's). With `error_messages` false, only the type of a handler's
        exception is recorded as the reason: the message may contain data of the item. With `wait_for_queue`, the consumer waits for a queue
        that does not exist yet, instead of failing.

        With `ordered`, for a queue with `order`, it leases several items of a key at once, and handles them one after the other, other keys
        beside them. If one is put back, it does not begin those behind it: they come again after it. A list of `run_batches` has one item
        of a key; a table of `run_tables` may have several. Raises `invalid_request` for an option out of bounds.
        """
        # Imported here because a consumer needs asyncio, and importing that adds half to the start-up time of the command line.
        from sluiceway.client._async.consumer import open_consumer

        manager = consumer_common.new_lease_manager(
            prefetch, lease_timeout, linger, producer_common.patience(retry_for, self._channel.retry_for), wait_for_queue, ordered
        )
        return open_consumer(self._channel, queue_name, self.client_id, manager, error_messages)

    # -- partitions and rebalances -------------------------------------------------------------------------------------

    async def explain_partition(self, queue_name: str, partition: int) -> answers.PartitionExplanation:
        """Return which instance owns a partition and why, and whether it serves the partition."""
        return await self._channel.run(item_calls.explain_partition(queue_name, partition))

    async def pause_partition(self, queue_name: str, partition: int) -> answers.QueueInfo:
        """Stop a partition from taking and giving out items until `resume_partition`, and return the queue. It survives restarts.

        Leased items can still be settled. Raises `rebalance_open` if a rebalance creates or drains the partition.
        """
        return await self._channel.run(rebalance_calls.set_partition(queue_name, partition, True))

    async def resume_partition(self, queue_name: str, partition: int) -> answers.QueueInfo:
        """Let a paused partition take and give out items again, and return the queue."""
        return await self._channel.run(rebalance_calls.set_partition(queue_name, partition, False))

    async def pin_partition(
        self, queue_name: str, partition: int, *, instance: str | None = None, zone: str | None = None
    ) -> answers.PartitionPin:
        """Pin a partition to the instance of that name (`cluster.name`), or to the instances in a zone, and return the pin.

        It moves there with a round. While no such instance is in the cluster, any other serves the partition. Give one of the two. Raises
        `invalid_request` if there is no such instance, and on a server without a cluster.
        """
        return await self._channel.run(rebalance_calls.pin_partition(queue_name, partition, instance, zone))

    async def unpin_partition(self, queue_name: str, partition: int) -> answers.PartitionPin:
        """Let the cluster choose the instance of a pinned partition again."""
        return await self._channel.run(rebalance_calls.unpin_partition(queue_name, partition))

    async def plan_rebalance(self, queue_name: str, *, requested_partitions: int | None = None) -> RebalancePlan:
        """Return what a rebalance to `requested_partitions` (as many as now) would do at this moment. It changes nothing."""
        return await self._channel.run(rebalance_calls.plan_rebalance(queue_name, requested_partitions))

    async def rebalance(
        self,
        queue_name: str,
        *,
        requested_partitions: int | None = None,
        drain: Drain = "natural",
        rate: int | None = None,
        plan_id: str | None = None,
    ) -> Rebalance:
        """Start to add, remove and move partitions, and return the rebalance. The servers carry it out while the queue is in use.

        `requested_partitions` is the new number of partitions (as many as now). With `drain="natural"` consumers empty a removed partition;
        with `"copy"` the server moves its items to the others, at most `rate` items per second. With the `plan_id` of a plan, raises
        `plan_changed` if the plan would be another one now. Raises `nothing_to_rebalance`, and `rebalance_open` if the queue has an open
        one.
        """
        return await self._channel.run(rebalance_calls.rebalance(queue_name, requested_partitions, drain, rate, plan_id))

    async def rebalance_many(
        self, match: str, *, requested_partitions: int | None = None, drain: Drain = "natural", rate: int | None = None
    ) -> RebalanceBatch:
        """Start a rebalance for each queue whose name matches the pattern (`orders-*`; `*` for all); they run one after the other.

        Returns them in that order, and the queues that were left out with the reasons. Options as in `rebalance`.
        """
        return await self._channel.run(rebalance_calls.rebalance_many(match, requested_partitions, drain, rate))

    async def get_rebalance(self, id: str) -> Rebalance:
        """Return a rebalance and its progress. Raises `rebalance_not_found`."""
        return await self._channel.run(rebalance_calls.get_rebalance(id))

    async def list_rebalances(
        self, *, queue_name: str | None = None, only_open: bool = False, pivot: str | None = None, limit: int | None = None
    ) -> RebalancePage:
        """Return a page of up to `limit` rebalances (20; at most 100) without progress, newest first, beginning after `pivot`.

        They can be restricted to a queue, and with `only_open` to those that have not ended. Pass the page's `next` as the `pivot` of the
        next page.
        """
        return await self._channel.run(rebalance_calls.list_rebalances(queue_name, only_open, pivot, limit))

    async def cancel_rebalance(self, id: str) -> Rebalance:
        """Cancel a rebalance, and return it. The queue goes back to its former partitions.

        Raises `not_cancellable` if a partition was already removed or the rebalance has ended, and `rebalance_not_found`.
        """
        return await self._channel.run(rebalance_calls.cancel_rebalance(id))

    async def watch_rebalance(self, id: str, *, interval: Duration = "1s") -> AsyncGenerator[Rebalance, None]:
        """Yield the rebalance now and after every `interval`, until it has ended. The last one has the result.

        Raises as `get_rebalance`.
        """
        pause = seconds(interval, "interval")
        while True:
            found = await self.get_rebalance(id)
            yield found
            if not found.is_open:
                return
            await asyncio.sleep(pause)

    # -- operations ----------------------------------------------------------------------------------------------------

    async def create_key(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        expires_after: Duration | None = None,
        requests_per_second: int | None = None,
        bytes_per_second: int | None = None,
    ) -> answers.CreatedKey:
        """Create an API key. Only this answer ever has the key itself.

        A scope is `ACTION:PATTERN`, such as `produce:orders-*`, or `admin`. The key never expires without `expires_after`. A rate of 0 is
        no limit; None takes the limit of the server's configuration.
        """
        return await self._channel.run(admin_calls.create_key(name, scopes, expires_after, requests_per_second, bytes_per_second))

    async def list_keys(self, *, pivot: str | None = None, limit: int | None = None) -> answers.KeyPage:
        """Return a page of up to `limit` API keys (100; at most 1,000) by `key_id`, beginning after `pivot`, without their secrets.

        Pass the page's `next` as the `pivot` of the next page.
        """
        return await self._channel.run(admin_calls.list_keys(pivot, limit))

    async def revoke_key(self, key_id: str) -> None:
        """Revoke an API key: every server refuses it within a second. Raises `key_not_found`."""
        await self._channel.run(admin_calls.revoke_key(key_id))

    async def own_key(self) -> answers.OwnKey:
        """Return this client's own API key, without its secret, and its scopes. Any key may call this.

        A server with authentication off answers with every scope.
        """
        return await self._channel.run(admin_calls.own_key())

    async def list_audit(
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
        """Return a page of up to `limit` audit entries (100; at most 1,000), newest first, beginning after `pivot`.

        The entries can be restricted to a queue, to an actor, to an action (one that ends with a dot, such as `rebalance.`, is a prefix),
        and to the time from `since` (included) to `until` (excluded).
        """
        return await self._channel.run(admin_calls.list_audit(pivot, limit, queue_name, action, actor, since, until))

    async def reload_config(self) -> answers.Reloaded:
        """Make the server read its configuration again, and return the names of the keys that changed.

        Raises `invalid_request` or `restart_required` if it cannot be applied; then nothing has changed.
        """
        return await self._channel.run(admin_calls.reload_config())

    async def show_config(self) -> dict[str, object]:
        """Return the server's effective configuration, without secrets."""
        return await self._channel.run(admin_calls.show_config())

    async def list_backends(self) -> list[answers.BackendInfo]:
        """Return the storage backends, each with its kind, its number of partitions, and its problem if it does not serve."""
        page = await self._channel.run(admin_calls.list_backends())
        return page.items

    async def list_instances(self) -> answers.InstanceList:
        """Return the instances of the cluster with their states, and how they divide the partitions."""
        return await self._channel.run(admin_calls.list_instances())

    async def update_instances(
        self,
        *,
        settle_timeout: Duration | None = None,
        round_interval: Duration | None = None,
        heartbeat_interval: Duration | None = None,
        beat_interval: Duration | None = None,
        lease_timeout: Duration | None = None,
        member_timeout: Duration | None = None,
        strategy: str | None = None,
        load_moves: int | None = None,
    ) -> answers.InstanceList:
        """Change the cluster's times, `strategy` (`rounds` or `claims`) and `load_moves` while it runs, and return its instances.

        `load_moves`: partitions that may move in a minute to level the instances' loads, 0 to 20. Parameters that are None keep their
        values. A new round follows. Raises `invalid_request` for a value out of bounds, and on a server without a cluster.
        """
        times = {
            "settle_timeout": settle_timeout,
            "round_interval": round_interval,
            "heartbeat_interval": heartbeat_interval,
            "beat_interval": beat_interval,
            "lease_timeout": lease_timeout,
            "member_timeout": member_timeout,
        }
        return await self._channel.run(admin_calls.update_instances(times, strategy, load_moves))

    async def finalize_upgrade(self) -> answers.InstanceList:
        """Raise the compatibility level to the highest that all instances understand (docs/guides/upgrade.md), and return the instances.

        After it, a release that does not understand the level cannot be started any more. Needs the scope `admin`. Raises `unavailable`,
        `outcome_unknown`; a repeat completes it.
        """
        return await self._channel.run(admin_calls.finalize_upgrade())

    async def list_rounds(self, *, limit: int | None = None) -> list[answers.Round]:
        """Return the last rounds, newest first: up to `limit` (20; at most 100)."""
        rounds = await self._channel.run(admin_calls.list_rounds(limit))
        return rounds.items

    async def list_tasks(self) -> TaskList:
        """Return the captures in the server's meta store. Needs the scope `read:*` or `admin`."""
        return await self._channel.run(admin_calls.list_tasks())

    async def get_tasks(self, name: str) -> TaskGroup:
        """Return a capture and its partitions. Needs the scope `read:*` or `admin`.

        Raises `capture_not_found`, and `unavailable` if the capture's log cannot be read.
        """
        return await self._channel.run(admin_calls.get_tasks(name))

    # -- bundles -------------------------------------------------------------------------------------------------------

    async def create_bundle(
        self, queue_name: str, *, follow_up: object = None, follow_up_queue: str | None = None, items: int | None = None
    ) -> BundleInfo:
        """Create a bundle of items of a queue, and return it. Produce its items with `bundle=` its `id`, in any number of calls.

        When it is closed and all items have ended (completed, dead, or dropped), `follow_up`, a payload or an `Item`, is produced once into
        `follow_up_queue` (that of the items). With `items`, the bundle is closed when so many are stored; otherwise by `close_bundle`.
        """
        return await self._channel.run(bundle_calls.create_bundle(queue_name, follow_up, follow_up_queue, items))

    async def get_bundle(self, id: str) -> BundleInfo:
        """Return a bundle with the counts of its items. Raises `bundle_not_found`, as every call on a bundle does."""
        return await self._channel.run(bundle_calls.get_bundle(id))

    async def list_bundles(self, *, queue_name: str | None = None, pivot: str | None = None, limit: int | None = None) -> BundlePage:
        """Return a page of up to `limit` bundles (100; at most 1,000) by id, beginning after `pivot`: of one queue, or of all.

        Pass its `next` as the `pivot` of the next page. A bundle that has ended is listed for a day.
        """
        return await self._channel.run(bundle_calls.list_bundles(queue_name, pivot, limit))

    async def close_bundle(self, id: str) -> BundleInfo:
        """Close a bundle, and return it: it takes no more items. Call it when every produce that names the bundle is answered. Raises
        `bundle_closed` for one that was cancelled or has expired."""
        return await self._channel.run(bundle_calls.close_bundle(id))

    async def cancel_bundle(self, id: str) -> BundleInfo:
        """End a bundle without its follow-up, and return it. Its items stay. Raises `bundle_closed` for one whose follow-up is produced."""
        return await self._channel.run(bundle_calls.cancel_bundle(id))

    # -- backups -------------------------------------------------------------------------------------------------------

    async def begin_backup(self) -> BackupBegun:
        """Begin a backup of the server or cluster, and return it: everything that is stored as of this moment. Needs the scope `admin`.

        Read all of it with `backup_records` and `backup_blobs`, then call `end_backup`. One that is not read for a minute ends by itself,
        and further calls raise `snapshot_gone`. Most users want the command `sluiceway backup`. Raises `too_many_requests` while there is
        another backup, `unavailable` unless every partition is open and every instance answers, and `partition_damaged`.
        """
        return await self._channel.run(backup_calls.begin_backup())

    async def backup_records(
        self, backup_id: str, incarnation: str | None = None, partition: int | None = None, start: int = 0
    ) -> RecordsPart:
        """Return a part of the records of a partition in a backup, or of the meta store, from `start` on. Its `next` is the `start` of the
        next part, None on the last."""
        return await self._channel.run(backup_calls.backup_records(backup_id, incarnation, partition, start))

    async def backup_blobs(self, backup_id: str, incarnation: str, partition: int, blobs: Iterable[int]) -> BlobsPart:
        """Return the first of these blobs (at most 10,000) of a partition in a backup, by number: as many as fit into one answer."""
        return await self._channel.run(backup_calls.backup_blobs(backup_id, incarnation, partition, list(blobs)))

    async def end_backup(self, backup_id: str) -> None:
        """End a backup, so that the server can drop what it only kept for it."""
        await self._channel.run(backup_calls.end_backup(backup_id))

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def create_schedule(
        self,
        name: str,
        *,
        cron: str,
        queue_name: str,
        item: object,
        timezone: str | None = None,
        jitter: Duration | None = None,
        catch_up: CatchUp | None = None,
        paused: bool = False,
    ) -> ScheduleInfo:
        """Create a schedule that produces `item`, a payload or an `Item`, at the times of `cron` (`*/5 * * * *`, `@hourly`), and return it.

        `timezone` is an IANA name (UTC). Each firing is delayed by a part of `jitter`, always the same one. `catch_up` says which of the
        times that nobody could fire are fired later: the `last` one (the default), `all`, or none (`skip`). Raises `schedule_exists`,
        `queue_not_found`, and `invalid_request` for an expression that is wrong or never comes.
        """
        call = schedule_calls.create_schedule(name, queue_name, cron, item, timezone, jitter, catch_up, paused)
        return await self._channel.run(call)

    async def get_schedule(self, name: str) -> ScheduleInfo:
        """Return a schedule with its next and its latest firing. Raises `schedule_not_found`, as every call on a schedule does."""
        return await self._channel.run(schedule_calls.get_schedule(name))

    async def list_schedules(
        self,
        *,
        queue_name: str | None = None,
        name_contains: str | None = None,
        pivot: str | None = None,
        limit: int | None = None,
    ) -> SchedulePage:
        """Return a page of up to `limit` schedules (100; at most 1,000) by name, beginning after `pivot`: of one queue, or of all; with
        `name_contains`, those whose names have that text, in either case.

        Pass the page's `next` as the `pivot` of the next page.
        """
        return await self._channel.run(schedule_calls.list_schedules(queue_name, name_contains, pivot, limit))

    async def update_schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        item: object = None,
        timezone: str | None = None,
        jitter: Duration | None = None,
        catch_up: CatchUp | None = None,
    ) -> ScheduleInfo:
        """Change what is given, and return the schedule. A new `cron` or `timezone` counts from now on; a new `item` replaces all of the
        old one."""
        return await self._channel.run(schedule_calls.update_schedule(name, cron, item, timezone, jitter, catch_up))

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        """Pause a schedule, and return it. The times of the pause are not fired, later either."""
        return await self._channel.run(schedule_calls.pause_schedule(name, True))

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        """Resume a paused schedule, and return it."""
        return await self._channel.run(schedule_calls.pause_schedule(name, False))

    async def run_schedule(self, name: str) -> ScheduleRun:
        """Produce the schedule's item now, in addition to its times, even if it is paused. Raises as a produce does."""
        return await self._channel.run(schedule_calls.run_schedule(name))

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule. Its items stay."""
        await self._channel.run(schedule_calls.delete_schedule(name))

    async def next_times(
        self, cron: str, *, timezone: str | None = None, count: int | None = None, after: datetime | None = None
    ) -> list[datetime]:
        """Return the next `count` times (5; at most 100) of an expression, in UTC, after now or `after`. Makes no schedule."""
        return (await self._channel.run(schedule_calls.next_times(cron, timezone, count, after))).times

    # -- events --------------------------------------------------------------------------------------------------------

    def events(self, *, queue_name: str | None = None, types: Iterable[str] | None = None) -> AsyncGenerator[answers.Event, None]:
        """Yield the server's events as they happen, without end: those of one queue, or of some types, if given.

        A broken connection is replaced, and missed events follow; where the server no longer has them, an event of type `reset` comes
        instead. Raises CallError if the server refuses, and if there are no data for `retry_for` after a break.
        """
        return self._channel.events(queue_name, types)
