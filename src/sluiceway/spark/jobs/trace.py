"""Trace headers: the history of an item that is produced again, in the form of dead letters."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from sluiceway.kernel.limits import MAX_HEADER_BYTES

ORIGIN, ATTEMPTS, ENQUEUED = "sluiceway-origin", "sluiceway-attempts", "sluiceway-enqueued-at"
_MOST = 2**31 - 1


def history() -> dict[str, Column]:
    """Columns for a leased item's history: its origin, its number of earlier attempts, and its produce time. Existing headers from an
    earlier place win; attempts are added up, capped at _MOST, since a producer's own header may say anything."""
    before = F.greatest(F.coalesce(_told(ATTEMPTS).try_cast("int"), F.lit(0)), F.lit(0)).cast("bigint")
    # From seconds, so that the session's time zone is irrelevant.
    utc = F.lit("1970-01-01").cast("timestamp_ntz") + F.make_dt_interval(secs=F.unix_seconds("enqueued_at"))
    produced = F.date_format(utc, "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return {
        ORIGIN: F.coalesce(_told(ORIGIN), F.col("origin")),
        ATTEMPTS: F.least(before + F.col("attempts") - 1, F.lit(_MOST)).cast("string"),
        ENQUEUED: F.coalesce(_told(ENQUEUED), produced),
    }


def with_headers(own: Column, more: dict[str, Column]) -> Column:
    """The headers `own` (a map, or null) with `more` added, replacing those of the same names.

    Returns `own` unchanged where the result exceeds an item's limit, or where a name occurs twice, which only the server can write.
    """
    others = F.map_filter(own, lambda name, _: ~name.isin(*more))
    added = F.array(*(F.struct(F.lit(name).alias("key"), value.alias("value")) for name, value in more.items()))
    entries = F.when(own.isNull(), added).otherwise(F.concat(F.map_entries(others), added))
    length = F.aggregate(entries, F.lit(0), lambda total, each: total + _length(each["key"]) + _length(each["value"]))
    once = F.size(F.array_distinct(F.transform(entries, lambda each: each["key"]))) == F.size(entries)
    return F.when((length <= MAX_HEADER_BYTES) & once, F.map_from_entries(entries)).otherwise(own)


def _length(text: Column) -> Column:
    return F.coalesce(F.octet_length(text), F.lit(0))


def _told(name: str) -> Column:
    """The last header of that name: a dead queue appends its own after the producer's."""
    found = F.filter(F.map_entries("headers"), lambda pair: pair["key"] == name)
    return F.try_element_at(found, F.lit(-1))["value"]
