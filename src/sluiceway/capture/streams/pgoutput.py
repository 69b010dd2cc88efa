"""Decoder of PostgreSQL's `pgoutput` plugin (protocol 1) into transactions of records. Pure: bytes in, records out.

A record's payload is a JSON object:

* `table`: `schema.name`; a part that contains a dot or a double quote is in double quotes, as in SQL;
* `op`: `insert`, `update`, `delete` or `truncate`; `snapshot` for a row of the initial copy, which is as it was found;
* `key`: the columns of the replica identity, as they were *before* the change (of an insert: as they are). With REPLICA IDENTITY FULL that
  is the whole old row. null: there is none;
* `new`: the row after the change, or null;
* `unchanged`: names of columns missing in `new`, since they are large, stored separately and unchanged; only present if there are any;
* `committed_at`: commit time by the server's clock, in microseconds;
* `lsn`, `xid`, `seq`: location of the commit in the log, transaction number, and the record's number within the transaction, from 1. Of a
  `snapshot`, `lsn` is where the changes begin, and these and `committed_at` are null.

To apply a change, remove `key` and then put `new`; `unchanged` columns stay as they were. An update that changes the key has the old one in
`key`.

Booleans, `smallint`, `integer`, `bigint`, `real` and `double precision` are native JSON (NaN and the infinities are texts); `json` and
`jsonb` are embedded as they are; `numeric` and everything else is PostgreSQL's text. Bytes that are not UTF-8, which occur only in a
SQL_ASCII database, are replaced by U+FFFD.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from sluiceway.kernel.clock import Millis

__all__ = ["Decoder", "Lsn", "ProtocolError", "Record", "Relation", "Transaction", "format_lsn", "parse_lsn", "qualified"]

Lsn = int
"""A location in the server's log, in bytes."""

MAX_KEY_BYTES = 512
"""A longer record key is replaced by its hash."""

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_EPOCH_MILLIS = round(_EPOCH.timestamp()) * 1_000
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_INSERT, _UPDATE, _DELETE, _TRUNCATE, _BEGUN, _COMMITTED, _RELATION = b"IUDTBCR"
_PASSED_OVER = b"YOM"
"""Ignored messages: types (texts need no type name), origins, and messages that concern no table."""
_OLD_KEY, _OLD_ROW, _NEW_ROW = b"KON"
_TEXT, _NULL, _UNCHANGED = b"tnu"


class ProtocolError(ValueError):
    """The data is not `pgoutput` protocol 1."""


class Record(NamedTuple):
    kind: str
    key: str | None
    """`table:[values of the replica identity]`."""
    payload: bytes


@dataclass(slots=True)
class Transaction:
    """An atomic commit. Another transaction may have begun earlier and commit later."""

    lsn: Lsn
    """Start of its commit in the log."""
    at: Millis
    """Commit time by the server's clock. Later commits may have slightly earlier times."""
    end: Lsn = 0
    """End of its commit, from which reading continues."""
    upto: int = 0
    """Number of messages up to its end, counted from the first that the decoder was fed."""
    size: int = 0
    """Bytes of its payloads."""
    records: list[Record] = field(default_factory=list)


def parse_lsn(text: str) -> Lsn:
    """Parse `16/B374D848` to a number. Raises ValueError."""
    high, separator, low = text.partition("/")
    if not separator or not 1 <= len(high) <= 8 or not 1 <= len(low) <= 8:
        raise ValueError(f"{text[:40]!r} is not an LSN")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: Lsn) -> str:
    """Format as PostgreSQL does."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


# ---- values --------------------------------------------------------------------------------------------------------------


def _sound(value: bytes) -> bytes:
    return value if value.isascii() else value.decode("utf-8", "replace").encode()


def _text(value: bytes) -> bytes:
    return msgspec.json.encode(value.decode("utf-8", "replace"))


def _boolean(value: bytes) -> bytes:
    return b"true" if value == b"t" else b"false"


def _float(value: bytes) -> bytes:
    return b'"' + value + b'"' if value in (b"NaN", b"Infinity", b"-Infinity") else _sound(value)


_AS_JSON: Mapping[int, Callable[[bytes], bytes]] = {
    16: _boolean,
    20: _sound,
    21: _sound,
    23: _sound,
    114: _sound,
    700: _float,
    701: _float,
    3802: _sound,
}
"""By the OIDs of the built-in types, which never change. All others are texts."""


class _Same:
    """Stands for a value that did not change and was not sent."""


_SAME = _Same()
_Value = bytes | None | _Same
"""A value as JSON."""


class Relation:
    """A table as the server has described it: its name as in payloads, and of each column whether it belongs to the replica identity, its
    name, and its type's OID."""

    def __init__(self, table: str, columns: Sequence[tuple[bool, str, int]]) -> None:
        self.table = table
        self.opening = b'{"table":' + msgspec.json.encode(table)
        self.names = [msgspec.json.encode(name) for _, name, _ in columns]
        self.as_json = [_AS_JSON.get(oid, _text) for _, _, oid in columns]
        self.keyed = [n for n, (keyed, _, _) in enumerate(columns) if keyed]

    def key(self, row: Sequence[_Value]) -> tuple[str | None, bytes]:
        """The row's key, in the form of the record's key and of the payload's. Without a replica identity there is none."""
        values = [b"null" if (value := row[n]) is None else value for n in self.keyed]
        if not values or any(isinstance(value, _Same) for value in values):
            return None, b"null"
        known = [value for value in values if isinstance(value, bytes)]
        text = b"[" + b",".join(known) + b"]"
        if len(text) > MAX_KEY_BYTES:
            text = b"#" + hashlib.sha256(text).hexdigest().encode()
        pairs = b",".join([self.names[n] + b":" + value for n, value in zip(self.keyed, known, strict=True)])
        return f"{self.table}:{text.decode()}", b"{" + pairs + b"}"

    def row(self, row: Sequence[_Value]) -> bytes:
        """The row as the payload's `new`, followed by `unchanged` if needed."""
        pairs, same = [], []
        for name, value in zip(self.names, row, strict=True):
            if isinstance(value, _Same):
                same.append(name)
            else:
                pairs.append(name + b":" + (b"null" if value is None else value))
        new = b"{" + b",".join(pairs) + b"}"
        return new + b',"unchanged":[' + b",".join(same) + b"]" if same else new

    def copied(self, row: Sequence[bytes | None], ending: bytes) -> Record:
        """The record of a row as it is, given its values in the server's text form; `ending`: the payload's further fields."""
        values = [None if value is None else as_json(value) for value, as_json in zip(row, self.as_json, strict=True)]
        key, pairs = self.key(values)
        payload = b'%s,"op":"snapshot","key":%s,"new":%s,%s}' % (self.opening, pairs, self.row(values), ending)
        return Record("snapshot", key, payload)


class _Message:
    """One message, read from its start, with checks against truncation."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 1

    def number(self, size: int) -> int:
        end = self.at + size
        if end > len(self.data):
            raise ProtocolError("a message is cut off")
        value = int.from_bytes(self.data[self.at : end], "big")
        self.at = end
        return value

    def text(self) -> str:
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise ProtocolError("a message is cut off")
        value = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end + 1
        return value

    def whole(self, layout: struct.Struct) -> tuple[int, ...]:
        if len(self.data) != 1 + layout.size:
            raise ProtocolError("a message has the wrong length")
        return layout.unpack_from(self.data, 1)

    def row(self, relation: Relation) -> list[_Value]:
        if self.number(2) != len(relation.names):
            raise ProtocolError(f"a row of {relation.table} does not have the columns that the table has")
        row: list[_Value] = []
        for as_json in relation.as_json:
            kind = self.number(1)
            if kind == _TEXT:
                size = self.number(4)
                start, self.at = self.at, self.at + size
                if self.at > len(self.data):
                    raise ProtocolError("a message is cut off")
                row.append(as_json(self.data[start : self.at]))
            elif kind == _NULL:
                row.append(None)
            elif kind == _UNCHANGED:
                row.append(_SAME)
            else:
                raise ProtocolError(f"a value of unknown kind {kind}")
        return row

    def end(self) -> None:
        if self.at != len(self.data):
            raise ProtocolError("a message has something after its end")


class Decoder:
    """Decodes one call's messages, starting with the first: only there the server describes the tables.

    Transactions whose commit begins before `after` produce no records.
    """

    def __init__(self, after: Lsn = 0) -> None:
        self._after = after
        self._relations: dict[int, Relation] = {}
        self._open: Transaction | None = None
        self._skipping = False
        self._ending = b""
        self._count = 0

    def feed(self, messages: Iterable[bytes]) -> list[Transaction]:
        """Decode messages. Returns the transactions that end in them and are not skipped, in order. Raises ProtocolError."""
        done = []
        for data in messages:
            self._count += 1
            kind = data[0] if data else 0
            if kind in (_INSERT, _UPDATE, _DELETE, _TRUNCATE):
                if not self._skipping:
                    self._change(kind, _Message(data))
            elif kind == _BEGUN:
                self._begin(_Message(data))
            elif kind == _COMMITTED:
                transaction = self._commit(_Message(data))
                if not self._skipping:
                    done.append(transaction)
                self._skipping = False
            elif kind == _RELATION:
                self._describe(_Message(data))
            elif kind not in _PASSED_OVER:
                raise ProtocolError(f"a message of unknown kind {data[:1]!r}")
        return done

    def _begin(self, message: _Message) -> None:
        lsn, micros, xid = message.whole(_BEGIN)
        if self._open is not None:
            raise ProtocolError("a transaction begins within another")
        self._open = Transaction(lsn, _EPOCH_MILLIS + micros // 1_000)
        self._skipping = lsn < self._after
        try:
            at = (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds").replace("+00:00", "Z")
        except OverflowError:
            raise ProtocolError("a transaction without a time") from None
        self._ending = f'"committed_at":"{at}","lsn":"{format_lsn(lsn)}","xid":{xid},"seq":'.encode()

    def _commit(self, message: _Message) -> Transaction:
        _, lsn, end, _ = message.whole(_COMMIT)
        transaction = self._open
        if transaction is None or transaction.lsn != lsn:
            raise ProtocolError("a transaction ends that did not begin")
        transaction.end, transaction.upto, self._open = end, self._count, None
        return transaction

    def _describe(self, message: _Message) -> None:
        oid, schema, name = message.number(4), message.text(), message.text()
        message.number(1)
        columns = []
        for _ in range(message.number(2)):
            keyed, column = message.number(1) & 1, message.text()
            columns.append((bool(keyed), column, message.number(4)))
            message.number(4)
        message.end()
        # The server omits the name of its own schema.
        self._relations[oid] = Relation(qualified(schema or "pg_catalog", name), columns)

    def _relation(self, message: _Message) -> Relation:
        relation = self._relations.get(message.number(4))
        if relation is None:
            raise ProtocolError("a change in a table that was not described")
        return relation

    def _change(self, kind: int, message: _Message) -> None:
        if kind == _TRUNCATE:
            count, _ = message.number(4), message.number(1)
            for relation in [self._relation(message) for _ in range(count)]:
                self._add(relation, "truncate", (None, b"null"), b"null")
        else:
            relation = self._relation(message)
            part = message.number(1)
            if kind == _DELETE and part in (_OLD_KEY, _OLD_ROW):
                self._add(relation, "delete", relation.key(message.row(relation)), b"null")
            elif kind == _INSERT and part == _NEW_ROW:
                row = message.row(relation)
                self._add(relation, "insert", relation.key(row), relation.row(row))
            elif kind == _UPDATE:
                old = message.row(relation) if part in (_OLD_KEY, _OLD_ROW) else None
                if (part if old is None else message.number(1)) != _NEW_ROW:
                    raise ProtocolError("an update without a new row")
                row = message.row(relation)
                # The old key is only sent if it differs.
                self._add(relation, "update", relation.key(row if old is None else old), relation.row(row))
            else:
                raise ProtocolError(f"a change with the unknown part {part}")
        message.end()

    def _add(self, relation: Relation, op: str, key: tuple[str | None, bytes], new: bytes) -> None:
        transaction = self._open
        if transaction is None:
            raise ProtocolError("a change outside of a transaction")
        seq = len(transaction.records) + 1
        payload = b'%s,"op":"%s","key":%s,"new":%s,%s%d}' % (relation.opening, op.encode(), key[1], new, self._ending, seq)
        transaction.size += len(payload)
        transaction.records.append(Record(op, key[0], payload))


def qualified(schema: str, name: str) -> str:
    """The `table` of a payload."""
    return f"{_quoted(schema)}.{_quoted(name)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if "." in name or '"' in name else name
