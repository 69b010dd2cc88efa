"""Kafka topics with one partition, made if they are missing, and what both users of them share."""

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
    """The same: `HOST:PORT`, or several with commas between them. Raises `invalid_request`."""
    if not all(_SERVER.fullmatch(server) for server in bootstrap.split(",")):
        raise invalid("log", f"{bootstrap[:80]!r} does not name Kafka servers; expected kafka:HOST:PORT[,HOST:PORT]")
    return bootstrap


@contextlib.asynccontextmanager
async def administrator(bootstrap: str, timeout: Millis) -> AsyncIterator[AIOKafkaAdminClient]:
    """For the length of a block. Raises KafkaError."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=timeout)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def exists(bootstrap: str, topic: str, timeout: Millis) -> bool:
    """Whether there is such a topic. Raises KafkaError."""
    async with administrator(bootstrap, timeout) as client:
        # All of them, since some servers make a topic that is asked for by its name.
        return topic in await client.list_topics()


async def ensure(bootstrap: str, topic: str, timeout: Millis, settings: Mapping[str, str], least: Mapping[str, int]) -> None:
    """Make the topic, with one partition, as many replicas as the server gives by itself and these settings; or see that it is like that.

    `least`: settings that may be more. Raises `invalid_request` if it is otherwise than it must be, KafkaError.
    """
    wanted = {**settings, **{name: str(value) for name, value in least.items()}}
    async with administrator(bootstrap, timeout) as client:
        # The empty mapping is how this client is told that the number of replicas is the server's affair.
        new = NewTopic(topic, 1, -1, replica_assignments={}, topic_configs=wanted)
        ((_, code, *_),) = (await client.create_topics([new])).topic_errors
        error = for_code(code)
        if code == 0:
            return
        there = error is TopicAlreadyExistsError or (error is TopicAuthorizationFailedError and topic in await client.list_topics())
        if not there:
            raise error(f"topic {topic} could not be made")
        partitions = await _partitions(client, topic, timeout)
        if partitions != 1:
            raise _wrong(topic, f"has {partitions} partitions; it must have 1, as there is no order between partitions")
        for name, value in (await _settings(client, topic)).items():
            if name in settings and value != settings[name]:
                raise _wrong(topic, f"has {name}={value}; set it to {settings[name]}, or records would be lost")
            if name in least and int(value) < least[name]:
                raise _wrong(topic, f"has {name}={value}; set it to {least[name]} or more, or snapshots would not fit")


async def _partitions(client: AIOKafkaAdminClient, topic: str, timeout: Millis) -> int:
    """How many it has. That a topic was just made by somebody else is not known everywhere at once. Raises KafkaError."""
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
    """Raises KafkaError, OSError; then it is stopped all the same."""
    try:
        await consumer.stop()
    finally:
        # It stops half way if a question of its own has just failed.
        await consumer._client.close()


async def _settings(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    """Empty if we may not see them."""
    try:
        (response,) = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    except KafkaError:
        return {}
    return {name: value for _, _, _, _, entries in response.resources for name, value, *_ in entries if value is not None}


def _wrong(topic: str, what: str) -> SluicewayError:
    return invalid("log", f"Kafka's topic {topic} {what}")
