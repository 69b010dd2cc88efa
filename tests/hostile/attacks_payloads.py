"""Attacks with bodies that are what their type says, or nearly: JSON and Arrow."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator

import pyarrow as pa

from sluiceway.kernel.limits import MAX_CALL_BYTES
from tests.fuzz import flatbuffers
from tests.hostile.arena import MIB, QUEUE, Arena, answer_or_end, head

ARROW = "application/vnd.apache.arrow.stream"
FIELDS = f"?queue_name={QUEUE}"
CALLS = ("queue.produce", "queue.lease", "queue.complete", "queue.retry", "queue.settle", "queues.create", "queue.stats", "queue.redrive")


def deep_json(arena: Arena) -> None:
    """Brackets without an end, in every call."""
    for call in CALLS:
        for opening in (b"[", b'{"a":', b'[{"items":['):
            given = arena.post(call, opening * (MIB // len(opening)))
            assert given.status == 400, given
        nested = b"[" * 100_000 + b"]" * 100_000
        assert arena.post(call, b'{"queue_name": "q", "x": ' + nested + b"}").status == 400


def huge_json_numbers(arena: Arena) -> None:
    """Numbers of a million digits and of no size."""
    numbers = [
        b"1e999999999",
        b"-" + b"9" * MIB,
        b"9" * 5_000,
        b"1." + b"0" * MIB + b"1",
        b"1e-999999",
        b"18446744073709551616",
        b"NaN",
        b"-0",
    ]
    for number in numbers:
        for call, field in (("queue.lease", b"batch_size"), ("queues.create", b"max_attempts"), ("queues.update", b"version")):
            given = arena.post(call, b'{"queue_name": "%s", "client_id": "c", "%s": %s}' % (QUEUE.encode(), field, number))
            assert given.status == 400 or (number == b"-0" and given.status in (200, 409)), (number[:20], given)


def odd_json(arena: Arena) -> None:
    """Names twice, text that is no UTF-8, halves of characters, marks of byte order, and zeros."""
    name = QUEUE.encode()
    for body in (
        b'{"queue_name": "\xff\xfe"}',
        b'\xef\xbb\xbf{"queue_name": "%s"}' % name,
        b'{"queue_name": "\\ud800"}',
        b'{"queue_name": "a\\u0000b"}',
        b'{"queue_name": "%s"}\0' % name,
        b'{"queue_name": "%s"} {}' % name,
        ('{"queue_name": "' + QUEUE + '"}').encode("utf-16"),
        b'{"queue_name": "%s", "items": [{"utf8": "\\udc00"}]}' % name,
        b'{"queue_name": "%s", "items": [{"utf8": "a", "headers": {"\xed\xa0\x80": ""}}]}' % name,
        b'{"__proto__": {}, "queue_name": "%s"}' % name,
    ):
        for call in ("queue.produce", "queue.stats"):
            assert arena.post(call, body).status == 400, body
    # The last one counts, and it alone is checked.
    twice = arena.post("queue.stats", b'{"queue_name": "%s", "queue_name": "no such queue"}' % name)
    assert twice.status == 400, twice
    assert arena.total() == 0


def swelling_json(arena: Arena) -> None:
    """Bodies that are small on the wire and large once they are read."""
    tiny = (MAX_CALL_BYTES - 100) // 3
    for call, field in (("queue.retry", b"items"), ("queue.complete", b"ids"), ("queue.produce", b"items"), ("queue.settle", b"items")):
        for element in (b"{}", b'""', b"[]", b"0"):
            body = b'{"queue_name": "%s", "%s": [%s]}' % (QUEUE.encode(), field, b",".join([element] * tiny))
            assert arena.post(call, body).status in (400, 413), (call, element)
    keys = b",".join(b'"k%d":""' % number for number in range(400_000))
    body = b'{"queue_name": "%s", "items": [{"utf8": "", "headers": {%s}}]}' % (QUEUE.encode(), keys)
    assert arena.post("queue.produce", body).status == 400


def stream(schema: pa.Schema, *batches: pa.RecordBatch, **options: object) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


PAYLOADS = pa.record_batch({"payload": pa.array([b"one", b"two", b"three"])})
GOOD = stream(PAYLOADS.schema, PAYLOADS)


def check_refused(arena: Arena, body: bytes) -> None:
    """A 4xx of our own, and nothing is stored."""
    given = arena.post("queue.produce", body, ARROW, FIELDS)
    assert 400 <= given.status < 500, given
    assert given.code in ("invalid_body", "invalid_request", "too_many_items", "body_too_large"), given


def lying_arrow(arena: Arena) -> None:
    """Lengths and offsets that point elsewhere: refused, or harmless."""
    for data in lies():
        given = arena.post("queue.produce", data, ARROW, FIELDS)
        assert given.status in (200, 400, 413), given


def lies() -> Iterator[bytes]:
    """A good stream in which one number after the other is another."""
    values = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0xFFFFFFF8)
    for place in range(0, len(GOOD) - 4, 4):
        for value in values:
            yield GOOD[:place] + struct.pack("<I", value) + GOOD[place + 4 :]
    yield from (GOOD[:length] for length in range(0, len(GOOD), 8))


def arrow_bombs(arena: Arena) -> None:
    """Few bytes that stand for many rows, columns or levels."""
    empty = pa.schema([])
    nulls = pa.schema([pa.field("payload", pa.null())])
    check_refused(arena, stream(nulls, pa.record_batch([pa.nulls((1 << 31) - 1)], schema=nulls)))
    for rows in (1 << 31, (1 << 63) - 1, -1, -(1 << 63)):
        check_refused(arena, GOOD.replace(struct.pack("<q", 3), struct.pack("<q", rows)))
    many = pa.schema([pa.field(f"c{number}", pa.int32()) for number in range(20_000)])
    check_refused(arena, stream(many))
    check_refused(arena, stream(pa.schema([pa.field("payload", pa.binary())] * 20_000)))
    nested = pa.binary()
    for _ in range(200):
        nested = pa.list_(nested)
    check_refused(arena, stream(pa.schema([pa.field("payload", nested)])))
    check_refused(arena, stream(empty))
    check_refused(arena, stream(PAYLOADS.schema, *[PAYLOADS.slice(0, 0)] * 100_000))
    check_refused(arena, stream(PAYLOADS.schema.with_metadata({"x": "y" * (20 * MIB)})))


def compressed_arrow(arena: Arena) -> None:
    """A compressed buffer, and a dictionary: a few bytes that stand for gigabytes."""
    batch = pa.record_batch({"payload": pa.array([b"\0" * MIB] * 20)})
    for codec in ("lz4", "zstd"):
        check_refused(arena, stream(batch.schema, batch, compression=codec))
    large = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array([b"\0" * MIB]))
    coded = pa.record_batch({"payload": large})
    check_refused(arena, stream(coded.schema, coded))
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1 << 30], pa.int32()), pa.array([b"x"]))
    ends = pa.record_batch({"payload": runs})
    check_refused(arena, stream(ends.schema, ends))


def shared_arrow(arena: Arena) -> None:
    """Schemas in which one part is named many times: a quarter of a MiB that stands for gigabytes."""
    text = b"v" * 200_000
    for body in (
        flatbuffers.schema(note=text, of_message=10_000),
        flatbuffers.schema(note=text, of_schema=10_000),
        flatbuffers.schema(note=text, of_field=10_000),
        flatbuffers.schema(fields=4_000_000),
        flatbuffers.schema(levels=40),
    ):
        check_refused(arena, body)


def aliased_arrow(arena: Arena) -> None:
    """Ten thousand rows that are one and the same megabyte: larger than any body once they are counted one by one."""
    data, count = pa.py_buffer(b"x" * MIB), 10_000
    # Each row begins where the one before it does not end.
    offsets = struct.pack(f"<{count + 1}i", *[0, MIB] * (count // 2), 0)
    payload = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), data])
    batch = pa.RecordBatch.from_arrays([payload], names=["payload"])
    check_refused(arena, stream(batch.schema, batch))


def wrong_types(arena: Arena) -> None:
    """Bodies that are not what the content type says, and content types that there are not."""
    for content_type in ("text/plain", "application/xml", "multipart/form-data", "", "application/json, text/html", "a" * 10_000, "\xff"):
        given = answer_or_end(arena.connect(head("queue.produce", len(GOOD), content_type) + GOOD))
        assert given is None or given.status == 415, (content_type[:20], given)
    for encoding in ("gzip", "br", "deflate, gzip", "zstd"):
        assert arena.post("queue.produce", GOOD, ARROW, FIELDS, content_encoding=encoding).status == 415
    assert arena.post("queue.produce", GOOD).status == 400
    check_refused(arena, json.dumps({"queue_name": QUEUE, "items": [{"utf8": ""}]}).encode())


def swelling_protobuf(arena: Arena) -> None:
    """Items of no bytes behind a group, and an item of unknown fields alone: each became an object."""
    group, most = b"\x9b\x06\x9c\x06", 30 * MIB
    unknown = b"\x98\x06\x01" * (most // 3)
    length = bytearray()
    size = len(unknown)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    for body in (group + b"\x1a\x00" * (most // 2), b"\x1a" + bytes([*length, size]) + unknown, b"\x98\x06\x01" * (most // 3)):
        given = arena.post("queue.produce", body, "application/protobuf")
        assert given.status == 400, given
