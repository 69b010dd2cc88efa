"""Sync log in a Kafka topic with a single partition."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import KafkaError, OffsetOutOfRangeError
from aiokafka.structs import RecordMetadata

from sluiceway.adapters import system
from sluiceway.capture.logs.kafka_election import KafkaElection
from sluiceway.capture.logs.kafka_topics import administrator, check_bootstrap, ensure, exists, stop_consumer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.sync_log import LogPage, LogUnavailableError

__all__ = ["MAX_RECORD", "KafkaElection", "KafkaSyncLog"]

log = logging.getLogger(__name__)

MAX_RECORD = 2 << 20
"""Bytes. A snapshot of 2,000 partitions has a sixth of that."""
BATCH_BYTES = 1 << 19
"""Maximum bytes of small records appended together in one write."""
SETTINGS = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""Topic settings without retention limits: only a member knows what may be deleted."""
LEAST = {"max.message.bytes": MAX_RECORD + (64 << 10)}
AT_ONCE = 1_000
"""Records taken from the client at a time."""
SLICE: Millis = 500
"""Maximum time that a waiting call blocks other reads of the same log."""
CLOSING: Millis = 2_000
"""Time limit for pending work on closing."""


class KafkaSyncLog:
    """The topic `<name>_connector_sync`. Entry n is the record with the offset n - 1. Use from one event loop.

    As durable as the topic: appends are acknowledged by all in-sync replicas. A missing topic is created with the servers' default
    replication; retention is unlimited, and trimmed records are deleted by the servers.

    No connection is opened before the first call. A call is given up after `timeout`, and connections are re-established as needed. An
    append that was given up may still be carried out while the log is open.
    """

    def __init__(self, bootstrap: str, name: str, *, create: bool = True, timeout: Millis = 10_000, longest_poll: Millis = SLICE) -> None:
        """`bootstrap`: `HOST:PORT[,HOST:PORT]`. Without `create`, a log without a topic is empty, until another process creates it.

        `longest_poll`: how long the server holds a fetch for new records; concurrent reads wait for it. Raises `invalid_request` for a bad
        name or bad servers. So do calls if the topic exists and is unusable.
        """
        self._bootstrap = check_bootstrap(bootstrap)
        self.topic = f"{check_queue_name(name, 'name')}_connector_sync"
        self._create = create
        self._timeout, self._longest_poll = timeout, min(longest_poll, timeout)
        self._partition = TopicPartition(self.topic, 0)
        self._sound = False
        """The topic exists, with the required settings."""
        self._opening, self._reading = asyncio.Lock(), asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None
        # Two consumers: the server answers a connection's requests in order, and one of these waits for news.
        self._reader: AIOKafkaConsumer | None = None
        self._asker: AIOKafkaConsumer | None = None
        self._ahead: deque[tuple[int, bytes]] = deque()
        """Fetched and unread entries: all from `_from` up to `_at`."""
        self._from = self._at = -1
        self._end = 0
        """The highest number seen."""
        self._closing: set[asyncio.Task[None]] = set()

    # ---- appending ----------------------------------------------------------------------------------------------------

    async def append(self, records: Sequence[bytes]) -> None:
        for record in records:
            if len(record) > MAX_RECORD:
                raise ValueError(f"a record of {len(record):,} bytes is too large for the log: at most {MAX_RECORD:,}")
        if not records:
            return
        async with self._limited():
            producer = await self._open_producer()
            said: deque[asyncio.Future[RecordMetadata]] = deque()
            try:
                for record in records:
                    said.append(await producer.send(self.topic, record, partition=0))
                while said:
                    self._end = max(self._end, (await said[0]).offset + 1)
                    said.popleft()
            except KafkaError:
                # The idempotent producer no longer knows its sequence. A new one does.
                self._drop_producer(producer)
                raise
            finally:
                # The outcome of the rest does not matter. It is still written, if possible.
                for one in said:
                    if not one.cancel() and not one.cancelled():
                        one.exception()

    async def _open_producer(self) -> AIOKafkaProducer:
        async with self._opening:
            if self._producer is None:
                await self._make_sound()
                producer = AIOKafkaProducer(
                    bootstrap_servers=self._bootstrap,
                    acks="all",
                    enable_idempotence=True,
                    max_batch_size=BATCH_BYTES,
                    max_request_size=LEAST["max.message.bytes"],
                    request_timeout_ms=self._timeout,
                )
                try:
                    await producer.start()
                except BaseException:
                    self._later(_stop_producer(producer))
                    raise
                self._producer = producer
            return self._producer

    def _drop_producer(self, producer: AIOKafkaProducer) -> None:
        if self._producer is producer:
            self._producer = None
            self._later(_stop_producer(producer))

    # ---- reading ------------------------------------------------------------------------------------------------------

    async def read(self, after: int, limit: int = 1_000) -> LogPage:
        async with self._limited(), self._reading:
            if not await self._open_readers():
                return LogPage(1, (), 0)
            while True:
                first, end = await self._bounds()
                start = max(after, first)
                if start >= end:
                    return LogPage(first + 1, (), end)
                self._go(start)
                try:
                    while not self._ahead:
                        await self._fetch(self._timeout)
                except OffsetOutOfRangeError:
                    # Trimmed since.
                    self._lose_place()
                    continue
                entries = tuple(self._ahead.popleft() for _ in range(min(limit, len(self._ahead))))
                self._from = entries[-1][0]
                return LogPage(first + 1, entries, max(end, self._from))

    async def wait(self, after: int, timeout: Millis) -> None:
        deadline = system.steady() + timeout
        while self._end <= after and (left := deadline - system.steady()) > 0:
            span = min(left, SLICE)
            try:
                async with self._limited(), self._reading:
                    # Another call may have seen it meanwhile.
                    heard = self._end > after or await self._listen(after, span)
            except LogUnavailableError as error:
                log.debug("%s: %s", self.topic, error)
                heard = False
            if not heard:
                await asyncio.sleep(min(span, max(0, deadline - system.steady())) / 1000)

    async def _listen(self, after: int, span: Millis) -> bool:
        """Fetch entries after that number for up to `span` ms. False: impossible, without any delay."""
        if not await self._open_readers():
            return False
        self._go(after)
        try:
            await self._fetch(span)
        except OffsetOutOfRangeError:
            self._lose_place()
            _, self._end = await self._bounds()
            return self._end > after
        return True

    def _go(self, position: int) -> None:
        """Continue reading after that number."""
        if not self._from <= position <= self._at:
            assert self._reader is not None
            self._ahead.clear()
            self._reader.seek(self._partition, position)
            self._at = position
        while self._ahead and self._ahead[0][0] <= position:
            self._ahead.popleft()
        self._from = position

    def _lose_place(self) -> None:
        self._ahead.clear()
        self._from = self._at = -1

    async def _fetch(self, timeout: Millis) -> None:
        """Fetch entries at the reader's position, waiting up to `timeout` ms."""
        assert self._reader is not None
        found = await self._reader.getmany(self._partition, timeout_ms=timeout, max_records=AT_ONCE)
        for record in found.get(self._partition, ()):
            self._at = record.offset + 1
            self._ahead.append((self._at, record.value))
        self._end = max(self._end, self._at)

    async def _bounds(self) -> tuple[int, int]:
        """The offsets of the first remaining record, and of the next one to come."""
        assert self._asker is not None
        # In this order: a record trimmed in between seems to exist, and the read then fails and retries.
        beginning, ending = await asyncio.gather(
            self._asker.beginning_offsets([self._partition]), self._asker.end_offsets([self._partition])
        )
        first, end = beginning[self._partition], ending[self._partition]
        self._end = max(self._end, end)
        return first, end

    async def _open_readers(self) -> bool:
        """Open the consumers. False: there is no topic."""
        async with self._opening:
            if not self._sound and not self._create and not await exists(self._bootstrap, self.topic, self._timeout):
                return False
            if self._asker is None:
                await self._make_sound()
                self._asker = await self._open_consumer()
            if self._reader is None:
                reader = await self._open_consumer()
                reader.assign([self._partition])
                self._reader = reader
                self._lose_place()
            return True

    async def _open_consumer(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            auto_offset_reset="none",
            enable_auto_commit=False,
            fetch_max_wait_ms=self._longest_poll,
            max_partition_fetch_bytes=2 * MAX_RECORD,
            request_timeout_ms=self._timeout,
        )
        try:
            await consumer.start()
        except BaseException:
            self._later(stop_consumer(consumer))
            raise
        return consumer

    # ---- trimming -----------------------------------------------------------------------------------------------------

    async def trim(self, upto: int) -> None:
        if upto <= 0:
            return
        async with self._limited():
            async with self._reading:
                if not await self._open_readers():
                    return
                first, end = await self._bounds()
            if upto <= first:
                return
            async with administrator(self._bootstrap, self._timeout) as client:
                await client.delete_records({self._partition: RecordsToDelete(min(upto, end))}, timeout_ms=self._timeout)

    # ---- opening and closing ------------------------------------------------------------------------------------------

    async def _make_sound(self) -> None:
        if not self._sound:
            if self._create:
                await ensure(self._bootstrap, self.topic, self._timeout, SETTINGS, LEAST)
            self._sound = True

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """A block whose failures and time-outs become LogUnavailableError."""
        try:
            async with asyncio.timeout(self._timeout / 1000):
                yield
        except TimeoutError:
            raise LogUnavailableError(f"{self.topic}: no answer from Kafka within {self._timeout} ms") from None
        except (KafkaError, OSError) as error:
            raise LogUnavailableError(f"{self.topic}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Close. Takes at most 2 · CLOSING if the servers do not answer."""
        async with self._opening:
            producer, self._producer = self._producer, None
            consumers, self._reader, self._asker = (self._reader, self._asker), None, None
            if producer is not None:
                self._later(_stop_producer(producer))
            for consumer in consumers:
                if consumer is not None:
                    self._later(stop_consumer(consumer))
        if self._closing:
            await asyncio.wait(self._closing, timeout=2 * CLOSING / 1000)

    def _later(self, ending: Coroutine[object, object, None]) -> None:
        """Run it in the background."""
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("%s: closing a connection: %r", self.topic, error)


async def _stop_producer(producer: AIOKafkaProducer) -> None:
    """Stop the producer with a time limit: on its own it waits for unwritten records as long as the servers are away."""
    try:
        async with asyncio.timeout(CLOSING / 1000):
            await producer.flush()
        await producer.stop()
    except TimeoutError:
        # The producer has no way to give up.
        producer._closed = True
        await producer._sender.close()
        await producer.client.close()
