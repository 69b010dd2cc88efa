"""Kafka partitioned by key: a topic of PARTITIONS partitions and a consumer group with a consumer for each client, through librdkafka.

A record's key decides its partition, and a partition has one consumer of the group, which polls for up to a batch and commits its position
synchronously. The producer is idempotent, so its own repetitions keep the order. A slice begins when each consumer has its partitions.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.by_key.keyed_load import PATIENCE, KeyedClient, KeyedWork, split
from bench.systems.kafka_share import LINGER, BatchProducer, found, version
from bench.systems.kafka_share import PATIENCE as SETUP

__all__ = ["ORDER", "clients", "found", "version"]

ORDER = (
    "A partition has one consumer, which reads it in order: a slow record holds up all keys of its partition, and more consumers than "
    "partitions have nothing to do. A commit settles all records before its position; none can be put back."
)
PARTITIONS = 8
"""One for each client: that is how many consumers can share them."""


@asynccontextmanager
async def clients(name: str, address: str, work: KeyedWork) -> AsyncIterator[list[KeyedClient]]:
    admin = AdminClient({"bootstrap.servers": address})
    topic = f"keyed-{secrets.token_hex(4)}"
    for made in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        made.result(SETUP)
    producer = BatchProducer(address, topic, LINGER, **{"enable.idempotence": True})
    with ThreadPoolExecutor(work.clients) as threads:
        members = [Member(address, topic, work, number, producer, threads) for number in range(work.clients)]
        try:
            await _join(members, PARTITIONS // work.clients)
            yield [*members]
        finally:
            await asyncio.gather(*(each.close() for each in members))
            producer.close()
            for deleted in admin.delete_topics([topic]).values():
                deleted.result(SETUP)


async def _join(members: list[Member], partitions: int) -> None:
    """Wait until each consumer has its partitions. All of them poll meanwhile: one that does not would hold up the others."""
    deadline = time.monotonic() + SETUP
    while not all(await asyncio.gather(*(each.has(partitions) for each in members))):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not each consumer had {partitions} partitions within {SETUP:.0f} s")


class Member(KeyedClient):
    """A client whose consumer blocks in a thread."""

    def __init__(
        self, address: str, topic: str, work: KeyedWork, number: int, producer: BatchProducer, threads: ThreadPoolExecutor
    ) -> None:
        self._keys, self._batch = [key.encode() for key in work.keys_of(number)], work.batch
        self._producer, self._threads = producer, threads
        self._loop = asyncio.get_running_loop()
        settings = {"bootstrap.servers": address, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        self._consumer = Consumer(settings)
        self._consumer.subscribe([topic])

    async def has(self, partitions: int) -> bool:
        """Take part in the group, which has no records yet, and return whether this consumer has that many partitions."""
        await self._loop.run_in_executor(self._threads, self._consumer.poll, 0.1)
        return len(self._consumer.assignment()) == partitions

    async def close(self) -> None:
        await self._loop.run_in_executor(self._threads, self._consumer.close)

    async def produce(self, payloads: bytes) -> None:
        await self._producer.produce(zip(split(payloads), self._keys, strict=True), self._batch)

    async def lease(self) -> tuple[bytes, Any]:
        return await self._loop.run_in_executor(self._threads, self._poll), None

    async def complete(self, leased: Any) -> None:
        await self._loop.run_in_executor(self._threads, self._commit)

    async def complete_and_lease(self, leased: Any) -> tuple[bytes, Any]:
        return await self._loop.run_in_executor(self._threads, self._commit_and_poll), None

    def _commit(self) -> None:
        self._consumer.commit(asynchronous=False)

    def _commit_and_poll(self) -> bytes:
        self._commit()
        return self._poll()

    def _poll(self) -> bytes:
        # To wait for a whole batch would delay the records that are there.
        first = self._consumer.consume(1, PATIENCE)
        records = [*first, *self._consumer.consume(self._batch - 1, 0)] if first else []
        for record in records:
            if record.error() is not None:
                raise RuntimeError(str(record.error()))
        return b"".join([record.value() for record in records])
