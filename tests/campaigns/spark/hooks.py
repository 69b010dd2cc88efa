"""Inside Spark's processes: points at which a query is killed or held up, and a record of what each task has read.

A driver that is started with SLUICEWAY_CAMPAIGN registers `HookedSource` in the place of `sluiceway`; wherever Spark makes one, in the
process of the reader or of a task, the calls to the server are hooked too. Each point is reached while Spark waits for an answer, so what
it has logged by then does not depend on time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from sluiceway.client.protocol import Call
from sluiceway.spark import admission
from sluiceway.spark.format import SluicewaySource
from sluiceway.spark.offsets import Offset
from sluiceway.spark.server_calls import Client
from sluiceway.spark.sink import BATCH_ID
from sluiceway.spark.source import LeaseStreamReader
from tests.campaigns.spark import sabotages
from tests.spark.spark_world import until

VARIABLE = "SLUICEWAY_CAMPAIGN"
IN_A_CALL = 10_000
"""Items that a call leases at most, so that a batch takes more than one."""


@dataclass(frozen=True)
class Stage:
    """`event` in the batch of that number (from 1), and what happens there: `kill` all of this query's processes, kill this `worker`, or
    `wait` until the campaign lets it go on."""

    event: str
    batch: int
    deed: str = "kill"

    @property
    def name(self) -> str:
        return f"{self.deed}-{self.event}-{self.batch}"


class Plan:
    """What is to happen, and the folder in which it is told and recorded."""

    def __init__(self, folder: Path, stages: Sequence[Stage], sabotage: str = "") -> None:
        self.folder = folder
        self.stages = tuple(stages)
        self.sabotage = sabotage

    def to_environment(self) -> dict[str, str]:
        stages = [[stage.event, stage.batch, stage.deed] for stage in self.stages]
        return {VARIABLE: json.dumps({"folder": str(self.folder), "stages": stages, "sabotage": self.sabotage})}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Plan:
        said = json.loads(environment[VARIABLE])
        return cls(Path(said["folder"]), [Stage(*stage) for stage in said["stages"]], said["sabotage"])

    def reached(self, stage: Stage) -> Path:
        """There as soon as the stage was reached; once for all runs on this folder."""
        return self.folder / f"reached-{stage.name}"

    def released(self, stage: Stage) -> Path:
        """The campaign makes it, and who waits there goes on."""
        return self.folder / f"released-{stage.name}"


def reach(event: str, batch: int) -> None:
    """This process is there now. What the plan has for this point happens once."""
    plan = Plan.of(os.environ)
    for stage in plan.stages:
        if (stage.event, stage.batch) != (event, batch) or not _first(plan.reached(stage)):
            continue
        if stage.deed == "kill":
            _kill_session()
        elif stage.deed == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            until(f"{stage.name} is released", plan.released(stage).exists, 900)


def _first(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _kill_session() -> None:
    """Everything that the campaign started with this driver, the JVM first: nothing is logged after this. Then this process itself."""
    mine = os.getpid()
    pids = [pid for pid in in_session(os.getsid(0)) if pid != mine]
    for pid in sorted(pids, key=lambda pid: _command(pid) != "java"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(mine, signal.SIGKILL)


def in_session(session: int) -> list[int]:
    """The processes of a session that still do something."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
            if int(its) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


class _Reader:
    """Of this process, if it is that of a reader."""

    start = 0
    """The batch that was done when it was last asked for the next."""


def _batch(path: str = "") -> int:
    """To which batch a call belongs; 0: to none. In a task Spark says so, the reader closes one and leases the next."""
    task = TaskContext.get()
    if task is None:
        return _Reader.start + (path == "/v1/queue.lease")
    number = task.getLocalProperty(BATCH_ID)
    return int(number) + 1 if number is not None else 0


class _Calls:
    """How often each call was answered in the batch at hand."""

    batch = -1
    answered: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def count(cls, path: str, batch: int) -> int:
        if batch != cls.batch:
            cls.batch, cls.answered = batch, {}
        cls.answered[path] = cls.answered.get(path, 0) + 1
        return cls.answered[path]


def _hook_calls() -> None:
    """`leased-1` is reached when the first call of a batch to `/v1/queue.lease` was answered, and so on."""
    verbs = {"lease": "leased", "complete": "completed", "produce": "produced", "settle": "settled"}

    def answered(path: str) -> None:
        batch = _batch(path)
        verb = verbs.get(path.rpartition(".")[2])
        if batch and verb:
            reach(f"{verb}-{_Calls.count(path, batch)}", batch)

    def hooked(name: str) -> None:
        honest = getattr(Client, name)

        def call(self: Client, path: str, *more: Any) -> Any:
            answer = honest(self, path, *more)
            if path == "/v1/queue.lease" and "complete" in more[0]:
                reach("completed-1", _Reader.start)
            answered(path)
            return answer

        setattr(Client, name, call)

    hooked("call")
    hooked("send_arrow")
    finish = Client.finish

    def finished(self: Client, call: Call[Any]) -> Any:
        answer = finish(self, call)
        answered(call.path.partition("?")[0])
        return answer

    Client.finish = finished  # type: ignore[method-assign]


if VARIABLE in os.environ:
    _hook_calls()
    vars(admission).update(MAX_ITEMS_UNREAD=IN_A_CALL)
    sabotages.apply(Plan.of(os.environ).sabotage)


class HookedReader(LeaseStreamReader):
    """Events, in their order: `initial`; `latest-end`; `commit` of the batch before; `partitions`, `partitions-end`; `read`; `closing`."""

    def initialOffset(self) -> dict[str, Any]:
        offset = super().initialOffset()
        reach("initial", 1)
        return offset

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        before = _Reader.start = Offset.parse(start).sequence
        reach("closing", before)
        end = super().latestOffset(start, limit)
        if end == start:
            reach("idle", before)
        else:
            reach("latest-end", before + 1)
        return end

    def commit(self, end: dict[str, Any]) -> None:
        reach("commit", Offset.parse(end).sequence)
        super().commit(end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        batch = Offset.parse(end).sequence
        reach("partitions", batch)
        tasks = super().partitions(start, end)
        reach("partitions-end", batch)
        return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        with _Record(Plan.of(os.environ).folder / "reads", _batch(), task.partitionId()) as record:
            for rows in super().read(partition):
                record.add(rows)
                reach("reading", _batch())
                yield rows
                reach("read", _batch())
            record.end()


class _Record:
    """The ids that one attempt of a task hands on, in their order, in a file of its own. One that was killed leaves those that it had."""

    def __init__(self, folder: Path, batch: int, task: int) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{batch}-{task}-{uuid.uuid4().hex}.part"
        self._file = pa.OSFile(str(self._path), "wb")
        self._stream: Any = None

    def add(self, rows: pa.RecordBatch) -> None:
        ids = rows.select(["id", "attempts"])
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._file, ids.schema)
        self._stream.write_batch(ids)

    def end(self) -> None:
        """The task has read all that it was to read."""
        self._path.rename(self._path.with_suffix(".whole"))

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class HookedStreamSink(DataSourceStreamArrowWriter):
    """Events: `sink` before the batch is committed in the sink, when all tasks have written; `sink-end` after it."""

    def __init__(self, honest: DataSourceStreamArrowWriter) -> None:
        self._honest = honest

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._honest.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        reach("sink", batchId + 1)
        self._honest.commit(messages, batchId)
        reach("sink-end", batchId + 1)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._honest.abort(messages, batchId)


class HookedSource(SluicewaySource):
    """In the place of `sluiceway`."""

    def streamReader(self, schema: StructType) -> LeaseStreamReader:
        reader = super().streamReader(schema)
        reader.__class__ = HookedReader
        return reader

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return HookedStreamSink(super().streamWriter(schema, overwrite))
