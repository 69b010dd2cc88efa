"""Each decoder of what comes from outside, as a function of bytes, with bytes to begin from. A fault is any error that is not its own.

`python -m tests.fuzz.guided` lets the coverage of these choose the next input. The first byte of an input chooses the call, where there are
several; what follows is the body.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa
from pyroaring import BitMap

from sluiceway.capture import lineage
from sluiceway.capture.streams import kinesis_positions, pgoutput, postgres_copy, spanner
from sluiceway.cli.backup_format import Manifest, Piece, SavedBlob, SavedPartition, checksum, seal, unseal
from sluiceway.core.bucket import journal_entry
from sluiceway.core.bucket.partition_head import Head, Range
from sluiceway.core.group import task_state
from sluiceway.core.partition import records
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.kernel import clock, ids
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import parse_scope
from sluiceway.model.changes import Changes, Fence, RecordKind
from sluiceway.model.items import decode_blob, encode_blob, narrow
from sluiceway.ports.change_stream import BrokenOffError, UnknownPositionError
from sluiceway.wire import answers, backup_records
from sluiceway.wire.protobuf import CALLS as PROTOBUF_CALLS
from tests.fuzz import arrow_bodies, flatbuffers, json_bodies, kinesis_bodies, peer_bodies, protobuf_bodies

_LONGEST_ERROR: Final = 4_000
_VECTORS: Final = Path(__file__).parents[1] / "data" / "querator-requests.json"


class Target(NamedTuple):
    """`put` raises only for a fault. `longest`: bytes of an input."""

    put: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    longest: int = 4_096


def _refusable(call: Callable[[], object]) -> None:
    """Refusals of a client can be answered, and do not send back all that came."""
    try:
        call()
    except SluicewayError as error:
        assert len(answers.problem(error, "r-1")) < _LONGEST_ERROR, "a very long error"
        assert error.kind.status < 500, error.code


# ---- what clients and instances send ----------------------------------------------------------------------------------


def _json(data: bytes) -> None:
    put, _ = json_bodies.CALLS[data[0] % len(json_bodies.CALLS)] if data else json_bodies.CALLS[0]
    _refusable(lambda: put(data[1:]))


def _json_seeds() -> list[bytes]:
    return [bytes([number]) + json.dumps(fields).encode() for number, (_, fields) in enumerate(json_bodies.CALLS)]


def _arrow(data: bytes) -> None:
    chosen, body = (data[0], data[1:]) if data else (0, b"")
    _refusable((lambda: arrow_bodies._settle(body)) if chosen & 1 else (lambda: arrow_bodies._produce(body, chosen)))


def _arrow_seeds() -> list[bytes]:
    streams = [*arrow_bodies.sound(), flatbuffers.schema(2, 1, b"value", 1, 1, 1)]
    return [bytes([chosen]) + body for body in streams for chosen in (0, 1)]


@cache
def _paths() -> list[str]:
    return sorted(PROTOBUF_CALLS)


def _protobuf(data: bytes) -> None:
    path = _paths()[data[0] % len(_paths())] if data else _paths()[0]
    _refusable(lambda: protobuf_bodies._decode(path, data[1:]))


def _protobuf_seeds() -> list[bytes]:
    """What Querator's own client has sent."""
    return [bytes([_paths().index(each["path"])]) + bytes.fromhex(each["request"]) for each in json.loads(_VECTORS.read_text())]


def _peer(data: bytes) -> None:
    _, said, _ = peer_bodies.sound()
    chosen, body = (data[0], data[1:]) if data else (0, b"")
    if chosen < len(said):
        _refusable(lambda: peer_bodies._pass_on(said[chosen][0], body))
    elif chosen < 200:
        _refusable(lambda: peer_bodies._take(body))
    else:
        _refusable(lambda: peer_bodies._raise(body))


def _peer_seeds() -> list[bytes]:
    requests, said, errors = peer_bodies.sound()
    found = [bytes([number]) + body for number, (_, body) in enumerate(said)]
    return found + [b"\x64" + body for body in requests] + [b"\xff" + body for body in errors]


def _texts(data: bytes) -> None:
    """Durations, times, ids, scopes and expressions: each text of a request that has a form of its own."""
    text = data.decode("utf-8", "replace")
    parsers: list[Callable[[], object]] = [
        lambda: clock.parse_duration(text, "f"),
        lambda: clock.parse_time(text, "f"),
        lambda: ids.parse_item_id(text, "f"),
        lambda: ids.parse_lease_id(text, "f"),
        lambda: parse_scope(text, "f"),
        lambda: parse_cron(text).after(0),
    ]
    for parse in parsers:
        _refusable(parse)


def _text_seeds() -> list[bytes]:
    return [
        *(b"1h30m", b"0.5s", b"2026-01-31T08:00:00.5+01:00", b"k7f3q2ma.0.1042", b"k7f3q2ma.0.L17", b"produce:orders-*", b"admin"),
        *(b"*/5 0-3,7 1-31/2 jan-mar mon", b"@hourly", b"0 0 29 2 */7"),
    ]


# ---- what captures read -----------------------------------------------------------------------------------------------


def _pgoutput(data: bytes) -> None:
    """Messages, each after its length."""
    messages = []
    while len(data) >= 2:
        size = int.from_bytes(data[:2])
        messages.append(data[2 : 2 + size])
        data = data[2 + size :]
    try:
        found = pgoutput.Decoder().feed(messages)
    except pgoutput.ProtocolError:
        return
    for record in (record for each in found for record in each.records):
        record.payload.decode()
        (record.key or "").encode()


def _pgoutput_seeds() -> list[bytes]:
    begin, commit = b"B" + struct.pack(">QqI", 5, 1_000, 7), b"C" + struct.pack(">BQQq", 0, 5, 9, 0)
    columns = b"".join(b"\1%b\0" % name + struct.pack(">Ii", oid, -1) for name, oid in ((b"id", 20), (b"b", 16), (b"j", 3802), (b"f", 701)))
    table = b"R" + struct.pack(">I", 7) + b"public\0t\0d" + struct.pack(">H", 4) + columns
    values = b"".join(b"t" + struct.pack(">I", len(value)) + value for value in (b"5", b"t", b'{"a": 1}', b"NaN"))
    row, gone = struct.pack(">H", 4) + values, struct.pack(">H", 4) + b"nunn"
    changes = [b"I%bN%b", b"U%bN%b", b"D%bK%b"]
    some = [change % (struct.pack(">I", 7), row) for change in changes] + [b"U" + struct.pack(">I", 7) + b"O" + gone + b"N" + row]
    some += [b"T" + struct.pack(">IBI", 1, 0, 7), b"Y" + bytes(8), b"O" + bytes(9), b"M" + bytes(14)]
    histories = [[begin, table, each, commit] for each in some] + [[begin, table, *some, commit]]
    return [b"".join(len(each).to_bytes(2) + each for each in history) for history in histories]


class _Told:
    """A reader of a change stream that has one answer to every query."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    async def query(self, *_: object) -> AsyncGenerator[Any]:
        for each in self._told:
            yield each

    async def now(self) -> str:
        return "2026-05-01T12:00:10Z"

    async def close(self) -> None: ...


def _spanner(data: bytes) -> None:
    try:
        told = msgspec.json.decode(data, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return

    async def read() -> None:
        stream = spanner.SpannerStream(_Told(told), "2026-05-01T12:00:00Z", wait=0)
        for call in (stream.seeds(""), stream.read("t", "2026-05-01T12:00:00Z", None, 2), stream.read("t@2026-05-01T12:00:00Z", "x")):
            try:
                await call
            except SluicewayError as error:
                # "It cannot be decoded", which stops the capture with an alarm.
                assert error.code in ("internal", "invalid_request"), error.code
            except (UnknownPositionError, BrokenOffError):
                continue

    asyncio.run(read())


def _spanner_seeds() -> list[bytes]:
    at = "2026-05-01T12:00:03.000000Z"
    mod = {"keys": '{"id": 1}', "new_values": '{"a": "x"}', "old_values": None}
    change = {"commit_timestamp": at, "server_transaction_id": "7", "record_sequence": "0", "table_name": "t", "mod_type": "INSERT"}
    child = {"token": "c", "parent_partition_tokens": ["t"]}
    told: list[dict[str, Any]] = [
        {"data_change_record": {**change, "mods": [mod, mod]}},
        {"child_partitions_record": [{"start_timestamp": at, "record_sequence": "1", "child_partitions": [child]}]},
        {"partition_start_record": {"start_timestamp": at, "partition_tokens": ["a", "b"]}},
        {"partition_end_record": {"end_timestamp": at}},
        {"partition_event_record": {"commit_timestamp": at, "move_in_events": [{"source_partition_token": "s"}]}},
        {"partition_event_record": {"commit_timestamp": at, "move_out_events": [{"destination_partition_token": "d"}]}},
        {"heartbeat_record": {"timestamp": at}},
    ]
    return [json.dumps(each).encode() for each in ([one] for one in told)] + [json.dumps(told).encode()]


def _positions(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for parse in (kinesis_positions.parse_position, lineage._place, spanner._parse_place, postgres_copy.parse_place):
        try:
            found = parse(text)
        except UnknownPositionError:
            continue
        assert found is None or isinstance(str(found), str)
    try:
        pgoutput.parse_lsn(text)
    except ValueError:
        return


def _position_seeds() -> list[bytes]:
    kinesis = [b"TRIM_HORIZON", b"AT_TIMESTAMP@1700000000000", b"4965@17~18<49"]
    place = b'copy {"table":"public.t","row":["1"]}'
    return [*kinesis, b"12x500+9,10", b"2026-05-01T12:00:03.120456Z!", b"2026-05-01T12:00:03Z~", b"copy", place, b"16/B374D848"]


# ---- what lies in stores ----------------------------------------------------------------------------------------------

_UNPACKERS: Final = (records.unpack_header, records.unpack_blob, records.unpack_extent, records.unpack_lease, records.unpack_due)


def _records(data: bytes) -> None:
    """Small records of a partition, the bit maps in them, and records of the log of a capture's tasks."""
    if not data:
        return
    chosen, body = data[0] % (len(_UNPACKERS) + 2), data[1:]
    try:
        if chosen < len(_UNPACKERS):
            _UNPACKERS[chosen](body)
        elif chosen == len(_UNPACKERS):
            bits = records.unpack_bits(body)
            assert records.unpack_bits(records.pack_bits(bits)) == bits
        else:
            task_state.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return


def _record_seeds() -> list[bytes]:
    bits = [BitMap(range(5, 40)), BitMap([1, 9, 70_000]), BitMap(range(0, 900, 2))]
    found = [
        records.pack(records.Header(7, 3, 2)),
        records.pack(records.BlobRecord(3, 1, 5, 100, 0, (records.ReasonGroup("r", "q", 2, b"\x80"),))),
        records.pack(records.ExtentRecord(3, 1, 0, records.pack_bits(bits[0]), 2)),
        records.pack(records.LeaseRecord([(1, 5)], "c", 9, "k", None, records.pack_bits(bits[1]), [])),
        records.pack(records.DueRecord(9, 1, records.pack_bits(bits[0]), 0)),
    ]
    seeds = [bytes([number]) + data for number, data in enumerate(found)]
    seeds += [bytes([len(_UNPACKERS)]) + packed for each in bits for packed in (records.pack_bits(each), each.serialize())]
    log: list[task_state.Record] = [task_state.Join("m"), task_state.Leave("m"), task_state.Snapshot(task_state.State())]
    return seeds + [bytes([len(_UNPACKERS) + 1]) + task_state.encode(each) for each in log]


def _blob(data: bytes) -> None:
    """Rows of items, as a store has them; their checksum was right."""
    try:
        decode_blob(data[1:], data[0] if data else 0).validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError):
        return


def _blob_seeds() -> list[bytes]:
    found = []
    for body in arrow_bodies.sound()[:6]:
        rows = pa.ipc.open_stream(body).read_all().combine_chunks().to_batches()[0]
        if rows.schema.field("payload").type == pa.binary():
            batch, columns = narrow(rows.select([name for name in rows.schema.names if name != "enqueue_at"]))
            found.append(bytes([columns & 0xFF]) + encode_blob(batch))
    return found


_decode_head = msgspec.msgpack.Decoder(Head).decode


def _journal(data: bytes) -> None:
    """Entries of a bucket's journal, with a checksum that is right, and heads of partitions."""
    chosen, body = (data[0] % 3, data[1:]) if data else (0, b"")
    try:
        if chosen == 0:
            journal_entry.decode(journal_entry._FRAME.pack(journal_entry.MAGIC, len(body), crc32(body)) + body)
        elif chosen == 1:
            journal_entry.decode(body)
        else:
            head = _decode_head(body)
            assert head.attached is None or head.attached.journal in head.named
    except (ValueError, msgspec.DecodeError):
        return


def _journal_seeds() -> list[bytes]:
    changes = Changes(1, b"header", puts={(RecordKind.BLOB, "1"): b"x"}, deletes={(RecordKind.LEASE, "2")}, blobs={1: b"data"})
    _, whole = journal_entry.entry_of([("life", changes)], 7, b"nonce", 0)
    _, ending = journal_entry.ending_entry(8, b"nonce")
    head = Head(b"nonce", "life", Fence(1, 2, 3), "checkpoint", [Range("j", 1, 5), Range("k", 1)], ["i"])
    frame = journal_entry.FRAME_BYTES
    return [b"\0" + whole[frame:-4], b"\1" + whole, b"\0" + ending[frame:], b"\2" + msgspec.msgpack.encode(head)]


def _backup(data: bytes) -> None:
    """A manifest that has its checksum, and the records that its pieces have."""
    chosen, body = (data[0] % 3, data[1:]) if data else (0, b"")
    try:
        if chosen == 0:
            unseal(body + b"\n" + checksum(body).encode() + b"\n", "id")
        elif chosen == 1:
            backup_records.decode_meta(body)
        else:
            backup_records.decode_partition(body)
    except SluicewayError as error:
        assert error.code == "invalid_request", error.code
        assert len(error.detail) < _LONGEST_ERROR
    except (msgspec.DecodeError, UnicodeDecodeError):
        assert chosen


def _backup_seeds() -> list[bytes]:
    piece = Piece("2026-01-31T080000Z.0", 0, 5, "00")
    part = SavedPartition(
        queue_name="q", incarnation="k7f3q2ma", partition=0, backend="default", records=[piece], blobs=[SavedBlob(1, "1.0", piece)]
    )
    manifest = Manifest(
        backup_id="2026-01-31T080000Z",
        taken_at=datetime(2026, 1, 31, 8, tzinfo=UTC),
        version="1",
        meta_layout=1,
        partition_layout=1,
        meta=[piece],
        partitions=[part],
    )
    meta = backup_records.encode(backup_records.MetaRecords(5, [("queue/q", 3, b"{}")]))
    partition = backup_records.encode(backup_records.PartitionRecords(5, b"h", [(RecordKind.BLOB, "1", b"x")]))
    return [b"\0" + seal(manifest).split(b"\n")[0], b"\1" + meta, b"\2" + partition]


# ---- HTTP itself ------------------------------------------------------------------------------------------------------


def _http(data: bytes) -> None:
    """What a connection carries out does not depend on how its bytes arrive, but for how much of it before bytes that are no request."""
    from tests.server import test_framing as framing

    where, body = (data[0], data[1:]) if data else (0, b"")

    async def receive() -> None:
        bench = framing.Bench()
        await bench.receive([body], True)
        whole = bench.app.seen
        at = where * len(body) // 256
        await bench.receive([part for part in (body[:at], body[at:]) if part], True)
        fewer, more = sorted((whole, bench.app.seen), key=len)
        assert more[: len(fewer)] == fewer, (whole, bench.app.seen)

    asyncio.run(receive())


def _http_seeds() -> list[bytes]:
    from tests.server import test_framing as framing

    return [bytes([17 * number % 256]) + each.data for number, each in enumerate((*framing.SERVED, *framing.REFUSED, *framing.BROKEN))]


TARGETS: Final[dict[str, Target]] = {
    "json": Target(_json, _json_seeds),
    "arrow": Target(_arrow, _arrow_seeds, 16_384),
    "protobuf": Target(_protobuf, _protobuf_seeds),
    "peer": Target(_peer, _peer_seeds, 8_192),
    "texts": Target(_texts, _text_seeds, 256),
    "http": Target(_http, _http_seeds, 2_048),
    "pgoutput": Target(_pgoutput, _pgoutput_seeds),
    "spanner": Target(_spanner, _spanner_seeds),
    "kinesis": Target(kinesis_bodies.put, kinesis_bodies.seeds),
    "positions": Target(_positions, _position_seeds, 256),
    "records": Target(_records, _record_seeds),
    "blob": Target(_blob, _blob_seeds, 16_384),
    "journal": Target(_journal, _journal_seeds),
    "backup": Target(_backup, _backup_seeds),
}
