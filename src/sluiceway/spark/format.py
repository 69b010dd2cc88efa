"""`format("sluiceway")`: Spark's entry point to the readers and writers."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.browse import BROWSED, BrowseReader
from sluiceway.spark.columns import Columns, ItemColumns, JsonColumns
from sluiceway.spark.consume import ConsumeReader, give_back, take
from sluiceway.spark.offsets import HeldLease
from sluiceway.spark.options import browse_options, consume_options, consumes, leases, server_options, sink_options, source_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.settle import BatchSettle, StreamSettle
from sluiceway.spark.sink import BatchSink, StreamSink
from sluiceway.spark.source import LeaseStreamReader, RefusedReader
from sluiceway.spark.worker_errors import plain_errors


class SluicewaySource(DataSource):
    """A queue as a stream source, as a read-only table, and as a batch and stream sink. `docs/reference/spark.md` has the options."""

    @plain_errors()
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        server_options(options)
        self._taken: tuple[HeldLease, ...] = ()
        if consumes(options):
            # Here and not in `reader`: Spark creates this once per DataFrame, and a reader at each planning. If `load` fails afterwards,
            # the leases are not given back: the same consumer's next `load` finds them.
            self._taken = take(consume_options(options))

    @classmethod
    def name(cls) -> str:
        return "sluiceway"

    @plain_errors()
    def schema(self) -> StructType:
        # Spark calls this only for readers, when they are loaded: the first place where a wrong option can be reported.
        if consumes(self.options):
            json, columns = consume_options(self.options).json, SCHEMA
        elif leases(self.options):
            json, columns = source_options(self.options).json, SCHEMA
        else:
            json, columns = browse_options(self.options).json, BROWSED
        if json:
            raise invalid("payloadFormat", 'json requires a schema, such as .schema("shop int, amount double")')
        return columns

    @plain_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        if consumes(self.options):
            options = consume_options(self.options)
            return ConsumeReader(options, self._taken, _columns(schema, json=options.json))
        return BrowseReader(schema, browse_options(self.options))

    def streamReader(self, schema: StructType) -> LeaseStreamReader:
        try:
            self._only_read()
            options = source_options(self.options)
            return LeaseStreamReader(options, _columns(schema, json=options.json))
        except SluicewayError as error:
            # Only here is it known that the `load` was for a stream. PySpark buries an exception raised here under an UnboundLocalError of
            # its own.
            return RefusedReader(error)

    @plain_errors()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        self._only_read()
        _append_only(overwrite)
        options = sink_options(self.options)
        return BatchSettle(schema, options) if options.mode == "settle" else BatchSink(schema, options)

    @plain_errors()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        self._only_read()
        _append_only(overwrite)
        options = sink_options(self.options)
        return StreamSettle(schema, options) if options.mode == "settle" else StreamSink(schema, options)

    def _only_read(self) -> None:
        """Raises `invalid_request` if items were taken: only now does Spark reveal that the options are not for `spark.read`."""
        if consumes(self.options):
            give_back(consume_options(self.options), self._taken)
            raise invalid("mode", "mode=consume is for spark.read only; spark.readStream always consumes")


def _columns(schema: StructType, *, json: bool) -> Columns:
    """What makes rows of `schema` out of leased items. Raises `invalid_request` for columns that cannot be made."""
    return JsonColumns(schema, SCHEMA) if json else ItemColumns(schema, SCHEMA)


def _append_only(overwrite: bool) -> None:
    if overwrite:
        raise invalid("mode", 'a queue cannot be overwritten; use .mode("append")')
