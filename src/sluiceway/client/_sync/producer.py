"""The producer for blocking code: threads send the batches."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Self

from sluiceway.client import answers
from sluiceway.client.batching import Batch, Batching, BatchLimits
from sluiceway.client.producer_common import Posting, checked_item, closed, of_the_parent
from sluiceway.client.protocol import Call
from sluiceway.kernel.clock import Millis


class Sent:
    """An item that was sent."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: Batch[threading.Event], at: int) -> None:
        self._batch = batch
        self._at = at

    def result(self, timeout: float | None = None) -> str:
        """Return the item's id once the item is stored, or raise the error that it failed with.

        Raises TimeoutError if neither has happened within `timeout` seconds; the item may still be stored later.
        """
        self._batch.asked.add(self._at)
        if not self._batch.done.wait(timeout):
            raise TimeoutError(f"the item was not stored within {timeout} s; it is still being sent")
        return self._batch.id_of(self._at)

    def done(self) -> bool:
        """Whether the item is stored or has failed."""
        return self._batch.done.is_set()


class Producer:
    """Takes items one by one, and stores them in one queue in batches. Made by `Client.producer`; safe to share between threads.

    An item is sent at once while no batch is in flight. While any is, items gather in a batch, which is sent once those have ended, after
    `linger`, or with `max_batch` items or `max_bytes` bytes, whichever is first. Each batch is one call with an idempotency key of its own,
    which is repeated for `retry_for`, so no item is stored twice, whatever fails. With `max_in_flight=1` each partition has the items of a
    producer in the order in which they were sent. With more there is no order, and across partitions there never is one.

    An item that the server refuses fails alone; the rest of its batch is stored. When a call fails, all items of its batch fail. With
    `outcome_unknown` they may be stored nevertheless, all or none.

    A forked process may go on using the producer of its parent, which alone sends the items that it had taken.
    """

    def __init__(self, run: Callable[[Call[answers.Produced], float], answers.Produced], posting: Posting, limits: BatchLimits) -> None:
        self._run = run
        self._posting = posting
        self._limits = limits
        self._closed = False
        self._begin()
        self._start()
        _producers.add(self)

    def _begin(self) -> None:
        """Begin without items and workers."""
        self._batching: Batching[threading.Event] = Batching(self._limits, threading.Event)
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)
        """Notifies the workers that a batch may be due."""
        self._moved = threading.Condition(self._lock)
        """Notifies waiting `send` calls that there may be room."""
        self._workers: list[threading.Thread] = []

    def _start(self) -> None:
        count = self._limits.max_in_flight
        self._workers = [threading.Thread(target=self._work, name=f"sluiceway-producer-{n}", daemon=True) for n in range(count)]
        for worker in self._workers:
            worker.start()

    def _part(self) -> None:
        """This process was forked off the producer's: it has none of its threads, and perhaps locks that nobody releases."""
        unfinished = self._batching.unfinished
        self._begin()
        for batch in unfinished:
            batch.error, batch.done = of_the_parent(), threading.Event()
            batch.done.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.close()

    def send(
        self,
        payload: object,
        *,
        kind: str | None = None,
        encoding: str | None = None,
        reference: str | None = None,
        headers: Mapping[str, str] | None = None,
        enqueue_at: datetime | None = None,
        key: str | None = None,
        priority: int | None = None,
        unique_key: str | None = None,
    ) -> Sent:
        """Put an item into the next batch, and return it without waiting until it is stored.

        A payload that is neither bytes nor text is sent as JSON, as `Item` says. The item is not served before `enqueue_at`. Blocks while
        `max_buffered` bytes are buffered or being sent. Raises `invalid_request` for an item that no server would take, and `unavailable`
        if the producer is closed.
        """
        item, size = checked_item(payload, kind, encoding, reference, headers, enqueue_at, key, priority, unique_key)
        with self._lock:
            while not self._closed and not self._batching.has_room(size):
                self._moved.wait()
            if self._closed:
                raise closed()
            if not self._workers:
                # In a forked process, with its first item.
                self._start()
            batch, at = self._batching.add(item, size, _now())
            if at == 0 or self._batching.is_full(batch):
                self._due.notify()
        return Sent(batch, at)

    def flush(self) -> None:
        """Send all waiting items at once. Returns when every item sent so far is stored or has failed.

        Raises the first failure of an item whose result was not asked for.
        """
        with self._lock:
            self._batching.flush(_now())
            waited_for = [batch.done for batch in self._batching.unfinished]
            self._due.notify_all()
        for done in waited_for:
            done.wait()
        with self._lock:
            error = self._batching.unheard()
        if error is not None:
            raise error

    def close(self) -> None:
        """Take no more items, and flush. Raises as `flush`."""
        with self._lock:
            self._closed = True
            self._moved.notify_all()
        try:
            self.flush()
        finally:
            for worker in self._workers:
                worker.join()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            again = True
            while again:
                try:
                    batch.produced = self._run(self._posting.call(batch), self._posting.retry_for)
                    again = False
                except Exception as error:
                    again = self._posting.failed(batch, error)
            with self._lock:
                self._batching.ended(batch)
                batch.done.set()
                if self._closed:
                    # Only then: this worker takes what is due next, and an idle one was told of each batch when it was begun and full.
                    self._due.notify_all()
                self._moved.notify_all()

    def _next(self) -> Batch[threading.Event] | None:
        with self._lock:
            while True:
                now = _now()
                batch = self._batching.take(now)
                if batch is not None:
                    return batch
                if self._closed and not self._batching.unfinished:
                    return None
                at = self._batching.wake_at()
                self._due.wait(None if at is None else max(1, at - now) / 1000)


_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _forked() -> None:
    for producer in list(_producers):
        producer._part()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _now() -> Millis:
    return time.monotonic_ns() // 1_000_000
