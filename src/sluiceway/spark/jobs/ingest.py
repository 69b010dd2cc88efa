"""The job `ingest`: stores rows of files as items, by a keyed write of existing files, or a stream over a folder."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.jobs.common import Followed, Place, Progress, ProgressListener, Stop, follow, never, unheard
from sluiceway.spark.jobs.files import FORMATS, JSON, PARQUET, check_lines, check_names, files_of, format_of
from sluiceway.spark.jobs.shape import Shape, shaped
from sluiceway.spark.options import sink_options
from sluiceway.spark.server_calls import Client
from sluiceway.spark.sink import BatchSink
from sluiceway.spark.spark_errors import translated

_GLANCE = 0.5
"""Seconds between two checks of the finished tasks."""
_FILES_OF_A_BATCH = 1_000
"""Files per batch of a watched folder, so that the first batch is not everything that ever was in it."""

_CUT = {
    "spark.sql.files.maxPartitionBytes": "16m",
    "spark.sql.files.openCostInBytes": "1m",
    "spark.sql.files.minPartitionNum": "4",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.streaming.schemaInference": "true",
}
"""All settings that decide how rows are divided into tasks, so that a repetition sends the same chunks on any number of cores."""


class Ingested(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a load. Of `chunks`, `repeated` were stored already, by an earlier run."""

    write_id: str
    files: int
    items: int
    chunks: int
    repeated: int


@dataclass(frozen=True)
class _Task:
    """Runs in each task: writes its rows, and returns one row of figures."""

    sink: BatchSink = field(repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            written = self.sink.write(batches)
        except SluicewayError as error:
            # Spark forwards only the text.
            raise RuntimeError(_MARK + json.dumps([error.code, error.detail, error.field])) from None
        figures = (written.items, written.chunks, written.deduplicated)
        yield pa.RecordBatch.from_pydict({name: [value] for name, value in zip(_FIGURES, figures, strict=True)})


_FIGURES = ("items", "chunks", "repeated")
_MARK = "refused: "


def ingest(
    spark: SparkSession,
    inputs: Sequence[str | Path],
    place: Place,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    shape: Shape | None = None,
    create: bool = False,
    partitions: int | None = None,
    write_id: str | None = None,
    announce: Callable[[str, int], None] | None = None,
    tell: ProgressListener = unheard,
) -> Ingested:
    """Store each row of the files as an item. Repeating the call adds nothing within the queue's `idempotency_window`.

    `inputs` are files and folders of one format. `announce` receives the write id and the number of files before anything is stored. Raises
    `invalid_request` if a file changes meanwhile; what was stored by then stays.
    """
    shape, options = shape or Shape(), dict(options or {})
    if not inputs:
        raise invalid("input", "pass a file or a folder")
    files = _files(inputs)
    format = _checked(format or format_of(files, ", ".join(map(str, inputs))), shape, options)
    if format == JSON and not options:
        check_lines(files)
    before = _look(files)
    write_id = write_id or _write_id(before, format, options, shape)
    target = sink_options(place.options(writeId=write_id))
    if create:
        _create(place, partitions)
    if announce is not None:
        announce(write_id, len(files))
    cut = _cutting(spark)
    try:
        rows = shaped(cut.read, format, [str(file) for file in files], _based(inputs, format) | options, shape)
        task = _Task(BatchSink(rows.schema, target))
        counted = rows.mapInArrow(task, ", ".join(f"{name} long" for name in _FIGURES))
        with _tasks_told(spark, tell):
            told = counted.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise _refusal(error) from error
    if _look(files) != before:
        raise invalid("input", f"files changed while they were read; what was read is stored under the write id {write_id}")
    figures = {name: sum(row[name] for row in told) for name in _FIGURES}
    return Ingested(write_id=write_id, files=len(files), **figures)


def watch(
    spark: SparkSession,
    folder: str | Path,
    place: Place,
    *,
    checkpoint: str | Path,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    schema: str | None = None,
    shape: Shape | None = None,
    create: bool = False,
    partitions: int | None = None,
    once: bool = False,
    tell: ProgressListener = unheard,
    stop: Stop = never,
) -> Followed:
    """Store each row of each file in the folder, present or future, once, however often the job is restarted from its checkpoint.

    `once`: end when everything present is stored; otherwise run until `stop` says so.
    """
    shape, options = shape or Shape(), dict(options or {})
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise invalid("watch", f"there is no folder {folder}")
    check_names([path])
    format = _checked(format or format_of(files_of(str(folder)), str(folder)), shape, options)
    if create:
        _create(place, partitions)
    reader = _cutting(spark).readStream.option("recursiveFileLookup", "true").option("maxFilesPerTrigger", _FILES_OF_A_BATCH)
    try:
        rows = shaped(reader if schema is None else reader.schema(schema), format, str(path), options, shape)
        writer = rows.writeStream.format("sluiceway").queryName(f"ingest {place.queue}")
        writer = writer.options(**place.options(), checkpointLocation=str(Path(checkpoint).expanduser().absolute()))
        query = (writer.trigger(availableNow=True) if once else writer).start()
    except (PySparkException, Py4JJavaError) as error:
        raise _refusal(error) from error
    return follow("ingest", query, tell, stop)


def _checked(format: str, shape: Shape, options: Mapping[str, str]) -> str:
    if format not in FORMATS:
        raise invalid("format", f"{format[:40]!r} is not a format; expected one of {', '.join(FORMATS)}")
    shape.check(format, bool(options))
    return format


def _files(inputs: Sequence[str | Path]) -> list[Path]:
    files = [file for given in inputs for file in files_of(str(given))]
    if len(set(files)) < len(files):
        raise invalid("input", "a file is named twice")
    check_names(files)
    return sorted(files)


def _based(inputs: Sequence[str | Path], format: str) -> dict[str, str]:
    """Options that let Spark find the partition columns in subfolder names."""
    folder = Path(inputs[0]).expanduser().absolute()
    return {"basePath": str(folder)} if format == PARQUET and len(inputs) == 1 and folder.is_dir() else {}


def _look(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and modification time of each file."""
    found = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError as error:
            raise invalid("input", f"{file} cannot be read: {error.strerror}") from None
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def _write_id(files: Sequence[tuple[str, int, int]], format: str, options: Mapping[str, str], shape: Shape) -> str:
    """The write id: identical for the same load and for no other, since it covers everything that decides its items and their chunks."""
    told = json.dumps([1, files, format, sorted(options.items()), shape.as_list(), sorted(_CUT.items())])
    return "ingest-" + hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _create(place: Place, partitions: int | None) -> None:
    """Create the queue; an existing one stays as it is."""
    client = Client(place.server())
    try:
        more = {} if partitions is None else {"requested_partitions": partitions}
        client.call("/v1/queues.create", {"queue_name": place.queue, **more})
    except SluicewayError as error:
        if error.code != "queue_exists":
            raise
    finally:
        client.close()


def _cutting(spark: SparkSession) -> SparkSession:
    """A session of the same application that reads files as `_CUT` says, without changing the caller's."""
    own = spark.newSession()
    for name, value in _CUT.items():
        own.conf.set(name, value)
    own.conf.unset("spark.sql.files.maxPartitionNum")
    return own


@contextmanager
def _tasks_told(spark: SparkSession, tell: ProgressListener) -> Iterator[None]:
    """Report the finished tasks of the job begun in this block."""
    context = spark.sparkContext
    group = uuid.uuid4().hex
    ended = threading.Event()
    look = partial(_tell_tasks, spark, group, tell)

    def run() -> None:
        while not ended.wait(_GLANCE):
            look()

    outer = context.getLocalProperty("spark.jobGroup.id")
    context.setJobGroup(group, "sluiceway ingest")
    watcher = threading.Thread(target=run, name="sluiceway-ingest-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", outer)  # type: ignore[arg-type]


def _tell_tasks(spark: SparkSession, group: str, tell: ProgressListener) -> None:
    tracker = spark.sparkContext.statusTracker()
    try:
        jobs = [job for number in tracker.getJobIdsForGroup(group) if (job := tracker.getJobInfo(number)) is not None]
        stages = [stage for job in jobs for number in job.stageIds if (stage := tracker.getStageInfo(number)) is not None]
    except Py4JError:
        # The job is ending; its result is reported elsewhere.
        return
    if stages:
        tell(Progress(job="ingest", tasks=sum(each.numTasks for each in stages), tasks_done=sum(each.numCompletedTasks for each in stages)))


def _refusal(error: Exception) -> SluicewayError:
    """A task's own error with its code; otherwise Spark's."""
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    _, mark, told = str(text).rpartition(f"RuntimeError: {_MARK}")
    if not mark:
        return translated(error)
    code, detail, at = json.loads(told.partition("\n")[0])
    # The unknown outcome of the last call is harmless: the load can be repeated.
    return SluicewayError("unavailable" if code == "outcome_unknown" else code, detail, at)
