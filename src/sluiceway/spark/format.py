"""`format("sluiceway")`: what Spark asks for a reader or a writer."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from sluiceway.kernel.errors import invalid
from sluiceway.spark.browse import BROWSED, BrowseReader
from sluiceway.spark.options import browse_options, leases, server_options, sink_options, source_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.settle import BatchSettle, StreamSettle
from sluiceway.spark.sink import BatchSink, StreamSink
from sluiceway.spark.source import LeaseStreamReader


class SluicewaySource(DataSource):
    """A queue as a stream source, as a table to look at, and as a batch and stream sink. The options are described in `docs/spark.md`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        server_options(options)

    @classmethod
    def name(cls) -> str:
        return "sluiceway"

    def schema(self) -> StructType:
        # Spark asks this of readers only, as soon as they are loaded: the first place where a wrong option can be told.
        if leases(self.options):
            source_options(self.options)
            return SCHEMA
        browse_options(self.options)
        return BROWSED

    def reader(self, schema: StructType) -> BrowseReader:
        return BrowseReader(schema, browse_options(self.options))

    def streamReader(self, schema: StructType) -> LeaseStreamReader:
        source_options(self.options)
        if schema.simpleString() != SCHEMA.simpleString():
            raise invalid("schema", "the columns of an item are fixed; leave out .schema(...)")
        return LeaseStreamReader(source_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        _append_only(overwrite)
        options = sink_options(self.options)
        return BatchSettle(schema, options) if options.mode == "settle" else BatchSink(schema, options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        _append_only(overwrite)
        options = sink_options(self.options)
        return StreamSettle(schema, options) if options.mode == "settle" else StreamSink(schema, options)


def _append_only(overwrite: bool) -> None:
    if overwrite:
        raise invalid("mode", 'a queue cannot be overwritten; use .mode("append")')
