"""TaskIQ with Redis streams: https://taskiq-python.github.io

`RedisStreamBroker` is the broker with acknowledgements, by default after the task. Messages that a worker did not acknowledge are taken
over after `idle_timeout`; the lock of that has a time limit, without which a worker that dies in it would hold it for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from taskiq_redis import RedisStreamBroker

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import broker_url, handle_async, redelivery

AT_ONCE = 64
BATCH = 1
IS_ASYNC = True

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

broker = RedisStreamBroker(
    url=broker_url(),
    # From the first message on, also those of before the first worker.
    consumer_id="0",
    idle_timeout=redelivery(600) * 1_000,
    unacknowledged_lock_timeout=redelivery(600),
)


@broker.task(task_name="job")
async def job(number: int) -> None:
    await handle_async(number)


def prepare() -> None:
    async def start() -> None:
        await broker.startup()
        await broker.shutdown()

    asyncio.run(start())


@asynccontextmanager
async def sending() -> AsyncIterator[Sender]:
    await broker.startup()

    async def send(jobs: list[int]) -> None:
        for number in jobs:
            await job.kiq(number)

    yield send
    await broker.shutdown()
