"""Celery with Redis: https://docs.celeryq.dev

Late acknowledgement, so that a job is not lost with its worker; no results, since nothing reads them. The prefetch multiplier is the one
that the guide on optimization names for many short tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import broker_url, handle, redelivery

AT_ONCE = 8
BATCH = 1
IS_ASYNC = False

app = Celery("jobs", broker=broker_url())
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": redelivery(3_600)},
)


@app.task(name="job")
def job(number: int) -> None:
    handle(number)


def prepare() -> None:
    """Nothing: queues come with the first message."""


@contextmanager
def sending() -> Iterator[Sender]:
    def send(jobs: list[int]) -> None:
        for number in jobs:
            job.delay(number)

    yield send
