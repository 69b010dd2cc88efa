"""Damaged Arrow streams for produce and settle."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Final

import numpy as np
import pyarrow as pa

from sluiceway.core.partition.blob_builder import Forming, due_times
from sluiceway.core.partition.records import Blob
from sluiceway.model.items import HEADERS, TIME, batch_from_rows, decode_blob, digest
from sluiceway.model.leased_items import Slice
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import Leased, LeaseInfo
from sluiceway.model.small_batch import Rows, Served, SmallBatch, in_columns
from sluiceway.wire import answers
from sluiceway.wire.arrow_codec import produce_request, settle_request
from sluiceway.wire.json_items import ProduceFields
from sluiceway.wire.json_outcomes import SettleQuery

NOW: Final = 1_700_000_000_000
RECORD: Final = QueueRecord("q", "k7f3q2ma", NOW, NOW, tuple(PartitionRecord(number) for number in range(3)))
_WORDS: Final = (
    0,
    1,
    2,
    3,
    4,
    8,
    12,
    16,
    0x7F,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    0xFFFFFFFE,
    0xFFFFFFF8,
    0x10000,
    0x40000000,
)


def stream(*batches: pa.RecordBatch, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


@cache
def sound() -> list[bytes]:
    """Streams that are accepted, and some that are refused for what they hold."""
    payload = pa.array([b"one", b"", b"three" * 9])
    texts = pa.array(["a", None, "é" * 20])
    priorities = pa.array([0, None, 9], pa.int8())
    headers = pa.array([[("a", "b"), ("c", "")], None, []], HEADERS)
    times = pa.array([NOW + 5, None, 0], TIME)
    full = {"payload": payload, **dict.fromkeys(("kind", "encoding", "reference", "key", "unique_key"), texts)}
    full |= {"priority": priorities, "headers": headers, "enqueue_at": times}
    ids = {"partition": pa.array([0, 1, 0], pa.int32()), "offset": pa.array([5, 6, 7], pa.int64())}
    dispositions = {"retry_after_ms": pa.array([None, 5, None], pa.int64()), "reason": texts}
    batches = [
        pa.record_batch({"payload": payload}),
        pa.record_batch({"payload": payload.cast(pa.large_binary())}),
        pa.record_batch({"payload": pa.array(["x", "y", "é"], pa.large_utf8())}),
        pa.record_batch(full),
        pa.record_batch({**full, "kind": texts.cast(pa.large_utf8())}).slice(1, 2),
        pa.record_batch({"payload": pa.array([b"x" * 50] * 200)}),
        pa.record_batch({**ids, "outcome": ["done", "retry", "dead"], **dispositions}),
        pa.record_batch({**ids, "outcome": ["done", "done", "done"]}),
    ]
    found = [stream(batch) for batch in batches]
    found += [stream(batch, batch.slice(0, 0), batch) for batch in batches[:4]]
    found.append(stream(batches[0], compression="zstd"))
    found.append(stream(pa.record_batch({"payload": payload.dictionary_encode()})))
    found.append(stream(pa.record_batch({"payload": pa.nulls(5)})))
    found.append(stream(pa.record_batch({"payload": pa.array([[b"a"], []])})))
    found.append(stream(pa.record_batch({"payload": pa.array([b"ab", b"cd"], pa.binary_view())})))
    found.append(stream(pa.record_batch({"payload": pa.array([b"ab", b"cd"], pa.binary(2))})))
    return found


def attempt(chance: Random) -> Callable[[], None]:
    """One body, and the two decoders that it may be for."""
    body = damaged(chance, sound())
    settles = chance.random() < 0.3
    rows = chance.randrange(1 << 30)
    return (lambda: _settle(body)) if settles else (lambda: _produce(body, rows))


def _settle(body: bytes) -> None:
    settle_request(SettleQuery(queue_name="q", incarnation="k7f3q2ma"), body, RECORD)


def _produce(body: bytes, chosen: int) -> None:
    """All that becomes of items: they are digested, stored beside others, read back, and served in both forms, as they came too."""
    came: Rows = produce_request(ProduceFields(queue_name="q"), body, RECORD, NOW).batch
    batch = in_columns(came)
    digest(batch)
    due_times(batch, NOW)
    forming = Forming(Blob(0, 0, 0, NOW, 0))
    forming.add(batch_from_rows([{"payload": b"before"}]))
    first = forming.add(came)
    _, data = forming.seal()
    blob = decode_blob(data, forming.blob.columns)
    blob.validate(full=True)
    end = first + batch.num_rows
    some = np.unique(np.array([first, end - 1, first + chosen % batch.num_rows], np.int64))
    for rows in (np.arange(first, end), some):
        _serve(Slice(0, rows, rows, 1, NOW), blob)
        if isinstance(came, SmallBatch):
            _serve(Slice(0, rows - first, rows, 1, NOW), came)


def _serve(piece: Slice, blob: Rows) -> None:
    leased = Leased([LeaseInfo(0, 1, len(piece.rows), NOW)], [Served(0, 1, piece, blob)])
    answers.leased(RECORD, leased, arrow=True)
    answers.leased(RECORD, leased, arrow=False)


def damaged(chance: Random, bodies: Sequence[bytes]) -> bytes:
    """One of the bodies, in which something is wrong."""
    body = bytearray(chance.choice(bodies))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        chance.choice(_DAMAGES)(chance, body)
    return bytes(body)


def _bytes(chance: Random, body: bytearray) -> None:
    for _ in range(chance.randint(1, 4)):
        if body:
            body[chance.randrange(len(body))] = chance.randrange(256)


def _word(chance: Random, body: bytearray) -> None:
    """Another number where one may stand: numbers are aligned to their size."""
    width = chance.choice((2, 4, 4, 4, 8))
    places = len(body) // width
    if places:
        at = chance.randrange(places) * width
        value = chance.choice(_WORDS) if chance.random() < 0.7 else chance.getrandbits(32)
        if chance.random() < 0.3:
            value = int.from_bytes(body[at : at + width], "little") + chance.choice((-8, -4, -1, 1, 4, 8))
        if width == 8 and chance.random() < 0.3:
            value <<= 32
        body[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _cut(chance: Random, body: bytearray) -> None:
    del body[chance.randrange(len(body) + 1) :]


def _block(chance: Random, body: bytearray) -> None:
    """Take out, double or move some aligned bytes."""
    if len(body) < 16:
        return
    start, to = (chance.randrange(len(body) // 8) * 8 for _ in range(2))
    block = body[start : start + 8 * chance.randint(1, 8)]
    if chance.random() < 0.5:
        del body[start : start + len(block)]
    if chance.random() < 0.7:
        body[to:to] = block


def _splice(chance: Random, body: bytearray) -> None:
    """Begin as one stream and go on as another, at the border of a message if there is one."""
    other = chance.choice(sound())
    borders = [at for at in range(0, len(other) - 4, 8) if other[at : at + 4] == b"\xff\xff\xff\xff"]
    own = [at for at in range(0, len(body) - 4, 8) if body[at : at + 4] == b"\xff\xff\xff\xff"]
    if borders and own:
        body[chance.choice(own) :] = other[chance.choice(borders) :]


def _noise(chance: Random, body: bytearray) -> None:
    body[:] = chance.randbytes(chance.randint(0, 200))


def _head(chance: Random, body: bytearray) -> None:
    """A message that claims a length and has another."""
    body[:0] = (
        b"\xff\xff\xff\xff"
        + struct.pack("<i", chance.choice((0, 8, -8, 1 << 30, (1 << 31) - 1, -1, 256)))
        + chance.randbytes(chance.randint(0, 64))
    )


_DAMAGES: Final = (_bytes, _bytes, _word, _word, _word, _word, _cut, _block, _splice, _noise, _head)
