"""Threads for blocking handlers. Unlike those of a ThreadPoolExecutor, they do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class HandlerThreads:
    """Up to `most` daemon threads, started as needed. The interpreter ends without waiting for them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[[T], object], argument: T) -> Future[object]:
        """Call `function(argument)` in a thread. For one thread at a time. Raises RuntimeError if there is none to be had."""
        future: Future[object] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(argument))
                except BaseException as error:
                    future.set_exception(error)

        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._run, name=f"sluiceway-handler-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system has no more now. Those that there are take the work one after the other.
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)
        self._work.put(call)
        return future

    def close(self) -> None:
        """Let each thread end after its work. Does not wait."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()
            del call
            self._idle.release()
