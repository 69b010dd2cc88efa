"""KafkaSyncLog on a real Kafka server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import UnknownTopicOrPartitionError

from sluiceway.capture.logs.kafka_log import MAX_RECORD, KafkaSyncLog
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.sync_log import LogUnavailableError, SyncLog
from sluiceway.testing.drive import driven
from sluiceway.testing.sync_log_suite import LONG, OpenLog, SyncLogSuite, of, read_all, records
from tests.instance.instance_rig import eventually
from tests.servers.kafka_server import KafkaServer, server_or_skip
from tests.servers.postgres_server import free_port

numbers = itertools.count()
SOON: Millis = 1_500
"""After so long a call is given up where the test waits for that."""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"capture-{next(numbers)}"


@contextlib.asynccontextmanager
async def opened(bootstrap: str, name: str, *, create: bool = True, timeout: Millis = 30_000) -> AsyncIterator[KafkaSyncLog]:
    log = KafkaSyncLog(bootstrap, name, create=create, timeout=timeout, longest_poll=50)
    try:
        yield log
    finally:
        await log.close()


@contextlib.asynccontextmanager
async def administering(server: KafkaServer) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=server.bootstrap)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def appended(log: SyncLog, record: bytes) -> None:
    """As a member does it: say it until it is there."""
    while True:
        try:
            await log.append([record])
            return
        except LogUnavailableError:
            await asyncio.sleep(0.1)


async def everything(log: SyncLog) -> list[tuple[int, bytes]]:
    while True:
        try:
            return await read_all(log)
        except LogUnavailableError:
            await asyncio.sleep(0.1)


class TestKafkaSyncLog(SyncLogSuite):
    too_large = MAX_RECORD + 1

    @pytest.fixture
    def open_log(self, server: KafkaServer, name: str) -> OpenLog:
        def open_log() -> contextlib.AbstractAsyncContextManager[SyncLog]:
            return opened(server.bootstrap, name)

        return open_log


@driven
async def test_the_largest_record_fits_and_comes_back(server: KafkaServer, name: str) -> None:
    async with opened(server.bootstrap, name) as log:
        await log.append([b"before", b"x" * MAX_RECORD, b"y" * MAX_RECORD, b"after"])
        assert [len(record) for _, record in await read_all(log)] == [6, MAX_RECORD, MAX_RECORD, 5]


@driven
async def test_what_is_trimmed_between_looking_and_reading_is_not_waited_for(server: KafkaServer, name: str) -> None:
    async with opened(server.bootstrap, name) as log, opened(server.bootstrap, name) as other:
        await other.append(records("a", 10))
        bounds = log._bounds

        async def trimmed_since() -> tuple[int, int]:
            found = await bounds()
            await other.trim(5)
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(log, "_bounds", trimmed_since)
            page = await log.read(0)
        assert page.first == 6
        assert of("a", page.entries) == records("a", 10)[5:]


@driven
async def test_a_topic_that_somebody_else_has_just_made_may_not_be_known_everywhere(server: KafkaServer, name: str) -> None:
    async with opened(server.bootstrap, name) as log:
        await log.append([b"one"])
    describe, asked = AIOKafkaAdminClient.describe_topics, []

    async def late(self: AIOKafkaAdminClient, topics: list[str]) -> list[dict[str, Any]]:
        asked.append(topics)
        if len(asked) < 3:
            return [{"error_code": UnknownTopicOrPartitionError.errno, "topic": topics[0], "partitions": []}]
        found: list[dict[str, Any]] = await describe(self, topics)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AIOKafkaAdminClient, "describe_topics", late)
        async with opened(server.bootstrap, name) as log:
            assert [record for _, record in (await log.read(0)).entries] == [b"one"]
    assert len(asked) == 3


@driven
async def test_a_log_that_must_not_be_made_is_empty_until_it_is_there(server: KafkaServer, name: str) -> None:
    async with opened(server.bootstrap, name, create=False) as looking:
        assert await looking.read(0) == (1, (), 0)
        await looking.wait(0, 20)
        await looking.trim(3)
        async with administering(server) as client:
            assert looking.topic not in await client.list_topics()
        async with opened(server.bootstrap, name) as log:
            await log.append([b"one"])
        assert [record for _, record in (await looking.read(0)).entries] == [b"one"]


@pytest.mark.parametrize(
    ("topic", "what"),
    [
        (partial(NewTopic, num_partitions=3, topic_configs={"retention.ms": "-1", "max.message.bytes": "4000000"}), "3 partitions"),
        (partial(NewTopic, num_partitions=1, topic_configs={"max.message.bytes": "4000000"}), "retention.ms"),
        (partial(NewTopic, num_partitions=1, topic_configs={"retention.ms": "-1", "cleanup.policy": "compact"}), "cleanup.policy"),
        (partial(NewTopic, num_partitions=1, topic_configs={"retention.ms": "-1"}), "max.message.bytes"),
    ],
)
@driven
async def test_a_topic_that_would_lose_records_or_their_order_is_refused(
    server: KafkaServer, name: str, topic: partial[NewTopic], what: str
) -> None:
    async with administering(server) as client:
        await client.create_topics([topic(f"{name}_connector_sync", replication_factor=1)])
    async with opened(server.bootstrap, name) as log:
        for call in (log.read(0), log.append([b"one"])):
            with pytest.raises(SluicewayError, match=what) as refused:
                await call
            assert refused.value.code == "invalid_request"
            assert refused.value.field == "log"


@driven
async def test_a_topic_that_somebody_else_made_rightly_is_used(server: KafkaServer, name: str) -> None:
    settings = {"retention.ms": "-1", "max.message.bytes": "4000000", "segment.bytes": "2000000"}
    async with administering(server) as client:
        await client.create_topics([NewTopic(f"{name}_connector_sync", 1, 1, topic_configs=settings)])
    async with opened(server.bootstrap, name) as log:
        await log.append([b"one"])
        assert [record for _, record in await read_all(log)] == [b"one"]


@pytest.mark.parametrize(
    "bootstrap", ["", "host", "host:", "host:port", "http://host:9092", "user@host:9092", "one:1,,two:2", "one:1, two:2"]
)
def test_what_names_no_servers_is_refused(bootstrap: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        KafkaSyncLog(bootstrap, "name")
    assert (refused.value.code, refused.value.field) == ("invalid_request", "log")


@driven
async def test_servers_that_are_not_there_are_said_to_be_away(name: str) -> None:
    async with opened(f"127.0.0.1:{free_port()}", name, timeout=SOON) as log:
        for call in (log.read(0), log.append([b"one"]), log.trim(5)):
            with pytest.raises(LogUnavailableError):
                await call
        await log.wait(0, 30)


@driven
@pytest.mark.slow
async def test_a_killed_server_has_all_that_was_acknowledged_and_the_same_log_goes_on(server: KafkaServer, name: str) -> None:
    """Appends go on while it dies and comes back. What failed may be there, what did not is, each once."""
    async with opened(server.bootstrap, name, timeout=SOON) as log, opened(server.bootstrap, name, timeout=SOON) as other:
        acknowledged: list[bytes] = []
        failed: list[bytes] = []
        enough = asyncio.Event()

        async def write() -> None:
            for number in itertools.count():
                record = b"a %d" % number
                try:
                    await log.append([record])
                    acknowledged.append(record)
                except LogUnavailableError:
                    failed.append(record)
                if enough.is_set() and record in acknowledged:
                    return

        writing = asyncio.create_task(write())
        await eventually(lambda: len(acknowledged) >= 50)
        before = await everything(other)
        server.kill()
        await eventually(lambda: bool(failed))
        # Whoever waits does not learn that it is away, but waits on.
        waiting = asyncio.create_task(other.wait(len(acknowledged) + len(failed), LONG))
        await asyncio.to_thread(server.start)
        await waiting
        enough.set()
        await writing
        await appended(other, b"b 0")
        entries = await everything(other)
        assert entries[: len(before)] == before
        there = of("a", entries)
        assert [record for record in there if record not in failed] == acknowledged
        assert len(there) == len(set(there))
        assert set(there) <= set(acknowledged) | set(failed)
        assert await everything(log) == entries


@driven
async def test_a_server_that_stands_still_is_away_and_late_appends_are_there_once(server: KafkaServer, name: str) -> None:
    async with opened(server.bootstrap, name, timeout=SOON) as log:
        await log.append(records("a", 3))
        assert len(await read_all(log)) == 3
        server.pause()
        try:
            for number in range(2):
                with pytest.raises(LogUnavailableError):
                    await log.append([b"late %d" % number])
            with pytest.raises(LogUnavailableError):
                await log.read(0)
        finally:
            server.resume()
        await appended(log, b"b 0")
        entries = await everything(log)
        assert of("a", entries) == records("a", 3)
        assert of("b", entries)[-1:] == [b"b 0"]
        assert len(of("late", entries)) == len(set(of("late", entries)))


@pytest.mark.slow
@driven
async def test_a_log_is_closed_soon_although_its_server_is_away(server: KafkaServer, name: str) -> None:
    log = KafkaSyncLog(server.bootstrap, name, timeout=SOON)
    await log.append([b"one"])
    await log.read(0)
    server.pause()
    try:
        with pytest.raises(LogUnavailableError):
            await log.append([b"two"])
        async with asyncio.timeout(30):
            await log.close()
        # Nothing of it goes on for long that keeps the loop busy, or writes.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=30)
        assert asyncio.all_tasks() == {asyncio.current_task()}
    finally:
        server.resume()
