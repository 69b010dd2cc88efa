"""One worker process: a handler and a consumer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from sluiceway.client import AsyncClient, AsyncConsumer, Client, Consumer
from sluiceway.worker.counts import Counts, Meter, mapped_outcomes
from sluiceway.worker.handlers import Handler, is_async
from sluiceway.worker.worker_options import Options

RETRY_FOR = "10s"
"""How long a worker that stops tries to send outcomes. Beyond that their leases run out."""


class WorkerProcess:
    """Runs `handler` on the items of a queue, until SIGTERM, SIGINT or `stop`."""

    def __init__(self, handler: Handler, options: Options) -> None:
        self._handler, self._options = handler, options
        self._meter = Meter()
        self._consumer: AsyncConsumer | Consumer | None = None

    def run(self) -> None:
        """Block until it was stopped and the outcomes of its items are sent. Raises the error that stopped it, if any."""
        if is_async(self._handler):
            asyncio.run(self._run_async())
        else:
            self._run_sync()

    def counts(self) -> Counts:
        """What it did so far. For any thread."""
        consumer = self._consumer
        if consumer is not None:
            self._meter.counts.problem = consumer.problem
            self._meter.counts.stopping = consumer.is_stopping
        return self._meter.counts

    def running_counts(self) -> list[Counts]:
        return [self.counts()]

    def ended_counts(self) -> Counts:
        """None: it is the only process."""
        return Counts()

    def _run_sync(self) -> None:
        def measured(given: Any) -> Any:
            with self._meter.handling(self._size(given)) as others:
                return self._counted(self._handler(given), others)

        with Client(**self._client()) as client:
            self._consumer = consumer = client.consumer(self._options.queue_name, **self._leasing())
            self._run_of(consumer)(wraps(self._handler)(measured), **self._running())

    async def _run_async(self) -> None:
        async def measured(given: Any) -> Any:
            with self._meter.handling(self._size(given)) as others:
                return self._counted(await self._handler(given), others)

        async with AsyncClient(**self._client()) as client:
            self._consumer = consumer = client.consumer(self._options.queue_name, **self._leasing())
            await self._run_of(consumer)(measured, **self._running())

    def _run_of(self, consumer: AsyncConsumer | Consumer) -> Callable[..., Any]:
        if self._options.tables:
            return consumer.run_tables
        return consumer.run if self._options.batch_size is None else consumer.run_batches

    def _size(self, given: Any) -> int:
        """The number of items that a handler gets."""
        return len(given) if self._takes_many else 1

    def _counted(self, returned: object, others: Counter[str]) -> object:
        """What the handler returned, for the consumer. The items with another outcome than done are added to `others`."""
        if self._options.tables and hasattr(returned, "__arrow_c_stream__"):
            # Only handlers of tables need pyarrow.
            from sluiceway.client.outcome_rows import outcome_counts, outcome_table

            # The consumer gets the table: what exports Arrow may do so only once.
            returned = table = outcome_table(returned)
            others.update({name: count for name, count in outcome_counts(table).items() if name != "done"})
        elif self._takes_many and isinstance(returned, Mapping):
            others.update(mapped_outcomes(returned))
        return returned

    @property
    def _takes_many(self) -> bool:
        return self._options.tables or self._options.batch_size is not None

    def _client(self) -> dict[str, Any]:
        options = self._options
        names = {} if options.client_id is None else {"client_id": options.client_id}
        return {"url": options.url, "api_key": options.api_key, "ca_file": options.ca_file, **names}

    def _leasing(self) -> dict[str, Any]:
        options = self._options
        return {
            "prefetch": options.prefetch,
            "ordered": options.ordered,
            "lease_timeout": options.lease_timeout,
            "error_messages": options.error_messages,
            "retry_for": RETRY_FOR,
            "wait_for_queue": True,
        }

    def _running(self) -> dict[str, Any]:
        batch = {} if self._options.batch_size is None else {"batch_size": self._options.batch_size}
        return {"concurrency": self._options.concurrency, "shutdown_timeout": self._options.shutdown_timeout, **batch}
