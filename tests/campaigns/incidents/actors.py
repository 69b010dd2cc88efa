"""Producers and consumers of one queue, each a thread with a client of its own, that behave well or badly until they are told to stop."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from sluiceway.client import Client
from sluiceway.kernel.errors import SluicewayError

_numbers = itertools.count()
_WAIT = "1s"
"""How long a lease call waits: actors look at least so often whether they are to stop."""

Step = Callable[[Client], None]


class Cast:
    """The actors of one scene. Leaving the block stops them all."""

    def __init__(self, url: str, queue: str) -> None:
        self.url, self.queue = url, queue
        self._stack = ExitStack()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._stack.close()

    def start(self, step: Step, name: str = "actor") -> Callable[[], None]:
        """Repeat the step in a thread. Returns what stops it."""
        stopping = threading.Event()
        client = Client(self.url, client_id=f"{name}-{next(_numbers)}")

        def act() -> None:
            with client:
                while not stopping.is_set():
                    try:
                        step(client)
                    except SluicewayError:
                        # A refusal is a part of most scenes.
                        stopping.wait(0.2)

        thread = threading.Thread(target=act, daemon=True)

        def stop() -> None:
            stopping.set()
            thread.join()

        thread.start()
        self._stack.callback(stop)
        return stop

    # ---- what they do -------------------------------------------------------------------------------------------

    def produces(self, count: int, pause: float, text: str = "x") -> Callable[[], None]:
        """So many at once, and again after the pause in seconds."""

        def step(client: Client) -> None:
            client.produce(self.queue, [text] * count)
            time.sleep(pause)

        return self.start(step, "producer")

    def works(self, handle: Callable[[Client, str, str], None], batch: int = 1, lease_timeout: str | None = None) -> Callable[[], None]:
        """Lease items, and give the id and text of each to the handler, which settles it."""

        def step(client: Client) -> None:
            leased = client.lease(self.queue, batch_size=batch, request_timeout=_WAIT, lease_timeout=lease_timeout)
            for item in leased.items:
                handle(client, item.id, (item.payload or b"").decode())

        return self.start(step, "consumer")

    def completes(self, took: float = 0.0) -> Callable[[Client, str, str], None]:
        def handle(client: Client, id: str, text: str) -> None:
            # A slow handler does not outlast the scene.
            self._over.wait(took)
            client.complete(self.queue, [id])

        return handle

    def fails(self) -> Callable[[Client, str, str], None]:
        def handle(client: Client, id: str, text: str) -> None:
            client.retry(self.queue, [id])

        return handle


@contextmanager
def on_stage(url: str, queue: str, **settings: object) -> Iterator[Cast]:
    """A new queue and its actors; the queue is deleted at the end."""
    with Client(url) as client:
        client.create_queue(queue, **settings)  # type: ignore[arg-type]
        try:
            with Cast(url, queue) as cast:
                yield cast
        finally:
            client.delete_queue(queue, force=True)
