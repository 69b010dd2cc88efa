"""Helpers shared by the jobs: the queue, progress, and following a streaming query to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from sluiceway.spark.offsets import Offset
from sluiceway.spark.options import Server, server_options
from sluiceway.spark.spark_errors import translated

_GLANCE = 0.2
"""Seconds between two checks of a query."""


@dataclass(frozen=True, slots=True)
class Place:
    """A queue of a server. `api_key` and `ca_file` are the options `apiKey` and `caFile` of `docs/reference/spark.md`."""

    url: str
    queue: str
    api_key: str = ""
    ca_file: str = ""
    request_timeout: str = "2m"

    def options(self, **more: object) -> dict[str, str]:
        """Options for `.options(...)` of a reader or writer, without empty ones and None."""
        given = {"apiKey": self.api_key, "caFile": self.ca_file, **more}
        mine = {"url": self.url, "queue": self.queue, "requestTimeout": self.request_timeout}
        return mine | {name: str(value) for name, value in given.items() if value not in ("", None)}

    def server(self) -> Server:
        """The server's options. Raises `invalid_request` that names the one at fault."""
        return server_options(self.options())


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a job: the `items` of this run, and the last finished batch, or the number of finished tasks."""

    job: str
    items: int = 0
    batch: int | None = None
    tasks: int | None = None
    tasks_done: int | None = None


ProgressListener = Callable[[Progress], None]
Stop = Callable[[], bool]


class Followed(msgspec.Struct, frozen=True):
    """Result of a query's run. `stopped`: it was asked to end, so more may be waiting."""

    items: int
    batches: int
    stopped: bool


def never() -> bool:
    return False


def unheard(progress: Progress) -> None:
    """The default `tell`: ignore progress."""


def rows_read(progress: StreamingQueryProgress) -> int:
    """The rows of a batch, for a query that reads each once."""
    return int(progress.numInputRows)


def items_leased(progress: StreamingQueryProgress) -> int:
    """The items of a batch of the Sluiceway stream source, however often its rows were read."""
    if not progress.numInputRows:
        return 0
    offset = json.loads(progress.sources[0].endOffset)
    return sum(lease.count for lease in Offset.parse(offset).leases)


def follow(
    job: str,
    query: StreamingQuery,
    tell: ProgressListener = unheard,
    stop: Stop = never,
    count: Callable[[StreamingQueryProgress], int] = rows_read,
) -> Followed:
    """Follow the query until it ends, or stop it when `stop` says so. Raises the query's error, as converted by `translated`.

    `tell` is called after each non-empty batch.
    """
    batches: dict[int, int] = {}
    asked = False

    def look() -> None:
        last = query.lastProgress
        if last is None or last.batchId in batches:
            return
        before = sum(batches.values())
        batches.update({each.batchId: count(each) for each in query.recentProgress if each.batchId not in batches or each.numInputRows})
        if (items := sum(batches.values())) > before:
            tell(Progress(job=job, items=items, batch=max(batch for batch, rows in batches.items() if rows)))

    try:
        while not asked and not query.awaitTermination(_GLANCE):  # type: ignore[arg-type]
            look()
            asked = stop()
        if asked:
            query.stop()
            # Raises the query's error, if it failed meanwhile.
            query.awaitTermination()
    except (PySparkException, Py4JJavaError) as error:
        raise translated(error) from error
    except BaseException:
        query.stop()
        raise
    look()
    return Followed(sum(batches.values()), sum(rows > 0 for rows in batches.values()), asked)
