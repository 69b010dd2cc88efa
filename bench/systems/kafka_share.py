"""Kafka: a topic of PARTITIONS partitions and a share group, through librdkafka (confluent-kafka).

A batch is passed to the producer at once, and is produced when each of its records is reported as delivered with `acks=all`. One
producer serves all clients, as its makers advise; each client has a consumer, with which it polls for up to a batch, commits the records
it got, and waits for the broker's answer (`commit_sync`). After a poll with fewer records it polls again.

On one broker, `acks=all` means that the record is in the page cache: Kafka relies on other brokers for durability. In `kafka-share-sync`
the broker syncs after each batch of records (`log.flush.interval.messages=1`).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from bench.kafka import SETTINGS, VERSION, Broker, NotFoundError, fetch, java
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

GUARANTEES = {
    "kafka-share": "A record is confirmed when the one broker has it in memory that outlives its process, not the machine; so are commits.",
    "kafka-share-sync": "A record is confirmed when the broker has synced it to the disk. Commits are not synced.",
}

FLAGS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
QUICK = {
    "num.network.threads": "3",
    "num.io.threads": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    # Delay until a new member gets its partitions.
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.max.size": "200",
    # Records of a partition that all consumers together may hold.
    "group.share.partition.max.record.locks": "10000",
    "group.share.max.partition.max.record.locks": "10000",
}
PARTITIONS = 4
LINGER = 5
"""Milliseconds that the producer waits for more records of a batch; librdkafka's default."""
GROUP = "bench"
QUIET = 0.02
"""Seconds without a record after which a client takes the records it has: other clients have acquired the rest."""
PATIENCE = 30.0
"""Seconds within which a consumer must have its partitions."""


def found() -> str | None:
    """Fetch Kafka if needed. Returns why it cannot run here; None if it can."""
    try:
        java()
        _program()
    except NotFoundError as error:
        return str(error)
    return None


def version() -> str:
    return f"Kafka {VERSION}"


def _program() -> Path:
    return fetch("org.apache.kafka", "kafka_2.13", VERSION, Path(".tools").absolute())


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    settings = {**SETTINGS, **QUICK, **({"log.flush.interval.messages": "1"} if name == "kafka-share-sync" else {})}
    with Broker(_program(), settings, FLAGS) as broker:
        yield Served(broker.bootstrap, [broker.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(address, work, seconds))


async def _drive(address: str, work: Work, seconds: float) -> Done:
    admin = AdminClient({"bootstrap.servers": address})
    # A fresh topic, so that no slice meets another one's records.
    topic = f"bench-{secrets.token_hex(4)}"
    for made in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        made.result(PATIENCE)
    group = ConfigResource(ResourceType.GROUP, GROUP)
    group.add_incremental_config(ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET))
    for altered in admin.incremental_alter_configs([group]).values():
        altered.result(PATIENCE)
    # A consumer gets whole batches of the producer, so they should not be a few records each.
    producer = BatchProducer(address, topic, linger=0 if work.batch == 1 else LINGER)
    with ThreadPoolExecutor(work.clients) as threads:
        clients = [_Client(address, topic, producer, threads, work) for _ in range(work.clients)]
        try:
            await asyncio.gather(*(each.join() for each in clients))
            return await repeat(clients, work, seconds)
        finally:
            await asyncio.gather(*(each.close() for each in clients))
            producer.close()
            for deleted in admin.delete_topics([topic]).values():
                deleted.result(PATIENCE)


class BatchProducer:
    """One producer for all clients. A batch is produced when each of its records is reported as delivered."""

    def __init__(self, address: str, topic: str, linger: int, **settings: Any) -> None:
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        ours = {"bootstrap.servers": address, "acks": "all", "linger.ms": linger, "queue.buffering.max.messages": 1_000_000}
        self._producer = Producer(ours | settings)
        self._ending = False
        self._polling = threading.Thread(target=self._poll)
        self._polling.start()

    def close(self) -> None:
        self._ending = True
        self._polling.join()

    async def produce(self, records: Iterable[tuple[bytes, bytes | None]], count: int) -> None:
        """Produce `count` records, each a value and its key."""
        done, missing = self._loop.create_future(), count

        def delivered(error: Any, message: Any) -> None:
            nonlocal missing
            missing -= 1
            if error is not None:
                self._loop.call_soon_threadsafe(_fail, done, RuntimeError(str(error)))
            elif not missing:
                self._loop.call_soon_threadsafe(done.set_result, None)

        produce, topic = self._producer.produce, self._topic
        for value, key in records:
            produce(topic, value, key, on_delivery=delivered)
        await done

    def _poll(self) -> None:
        """Run the delivery callbacks, in a thread."""
        while not self._ending:
            self._producer.poll(0.1)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


class _Client(Client):
    """A client whose consumer blocks in a thread."""

    def __init__(self, address: str, topic: str, producer: BatchProducer, threads: ThreadPoolExecutor, work: Work) -> None:
        self._topic, self._producer, self._threads, self._batch = topic, producer, threads, work.batch
        self._body, self._size = b"x" * work.payload, work.payload
        self._loop = asyncio.get_running_loop()
        self._consumer = ShareConsumer({"bootstrap.servers": address, "group.id": GROUP, "max.poll.records": work.batch})

    async def join(self) -> None:
        """Wait until this consumer gets records."""
        await self._loop.run_in_executor(self._threads, self._consumer.subscribe, [self._topic])
        deadline = self._loop.time() + PATIENCE
        while self._loop.time() < deadline:
            await self._producer.produce([(self._body, None)], 1)
            count, leased = await self.lease()
            if count:
                await self.complete(leased)
                return
        raise RuntimeError(f"a consumer had no records within {PATIENCE:.0f} s")

    async def close(self) -> None:
        await self._loop.run_in_executor(self._threads, self._consumer.close)

    async def produce(self) -> None:
        await self._producer.produce([(self._body, None)] * self._batch, self._batch)

    async def lease(self) -> tuple[int, Any]:
        return await self._loop.run_in_executor(self._threads, self._lease), None

    async def complete(self, leased: Any) -> None:
        await self._loop.run_in_executor(self._threads, self._commit)

    def _lease(self) -> int:
        count = 0
        while count < self._batch:
            if count:
                self._commit()
            messages = self._consumer.poll(QUIET)
            if not len(messages):
                break
            # The length of an error message is that of its text.
            if sum(map(len, messages)) != len(messages) * self._size:
                raise RuntimeError("a record is not of the size that was produced")
            count += len(messages)
        return count

    def _commit(self) -> None:
        """Accept the records of the last poll."""
        for error in self._consumer.commit_sync(PATIENCE).values():
            if error is not None:
                raise RuntimeError(str(error))
