"""The job `process`: runs a user's function on each batch of a queue's items, and settles its outcomes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.jobs.common import Followed, Place, ProgressListener, Stop, follow, items_leased, never, unheard
from sluiceway.spark.settle import check_columns, settle
from sluiceway.spark.spark_errors import translated

Work = Callable[..., DataFrame | None]
"""(items) or (items, batch number) → outcomes, as `settle` takes them; None: all are done."""


def process(
    spark: SparkSession,
    work: Work,
    place: Place,
    *,
    checkpoint: str | Path,
    consumer: str = "process",
    once: bool = False,
    max_items: int | None = None,
    hold_for: str | None = None,
    strict: bool = False,
    tell: ProgressListener = unheard,
    stop: Stop = never,
) -> Followed:
    """Run `work` on each batch of items and settle the outcomes it returns; restarted from its checkpoint it continues with the same items.

    Items without an outcome are done; with `strict` they are an error. An exception in `work` is raised here, and nothing of its batch is
    settled. `once`: end when what was ready at the start is processed; otherwise when `stop` says so.
    """
    batch = _Batch(work, place, strict)
    options = place.options(consumer=consumer, maxItemsPerTrigger=max_items, holdFor=hold_for)
    try:
        items = spark.readStream.format("sluiceway").options(**options).load()
        writer = items.writeStream.foreachBatch(batch).queryName(f"process {place.queue}")
        writer = writer.option("checkpointLocation", str(Path(checkpoint).expanduser().absolute()))
        query = (writer.trigger(availableNow=True) if once else writer).start()
    except (PySparkException, Py4JJavaError) as error:
        raise translated(error) from error
    try:
        return follow("process", query, tell, stop, items_leased)
    except SluicewayError:
        if batch.failed is None:
            raise
    # Raise the function's own exception, with its traceback, instead of Spark's textual version.
    raise batch.failed


class _Batch:
    """Processes each batch. `failed`: the function's exception, unless it was Spark's."""

    def __init__(self, work: Work, place: Place, strict: bool) -> None:
        self.failed: Exception | None = None
        self._work, self._place, self._strict = work, place, strict
        self._numbered = _takes_number(work)

    def __call__(self, items: DataFrame, number: int) -> None:
        try:
            self._run(items, number)
        except Exception as error:
            # An error of Sluiceway's tasks is best reported by its own text, which Spark's contains.
            if not (isinstance(error, PySparkException | Py4JJavaError) and "SluicewayError: " in str(error)):
                self.failed = error
            raise

    def _run(self, items: DataFrame, number: int) -> None:
        outcomes: Any = self._work(items, number) if self._numbered else self._work(items)
        if outcomes is None:
            if self._strict:
                raise invalid("outcome", "the function returned None, and every item needs an outcome (strict)")
            return
        if not isinstance(outcomes, DataFrame):
            what = type(outcomes).__name__
            raise invalid("function", f"it returned {what}; expected a DataFrame with the columns id and outcome, or None")
        check_columns(outcomes.schema)
        if not self._strict:
            self._settle(outcomes)
            return
        kept = outcomes.persist()
        try:
            _check_all(items, kept)
            self._settle(kept)
        finally:
            kept.unpersist()

    def _settle(self, outcomes: DataFrame) -> None:
        place = self._place
        more = {"request_timeout": place.request_timeout, "api_key": place.api_key, "ca_file": place.ca_file}
        settle(outcomes, url=place.url, queue=place.queue, **more)


def _check_all(items: DataFrame, outcomes: DataFrame) -> None:
    """Raises `invalid_request` unless the outcomes name each of the items once, and no other."""
    key = ["id"] if "id" in outcomes.columns else ["partition", "offset"]
    named = outcomes.groupBy(*key).agg(F.count("*").alias("times"))
    both = items.select(*key, F.lit(1).alias("given")).join(named, key, "full_outer")
    missing, foreign, often = F.col("times").isNull(), F.col("given").isNull(), F.col("times") > 1
    counts = [F.count_if(each).alias(name) for name, each in (("missing", missing), ("foreign", foreign), ("often", often))]
    one = F.first(F.when(missing | foreign | often, F.concat_ws(" ", *key)), ignorenulls=True).alias("one")
    found = both.agg(*counts, one).first()
    assert found is not None
    if found["missing"] or found["foreign"] or found["often"]:
        told = f"{found['missing']} without an outcome, {found['often']} named more than once, {found['foreign']} that are not in the batch"
        raise invalid("outcome", f"every item needs one outcome (strict), and there are items {told}, such as {found['one']}")


def _takes_number(work: Work) -> bool:
    """Whether the function also takes the batch number. Raises `invalid_request` if it accepts neither form."""
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):
        return False
    for arguments in ((None,), (None, 0)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    name = getattr(work, "__name__", "the function")
    raise invalid("function", f"{name} must take one argument, the items, or two: the items and the batch's number")
