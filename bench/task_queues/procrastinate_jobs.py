"""Procrastinate with PostgreSQL: https://procrastinate.readthedocs.io

The pool has a connection for each job at once. Several jobs are deferred by `batch_defer_async`. A periodic task puts back the jobs of
workers that died, as the page on stalled jobs has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from procrastinate import App, JobContext, PsycopgConnector

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import CONCURRENCY, broker_url, handle_async, redelivery

AT_ONCE = 4
BATCH = 100
IS_ASYNC = True

STALLED = redelivery(30)

app = App(
    connector=PsycopgConnector(conninfo=broker_url(), min_size=4, max_size=CONCURRENCY),
    worker_defaults={"update_heartbeat_interval": STALLED / 3, "stalled_worker_timeout": float(STALLED)},
)


@app.task(name="job")
async def job(number: int) -> None:
    await handle_async(number)


@app.periodic(cron="* * * * * */10")
@app.task(queueing_lock="retry_stalled_jobs", pass_context=True)
async def retry_stalled_jobs(context: JobContext, timestamp: int) -> None:
    for stalled in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=STALLED):
        await app.job_manager.retry_job(stalled)


def prepare() -> None:
    with app.open():
        app.schema_manager.apply_schema()


@asynccontextmanager
async def sending() -> AsyncIterator[Sender]:
    async with app.open_async():

        async def send(jobs: list[int]) -> None:
            await job.batch_defer_async(*({"number": number} for number in jobs))

        yield send
