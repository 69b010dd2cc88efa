"""arq: https://arq-docs.helpmanual.io

A job stays in the queue until it is done, and a worker marks those in progress. The mark of a worker that died ends 10 s after the job's
time limit. Polled each 10 ms in place of the default 500, half of which a job would wait on average; results are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import func

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import CONCURRENCY, broker_url, handle_async, redelivery

AT_ONCE = 64
BATCH = 1
IS_ASYNC = True
MARK_AFTER_LIMIT = 10
"""Seconds after a job's time limit in which its mark stays."""

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

QUIET = {"version": 1, "disable_existing_loggers": False}
"""Logging without a line for each job."""


async def job(_: Any, number: int) -> None:
    await handle_async(number)


class WorkerSettings:
    functions = (func(job, name="job", keep_result=0),)
    redis_settings = RedisSettings.from_dsn(broker_url())
    max_jobs = CONCURRENCY
    job_timeout = redelivery(310) - MARK_AFTER_LIMIT
    poll_delay = 0.01


def prepare() -> None:
    """Nothing: queues come with the first job."""


@asynccontextmanager
async def sending() -> AsyncIterator[Sender]:
    pool = await create_pool(RedisSettings.from_dsn(broker_url()))

    async def send(jobs: list[int]) -> None:
        for number in jobs:
            await pool.enqueue_job("job", number)

    yield send
    await pool.aclose()
