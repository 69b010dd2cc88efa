"""Outcomes of leased items, row by row: `settle(df)`, and the sink's `mode=settle`.

Outcomes are staged in the items' leases and take effect when these are closed: by the stream source, with the batch, or by `close` for
items taken with `spark.read`. Until then a replay of the batch reads every row, and stating the same outcome again changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import IntegralType, StringType, StructType

from sluiceway.client.outcome_rows import check_values
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON
from sluiceway.model.chunks import recut
from sluiceway.spark.options import SinkOptions
from sluiceway.spark.rows import SCHEMA, join_id
from sluiceway.spark.server_calls import Client
from sluiceway.spark.sink import QUERY_ID, check_once, in_lower_case
from sluiceway.spark.spark_errors import ours
from sluiceway.spark.task_clients import client_of_task
from sluiceway.spark.worker_errors import plain_errors

log = logging.getLogger("sluiceway.spark")

_IN_A_STREAM = "the stream source closes the leases of its batches itself, once they are in Spark's commit log; leave it out"

_REFUSED_HOLD = "1h"
"""Hold time of leases left open because of missing rows: the default of `holdFor`, or less if the queue allows less."""

_POSITION = {"partition": 2**31 - 1, "offset": 2**63 - 1}
"""The columns of an item's position, each with the largest number that the server takes."""
_USED = ("id", *_POSITION, "outcome", "retry_after_ms", "reason", "queue")
_WIRE = {"partition": pa.int32(), "offset": pa.int64(), "outcome": pa.utf8(), "retry_after_ms": pa.int64(), "reason": pa.utf8()}
_ID = r"^[^.]+\.[0-9]{1,9}\.[0-9]{1,18}$"


@dataclass(frozen=True)
class Settled(WriterCommitMessage):
    """Figures of one task; `ignored` items were no longer leased, so they are served again. `lease_ids` are to be closed; `ids` are then
    the items that the task named in them."""

    staged: int
    ignored: int
    lease_ids: frozenset[str] = frozenset()
    ids: tuple[pa.Array, ...] = ()


def settle(
    df: DataFrame,
    *,
    url: str,
    queue: str,
    request_timeout: str = "2m",
    api_key: str = "",
    ca_file: str = "",
    direct: bool | str = False,
    close: bool | str = False,
) -> None:
    """Stage the outcomes of leased items; returns when all are staged.

    Columns: `id`, or `partition` and `offset`; `outcome` (`done`, `retry` or `dead`); optionally `retry_after_ms` (milliseconds, with
    `retry`) and `reason` (text). The stream source's other columns may stay; any other column is an error. An outcome that is null or
    unknown, a `retry_after_ms` that is out of range or not with `retry`, and a `reason` of more than 2,048 bytes fail the write with
    `invalid_request`, which names the column and an item; types are checked before anything runs. Items without a row are done when the
    batch is closed. Idempotent, so it is suitable for `foreachBatch`; an item whose outcome may differ when the batch is repeated needs a
    row each time, also if it is done.

    With `close`, for items taken with `spark.read`, the leases in the column `lease_id` are closed when all outcomes are staged, which puts
    these into effect. Raises, and closes nothing, unless every open item in them is named. `api_key`, `ca_file` and `direct` are the
    options `apiKey`, `caFile` and `direct` of `docs/reference/spark.md`.
    """
    check_columns(df.schema)
    names = {name.lower(): name for name in df.columns}
    unused = _POSITION if "id" in names else ()
    wanted = [names[name] for name in (*_USED, *(["lease_id"] if close else [])) if name in names and name not in unused]
    options = {"url": url, "queue": queue, "requestTimeout": request_timeout, "apiKey": api_key, "caFile": ca_file}
    options |= {"direct": str(direct), "close": str(close), "mode": "settle"}
    try:
        df.select(*wanted).write.format("sluiceway").mode("append").options(**options).save()
    except (PySparkException, Py4JJavaError) as error:
        # The workers' tracebacks add nothing.
        if (refused := ours(error)) is not None:
            raise refused from None
        raise


def check_columns(schema: StructType) -> None:
    """Raises `invalid_request` that names the column at fault."""
    check_once(schema)
    known = {*_USED, *SCHEMA.names}
    names = [name.lower() for name in schema.names]
    for name in schema.names:
        if name.lower() not in known:
            raise invalid(name, f"unknown column of an outcome; expected one of {', '.join(_USED)}")
    if "outcome" not in names:
        raise invalid("outcome", f"this column is required; the columns are {', '.join(schema.names)}")
    if "id" not in names and not all(name in names for name in _POSITION):
        raise invalid("id", "the column id is required, or partition and offset")
    for name, field in zip(names, schema.fields, strict=True):
        if name in ("id", "outcome", "reason") and not isinstance(field.dataType, StringType):
            raise invalid(field.name, f"the column must be string, not {field.dataType.simpleString()}")
        if name in (*_POSITION, "retry_after_ms") and not isinstance(field.dataType, IntegralType):
            raise invalid(field.name, f"the column must be a whole number, not {field.dataType.simpleString()}")


class _Settle:
    """The common part of batch and stream sink; runs in a task."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        check_columns(schema)
        if options.close and "lease_id" not in [name.lower() for name in schema.names]:
            raise invalid("lease_id", f"to close leases this column is required; the columns are {', '.join(schema.names)}")
        self._server = options.server
        self._close = options.close

    @plain_errors()
    def run(self, batches: Iterator[pa.RecordBatch]) -> Settled:
        staged, ignored = 0, 0
        lease_ids: set[str] = set()
        ids: list[pa.Array] = []
        batches = map(in_lower_case, batches)
        if self._close:
            batches = _noting(batches, lease_ids)
        with client_of_task(self._server) as client:
            incarnation: str | None = None
            for chunk in recut((_checked(batch, self._server.queue) for batch in batches if batch.num_rows), MAX_ITEMS_ARROW):
                if "id" not in chunk.schema.names and incarnation is None:
                    info = client.call("/v1/queues.info", {"queue_name": self._server.queue})
                    incarnation = str(info["incarnation"])
                for name, outcomes in _located(chunk, incarnation):
                    answer = client.send_arrow("/v1/queue.settle", self._query(name, client), outcomes)
                    staged += int(answer["staged"])
                    ignored += len(answer["ignored"])
                    _check_known(answer["ignored"], self._server.queue)
                    if self._close:
                        ids.append(_staged(name, outcomes, answer["ignored"]))
        if ignored:
            log.warning("%d items were no longer leased when their outcomes were staged; they are served again", ignored)
        return Settled(staged, ignored, frozenset(lease_ids), tuple(ids))

    @plain_errors()
    def close(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Close the leases that the tasks have named. Idempotent.

        Raises `invalid_request`, and closes none, rather than complete items without an outcome.
        """
        settled = [message for message in messages if isinstance(message, Settled)]
        lease_ids = sorted({lease_id for message in settled for lease_id in message.lease_ids})
        if not lease_ids:
            return
        named = len(pc.unique(pa.chunked_array([each for message in settled for each in message.ids], pa.utf8())))
        portions = [lease_ids[start : start + MAX_ITEMS_JSON] for start in range(0, len(lease_ids), MAX_ITEMS_JSON)]
        client = Client(self._server)
        try:
            there = sum(self._open(client, some) for some in portions)
            if named != there:
                raise invalid("close", _not_each(named, there))
            for some in portions:
                answer = client.call("/v1/queue.complete", {"queue_name": self._server.queue, "lease_ids": some})
                if answer["ignored"]:
                    gone = ", ".join(entry["id"] for entry in answer["ignored"])
                    log.warning("leases ended before they were closed, so their items may be served again: %s", gone)
        finally:
            client.close()

    def _open(self, client: Client, lease_ids: list[str]) -> int:
        """The number of open items in these leases. Only extending them reveals it."""
        body = {"queue_name": self._server.queue, "lease_ids": lease_ids, "request_timeout": client.server_wait}
        try:
            answer = client.call("/v1/queue.extend", {**body, "lease_timeout": _REFUSED_HOLD})
        except SluicewayError as error:
            if error.field != "lease_timeout":
                raise
            # The queue's maximum is lower. Its default is enough for closing.
            answer = client.call("/v1/queue.extend", body)
        return sum(lease["count"] for lease in answer["leases"])

    def _query(self, incarnation: str, client: Client) -> dict[str, object]:
        return {"queue_name": self._server.queue, "incarnation": incarnation, "request_timeout": client.server_wait}


class BatchSettle(DataSourceArrowWriter):
    """`df.write` with `mode=settle`."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        self._settle = _Settle(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Settled:
        return self._settle.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._settle.close(messages)
        _report(messages)


class StreamSettle(DataSourceStreamArrowWriter):
    """`df.writeStream` with `mode=settle`."""

    def __init__(self, schema: StructType, options: SinkOptions) -> None:
        if options.close:
            raise invalid("close", _IN_A_STREAM)
        self._settle = _Settle(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Settled:
        return self._settle.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages)


def _noting(batches: Iterator[pa.RecordBatch], lease_ids: set[str]) -> Iterator[pa.RecordBatch]:
    """Pass the batches through, collecting their leases. Raises `invalid_request` inside a streaming query's batch."""
    task = TaskContext.get()
    if task is not None and task.getLocalProperty(QUERY_ID) is not None:
        raise invalid("close", _IN_A_STREAM)
    for batch in batches:
        lease_ids.update(pc.unique(batch.column("lease_id")).drop_null().to_pylist())
        yield batch


def _checked(batch: pa.RecordBatch, queue: str) -> pa.RecordBatch:
    """The relevant columns, with all values checked. Rows with a queue must have that one."""
    if "queue" in batch.schema.names:
        others = batch.column("queue").filter(pc.not_equal(batch.column("queue"), queue))
        if len(others):
            raise invalid(
                "queue",
                f"a row of {str(others[0].as_py())[:128]!r} cannot be settled in {queue!r}; settle the rows of each queue separately",
            )
    names = [name for name in batch.schema.names if name in _USED and name != "queue"]
    batch = batch.select(names)
    check_values(batch)
    if "id" in names:
        good = pc.match_substring_regex(batch.column("id"), _ID)
        bad = batch.column("id").filter(pc.invert(good), null_selection_behavior="emit_null")
        if len(bad):
            shown = "null" if bad[0].as_py() is None else repr(str(bad[0].as_py())[:64])
            raise invalid("id", f"{shown} is not an item id such as k7f3q2ma.0.1042")
    for name, most in _POSITION.items() if "id" not in names else ():
        place = batch.column(name)
        bad = place.filter(pc.or_(pc.less(place, 0), pc.greater(place, most)))
        if place.null_count or len(bad):
            raise invalid(name, f"{'null' if place.null_count else f'{bad[0].as_py():,}'} is not the position of an item")
    return batch


def _check_known(ignored: Sequence[dict[str, str]], queue: str) -> None:
    """Raises `invalid_request` for items of other queues: without an outcome they would be done."""
    for entry in ignored:
        if entry["reason"] == "unknown":
            raise invalid("id", f"{entry['id']} is not an item of the queue {queue!r}; settle the rows of each queue separately")


def _staged(incarnation: str, outcomes: pa.RecordBatch, ignored: Sequence[dict[str, str]]) -> pa.Array:
    """The ids of the items whose outcome is staged now."""
    ids = join_id(incarnation, outcomes.column("partition").cast(pa.utf8()), outcomes.column("offset"))
    return ids.filter(pc.invert(pc.is_in(ids, pa.array([entry["id"] for entry in ignored], pa.utf8()))))


def _not_each(named: int, there: int) -> str:
    return (
        f"the rows name {named:,} items, but {there:,} are open in the leases that they name; those without an outcome would be completed "
        "unread. No lease was closed, and they are kept for an hour, or for less if the queue allows less. State an outcome for each "
        "item, so filter, limit and join after the outcome and not before: case when … then 'dead' else 'done' end as outcome"
    )


def _located(chunk: pa.RecordBatch, incarnation: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Outcomes by position, grouped by incarnation: a single one, unless ids of a deleted queue are among them."""
    columns = {name: chunk.column(name) for name in chunk.schema.names if name != "id"}
    if incarnation is not None:
        yield incarnation, _wire(columns)
        return
    parts = pc.split_pattern(chunk.column("id"), ".")
    columns["partition"], columns["offset"] = pc.list_element(parts, 1), pc.list_element(parts, 2)
    incarnations = pc.list_element(parts, 0)
    for name in pc.unique(incarnations).to_pylist():
        mine = pc.equal(incarnations, name)
        yield name, _wire({key: column.filter(mine) for key, column in columns.items()})


def _wire(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    fields = [(name, kind) for name, kind in _WIRE.items() if name in columns]
    return pa.RecordBatch.from_arrays([columns[name].cast(kind) for name, kind in fields], schema=pa.schema(fields))


def _report(messages: Sequence[WriterCommitMessage | None]) -> None:
    settled = [message for message in messages if isinstance(message, Settled)]
    log.info("%d outcomes staged, %d ignored", sum(each.staged for each in settled), sum(each.ignored for each in settled))
