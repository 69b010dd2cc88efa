"""A step of a rebalance caught in the act, from outside: by a lock on which its commit waits in the meta store's own database.

Nothing in the product knows of it. The n-th step of a queue's newest rebalance is its n-th *mark*: each change of the record's state, of
its next step or of what is done. Changes of its counters are none.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import apsw
import psycopg

from tests.server.server_process import PATIENCE, wait_until

LOCK = 7_302_651
_NOTE = f"""
CREATE TABLE public.step (
    id bigserial PRIMARY KEY, queue text NOT NULL, rebalance text NOT NULL, state text NOT NULL, step text NOT NULL, done int NOT NULL,
    writer text NOT NULL);
CREATE TABLE public.stop (queue text PRIMARY KEY, nth int NOT NULL);
CREATE FUNCTION public.note_step() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE fresh jsonb; reached int;
BEGIN
    IF NEW.value IS NULL OR substring(NEW.key FROM 1 FOR 10) <> 'rebalance/'::bytea THEN
        RETURN NULL;
    END IF;
    fresh := convert_from(NEW.value, 'UTF8')::jsonb;
    IF (fresh->>'state', fresh->>'step', jsonb_array_length(fresh->'done')) IS NOT DISTINCT FROM
            (SELECT (state, step, done) FROM public.step WHERE rebalance = fresh->>'id' ORDER BY id DESC LIMIT 1) THEN
        RETURN NULL;
    END IF;
    INSERT INTO public.step (queue, rebalance, state, step, done, writer) VALUES (
        fresh->>'queue_name', fresh->>'id', fresh->>'state', fresh->>'step', jsonb_array_length(fresh->'done'),
        current_setting('application_name'));
    SELECT count(*) INTO reached FROM public.step WHERE rebalance = fresh->>'id';
    IF EXISTS (SELECT 1 FROM public.stop WHERE queue = fresh->>'queue_name' AND nth = reached) THEN
        PERFORM pg_advisory_xact_lock({LOCK});
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_step AFTER INSERT OR UPDATE ON sluiceway_meta.entry FOR EACH ROW EXECUTE FUNCTION public.note_step();
"""
_TAKEN = "SELECT rebalance, state, step, done, writer FROM public.step WHERE rebalance = %s ORDER BY id"
_WAITING = """
SELECT pid, application_name FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'"""


class Step(NamedTuple):
    """How a rebalance was recorded at one moment. `done`: so many steps are. `writer`: the process (its instance, and its start)."""

    rebalance: str
    state: str
    step: str
    done: int
    writer: str = ""

    def __str__(self) -> str:
        return f"{self.state}, {self.done} done, next {self.step}"


class Held(NamedTuple):
    """A commit that is complete but for its end: it is seen by nobody yet."""

    pid: int
    """The session's process, in the database."""
    writer: str


class PostgresSteps:
    """Of a meta store in PostgreSQL. The commit that takes a step waits, and with it every other commit: so not for long."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True, application_name="steps.0")
        self._connection.execute(_NOTE)

    def close(self) -> None:
        self._connection.close()

    def taken(self, rebalance: str) -> list[Step]:
        """The marks of that rebalance, in order."""
        return [Step(*row) for row in self._connection.execute(_TAKEN, [rebalance]).fetchall()]

    @contextlib.contextmanager
    def armed(self, queue: str, nth: int) -> Iterator[None]:
        """Whoever commits the n-th mark of a rebalance of that queue waits, for the length of the block or until `let` or `undo`."""
        self._connection.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        self._connection.execute("INSERT INTO public.stop VALUES (%s, %s)", [queue, nth])
        try:
            yield
        finally:
            self._disarm()

    def held(self) -> Held | None:
        """Who waits at this moment."""
        row = self._connection.execute(_WAITING).fetchone()
        return None if row is None else Held(*row)

    def let(self, held: Held) -> None:
        """Its commit is done, whether its client is still there or not; returns when it is."""
        self._disarm()
        wait_until(lambda: self.held() is None, f"the end of the commit of {held.writer}")

    def undo(self, held: Held) -> None:
        """Its commit fails, as if it had never come."""
        # First of all the one who waits: otherwise it would go on when the lock is free.
        self._connection.execute("SELECT pg_terminate_backend(%s)", [held.pid])
        wait_until(lambda: self.held() != held, f"the end of the session of {held.writer}")
        self._disarm()

    def _disarm(self) -> None:
        self._connection.execute("DELETE FROM public.stop")
        self._connection.execute("SELECT pg_advisory_unlock_all()")


class SqliteSteps:
    """Of a meta store in an SQLite file, which is watched closely: as soon as a step is there, no other can be taken."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def catching(self, queue: str, nth: int, known: Collection[str]) -> Iterator[Callable[[], Step | None]]:
        """What is called in the block returns once a rebalance of that queue that is not `known` has n-1 steps done, or more; nothing is
        committed from then on until the block is left. None: it has ended before."""
        db = apsw.Connection(str(self._path))
        db.set_busy_timeout(10_000)
        try:
            yield lambda: _caught(db, queue, nth, known)
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
            db.close()


ENDED = ("done", "cancelled", "failed")


def _caught(db: apsw.Connection, queue: str, nth: int, known: Collection[str]) -> Step | None:
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE
    while True:
        step = _newest(db, queue, known)
        if step is not None and step.done >= nth - 1:
            db.execute("BEGIN IMMEDIATE")
            step = _newest(db, queue, known)
            assert step is not None
            return None if step.state in ENDED else step
        assert time.monotonic() < deadline, f"step {nth} of {queue} was not reached within {PATIENCE:.0f} s; it is at {step}"
        pause.wait(0.000_2)


def _newest(db: apsw.Connection, queue: str, known: Collection[str]) -> Step | None:
    rows = db.execute("SELECT value FROM entry WHERE key >= ? AND key < ? AND value IS NOT NULL", (b"rebalance/", b"rebalance0")).fetchall()
    records = [json.loads(cast(bytes, value)) for (value,) in rows]
    mine = [step_of(record) for record in records if record["queue_name"] == queue and record["id"] not in known]
    return max(mine, default=None, key=lambda step: step.rebalance)


def step_of(record: dict[str, Any]) -> Step:
    return Step(record["id"], record["state"], record["step"], len(record["done"]))
