"""A real Kafka server of the tests' own, on loopback, in a directory that goes with it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from bench.kafka import VERSION, Broker, NotFoundError, fetch
from tests.servers import pids

CACHE = Path(__file__).resolve().parents[2] / ".tools"


class NoServerError(Exception):
    """This machine has no Kafka server, and none can be fetched."""


@functools.cache
def _found() -> Path | str:
    """Or why not: who asks again is told the same, at once."""
    try:
        return fetch("org.apache.kafka", "kafka_2.13", VERSION, CACHE)
    except NotFoundError as error:
        return str(error)


def jars() -> Path:
    """The directory with the server's program: SLUICEWAY_TEST_KAFKA if that is set, otherwise under `.tools`. Raises NoServerError."""
    if chosen := os.environ.get("SLUICEWAY_TEST_KAFKA"):
        return Path(chosen).absolute()
    found = _found()
    if isinstance(found, str):
        raise NoServerError(found)
    return found


class KafkaServer(Broker):
    """Raises NoServerError."""

    def __init__(self) -> None:
        super().__init__(jars())

    def ready(self) -> bool:
        # In a thread of its own, since whoever waits may be in an event loop.
        answers: list[bool] = []
        asking = threading.Thread(target=lambda: answers.append(asyncio.run(_has_server(self.bootstrap))))
        asking.start()
        asking.join()
        return answers == [True]

    def pause(self) -> None:
        """It does nothing until `resume`."""
        pids.stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


async def _has_server(bootstrap: str) -> bool:
    """Whether one is there that takes part in the cluster."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=2_000)
    logger = logging.getLogger("aiokafka")
    level = logger.level
    # That it is not there yet is no news.
    logger.setLevel(logging.CRITICAL)
    try:
        await client.start()
        return bool((await client.describe_cluster())["brokers"])
    except (KafkaError, OSError, TimeoutError):
        return False
    finally:
        logger.setLevel(level)
        await client.close()


@contextlib.contextmanager
def server_or_skip() -> Iterator[KafkaServer]:
    """For a fixture: a server for the length of a block, or a skip that cannot be overlooked."""
    try:
        kafka = KafkaServer()
    except NoServerError as error:
        warnings.warn(f"NOTHING IS TESTED ON KAFKA: {error}", stacklevel=2)
        pytest.skip(f"NOTHING IS TESTED ON KAFKA: {error}")
    with kafka:
        yield kafka
