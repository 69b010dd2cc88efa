"""The decoder of `pgoutput`, against an encoder that is made from the protocol's description alone."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.capture.streams.pgoutput import MAX_KEY_BYTES, Decoder, ProtocolError, format_lsn, parse_lsn

BOOL, INT8, TEXT, JSONB, FLOAT8, NUMERIC = 16, 20, 25, 3802, 701, 1700
UNCHANGED = "unchanged"
"""Stands for a value that is not sent."""


# ---- the encoder ---------------------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def begin(lsn: int, micros: int = 0, xid: int = 1) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, micros, xid)


def commit(lsn: int, end: int, micros: int = 0) -> bytes:
    return b"C" + struct.pack(">bQQq", 0, lsn, end, micros)


def relation(oid: int, schema: str, name: str, columns: list[tuple[bool, str, int]]) -> bytes:
    head = b"R" + struct.pack(">I", oid) + string(schema) + string(name) + b"d" + struct.pack(">H", len(columns))
    return head + b"".join(struct.pack("b", key) + string(column) + struct.pack(">Ii", kind, -1) for key, column, kind in columns)


def sent(value: Any) -> bytes:
    """A value as the server sends it; a text is what the server would write."""
    if value is None:
        return b"n"
    if value is UNCHANGED:
        return b"u"
    data: bytes = value.encode()
    return b"t" + struct.pack(">I", len(data)) + data


def row(values: list[Any]) -> bytes:
    return struct.pack(">H", len(values)) + b"".join(map(sent, values))


def insert(oid: int, new: list[Any]) -> bytes:
    return b"I" + struct.pack(">I", oid) + b"N" + row(new)


def update(oid: int, new: list[Any], old: list[Any] | None = None, part: bytes = b"K") -> bytes:
    return b"U" + struct.pack(">I", oid) + (b"" if old is None else part + row(old)) + b"N" + row(new)


def delete(oid: int, old: list[Any], part: bytes = b"K") -> bytes:
    return b"D" + struct.pack(">I", oid) + part + row(old)


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(">IB", len(oids), 1) + b"".join(struct.pack(">I", oid) for oid in oids)


BYSTANDERS = [
    b"Y" + struct.pack(">I", 70_000) + string("public") + string("mood"),
    b"O" + struct.pack(">Q", 5) + string("elsewhere"),
    b"M" + struct.pack(">BQ", 1, 5) + string("prefix") + struct.pack(">I", 3) + b"abc",
]
"""They are about no table."""

PEOPLE = relation(7, "public", "people", [(True, "id", INT8), (False, "name", TEXT)])


def decode(*messages: bytes, after: int = 0) -> list[dict[str, Any]]:
    return [json.loads(record.payload) for transaction in Decoder(after).feed(messages) for record in transaction.records]


# ---- any transactions ----------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def as_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


VALUES: dict[int, st.SearchStrategy[tuple[str, Any]]] = {
    BOOL: st.sampled_from([("t", True), ("f", False)]),
    INT8: st.integers(-(2**63), 2**63 - 1).map(lambda value: (str(value), value)),
    TEXT: texts.map(lambda value: (value, value)),
    JSONB: jsons.map(lambda value: (json.dumps(value, ensure_ascii=False), value)),
    FLOAT8: st.floats().map(lambda value: (as_text(value), value if math.isfinite(value) else as_text(value))),
    NUMERIC: st.decimals(allow_nan=False, allow_infinity=False).map(lambda value: (str(value), str(value))),
    99_999: texts.map(lambda value: (value, value)),
}
"""By type: what the server would send, and what is to be read."""


@dataclass
class Table:
    oid: int
    name: str
    columns: list[tuple[bool, str, int]]

    def dictionary(self, values: list[Any], only_keys: bool) -> dict[str, Any]:
        return {
            name: value
            for (key, name, _), value in zip(self.columns, values, strict=True)
            if value is not UNCHANGED and (key or not only_keys)
        }


@st.composite
def tables(draw: st.DrawFn, oid: int) -> Table:
    names = draw(st.lists(texts.filter(bool), min_size=1, max_size=4, unique=True))
    return Table(oid, f"t{oid}", [(draw(st.booleans()), name, draw(st.sampled_from(sorted(VALUES)))) for name in names])


@st.composite
def rows(draw: st.DrawFn, table: Table, toast: bool = False) -> tuple[list[Any], list[Any]]:
    """What is sent, and what is read."""
    pairs = []
    for key, _, kind in table.columns:
        how = draw(st.sampled_from(["value", "value", "null", "unchanged"] if toast and not key else ["value", "value", "null"]))
        pairs.append(draw(VALUES[kind]) if how == "value" else (None, None) if how == "null" else (UNCHANGED, UNCHANGED))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@st.composite
def changes(draw: st.DrawFn, table: Table) -> tuple[bytes, dict[str, Any]]:
    """A message, and what of its payload does not depend on the transaction."""
    keyed = any(key for key, _, _ in table.columns)
    op = draw(st.sampled_from(["insert", "update", "update with the old key", "delete", "truncate"] if keyed else ["insert", "truncate"]))
    told: dict[str, Any] = {"table": f"public.{table.name}", "op": op.split()[0], "key": None, "new": None}
    if op == "truncate":
        return truncate(table.oid), told
    old, known = draw(rows(table))
    part = draw(st.sampled_from([b"K", b"O"]))
    if op == "delete":
        return delete(table.oid, old, part), told | {"key": table.dictionary(known, True)}
    new, read = draw(rows(table, toast=op != "insert"))
    told["new"] = table.dictionary(read, False)
    unchanged = [name for (_, name, _), value in zip(table.columns, read, strict=True) if value is UNCHANGED]
    if unchanged:
        told["unchanged"] = unchanged
    if keyed:
        told["key"] = table.dictionary(known if op == "update with the old key" else read, True)
    if op == "insert":
        return insert(table.oid, new), told
    return update(table.oid, new, old if op == "update with the old key" else None, part), told


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[int, int, list[dict[str, Any]]]]]:
    """Messages, and (commit, its end, payloads) of the transactions in them."""
    known = [draw(tables(oid)) for oid in (7, 8)]
    messages: list[bytes] = []
    expected = []
    lsn = 1_000
    described: set[int] = set()
    for _ in range(draw(st.integers(1, 4))):
        lsn += draw(st.integers(1, 1 << 40))
        xid, micros = draw(st.integers(1, 2**32 - 1)), draw(st.integers(-(10**15), 10**15))
        at = (datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat(timespec="microseconds").replace("+00:00", "Z")
        messages.append(begin(lsn, micros, xid))
        payloads = []
        for seq in range(1, draw(st.integers(0, 4)) + 1):
            table = draw(st.sampled_from(known))
            messages += draw(st.lists(st.sampled_from(BYSTANDERS), max_size=1))
            if table.oid not in described or draw(st.booleans()):
                messages.append(relation(table.oid, "public", table.name, table.columns))
                described.add(table.oid)
            message, told = draw(changes(table))
            messages.append(message)
            payloads.append(told | {"lsn": format_lsn(lsn), "xid": xid, "seq": seq, "committed_at": at})
        end = lsn + draw(st.integers(1, 100))
        messages.append(commit(lsn, end, micros))
        expected.append((lsn, end, payloads))
        lsn = end
    return messages, expected


@given(histories())
def test_what_was_encoded_is_read(history: tuple[list[bytes], list[tuple[int, int, list[dict[str, Any]]]]]) -> None:
    messages, expected = history
    transactions = Decoder().feed(messages)
    read = [
        (transaction.lsn, transaction.end, [json.loads(record.payload) for record in transaction.records]) for transaction in transactions
    ]
    assert read == expected
    for transaction in transactions:
        assert transaction.size == sum(len(record.payload) for record in transaction.records)
        assert [record.kind for record in transaction.records] == [json.loads(record.payload)["op"] for record in transaction.records]
        for record in transaction.records:
            key = json.loads(record.payload)["key"]
            assert (record.key is None) == (key is None)


@given(histories(), st.data())
def test_what_lies_before_is_passed_over_and_its_tables_are_known(
    history: tuple[list[bytes], list[tuple[int, int, list[dict[str, Any]]]]], data: st.DataObject
) -> None:
    messages, expected = history
    after = data.draw(st.sampled_from([0, *(end for _, end, _ in expected)]))
    decoder = Decoder(after)
    # The messages may come in any pieces.
    cut = data.draw(st.integers(0, len(messages)))
    transactions = decoder.feed(messages[:cut]) + decoder.feed(messages[cut:])
    read = [
        (transaction.lsn, transaction.end, [json.loads(record.payload) for record in transaction.records]) for transaction in transactions
    ]
    assert read == [one for one in expected if one[1] > after]
    ends = [number for number, message in enumerate(messages, 1) if message[:1] == b"C"]
    assert [transaction.upto for transaction in transactions] == ends[len(ends) - len(transactions) :]


@given(histories(), st.data())
def test_damaged_messages_are_errors_and_no_records(
    history: tuple[list[bytes], list[tuple[int, int, list[dict[str, Any]]]]], data: st.DataObject
) -> None:
    messages, _ = history
    place = data.draw(st.integers(0, len(messages) - 1))
    whole = messages[place]
    if whole[:1] in b"YOM":
        return
    for broken in (whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\0"):
        with pytest.raises(ProtocolError):
            Decoder().feed([*messages[:place], broken])


@given(
    st.lists(
        st.binary(max_size=40)
        | st.builds(bytes.__add__, st.sampled_from([b"B", b"C", b"R", b"I", b"U", b"D", b"T"]), st.binary(max_size=40))
    )
)
def test_anything_else_is_a_protocol_error_at_most(messages: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        Decoder().feed([PEOPLE, *messages])


# ---- by name -------------------------------------------------------------------------------------------------------------


def test_a_record_by_hand() -> None:
    (transaction,) = Decoder().feed(
        [begin(0x1_0000_00AB, 1_500, 42), PEOPLE, insert(7, ["1", 'An"na']), commit(0x1_0000_00AB, 0x1_0000_00FF)]
    )
    assert (format_lsn(transaction.lsn), format_lsn(transaction.end), transaction.at) == ("1/AB", "1/FF", 946_684_800_001)
    (record,) = transaction.records
    assert (record.kind, record.key) == ("insert", "public.people:[1]")
    assert record.payload == (
        b'{"table":"public.people","op":"insert","key":{"id":1},"new":{"id":1,"name":"An\\"na"},'
        b'"committed_at":"2000-01-01T00:00:00.001500Z","lsn":"1/AB","xid":42,"seq":1}'
    )


def test_an_update_of_the_key_is_about_the_old_one() -> None:
    (told,) = decode(begin(9), PEOPLE, update(7, ["2", "Anna"], ["1", None]), commit(9, 10))
    assert (told["key"], told["new"]) == ({"id": 1}, {"id": 2, "name": "Anna"})


def test_a_table_that_was_altered_is_described_again() -> None:
    wider = relation(7, "public", "people", [(True, "id", INT8), (False, "name", TEXT), (False, "age", INT8)])
    told = decode(begin(9), PEOPLE, insert(7, ["1", "a"]), wider, insert(7, ["2", "b", "3"]), commit(9, 10))
    assert [one["new"] for one in told] == [{"id": 1, "name": "a"}, {"id": 2, "name": "b", "age": 3}]


def test_a_truncation_of_several_tables_is_a_record_of_each() -> None:
    other = relation(8, "", "x", [(True, "id", INT8)])
    told = decode(begin(9), PEOPLE, other, truncate(7, 8), commit(9, 10))
    assert [(one["table"], one["op"], one["key"], one["new"], one["seq"]) for one in told] == [
        ("public.people", "truncate", None, None, 1),
        ("pg_catalog.x", "truncate", None, None, 2),
    ]


def test_names_with_dots_in_them_are_not_mistaken_for_others() -> None:
    columns = [(True, "id", INT8)]
    messages = [begin(9)]
    for oid, (schema, name) in enumerate([("a.b", "c"), ("a", "b.c"), ('a"', "b")]):
        messages += [relation(oid, schema, name, columns), insert(oid, ["1"])]
    (transaction,) = Decoder().feed([*messages, commit(9, 10)])
    assert [record.key for record in transaction.records] == ['"a.b".c:[1]', 'a."b.c":[1]', '"a""".b:[1]']


def test_a_long_key_is_its_hash() -> None:
    wide = relation(7, "public", "t", [(True, "id", TEXT)])
    keys = []
    for name in ("x" * MAX_KEY_BYTES, "y" * MAX_KEY_BYTES, "é" * MAX_KEY_BYTES, "é" * MAX_KEY_BYTES):
        (transaction,) = Decoder().feed([begin(9), wide, insert(7, [name]), commit(9, 10)])
        keys.append(transaction.records[0].key)
        assert json.loads(transaction.records[0].payload)["key"] == {"id": name}
    assert all(key is not None and key.startswith("public.t:#") and len(key) < 100 for key in keys)
    assert len(set(keys)) == 3


def test_bytes_that_are_no_text_do_not_make_bad_json() -> None:
    columns = relation(7, "public", "t", [(False, "a", TEXT), (False, "b", JSONB)])
    bad = (
        b"I"
        + struct.pack(">I", 7)
        + b"N"
        + struct.pack(">H", 2)
        + b"t"
        + struct.pack(">I", 2)
        + b"\xffa"
        + b"t"
        + struct.pack(">I", 3)
        + b'"\xfe"'
    )
    (told,) = decode(begin(9), columns, bad, commit(9, 10))
    assert told["new"] == {"a": "�a", "b": "�"}


@pytest.mark.parametrize(
    "messages",
    [
        [insert(7, ["1", "a"])],
        [begin(9), insert(7, ["1", "a"])],
        [PEOPLE, insert(7, ["1", "a"])],
        [begin(9), begin(10)],
        [commit(9, 10)],
        [begin(9), commit(8, 10)],
        [begin(9), PEOPLE, insert(7, ["1"])],
        [begin(9), PEOPLE, insert(7, ["1", "a", "b"])],
        [begin(9), PEOPLE, b"U" + struct.pack(">I", 7) + b"K" + row(["1", None])],
        [begin(9), PEOPLE, b"I" + struct.pack(">I", 7) + b"K" + row(["1", None])],
        [begin(9), PEOPLE, b"I" + struct.pack(">I", 7) + b"N" + struct.pack(">H", 2) + b"b\0\0\0\x01x" + b"n"],
        [begin(9, 2**62)],
        [b"S" + struct.pack(">IB", 1, 1)],
        [b""],
    ],
)
def test_what_makes_no_sense_is_an_error(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(messages)


def test_a_number_that_is_no_text_does_not_break_the_decoder() -> None:
    """It was in the key, and raised another error than its own."""
    bad = b"t" + struct.pack(">I", 3) + b"\xff7\xfe"
    for kind in (INT8, FLOAT8):
        table = relation(7, "public", "people", [(True, "id", kind)])
        (transaction,) = Decoder().feed([begin(5), table, b"I" + struct.pack(">I", 7) + b"N" + struct.pack(">H", 1) + bad, commit(5, 9)])
        assert transaction.records[0].key == "public.people:[\ufffd7\ufffd]"
        assert transaction.records[0].payload.decode()


@given(st.integers(0, 2**64 - 1))
def test_an_lsn_is_read_as_it_is_written(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


@pytest.mark.parametrize("text", ["", "1", "/", "1/", "/1", "1/2/3", "G/1", "123456789/1", "1/123456789"])
def test_what_is_no_lsn_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an LSN|invalid literal"):
        parse_lsn(text)
