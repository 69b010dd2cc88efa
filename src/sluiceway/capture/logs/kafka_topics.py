"""Kafka topics with a single partition, created on demand, and helpers shared by the log and the election."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NoError, TopicAlreadyExistsError, TopicAuthorizationFailedError, for_code

from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid

_AGAIN = 0.05
_SERVER = re.compile(r"[^\s,:/@]+:\d{1,5}")


def check_bootstrap(bootstrap: str) -> str:
    """Validate and return `HOST:PORT`, or several separated by commas. Raises `invalid_request`."""
    if not all(_SERVER.fullmatch(server) for server in bootstrap.split(",")):
        raise invalid("log", f"{bootstrap[:80]!r} does not name Kafka servers; expected kafka:HOST:PORT[,HOST:PORT]")
    return bootstrap


@contextlib.asynccontextmanager
async def administrator(bootstrap: str, timeout: Millis) -> AsyncIterator[AIOKafkaAdminClient]:
    """An administration client for the length of a block. Raises KafkaError."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=timeout)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def exists(bootstrap: str, topic: str, timeout: Millis) -> bool:
    """Whether the topic exists. Raises KafkaError."""
    async with administrator(bootstrap, timeout) as client:
        # List all topics, since some servers create a topic that is requested by name.
        return topic in await client.list_topics()


async def ensure(bootstrap: str, topic: str, timeout: Millis, settings: Mapping[str, str], least: Mapping[str, int]) -> None:
    """Create the topic, with one partition, the server's default replication and these settings; or check an existing one.

    `least`: settings that may be higher. Raises `invalid_request` if an existing topic differs, KafkaError.
    """
    wanted = {**settings, **{name: str(value) for name, value in least.items()}}
    async with administrator(bootstrap, timeout) as client:
        # With an empty mapping this client leaves the number of replicas to the server.
        new = NewTopic(topic, 1, -1, replica_assignments={}, topic_configs=wanted)
        ((_, code, *_),) = (await client.create_topics([new])).topic_errors
        error = for_code(code)
        if code == 0:
            return
        there = error is TopicAlreadyExistsError or (error is TopicAuthorizationFailedError and topic in await client.list_topics())
        if not there:
            raise error(f"topic {topic} could not be created")
        partitions = await _partitions(client, topic, timeout)
        if partitions != 1:
            raise _wrong(topic, f"has {partitions} partitions; it must have 1, as there is no order between partitions")
        for name, value in (await _settings(client, topic)).items():
            if name in settings and value != settings[name]:
                raise _wrong(topic, f"has {name}={value}; set it to {settings[name]}, or records would be lost")
            if name in least and int(value) < least[name]:
                raise _wrong(topic, f"has {name}={value}; set it to {least[name]} or more, or snapshots would not fit")


async def _partitions(client: AIOKafkaAdminClient, topic: str, timeout: Millis) -> int:
    """The number of partitions. A topic just created by another process is not known everywhere at once. Raises KafkaError."""
    end = stopwatch() + timeout / 1000
    while True:
        (described,) = await client.describe_topics([topic])
        error = for_code(described["error_code"])
        if error is NoError:
            return len(described["partitions"])
        if not error.retriable or stopwatch() > end:
            raise error(f"topic {topic}")
        await asyncio.sleep(_AGAIN)


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop the consumer, also if that raises KafkaError, OSError."""
    try:
        await consumer.stop()
    finally:
        # The consumer stops half way if a request of its own has just failed.
        await consumer._client.close()


async def _settings(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    """The topic's settings; empty without permission to see them."""
    try:
        (response,) = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    except KafkaError:
        return {}
    return {name: value for _, _, _, _, entries in response.resources for name, value, *_ in entries if value is not None}


def _wrong(topic: str, what: str) -> SluicewayError:
    return invalid("log", f"Kafka's topic {topic} {what}")
