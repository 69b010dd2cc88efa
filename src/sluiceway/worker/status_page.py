"""Health and metrics of a worker over HTTP: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from sluiceway.kernel.errors import invalid
from sluiceway.worker.counts import Counts, WorkerMetrics

MAX_CONNECTIONS: Final = 32
"""Connections at a time, each of which is a thread: probes and scrapes need two or three."""
PATIENCE: Final = 10.0
"""Seconds for a request to arrive, and for its answer to be taken."""


class _Server(ThreadingHTTPServer):
    """Closes connections beyond MAX_CONNECTIONS: whoever can reach the page must not take the threads and files of the worker."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], answers: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, answers)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # There is no thread that would.
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no fault."""


class StatusPage:
    """Serves the page at `address` within the block. `running` returns the counts of running processes, `ended` the sum of ended ones.

    `/healthz` answers 200 while this process runs. `/readyz` answers 200 if a process can ask for items, else 503 with the reason.
    Raises `invalid_request` if it cannot listen there.
    """

    def __init__(
        self, address: tuple[str, int], queue_name: str, running: Callable[[], Sequence[Counts]], ended: Callable[[], Counts]
    ) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerMetrics(queue_name, lambda: [*running(), ended()]))
        ProcessCollector(registry=registry)

        class Answers(BaseHTTPRequestHandler):
            timeout = PATIENCE

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(registry).decode(), "text/plain; version=0.0.4; charset=utf-8")
                elif self.path == "/healthz":
                    self._answer(200, "ok\n")
                elif self.path == "/readyz":
                    reason = why_not_ready(running())
                    self._answer(200 if reason is None else 503, f"{reason or 'ok'}\n")
                else:
                    self._answer(404, "see /healthz, /readyz or /metrics\n")

            def _answer(self, status: int, text: str, content_type: str = "text/plain; charset=utf-8") -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        try:
            self._server = _Server(address, Answers)
        except OSError as error:
            raise invalid("listen", f"cannot listen at {address[0]}:{address[1]}: {error.strerror}") from None
        self.url = "http://{}:{}".format(*self._server.server_address[:2])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="sluiceway-status", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def why_not_ready(processes: Sequence[Counts]) -> str | None:
    """The reason why no process of the worker can get items; None if one can."""
    if not processes:
        return "no process is running"
    if all(each.stopping for each in processes):
        return "it is stopping"
    problems = [each.problem for each in processes if not each.stopping]
    return problems[0] if all(problems) else None
