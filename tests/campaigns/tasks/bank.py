"""Tables that pgbench writes to, and their copy, made from nothing but what a capture handed on.

Everything is in one database: the tables in `public`, which is published, and the copy in `copied`, which is not.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.server.server_process import PATIENCE
from tests.servers.postgres_server import PostgresServer, binaries

TABLES = {"accounts": "id", "orders": "id"}
"""With their keys."""
PUBLICATION = "bank"
ACCOUNTS = 1_000
SCHEMA = (
    "CREATE TABLE accounts (id bigint PRIMARY KEY, balance numeric(20, 4) NOT NULL, note text, changed timestamptz NOT NULL DEFAULT now())",
    "CREATE TABLE orders (id bigserial PRIMARY KEY, account bigint NOT NULL, amount double precision, paid boolean NOT NULL, tag jsonb)",
    f"CREATE PUBLICATION {PUBLICATION} FOR TABLE accounts, orders",
    "CREATE SCHEMA copied",
    *(f"CREATE TABLE copied.{table} (LIKE public.{table} INCLUDING ALL)" for table in TABLES),
)
SCRIPT = f"""
\\set id random(1, {ACCOUNTS})
\\set other random(1, {ACCOUNTS})
\\set delta random(-5000, 5000)
BEGIN;
UPDATE accounts SET balance = balance + :delta / 7.0, changed = clock_timestamp(), note = repeat('n', :delta % 50) WHERE id = :id;
INSERT INTO orders (account, amount, paid, tag) VALUES (:id, :delta / 3.0, :delta % 2 = 0, jsonb_build_object('of', :other));
DELETE FROM orders WHERE id IN (SELECT id FROM orders WHERE account = :other ORDER BY id LIMIT 1);
UPDATE orders SET paid = true, tag = NULL WHERE account = :other AND NOT paid;
END;
"""


class Bank:
    """The tables, and pgbench that writes to them, again and again as its server is killed."""

    def __init__(self, server: PostgresServer, folder: Path, clients: int = 2, rate: int = 100) -> None:
        """`rate`: transactions a second that are aimed at."""
        self._server, self._folder = server, folder
        self._clients, self._rate = clients, rate
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgbench")
        self._child: subprocess.Popen[bytes] | None = None
        self.runs = 0

    def create(self) -> None:
        with self.connected() as connection:
            for statement in SCHEMA:
                connection.execute(statement.encode())

    def fill(self) -> None:
        """What is there before anything changes; it is captured like all else."""
        with self.connected() as connection:
            connection.execute(
                """
                INSERT INTO accounts
                SELECT n, n * 10, CASE WHEN mod(n, 3) = 0 THEN NULL ELSE 'é "' || n END FROM generate_series(1, %s) AS n
                """,
                (ACCOUNTS,),
            )

    @contextlib.contextmanager
    def connected(self) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            yield connection

    # ---- load -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        (self._folder / "bank.sql").write_text(SCRIPT)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        where = conninfo_to_dict(self._server.dsn())
        command = [str(binaries() / "pgbench"), "-n", "-f", str(self._folder / "bank.sql"), "-c", str(self._clients), "-R", str(self._rate)]
        command += ["-T", "3600", "-h", str(where["host"]), "-p", str(where["port"]), "-U", str(where["user"]), str(where["dbname"])]
        while not self._stopping.is_set():
            with (self._folder / "pgbench.log").open("ab") as log:
                self._child = subprocess.Popen(command, stdout=log, stderr=log, env={"PGPASSWORD": str(where["password"])})
            self.runs += 1
            while self._child.poll() is None:
                if self._stopping.wait(0.1):
                    self._child.terminate()
                    self._child.wait(PATIENCE)
            # Its server was killed. It ends by itself, and is started again when that answers.
            self._stopping.wait(0.3)

    def rows(self) -> dict[str, int]:
        with self.connected() as connection:
            return {table: _count(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))) for table in TABLES}


def _count(connection: psycopg.Connection[Any], query: sql.Composed) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


# ---- the copy -----------------------------------------------------------------------------------------------------------


def apply_changes(bank: Bank, payloads: Sequence[str]) -> list[str]:
    """Do to the copy what each change says, in their order. What cannot be done is wrong: a row that is there already was inserted twice,
    one that is not there was lost, or its change came too early."""
    wrong: list[str] = []
    with bank.connected() as connection, connection.transaction():
        columns = {table: _columns(connection, table) for table in TABLES}
        for at, payload in enumerate(payloads):
            change = json.loads(payload)
            table = str(change["table"]).removeprefix("public.")
            if table not in TABLES:
                wrong.append(f"change {at} is of table {change['table']!r}")
                continue
            if _apply(connection, table, columns[table], change) != 1:
                wrong.append(f"change {at} does not fit: {payload[:200]}")
    return wrong


def _columns(connection: psycopg.Connection[Any], table: str) -> list[str]:
    found = connection.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s", (table,)
    ).fetchall()
    return [name for (name,) in found]


def _apply(connection: psycopg.Connection[Any], table: str, columns: Sequence[str], change: dict[str, Any]) -> int:
    """How many rows it changed."""
    key = TABLES[table]
    where = sql.Identifier("copied", table)
    if change["op"] == "delete":
        query = sql.SQL("DELETE FROM {} WHERE {} = %s").format(where, sql.Identifier(key))
        return connection.execute(query, (change["key"][key],)).rowcount
    row = json.dumps(change["new"])
    if change["op"] == "insert":
        query = sql.SQL("INSERT INTO {0} SELECT * FROM json_populate_record(NULL::{0}, %s) ON CONFLICT DO NOTHING").format(where)
        return connection.execute(query, (row,)).rowcount
    named = [name for name in columns if name not in (change.get("unchanged") or ())]
    query = sql.SQL("UPDATE {0} AS old SET {1} FROM json_populate_record(NULL::{0}, %s) AS new WHERE old.{2} = %s").format(
        where, sql.SQL(", ").join(sql.SQL("{0} = new.{0}").format(sql.Identifier(name)) for name in named), sql.Identifier(key)
    )
    return connection.execute(query, (row, (change.get("key") or change["new"])[key])).rowcount


def differences(bank: Bank) -> list[str]:
    """Rows that only the tables have, or only the copy."""
    found: list[str] = []
    with bank.connected() as connection:
        for table in TABLES:
            for only, here, there in (("the table", "public", "copied"), ("the copy", "copied", "public")):
                query = sql.SQL("TABLE {} EXCEPT ALL TABLE {} LIMIT 5").format(sql.Identifier(here, table), sql.Identifier(there, table))
                found += [f"only {only} {table} has {row}" for row in connection.execute(query).fetchall()]
    return found
