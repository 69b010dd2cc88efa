"""`format("sluiceway-capture")`: a change stream as rows, in micro-batches planned by one member of the capture beside the driver.

`capture_plan.py` explains why a replay is exact, and the consequences of a crash at each point. This module carries it out: a thread with
the member, in the reader's process, which settles, plans and waits; and the tasks, which read what was planned.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine, Iterator, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from sluiceway.adapters import system
from sluiceway.capture import open_stream, run_member
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.ports.change_stream import Batch, BrokenOffError, UnknownPositionError
from sluiceway.spark.capture_options import CaptureOptions, capture_options
from sluiceway.spark.capture_plan import Offset, Slice
from sluiceway.spark.capture_planning import Planning

T = TypeVar("T")

SCHEMA = StructType(
    [
        StructField("position", StringType(), False),
        StructField("at", TimestampType()),
        StructField("kind", StringType()),
        StructField("key", StringType()),
        StructField("payload", BinaryType(), False),
        StructField("partition", StringType(), False),
        StructField("batch", LongType(), False),
    ]
)

_LEAVE = 10.0
"""Seconds that the end of a query waits for its member to leave."""
_ELSEWHERE = (
    "If another query of this capture has taken over and delivered it meanwhile, this checkpoint cannot continue; with a new one, the "
    "query continues where the other is"
)
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class CaptureSource(DataSource):
    """A change stream as a stream source. The options are described in `docs/guides/capture.md`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "sluiceway-capture"

    def schema(self) -> StructType:
        # On loading: the first place where a wrong option can be reported.
        capture_options(self.options)
        return SCHEMA

    def reader(self, schema: StructType) -> NoReturn:
        raise invalid("format", "a change stream needs spark.readStream; use trigger(availableNow=True) to stop at its end")

    def streamReader(self, schema: StructType) -> CaptureStreamReader:
        if schema.simpleString() != SCHEMA.simpleString():
            raise invalid("schema", "the columns of a change are fixed; leave out .schema(...)")
        return CaptureStreamReader(capture_options(self.options))


class Task(InputPartition):
    """Work of one Spark task."""

    def __init__(self, part: Slice) -> None:
        super().__init__(part)
        self.part = part


class CaptureStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming query's reader. Spark keeps one in its own process beside the driver, and copies for tasks."""

    def __init__(self, options: CaptureOptions) -> None:
        self._options = options
        self._planner: Planner | None = None

    def initialOffset(self) -> dict[str, Any]:
        return Offset().to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._member().read_up_to_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Record that the batch that ends at `start` is done, and plan the next one. Nothing to plan: `start` itself."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sys.maxsize
        before = Offset.parse(start)
        following = self._member().following(before, most)
        return start if following is before else following.to_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of the batch that ends at `end`, by its content."""
        before, batch = Offset.parse(start), Offset.parse(end)
        if batch.sequence == before.sequence:
            # An empty batch. Spark logs one at the start.
            return []
        if batch.sequence != before.sequence + 1:
            raise SluicewayError(
                "invalid_request",
                f"Spark asks for batches {before.sequence + 1} to {batch.sequence} at once, but the checkpoint has only what the last one "
                "reads; asynchronous progress tracking cannot be used with this source",
            )
        # After a restart this is called first: the member can join before it is needed.
        self._member()
        return [Task(part) for part in batch.slices]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        yield to_rows(asyncio.run(read_slice(self._options, partition.part)), partition.part)

    def stop(self) -> None:
        """Let the member leave. Plans stay: a restart from the checkpoint knows whether they are done."""
        if self._planner is not None:
            self._planner.stop()

    def _member(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner


async def read_slice(options: CaptureOptions, part: Slice) -> pa.RecordBatch:
    """Read exactly what was planned. Raises `unavailable` if the stream keeps breaking off, `not_found` if it no longer has the records."""
    config = options.config
    stream = open_stream(config.stream, config.name, config.options)
    deadline = system.steady() + options.request_timeout
    tries = 0
    try:
        while True:
            try:
                batch = await stream.read(part.token, part.after, part.upto, config.limit)
                return _checked(batch, part)
            except UnknownPositionError as error:
                raise SluicewayError("not_found", f"{_named(part)} cannot be read again: {error}. {_ELSEWHERE}") from None
            except BrokenOffError as error:
                pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
                if system.steady() + pause * 1000 >= deadline:
                    tried = format_duration(options.request_timeout)
                    raise SluicewayError("unavailable", f"{_named(part)}: {error} (tried for {tried}; option requestTimeout)") from None
                tries += 1
                await asyncio.sleep(pause)
    finally:
        await stream.close()


def _checked(batch: Batch, part: Slice) -> pa.RecordBatch:
    rows = batch.records.num_rows
    if batch.upto != part.upto or rows != part.rows:
        raise UnknownPositionError(f"expected {part.rows} records up to {part.upto!r} as planned, got {rows} up to {batch.upto!r}")
    return batch.records


def _named(part: Slice) -> str:
    return f"batch {part.batch} of partition {part.token}"


def to_rows(records: pa.RecordBatch, part: Slice) -> pa.RecordBatch:
    """Convert a stream's records to rows of SCHEMA. No Python runs per row."""
    schema = to_arrow_schema(SCHEMA, timezone="UTC")
    own = {"partition": pa.repeat(part.token, records.num_rows), "batch": pa.repeat(part.batch, records.num_rows)}
    columns = [own[field.name] if field.name in own else records.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays([column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


class Planner:
    """A member of the capture in a thread of its own. Its methods are called by Spark's thread, and block.

    They raise the member's final error, if it has ended.
    """

    def __init__(self, options: CaptureOptions) -> None:
        self._config = options.config
        self._planning = Planning(options.config.limit)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ended: Future[None] = Future()
        threading.Thread(target=self._live, name="sluiceway-capture", daemon=True).start()

    def following(self, start: Offset, most: int) -> Offset:
        """The offset of the next batch, or `start` itself."""
        try:
            return self._ask(self._planning.following(start, most))
        except SluicewayError as error:
            # Spark shows the whole traceback, which would bury the error's own text.
            raise error.with_traceback(None) from None

    def read_up_to_now(self) -> None:
        """Let `following` end once everything present now is read."""
        self._ask(self._read_up_to_now())

    async def _read_up_to_now(self) -> None:
        self._planning.read_up_to_now()

    def stop(self) -> None:
        """Let the member leave, waiting some seconds."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave)
        wait((self._ended,), _LEAVE)

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:
            # The loop is closed.
            question.close()
            self._ended.result()
            raise
        both: list[Future[Any]] = [answer, self._ended]
        wait(both, return_when=FIRST_COMPLETED)
        if answer.done() and not answer.cancelled():
            return answer.result()
        # The member has ended, and all work there with it.
        answer.cancel()
        self._ended.result()
        raise SluicewayError("unavailable", "the query's member of the capture has left")

    def _live(self) -> None:
        planning = self._planning
        member = run_member(self._config, stop=self._stop, name_hint="query", handler=planning.begin, watch=planning.watch)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(member)
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _leave(self) -> None:
        self._planning.close()
        self._stop.set()
