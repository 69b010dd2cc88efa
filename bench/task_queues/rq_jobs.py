"""RQ: https://python-rq.org

A worker does one job at a time: to do more, one runs more workers. `Retry` has RQ put back the job of a worker that died. Several jobs are
enqueued by `enqueue_many`; results are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import Redis
from rq import Queue, Retry

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import broker_url, handle, redelivery

AT_ONCE = 1
BATCH = 100
IS_ASYNC = False


def job(number: int) -> None:
    handle(number)


def prepare() -> None:
    """Nothing: queues come with the first job."""


@contextmanager
def sending() -> Iterator[Sender]:
    queue = Queue(connection=Redis.from_url(broker_url()))
    options = {"result_ttl": 0, "timeout": redelivery(180), "retry": Retry(max=3)}

    def send(jobs: list[int]) -> None:
        queue.enqueue_many([Queue.prepare_data(job, (number,), **options) for number in jobs])

    yield send
