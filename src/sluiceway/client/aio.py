"""The client for asyncio. The same calls as `Client`, with the same guarantees."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import httpx

from sluiceway.client import admin_calls, answers, consumer_common, item_calls, producer_common, queue_calls
from sluiceway.client.aio_consumer import AsyncConsumer
from sluiceway.client.aio_producer import AsyncProducer
from sluiceway.client.aio_rebalances import AsyncRebalances
from sluiceway.client.connections import AsyncConnections
from sluiceway.client.direct import Direct
from sluiceway.client.errors import CallError
from sluiceway.client.events import Following, ended, read_async
from sluiceway.client.http_exchange import DEFAULT_URL, Endpoint, generated_key, generated_name, new_key, read_answer, seconds
from sluiceway.client.item_calls import Check, Item, Key, Retry, Verdict
from sluiceway.client.protocol import Call, Duration, Repeats
from sluiceway.client.queue_calls import Settings, Verb

if TYPE_CHECKING:
    from sluiceway.client.arrow import LeasedTable

T = TypeVar("T")


class AsyncClient(AsyncRebalances):
    """As `Client`, without blocking. Bound to the event loop in which it is first used.

    A call that is cancelled after it was sent may still take effect.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint = Endpoint(url, api_key)
        self._direct = Direct(self._endpoint) if direct else None
        self._retry_for = seconds(retry_for, "retry_for")
        self._generate_keys = generate_keys
        self.client_id = client_id or new_key()
        self._transport = transport or AsyncConnections(self._endpoint.verify(ca_file))

    async def close(self) -> None:
        """Close the connections. A call that is still running then fails."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: Call[T], retry_for: float | None = None) -> T:
        repeats = Repeats(call, self._retry_for if retry_for is None else retry_for, time.monotonic())
        while True:
            try:
                return await self._attempt(call)
            except CallError as error:
                await asyncio.sleep(repeats.pause(error, time.monotonic(), random.random()))
                call = repeats.next(call, generated_name)

    async def _attempt(self, call: Call[T]) -> T:
        direct = self._direct
        if direct is None or call.about is None:
            return await self._exchange(self._endpoint, call)
        queue_name = direct.to_look_up(call, time.monotonic())
        if queue_name is not None:
            try:
                direct.learn(queue_name, await self._exchange(self._endpoint, queue_calls.queue_info(queue_name)))
            except CallError as error:
                direct.not_told(queue_name, error, time.monotonic())
        owner = direct.endpoint(call, time.monotonic())
        if owner is not None:
            try:
                return await self._exchange(owner, call)
            except CallError as error:
                direct.failed(call, owner, error, time.monotonic())
        return await self._exchange(self._endpoint, call)

    async def _exchange(self, endpoint: Endpoint, call: Call[T]) -> T:
        try:
            response = await self._transport.handle_async_request(endpoint.request(call))
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        except httpx.RequestError as error:
            raise endpoint.broken(error) from error
        if self._direct is not None and response.status_code == 200:
            self._direct.heard(call, response.headers.get("x-sluiceway-served-by"))
        return read_answer(call, response, body)

    def _key(self, given: Key, request_timeout: Duration | None) -> Key:
        if given.key is None and given.group is None and self._generate_keys and self._retry_for:
            return generated_key(self._retry_for, request_timeout)
        return given

    # -- queues -------------------------------------------------------------------------------------------------------

    async def create_queue(
        self, queue_name: str, *, requested_partitions: int | None = None, **settings: Unpack[Settings]
    ) -> answers.QueueInfo:
        """As `Client.create_queue`."""
        return await self._run(queue_calls.create_queue(queue_name, requested_partitions, settings))

    async def update_queue(self, queue_name: str, *, version: int | None = None, **settings: Unpack[Settings]) -> answers.QueueInfo:
        """As `Client.update_queue`."""
        return await self._run(queue_calls.update_queue(queue_name, version, settings))

    async def list_queues(self, *, pivot: str | None = None, limit: int | None = None) -> answers.QueuePage:
        """As `Client.list_queues`."""
        return await self._run(queue_calls.list_queues(pivot, limit))

    async def queue_info(self, queue_name: str) -> answers.QueueInfo:
        """As `Client.queue_info`."""
        return await self._run(queue_calls.queue_info(queue_name))

    async def delete_queue(self, queue_name: str, *, force: bool = False) -> None:
        """As `Client.delete_queue`."""
        await self._run(queue_calls.delete_queue(queue_name, force))

    async def pause(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """As `Client.pause`."""
        return await self._run(queue_calls.pause(queue_name, verbs, True))

    async def resume(self, queue_name: str, verbs: Iterable[Verb] | None = None) -> answers.QueueInfo:
        """As `Client.resume`."""
        return await self._run(queue_calls.pause(queue_name, verbs, False))

    async def clear(
        self, queue_name: str, *, ready: bool = True, scheduled: bool = False, request_timeout: Duration | None = None
    ) -> answers.Cleared:
        """As `Client.clear`."""
        return await self._run(queue_calls.clear(queue_name, ready, scheduled, request_timeout))

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
        """As `Client.redrive`."""
        return await self._run(queue_calls.redrive(queue_name, target, limit, reason, source, dry_run, request_timeout))

    async def stats(self, queue_name: str) -> answers.QueueStats:
        """As `Client.stats`."""
        return await self._run(queue_calls.stats(queue_name))

    # -- items --------------------------------------------------------------------------------------------------------

    async def produce(
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
        """As `Client.produce`."""
        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        return await self._run(item_calls.produce(queue_name, items, request_timeout, self._key(given, request_timeout)))

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
    ) -> answers.Produced:
        """As `Client.produce_arrow`."""
        from sluiceway.client.arrow import write_stream

        given = Key(idempotency_key, idempotency_group, idempotency_sequence, idempotency_window)
        stream = write_stream(rows)
        return await self._run(item_calls.produce_stream(queue_name, stream, request_timeout, self._key(given, request_timeout)))

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
    ) -> answers.Leased:
        """As `Client.lease`."""
        one = (partition, after_lease)
        return await self._run(
            item_calls.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key, *one)
        )

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
    ) -> LeasedTable:
        """As `Client.lease_arrow`."""
        from sluiceway.client.arrow import read_leased

        one = (partition, after_lease)
        call = item_calls.lease(queue_name, self.client_id, batch_size, request_timeout, lease_timeout, max_partitions, lease_key, *one)
        return await self._run(call.as_arrow(read_leased))

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
        """As `Client.complete`."""
        return await self._run(item_calls.complete(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

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
        """As `Client.release`."""
        return await self._run(item_calls.release(queue_name, ids, lease_ids, request_timeout, Check(client_id, strict)))

    async def retry(
        self,
        queue_name: str,
        items: Iterable[Retry | str],
        *,
        request_timeout: Duration | None = None,
        client_id: str | None = None,
        strict: bool = False,
    ) -> answers.Retried:
        """As `Client.retry`."""
        return await self._run(item_calls.retry(queue_name, items, request_timeout, Check(client_id, strict)))

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
        """As `Client.extend`."""
        check = Check(client_id, strict)
        return await self._run(item_calls.extend(queue_name, lease_ids, ids, lease_timeout, request_timeout, check))

    async def settle(self, queue_name: str, verdicts: Iterable[Verdict], *, request_timeout: Duration | None = None) -> answers.Staged:
        """As `Client.settle`."""
        return await self._run(item_calls.settle(queue_name, verdicts, request_timeout))

    async def peek(
        self,
        queue_name: str,
        *,
        limit: int = 10,
        partition: int | None = None,
        lease_id: str | None = None,
        start: int | None = None,
    ) -> list[answers.LeasedItem]:
        """As `Client.peek`."""
        return (await self._run(item_calls.peek(queue_name, limit, partition, lease_id, start))).items

    async def peek_arrow(self, queue_name: str, lease_id: str, *, limit: int = 10_000, start: int | None = None) -> LeasedTable:
        """As `Client.peek_arrow`."""
        from sluiceway.client.arrow import read_leased

        return await self._run(item_calls.peek(queue_name, limit, None, lease_id, start).as_arrow(read_leased))

    async def explain(self, queue_name: str, item_id: str) -> answers.Explanation:
        """As `Client.explain`."""
        return await self._run(item_calls.explain(queue_name, item_id))

    async def explain_partition(self, queue_name: str, partition: int) -> answers.PartitionExplanation:
        """As `Client.explain_partition`."""
        return await self._run(item_calls.explain_partition(queue_name, partition))

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
    ) -> AsyncProducer:
        """As `Client.producer`; use it in an `async with` block."""
        patience = producer_common.patience(retry_for, producer_common.DELIVERY_RETRIES * self._retry_for)
        posting = producer_common.Posting(queue_name, request_timeout, patience)
        limits = producer_common.limits(linger, max_batch, max_bytes, max_in_flight, max_buffered)
        return AsyncProducer(self._run, posting, limits)

    def consumer(
        self,
        queue_name: str,
        *,
        prefetch: int = 100,
        lease_timeout: Duration = "1m",
        linger: Duration = "20ms",
        retry_for: Duration | None = None,
    ) -> AsyncConsumer:
        """As `Client.consumer`; go over it in an `async with` block."""
        kept = consumer_common.keeper(prefetch, lease_timeout, linger, producer_common.patience(retry_for, self._retry_for))
        return AsyncConsumer(self._attempt, queue_name, self.client_id, kept)

    # -- for whoever runs the server --------------------------------------------------------------------------------------

    async def create_key(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        expires_after: Duration | None = None,
        requests_per_second: int | None = None,
        bytes_per_second: int | None = None,
    ) -> answers.CreatedKey:
        """As `Client.create_key`."""
        return await self._run(admin_calls.create_key(name, scopes, expires_after, requests_per_second, bytes_per_second))

    async def list_keys(self, *, pivot: str | None = None, limit: int | None = None) -> answers.KeyPage:
        """As `Client.list_keys`."""
        return await self._run(admin_calls.list_keys(pivot, limit))

    async def revoke_key(self, key_id: str) -> None:
        """As `Client.revoke_key`."""
        await self._run(admin_calls.revoke_key(key_id))

    async def own_key(self) -> answers.OwnKey:
        """As `Client.own_key`."""
        return await self._run(admin_calls.own_key())

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
        """As `Client.list_audit`."""
        return await self._run(admin_calls.list_audit(pivot, limit, queue_name, action, actor, since, until))

    async def reload_config(self) -> answers.Reloaded:
        """As `Client.reload_config`."""
        return await self._run(admin_calls.reload_config())

    async def show_config(self) -> dict[str, object]:
        """As `Client.show_config`."""
        return await self._run(admin_calls.show_config())

    async def list_backends(self) -> list[dict[str, object]]:
        """As `Client.list_backends`."""
        return (await self._run(admin_calls.list_backends())).items

    async def list_instances(self) -> answers.InstanceList:
        """As `Client.list_instances`."""
        return await self._run(admin_calls.list_instances())

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
    ) -> answers.InstanceList:
        """As `Client.update_instances`."""
        times = {
            "settle_timeout": settle_timeout,
            "round_interval": round_interval,
            "heartbeat_interval": heartbeat_interval,
            "beat_interval": beat_interval,
            "lease_timeout": lease_timeout,
            "member_timeout": member_timeout,
        }
        return await self._run(admin_calls.update_instances(times, strategy))

    async def list_rounds(self, *, limit: int | None = None) -> list[answers.Round]:
        """As `Client.list_rounds`."""
        return (await self._run(admin_calls.list_rounds(limit))).items

    async def events(self, *, queue_name: str | None = None, types: Iterable[str] | None = None) -> AsyncGenerator[answers.Event, None]:
        """As `Client.events`."""
        following = Following(queue_name, types, self._retry_for, time.monotonic())
        while True:
            try:
                try:
                    request = self._endpoint.events(following.query, following.parser.last_id)
                    async with contextlib.aclosing(read_async(await self._transport.handle_async_request(request))) as parts:
                        async for part in parts:
                            for event in following.heard(part, time.monotonic()):
                                yield event
                except httpx.RequestError as error:
                    raise self._endpoint.broken(error) from error
                raise ended()
            except CallError as error:
                await asyncio.sleep(following.pause(error, time.monotonic(), random.random()))
