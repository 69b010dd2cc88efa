"""Query listener: reports the progress of streaming queries to the server that they read from: `watch(spark, url)`.

Spark's progress events name no options; the logged offset names the queue and the consumer. Reports are for display only: a separate thread
sends the latest one of each query, and drops it while the server is unreachable. Queries are neither slowed nor stopped.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.offsets import Offset
from sluiceway.spark.options import Server, server_options
from sluiceway.spark.server_calls import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("sluiceway.spark")

BEAT = 15.0
"""Seconds between reports of a running query: the server forgets it after a minute."""
_LAST_WORDS = 60.0
"""Seconds for which the report of a query's end is retried."""
_GOODBYE = 3.0
"""Seconds that the program's end waits for Spark's last events, and again for unsent reports."""
_GLANCE = 0.02
_LONGEST = 1_000
"""Maximum bytes of a name, or of the end of an error."""


@dataclass(frozen=True, slots=True)
class QueryReport:
    """Report on a query that reads a queue."""

    queue: str
    consumer: str
    id: str
    run_id: str
    name: str
    batch: int
    items: int
    input_per_s: float
    processed_per_s: float
    batch_duration: Millis
    state: Literal["running", "stopped", "failed"] = "running"
    error: str = ""

    def call(self) -> dict[str, object]:
        """The body of `/v1/consumers.report`."""
        told = ("id", "run_id", "name", "state", "batch", "items", "input_per_s", "processed_per_s", "error")
        query = {name: getattr(self, name) for name in told} | {"batch_duration": format_duration(self.batch_duration)}
        return {"queue_name": self.queue, "client_id": self.consumer, "query": query}


def watch(spark: SparkSession, url: str, *, api_key: str = "", ca_file: str = "") -> QueryListener:
    """Report the progress of this session's streaming queries that read from that server, from now on.

    The server shows them in `sluiceway top`, `sluiceway consumer list` and its metrics. `api_key` locates the key (`env:NAME`, `file:PATH`;
    default SLUICEWAY_API_KEY); it needs the scope `consume`, as the queries do. Raises `invalid_request`. A query is known after its first
    batch. `spark.streams.removeListener` and `close` of the returned listener end it.
    """
    given = {"url": url, "queue": "any", "requestTimeout": "2s", "apiKey": api_key, "caFile": ca_file}
    listener = QueryListener(server_options({name: value for name, value in given.items() if value}), lambda: _running(spark))
    spark.streams.addListener(listener)
    return listener


@contextmanager
def _harmless() -> Iterator[None]:
    """Log errors instead of raising them to Spark."""
    try:
        yield
    except Exception:
        log.warning("an event of Spark about a query could not be processed", exc_info=True)


class QueryListener(StreamingQueryListener):
    """Observes all queries, and reports those that read from that server. Its callbacks never raise.

    `running` returns the runs of active queries; None: Spark itself has ended, and sends no more events.
    """

    def __init__(self, server: Server, running: Callable[[], set[str] | None] = lambda: None) -> None:
        self._server = server
        self._running = running
        self._begun: set[str] = set()
        """Runs of queries without an end event so far."""
        self._lock = threading.Lock()
        self._words: dict[tuple[str, str, str], QueryReport] = {}
        """The latest report by queue, consumer and query: bounded by the number of queries."""
        self._due: set[tuple[str, str, str]] = set()
        self._ended: dict[tuple[str, str, str], float] = {}
        """Retry deadline for reporting a query's end."""
        self._wake = threading.Event()
        self._closed = False
        self._was_told = True
        self._thread = threading.Thread(target=self._run, name="sluiceway-query-listener", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Send outstanding reports, for some seconds at most, and end."""
        atexit.unregister(self.close)
        # Spark's events about a query's end and last batch come slightly after the end is visible to its waiter.
        deadline = time.monotonic() + _GOODBYE
        while self._awaits_an_end() and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        self._closed = True
        self._wake.set()
        self._thread.join(_GOODBYE)

    # ---- callbacks of Spark -----------------------------------------------------------------------------------

    @_harmless()
    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Note the run; its queue is not known yet."""
        with self._lock:
            self._begun.add(str(event.runId))

    @_harmless()
    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for word in query_reports(event.progress, self._server.url):
            log.info(
                "query %s, batch %d: %d items of %s as %s in %d ms, %.0f per second",
                *(word.name or word.id, word.batch, word.items, word.queue, word.consumer, word.batch_duration, word.processed_per_s),
                extra={"sluiceway": word.call()},
            )
            self._say(word)

    @_harmless()
    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        for word in self._of(str(event.id)):
            self._say(replace(word, items=0, input_per_s=0.0, processed_per_s=0.0, batch_duration=0))

    @_harmless()
    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        try:
            self._say_end(event)
        finally:
            with self._lock:
                self._begun.discard(str(event.runId))

    def _say_end(self, event: QueryTerminatedEvent) -> None:
        for word in self._of(str(event.id)):
            failed = event.exception is not None
            last = replace(word, state="failed" if failed else "stopped", error=error_of(event.exception or ""))
            if failed:
                log.warning("query %s, which reads %s as %s, has failed: %s", word.name or word.id, word.queue, word.consumer, last.error)
            self._say(last, until=time.monotonic() + _LAST_WORDS)

    # ---- reporting --------------------------------------------------------------------------------------------

    def _of(self, query: str) -> list[QueryReport]:
        with self._lock:
            return [word for word in self._words.values() if word.id == query]

    def _awaits_an_end(self) -> bool:
        """Whether a query has ended without an end event so far."""
        with self._lock:
            begun = set(self._begun)
        running = self._running() if begun else None
        return running is not None and not begun <= running

    def _say(self, word: QueryReport, until: float | None = None) -> None:
        key = (word.queue, word.consumer, word.id)
        with self._lock:
            self._words[key] = word
            self._due.add(key)
            self._ended.pop(key, None)
            if until is not None:
                self._ended[key] = until
        self._wake.set()

    def _run(self) -> None:
        client: Client | None = None
        beat = time.monotonic() + BEAT
        closing = False
        while not closing:
            self._wake.wait(max(0.0, beat - time.monotonic()))
            closing = self._closed
            self._wake.clear()
            with self._lock:
                if time.monotonic() >= beat:
                    self._due.update(self._words)
                    beat = time.monotonic() + BEAT
                due, self._due = self._due, set()
                words = {key: self._words[key] for key in due}
            for key, word in words.items():
                try:
                    # Created here, since it may raise: the certificate file may not exist yet.
                    client = client or Client(self._server)
                    client.call("/v1/consumers.report", word.call())
                    self._told(key, word, None)
                except Exception as error:
                    self._told(key, word, error)
        if client is not None:
            client.close()

    def _told(self, key: tuple[str, str, str], word: QueryReport, error: Exception | None) -> None:
        """Handle the result of a report; a failed one is repeated with the next beat. Failures are logged once, until a success."""
        if error is not None and self._was_told:
            unforeseen = None if isinstance(error, SluicewayError) else error
            log.warning("%s: reporting of queries is off: %s", self._server.url, error, exc_info=unforeseen)
        self._was_told = error is None
        with self._lock:
            over = key in self._ended and (error is None or time.monotonic() >= self._ended[key])
            if over and self._words.get(key) is word:
                del self._words[key], self._ended[key]
                self._due.discard(key)


def query_reports(progress: StreamingQueryProgress, url: str) -> Iterator[QueryReport]:
    """The reports for that server on a query: one for each of the server's queues that the query reads.

    Items are those leased for the batch: Spark counts a row as often as the query reads it.
    """
    for source in progress.sources:
        end = _object(source.endOffset)
        if not end.keys() >= {"consumer", "leases", "nonce", "queue", "url"} or _place(str(end["url"])) != _place(url):
            continue
        batch = Offset.parse(end)
        before = _object(source.startOffset)
        leases = batch.leases if before.get("sequence") != end["sequence"] else ()
        queues = str(end["queue"]).split(",")
        for queue in queues:
            items = sum(lease.count for lease in leases if lease.queue in ("", queue))
            yield QueryReport(
                queue,
                str(end["consumer"]),
                str(progress.id),
                str(progress.runId),
                _start(progress.name or ""),
                max(0, progress.batchId),
                items,
                _rate(source.inputRowsPerSecond * items / source.numInputRows) if source.numInputRows else 0.0,
                items * 1_000 / max(1, progress.batchDuration),
                max(0, progress.batchDuration),
            )


def error_of(exception: str) -> str:
    """The end of an exception's text, without the frames in Spark's own code: it names the error in the user's code."""
    text = exception.partition("\n\tat ")[0].strip()
    return text.encode(errors="replace")[-_LONGEST:].decode(errors="ignore")


def _running(spark: SparkSession) -> set[str] | None:
    try:
        # None once Spark was stopped; it has sent its last event by then.
        return None if spark.sparkContext._jsc is None else {str(query.runId) for query in spark.streams.active}
    except Exception:
        return None


def _object(text: str | None) -> dict[str, Any]:
    """A source's offset as an object, possibly of another format."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _place(url: str) -> tuple[str, str]:
    """The URL's scheme and address, without credentials."""
    scheme, _, rest = url.rstrip("/").partition("://")
    return scheme, rest.rpartition("@")[2]


def _start(name: str) -> str:
    return name.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def _rate(rate: float) -> float:
    return rate if math.isfinite(rate) and rate > 0 else 0.0
