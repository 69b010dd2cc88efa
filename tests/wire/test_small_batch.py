"""Items by their values are the same items as those in columns, wherever they come by."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.partition import Partition
from sluiceway.kernel.clock import format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_HEADER_BYTES, MAX_TEXT_BYTES
from sluiceway.model.changes import RecordKind
from sluiceway.model.items import HEADERS, TIME, decode_blob, fit, narrow, stored_schema
from sluiceway.model.leased_items import Slice, served
from sluiceway.model.peers import Ask
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import Lease, Leased, LeaseInfo, Produce, ProduceKey
from sluiceway.model.small_batch import MAX_BYTES, MOST, Served, SmallBatch, as_few, digest, in_columns, join
from sluiceway.wire import answers, peer
from sluiceway.wire.arrow_codec import produce_request
from sluiceway.wire.json_items import Item, ProduceFields, batch_of, decode_produce, to_small_batch
from tests.core.core_model import START

RECORD = QueueRecord("q", "k7f3q2ma", START, START, (PartitionRecord(0),))
SOME = [
    [Item(payload=b"a")],
    [Item(utf8="ä" * 9), Item(payload=b"")],
    [Item(payload=b"1", kind="k"), Item(payload=b"2"), Item(payload=b"3", reference="ü", encoding="e")],
    [Item(payload=b"h", headers={"x": "y", "ß": ""}), Item(payload=b"none"), Item(payload=b"empty", headers={})],
    [Item(payload=b"i", key="customer-7", headers={"x": "y"}), Item(payload=b"j")],
    [Item(payload=b"k", priority=0), Item(payload=b"l"), Item(payload=b"m", priority=9)],
    [Item(payload=b"k", unique_key="order-8"), Item(payload=b"l")],
]


def few(items: Sequence[Item]) -> SmallBatch:
    found = to_small_batch(items)
    assert found is not None
    return found


def columns(items: Sequence[Item]) -> pa.RecordBatch:
    return narrow(batch_of(items))[0]


@pytest.mark.parametrize("items", SOME)
def test_both_forms_say_the_same(items: list[Item]) -> None:
    assert few(items).batch().equals(columns(items))
    assert few(items).columns == narrow(batch_of(items))[1]
    assert digest(few(items)) == digest(few(items).batch()) == digest(batch_of(items))


def test_digests_are_those_that_partitions_have_stored() -> None:
    """A repeated produce is recognized by its digest, also after an upgrade."""
    assert [digest(few(items)).hex() for items in SOME] == [
        "038e5fc9ed29344cd425b4def3a83aed",
        "62e38ffa71242618191ddb3e99b656a9",
        "b36781e4e22f1df4a540733b7805e911",
        "72380204b393a9c167bddd742c6f9bae",
        "b834b5c35fb52744c2f88205cc8f7be7",
        "66196ed8470c7d975b13e9b3d7346132",
        "76a9c9472340fa67782b2582903d9789",
    ]


def test_the_span_of_a_repetition_does_not_count() -> None:
    def traced(*spans: str | None, headers: dict[str, str] | None = None) -> list[Item]:
        return [Item(payload=b"x", headers=headers if span is None else {**(headers or {}), "traceparent": span}) for span in spans]

    for some, other in (
        (traced("a", "b"), traced("c", None)),
        (traced("a", "b"), traced(None, None)),
        (traced("a", "b", headers={"h": "1"}), traced("c", None, headers={"h": "1"})),
    ):
        assert digest(few(some)) == digest(few(other)) == digest(batch_of(some)) == digest(batch_of(other))
    assert digest(few(traced("a", headers={"h": "1"}))) != digest(few(traced("a")))


TEXTS = st.one_of(st.none(), st.text(max_size=4))


@given(
    st.lists(
        st.builds(
            Item,
            payload=st.binary(max_size=5),
            kind=TEXTS,
            encoding=TEXTS,
            reference=TEXTS,
            key=st.one_of(st.none(), st.text(min_size=1, max_size=4)),
            priority=st.one_of(st.none(), st.integers(0, 9)),
            unique_key=st.one_of(st.none(), st.text(min_size=1, max_size=4)),
            headers=st.one_of(st.none(), st.dictionaries(st.sampled_from(["a", "b", "traceparent"]), st.text(max_size=2), max_size=3)),
        ),
        min_size=1,
        max_size=MOST,
    )
)
def test_both_forms_of_any_items_have_the_same_digest(items: list[Item]) -> None:
    assert digest(few(items)) == digest(batch_of(items))


def test_joined_they_are_what_they_are_one_after_the_other() -> None:
    together = join([few(items) for items in SOME])
    assert together.batch().equals(pa.concat_batches([fit(columns(items), stored_schema(0b11101111)) for items in SOME]))
    assert (together.num_rows, together.nbytes) == (16, sum(few(items).nbytes for items in SOME))


@pytest.mark.parametrize(("items", "pairs"), [(16, 1), (16, 40), (1, 2_000)])
def test_what_headers_take_in_memory_is_counted(items: int, pairs: int) -> None:
    """The cache of blobs has no other measure."""
    each = {"bytes": "", "headers": {chr(0x4E00 + n): "" for n in range(pairs)}}
    body = msgspec.json.encode({"queue_name": "q", "items": [each] * items})
    tracemalloc.start()
    rows = few(decode_produce(body).items)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert rows.held_bytes > taken / 2
    assert rows.nbytes > columns(decode_produce(body).items).nbytes * 0.7


@pytest.mark.parametrize("others", [SOME[3], []])
def test_a_partition_stores_the_same_bytes_of_either(others: list[Item]) -> None:
    """Also where requests of both forms share a blob."""
    stored = []
    for form in (few, columns):
        partition = Partition()
        for items in SOME:
            partition.produce(form(items), START)
        if others:
            partition.produce(columns(others), START)
        partition.produce(form(SOME[0]), START, ProduceKey("key"))
        taken = partition.take_changes()
        assert taken is not None
        (number,) = taken[0].blobs
        stored.append((decode_blob(taken[0].blobs[number], 0b1111), taken[0].header, taken[0].puts[RecordKind.EXTENT, "0"]))
        assert isinstance(taken[1][number], SmallBatch) is (form is few and not others)
        # The key remembers what the rows say: in the other form it is the same call.
        other = few if form is columns else columns
        assert partition.produce(other(SOME[0]), START, ProduceKey("key")).repeated
        with pytest.raises(SluicewayError, match="key"):
            partition.produce(other(SOME[1]), START, ProduceKey("key"))
    assert stored[0][0].equals(stored[1][0])
    assert stored[0][1:] == stored[1][1:]


def test_it_is_served_the_same() -> None:
    blob = join([few(items) for items in SOME])
    for rows in ([0], [2, 3, 8], [1, 2], list(range(9))):
        piece = Slice(40, np.array(rows), np.array(rows) + 70, 2, START)
        either = Served(1, 3, piece, blob)
        whole = served(1, 3, piece, blob.batch())
        assert in_columns(either).equals(whole.select(in_columns(either).schema.names))
        assert whole.drop_columns(in_columns(either).schema.names).num_columns == sum(
            whole.column(name).null_count == len(rows) for name in whole.schema.names
        )
        infos = [LeaseInfo(1, 3, len(rows), START + 9)]
        forms = (either, Served(1, 3, piece, blob.batch()), whole)
        told = [answers.leased(RECORD, Leased(infos, [each]), arrow=False) for each in forms]
        assert told[0] == told[1] == told[2]
        assert in_columns(forms[1]).equals(whole)
        assert answers.peeked(RECORD, [in_columns(either)], arrow=False) == answers.peeked(RECORD, [whole], arrow=False)
        streams = [pa.ipc.open_stream(pa.py_buffer(answers.leased(RECORD, Leased(infos, [each]), arrow=True))) for each in forms]
        assert [stream.read_all().num_rows for stream in streams] == [len(rows)] * 3


@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [0, 2]])
def test_what_is_served_says_how_much_memory_it_takes(rows: list[int]) -> None:
    """At least what its payloads have, also of one large item among many small ones."""
    blob = pa.RecordBatch.from_arrays([pa.array([b"", b"", b"x" * 1_000_000])], schema=stored_schema(0))
    assert Served(0, 1, Slice(0, np.array(rows), np.array(rows), 1, START), blob).nbytes >= 1_000_000


def test_another_instance_is_sent_columns() -> None:
    asked = Ask("k7f3q2ma", Produce(few(SOME[2]), 5_000))
    assert peer.decode_request(peer.encode_request(asked)).request.batch.equals(columns(SOME[2]))  # type: ignore[union-attr]
    piece = Slice(0, np.arange(3), np.arange(3), 1, START)
    answer = Leased([LeaseInfo(0, 1, 3, 9)], [Served(0, 1, piece, few(SOME[2]))])
    lease = Ask("k7f3q2ma", Lease("c", 3))
    (came,) = peer.decode_answer(lease, peer.encode_answer(lease, answer)).batches
    assert came.equals(served(0, 1, piece, columns(SOME[2])))


@pytest.mark.parametrize(
    "item",
    [
        {"utf8": "x", "enqueue_at": format_time(START + 1_000)},
        {"utf8": "x", "kind": "k" * (MAX_TEXT_BYTES // 4 + 1)},
        {"utf8": "x" * MAX_BYTES},
        {"utf8": "x", "headers": {"h": "v" * (MAX_HEADER_BYTES // 4)}},
    ],
)
def test_what_only_columns_can_tell_goes_by_columns(item: dict[str, object]) -> None:
    call = decode_produce(msgspec.json.encode({"queue_name": "q", "items": [item]}))
    assert not isinstance(call.request(RECORD, START).batch, SmallBatch)


def test_many_items_go_by_columns() -> None:
    for count, is_few in ((MOST, True), (MOST + 1, False)):
        call = decode_produce(msgspec.json.encode({"queue_name": "q", "items": [{"utf8": "x"}] * count}))
        assert isinstance(call.request(RECORD, START).batch, SmallBatch) is is_few


@pytest.mark.parametrize("items", SOME[:3])
def test_few_rows_of_arrow_are_the_same_as_of_json(items: list[Item]) -> None:
    rows = as_few(fit(batch_of(items), stored_schema(0b0111)))
    assert rows is not None
    assert (rows.payloads, rows.others) == (few(items).payloads, few(items).others)


@pytest.mark.parametrize(
    "rows",
    [
        pa.record_batch({"payload": pa.array([b"x"] * (MOST + 1))}),
        pa.record_batch({"payload": pa.array([b"x" * MAX_BYTES])}),
        pa.record_batch({"payload": pa.array([b"x"]), "enqueue_at": pa.array([START + 1_000], TIME)}),
        pa.record_batch({"payload": pa.array([b"x"]), "headers": pa.array([[("a", "1"), ("a", "2")]], HEADERS)}),
    ],
)
def test_of_arrow_too_what_only_columns_can_tell_stays_in_columns(rows: pa.RecordBatch) -> None:
    def request(batch: pa.RecordBatch) -> SmallBatch | pa.RecordBatch:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        return produce_request(ProduceFields(queue_name="q"), sink.getvalue().to_pybytes(), RECORD, START).batch

    assert not isinstance(request(rows), SmallBatch)
    assert isinstance(request(pa.record_batch({"payload": pa.array([b"x"] * MOST)})), SmallBatch)


def test_rows_are_taken_in_the_order_that_is_asked_for() -> None:
    batch = few([Item(payload=payload, kind=payload.decode()) for payload in (b"a", b"b", b"c")])
    assert batch.take([0, 1, 2]) is batch
    other = batch.take([2, 0, 1])
    assert (other.payloads, other.others) == ([b"c", b"a", b"b"], {"kind": ["c", "a", "b"]})
