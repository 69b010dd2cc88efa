"""Arrow messages whose metadata is small as it comes, and large once it is read."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.small_batch import in_columns
from sluiceway.wire import peer
from sluiceway.wire.arrow_codec import produce_request
from sluiceway.wire.ipc_header import MAX_METADATA, MAX_PARTS, check_metadata, metadata_at
from sluiceway.wire.json_items import ProduceFields
from tests.fuzz import flatbuffers, peer_bodies
from tests.fuzz.arrow_bodies import sound

NOW = 1_700_000_000_000
RECORD = QueueRecord("q", "k7f3q2ma", NOW, NOW, (PartitionRecord(0),))
TEXT = b"v" * 20_000


def refusal(body: bytes) -> SluicewayError:
    with pytest.raises(SluicewayError) as caught:
        produce_request(ProduceFields(queue_name="q"), body, RECORD, NOW)
    assert caught.value.kind.status == 400
    return caught.value


def test_what_is_made_by_hand_is_what_pyarrow_reads() -> None:
    """Otherwise the tests below would show nothing."""
    for fields, levels, notes in ((1, 0, 0), (2, 0, 3), (1, 3, 1)):
        body = flatbuffers.schema(fields, levels, b"value", notes, notes, notes)
        found = pa.ipc.open_stream(body).schema
        assert found.names == ["payload"] * fields
        assert (found.metadata or {}) == ({b"k": b"value"} if notes else {})
        inner = found.field(0)
        for _ in range(levels):
            assert inner.type.num_fields == 2
            inner = inner.type.field(1)
        assert inner.type == pa.binary()
        assert (inner.metadata or {}) == ({b"k": b"value"} if notes else {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (flatbuffers.schema(fields=MAX_PARTS + 1), "more than 512 columns and notes"),
        (flatbuffers.schema(fields=50_000), "more than 512 columns and notes"),
        (flatbuffers.schema(levels=9), "used several times"),
        (flatbuffers.schema(levels=25), "used several times"),
        (flatbuffers.schema(note=TEXT, of_schema=2), "used several times"),
        (flatbuffers.schema(note=TEXT, of_schema=500), "used several times"),
        (flatbuffers.schema(note=TEXT, of_message=500), "used several times"),
        (flatbuffers.schema(note=TEXT, of_field=500), "used several times"),
        (flatbuffers.schema(note=b"", of_message=50_000), "more than 512 columns and notes"),
        (flatbuffers.schema(note=b"v" * MAX_METADATA, of_schema=1), "bytes of metadata; at most 262,144 are read"),
    ],
)
def test_a_schema_that_swells_is_refused_before_it_is_read(body: bytes, said: str) -> None:
    error = refusal(body)
    assert error.code == "invalid_body"
    assert said in error.detail


def test_what_a_batch_says_of_itself_is_counted_too() -> None:
    """Of a batch, pyarrow reads the notes on the message as well."""
    flat = flatbuffers.Flat()
    flat.to(0, 4)
    links = flat.table({0: 4, 1: 3}, (2, 4))
    flat.link(links[2])
    flat.table({}, ())
    flatbuffers.notes(flat, links[4], 400, TEXT)
    batch = flatbuffers.framed(bytes(flat.data))
    good = flatbuffers.schema()[: -len(flatbuffers.END)]
    assert "used several times" in refusal(good + batch + flatbuffers.END).detail
    request = next(each for each in peer_bodies.sound()[0] if b"\xff\xff\xff\xff" in each)
    at = request.index(b"\xff\xff\xff\xff")
    with pytest.raises(SluicewayError, match="used several times"):
        peer.decode_request(request[:at] + batch)


def test_a_message_has_a_beginning_and_a_whole_head() -> None:
    data = memoryview(flatbuffers.schema())
    whole = metadata_at(data, 0)
    assert whole is not None
    check_metadata(whole)
    assert metadata_at(data, 8 + len(whole)) is None
    for at, cut in ((8, len(data)), (0, 3), (0, 7), (0, 20), (len(data), len(data)), (len(data) - 4, len(data))):
        with pytest.raises(ValueError, match=r"cut off|no message|outside itself"):
            metadata_at(data[:cut], at)


@pytest.mark.parametrize(
    "body", [b"", flatbuffers.END, b"{}", b"\xff" * 8, flatbuffers.schema()[:-8], flatbuffers.schema()[:-4], b"\0" * 8]
)
def test_what_is_no_stream_is_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_body"


def test_schemas_of_many_writers_are_within_the_bounds() -> None:
    """With the notes of pandas on a hundred columns, of which one is left."""
    note = {b"pandas": b'{"name": "column", "pandas_type": "unicode", "numpy_type": "object", "metadata": null},' * 100}
    batch = pa.record_batch({"payload": pa.array([b"a"])}).replace_schema_metadata(note)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"k": "v"})
    produced = produce_request(ProduceFields(queue_name="q"), bytes(sink.getvalue()), RECORD, NOW)
    assert in_columns(produced.batch).num_rows == 1
    for each in sound()[:6]:
        assert metadata_at(memoryview(each), 0) is not None
