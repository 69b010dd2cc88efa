"""What an item was before it was produced anew: headers that say so, as dead letters have them."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from sluiceway.kernel.limits import MAX_HEADER_BYTES

ORIGIN, ATTEMPTS, ENQUEUED = "sluiceway-origin", "sluiceway-attempts", "sluiceway-enqueued-at"
_MOST = 2**31 - 1


def history() -> dict[str, Column]:
    """Of a leased item: its origin, how often it was leased before, and when it was produced. What its headers say of that already, from
    where it was before, stays; attempts are added up, to at most _MOST: a producer's own header may say anything.
    """
    before = F.greatest(F.coalesce(_told(ATTEMPTS).try_cast("int"), F.lit(0)), F.lit(0)).cast("bigint")
    # From seconds, so that no session's time zone matters.
    utc = F.lit("1970-01-01").cast("timestamp_ntz") + F.make_dt_interval(secs=F.unix_seconds("enqueued_at"))
    produced = F.date_format(utc, "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return {
        ORIGIN: F.coalesce(_told(ORIGIN), F.col("origin")),
        ATTEMPTS: F.least(before + F.col("attempts") - 1, F.lit(_MOST)).cast("string"),
        ENQUEUED: F.coalesce(_told(ENQUEUED), produced),
    }


def with_headers(own: Column, more: dict[str, Column]) -> Column:
    """The headers `own` (a map, or null), and these in place of those of the same names.

    `own` as they are where all of them are more than an item may have, or where a name is there twice, which only the server can write.
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
    """The last of that name: a dead queue writes its own behind the producer's."""
    found = F.filter(F.map_entries("headers"), lambda pair: pair["key"] == name)
    return F.try_element_at(found, F.lit(-1))["value"]
