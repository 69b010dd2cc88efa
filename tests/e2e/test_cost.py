"""What it costs a server that its pages are open: a small part of a core, whoever looks at what."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from sluiceway.client import Client
from tests.e2e.filled_server import BACKENDS, fill
from tests.server.server_process import PATIENCE, wait_until
from tests.server.test_server_reload import Child, child

pytestmark = pytest.mark.e2e

SECONDS = 15.0
ALLOWED = 0.05
"""Of a core, for twenty open pages."""
LINGERS = 6.0
"""Seconds after which the server does nothing more for pages that were open."""
QUEUES = 12
ONE = ["/ui/live"] * 20
DIFFERENT = [
    *("/ui/live", "/ui/live/queues", "/ui/live/instances", "/ui/live/rebalances", "/ui/live/dead", "/ui/live/map?queue=orders"),
    *(f"/ui/live/queues/demo-{number}" for number in range(QUEUES)),
    *("/ui/live/queues/orders/partitions", "/ui/live/queues/orders/consumers"),
]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A server on which something happens in each second, as in the demo."""
    stop = threading.Event()

    def work() -> None:
        with Client(server.url) as client:
            # As much in each second, however long it takes, so that it costs the same whoever looks.
            due = time.monotonic()
            while not stop.wait(max(0, due - time.monotonic())):
                due += 0.5
                for number in range(QUEUES):
                    client.produce(f"demo-{number}", ["an item"] * 5)
                    leased = client.lease(f"demo-{number}", batch_size=4)
                    client.complete(f"demo-{number}", lease_ids=leased.lease_ids)

    with child(tmp_path_factory.mktemp("busy"), BACKENDS) as server:
        fill(server)
        with Client(server.url) as client:
            for number in range(QUEUES):
                client.create_queue(f"demo-{number}", requested_partitions=4)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield server
        finally:
            stop.set()
            thread.join()


class Open:
    """A page that is open: its stream, read as it comes."""

    def __init__(self, url: str, path: str) -> None:
        self.path, self.size, self.events = path, 0, 0
        self._http = httpx.Client(base_url=url, timeout=PATIENCE)
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._http.stream("GET", self.path) as answer, suppress(httpx.HTTPError):
            assert answer.status_code == 200
            self._socket = answer.extensions["network_stream"].get_extra_info("socket")
            for part in answer.iter_bytes():
                self.size += len(part)
                self.events += part.count(b"\n\n")

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *_: object) -> None:
        # A page on which nothing happens would be read for as long.
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._http.close()


def used(server: Child) -> float:
    """Seconds of a processor that the server has had."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(server: Child) -> float:
    """Of a core, over some time."""
    before = used(server)
    threading.Event().wait(SECONDS)
    return (used(server) - before) / SECONDS


@contextmanager
def opened(server: Child, paths: Sequence[str]) -> Iterator[list[Open]]:
    """Pages that have had their first contents."""
    with ExitStack() as stack:
        found = [stack.enter_context(Open(server.url, path)) for path in paths]
        wait_until(lambda: all(each.events for each in found), "the first contents of each page")
        yield found


def test_twenty_open_pages_cost_little(busy: Child) -> None:
    # What it costs without them, before and after: others are at work on the machine, too.
    alone = [share(busy)]
    for name, paths in (("the same", ONE), ("different", DIFFERENT)):
        assert len(paths) == 20
        with opened(busy, paths) as pages:
            size = sum(each.size for each in pages)
            watched = share(busy)
            size = sum(each.size for each in pages) - size
        threading.Event().wait(LINGERS)
        alone.append(share(busy))
        more = watched - sum(alone[-2:]) / 2
        print(f"{name}: {more:.1%} of a core ({alone[-1]:.1%} without, {watched:.1%} with), {size / SECONDS / 1000:.0f} kB/s sent")
        assert more < ALLOWED
