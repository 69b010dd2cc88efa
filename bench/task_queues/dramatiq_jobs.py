"""Dramatiq with Redis: https://dramatiq.io

Its defaults: messages are acknowledged after the actor, and retried. The default prefetch is twice the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import broker_url, handle, redelivery

AT_ONCE = 32
BATCH = 1
IS_ASYNC = False
DEFAULT = 60
"""Seconds after which a worker without a heartbeat is dead."""

broker = RedisBroker(url=broker_url(), heartbeat_timeout=redelivery(DEFAULT) * 1_000)
if redelivery(DEFAULT) < DEFAULT:
    # A hundred times the default, which would have a test of minutes wait for chance.
    broker.maintenance_chance = 100_000
dramatiq.set_broker(broker)


@dramatiq.actor
def job(number: int) -> None:
    handle(number)


def prepare() -> None:
    """Nothing: queues come with the first message."""


@contextmanager
def sending() -> Iterator[Sender]:
    def send(jobs: list[int]) -> None:
        for number in jobs:
            job.send(number)

    yield send
