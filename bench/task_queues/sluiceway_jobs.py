"""Sluiceway: one server on SQLite (synchronous=FULL), a worker by `sluiceway work`, and the client's `Producer`, which gathers items."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.task_queues.job_producer import Sender
from bench.task_queues.job_record import broker_url, handle, handle_async
from sluiceway.client import AsyncClient, Client, LeasedItem

AT_ONCE = 1_000
BATCH = 1
IS_ASYNC = True
QUEUE = "jobs"


async def job(item: LeasedItem) -> None:
    await handle_async(int(item.payload))


def job_in_thread(item: LeasedItem) -> None:
    handle(int(item.payload))


def prepare() -> None:
    with Client(broker_url()) as client:
        client.create_queue(QUEUE)


@asynccontextmanager
async def sending() -> AsyncIterator[Sender]:
    async with AsyncClient(broker_url()) as client, client.producer(QUEUE) as producer:

        async def send(jobs: list[int]) -> None:
            for number in jobs:
                await (await producer.send(str(number)))

        yield send
