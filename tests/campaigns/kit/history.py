"""Who wrote what, as the storage saw it.

This is how one can tell from outside that a partition never had two owners: each fence belongs to one process, and fences only rise.
In PostgreSQL a trigger notes each change of a partition's row, and in whose session it was made; a bucket of the tests' own notes each
opening and cycle that it takes, and with whose key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import psycopg

from tests.servers.faulty_bucket import FaultyBucket

_NOTE = """
CREATE TABLE public.history (
    id bigserial PRIMARY KEY, incarnation text NOT NULL, partition bigint NOT NULL,
    fence_era bigint NOT NULL, fence_grant bigint NOT NULL, fence_opening bigint NOT NULL, txn bigint NOT NULL, writer text NOT NULL);
CREATE FUNCTION public.note_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' OR (NEW.fence_era, NEW.fence_grant, NEW.fence_opening, NEW.txn)
            IS DISTINCT FROM (OLD.fence_era, OLD.fence_grant, OLD.fence_opening, OLD.txn) THEN
        INSERT INTO public.history (incarnation, partition, fence_era, fence_grant, fence_opening, txn, writer) VALUES (
            NEW.incarnation, NEW.partition, NEW.fence_era, NEW.fence_grant, NEW.fence_opening, NEW.txn,
            current_setting('application_name'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_history AFTER INSERT OR UPDATE ON sluiceway.partition FOR EACH ROW EXECUTE FUNCTION public.note_history();
"""
_HEAD = re.compile(r"partitions/([^/]+)-(\d+)/head$")
_WRITES = """
SELECT id, incarnation, partition, fence_era, fence_grant, fence_opening, txn, writer FROM public.history WHERE id > %s ORDER BY id"""

Place = tuple[str, int]
"""Incarnation and partition."""
Fence = tuple[int, int, int]


class Write(NamedTuple):
    id: int
    """Of one partition's writes, a later commit has the higher one: the partition's row is locked from the note to the commit."""
    place: Place
    fence: Fence
    txn: int
    writer: str
    """The process: the instance's name, and how often it was started."""


def instance_of(writer: str) -> str:
    return writer.partition(".")[0]


def faults(writes: Sequence[Write]) -> list[str]:
    """What cannot be if every partition has one owner at a time."""
    found = []
    newest: dict[Place, Write] = {}
    owners: dict[tuple[Place, Fence], str] = {}
    for write in writes:
        before = newest.get(write.place)
        if before is not None and write.fence < before.fence:
            found.append(f"{write.place} went back from fence {before.fence} to {write.fence}, by {write.writer}")
        if before is not None and write.txn < before.txn:
            found.append(f"{write.place} went back from turn {before.txn} to {write.txn}, by {write.writer}")
        owner = owners.setdefault((write.place, write.fence), write.writer)
        if owner != write.writer:
            found.append(f"{write.place} was written by {owner} and by {write.writer} under one fence, {write.fence}")
        newest[write.place] = write
    return found


def written_too_late(after: Sequence[Write], at: dict[Place, Write], instance: str) -> list[Write]:
    """Of what was written `after` another process had a partition (`at`: the newest write of each by then), what the instance wrote under
    a fence that was over."""
    return [
        write
        for write in after
        if instance_of(write.writer) == instance
        and write.place in at
        and write.fence <= at[write.place].fence
        and write.writer != at[write.place].writer
    ]


class History(Protocol):
    """The writes of all partitions of a fleet."""

    def writes(self, after: int = 0) -> Sequence[Write]:
        """Those with a higher id, in order."""
        ...


def newest(writes: Sequence[Write]) -> dict[Place, Write]:
    """The newest write of each partition."""
    return {write.place: write for write in writes}


class PostgresHistory:
    """Reads and writes nothing but its own table. The tables of the backend must be there already."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        with self._connect() as connection:
            connection.execute(_NOTE)

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self._dsn, autocommit=True, application_name="history.0")

    def writes(self, after: int = 0) -> list[Write]:
        with self._connect() as connection:
            rows = connection.execute(_WRITES, [after]).fetchall()
        return [Write(row[0], (row[1], row[2]), (row[3], row[4], row[5]), row[6], row[7]) for row in rows]  # type: ignore[arg-type]


class BucketHistory:
    """Of the partitions below a prefix of a bucket."""

    def __init__(self, bucket: FaultyBucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def writes(self, after: int = 0) -> list[Write]:
        found = []
        for number, (_, head, writer, fence, txn) in enumerate(self._bucket.cycles(after), after + 1):
            if head.startswith(f"{self._prefix}/") and (place := _HEAD.search(head)):
                found.append(Write(number, (place[1], int(place[2])), fence, txn, writer))
        return found
