"""What judges a capture must find what is wrong with one, and nothing in one that is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaigns.kit.ledger import Tally, payload_of
from tests.campaigns.tasks.bank import Bank, apply_changes, differences
from tests.campaigns.tasks.processes import mistakes
from tests.campaigns.tasks.records import Book, Place, Taken
from tests.servers.postgres_server import PostgresServer

LINEAGE = {"a": (), "b": ("a",), "c": ("b",), "d": ("b",), "e": ("c", "d")}
WRITTEN = [("w.1.0", "a", 1), ("w.1.1", "a", 2), ("w.1.2", "b", 1), ("w.1.3", "c", 1), ("w.1.4", "d", 7), ("w.1.5", "e", 1)]


def taken(*names: str) -> list[Taken]:
    return [Taken(payload_of(name), None, str(at)) for at, name in enumerate(names)]


def judged(items: list[Taken]) -> Tally:
    book, tally = Book(), Tally()
    book.sending([name for name, _, _ in WRITTEN] + ["w.2.0", "w.3.0"])
    for name, partition, number in WRITTEN:
        book.stored(name, Place(partition, number))
    book.refused(["w.3.0"])
    book.judge(tally, items, LINEAGE)
    return tally


ALL = [name for name, _, _ in WRITTEN]


def test_what_is_right_is_right() -> None:
    for order in (ALL, [*ALL[:3], "w.1.4", "w.1.3", "w.1.5"], [*ALL, "w.2.0"]):
        tally = judged(taken(*order))
        assert not tally.examples
        assert tally.counts["records"] == len(order)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        (ALL[1:], "lost"),
        ([*ALL, "w.1.0"], "doubled"),
        ([*ALL, "w.2.0", "w.2.0"], "doubled"),
        ([*ALL, "w.3.0"], "phantom"),
        ([ALL[1], ALL[0], *ALL[2:]], "out of order"),
        ([ALL[0], ALL[2], ALL[1], *ALL[3:]], "out of order"),
        ([*ALL[:4], ALL[5], ALL[4]], "out of order"),
        ([ALL[5], *ALL[:5]], "out of order"),
    ],
    ids=["lost", "twice", "without an answer, twice", "refused", "two of one", "child", "second parent", "grandchild"],
)
def test_what_is_wrong_is_found(order: list[str], kind: str) -> None:
    tally = judged(taken(*order))
    assert tally.counts[kind]
    assert {each.partition(":")[0] for each in tally.examples} == {kind}


def test_torn_bytes_are_found() -> None:
    items = [*taken(*ALL), Taken(payload_of("w.2.0")[:-1] + "?", None, "x")]
    assert judged(items).counts["torn"] == 1


# ---- tables -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bank(postgres: PostgresServer, tmp_path: Path) -> Bank:
    bank = Bank(postgres, tmp_path)
    with bank.connected() as connection:
        connection.execute("DROP SCHEMA IF EXISTS copied CASCADE")
        connection.execute("DROP TABLE IF EXISTS accounts, orders CASCADE")
        connection.execute("DROP PUBLICATION IF EXISTS bank")
    bank.create()
    with bank.connected() as connection:
        connection.execute("INSERT INTO accounts VALUES (1, 1.5, 'one', '2026-01-01'), (2, 2, NULL, '2026-01-01')")
        connection.execute("UPDATE accounts SET balance = 3, note = 'é' WHERE id = 2")
        connection.execute("INSERT INTO orders (account, paid, tag) VALUES (1, true, '{}')")
        connection.execute("DELETE FROM orders")
    return bank


def change(op: str, table: str, new: dict[str, object] | None, key: object = None, unchanged: tuple[str, ...] = ()) -> str:
    found = {"table": f"public.{table}", "op": op, "new": new, "key": None if key is None else {"id": key}, "unchanged": unchanged}
    return json.dumps(found)


AT = "2026-01-01 00:00:00+00"
CHANGES = [
    change("insert", "accounts", {"id": 1, "balance": "1.5000", "note": "one", "changed": AT}),
    change("insert", "accounts", {"id": 2, "balance": "2.0000", "note": None, "changed": AT}),
    change("update", "accounts", {"id": 2, "balance": "3.0000", "note": "é"}, unchanged=("changed",)),
    change("insert", "orders", {"id": 1, "account": 1, "amount": None, "paid": True, "tag": "{}"}),
    change("delete", "orders", None, 1),
]


def test_changes_that_make_the_tables_again_are_right(bank: Bank) -> None:
    assert not apply_changes(bank, CHANGES)
    assert not differences(bank)


@pytest.mark.parametrize("lost", range(len(CHANGES)))
def test_a_lost_change_is_found(bank: Bank, lost: int) -> None:
    assert apply_changes(bank, [each for at, each in enumerate(CHANGES) if at != lost]) or differences(bank)


@pytest.mark.parametrize("doubled", [0, 1, 3, 4])
def test_a_doubled_change_is_found(bank: Bank, doubled: int) -> None:
    """But for an update: that changes nothing."""
    assert apply_changes(bank, [*CHANGES[: doubled + 1], *CHANGES[doubled:]])


def test_changes_in_another_order_are_found(bank: Bank) -> None:
    assert apply_changes(bank, [*CHANGES[:3], CHANGES[4], CHANGES[3]])


# ---- logs --------------------------------------------------------------------------------------------------------------

SPARKS = """\
Traceback (most recent call last):
  File "/venv/site-packages/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 264, in manager
  File "/venv/site-packages/pyspark/python/lib/pyspark.zip/pyspark/daemon.py", line 95, in worker
BrokenPipeError: [Errno 32] Broken pipe
"""
OURS = SPARKS.replace("daemon.py", "worker.py").replace("BrokenPipe", '  File "/src/sluiceway/spark/source.py", line 9, in f\nBrokenPipe')


def test_a_traceback_of_ours_is_a_mistake_and_one_of_sparks_own_is_none(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    assert mistakes(log) == []
    log.write_text(f"begins\n{SPARKS}goes on\n")
    assert mistakes(log) == []
    log.write_text(f"{SPARKS}goes on\n{OURS}")
    (found,) = mistakes(log)
    assert "sluiceway/spark/source.py" in found
