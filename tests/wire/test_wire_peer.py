"""What instances say to one another comes over as it was said, or is refused."""

from __future__ import annotations

import itertools
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.kernel.compatibility import NEWEST, OLDEST
from sluiceway.kernel.errors import KINDS, OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_PAGE
from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD, TIME
from sluiceway.model.leased_items import POSITION, Slice, served
from sluiceway.model.peers import Ask, BackupStep, Count, Learn, ListConsumers, ListProblems, PeerRequest, Poll, ReadBackup, Reload
from sluiceway.model.requests import Lease, Leased, LeaseInfo, Offsets, Peek, Produce
from sluiceway.wire import peer
from tests.wire.peer_form import noted, present

HEAD = struct.calcsize("<3sBI")
NATURALS = st.integers(0, (1 << 63) - 1)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.binary(): st.binary(max_size=30),
    pa.utf8(): st.text(max_size=10),
    pa.int32(): st.integers(0, (1 << 31) - 1),
    pa.int64(): NATURALS,
    pa.int8(): st.integers(0, 9),
    TIME: st.integers(0, 1 << 47),
    HEADERS: st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=3),
}


@st.composite
def batches(draw: st.DrawFn, needed: Sequence[pa.Field]) -> pa.RecordBatch:
    """Some rows of a longer batch, with any of the columns that items may have."""
    chosen = {*needed, PAYLOAD, *draw(st.sets(st.sampled_from([*OPTIONAL, ENQUEUE_AT])))}
    schema = [field for field in peer.COLUMNS if field in chosen]
    rows = draw(st.integers(1, 6))
    columns = []
    for field in schema:
        values = st.none() | VALUES[field.type] if field.nullable else VALUES[field.type]
        columns.append(pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), field.type))
    first = draw(st.integers(0, rows - 1))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(schema)).slice(first, draw(st.integers(1, rows - first)))


def of(hint: Any, columns: Sequence[pa.Field] = ()) -> st.SearchStrategy[Any]:
    """Any value of that type; its rows have at least those columns."""
    if hint is pa.RecordBatch:
        return batches(columns)
    if hint == Offsets:
        return st.sets(NATURALS, max_size=5).map(lambda chosen: np.array(sorted(chosen), np.int64))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of([of(each, columns) for each in inner])
    if origin in (list, Sequence):
        return st.lists(of(inner[0], columns), max_size=3)
    if origin is tuple:
        return st.lists(of(inner[0]), max_size=3).map(tuple) if inner[1] is ... else st.tuples(*(of(each, columns) for each in inner))
    if origin in (dict, Mapping):
        return st.dictionaries(of(inner[0]), of(inner[1]), max_size=3)
    if is_dataclass(hint) or issubclass(hint, tuple | msgspec.Struct):
        return st.builds(hint, **{name: of(each, columns) for name, each in get_type_hints(hint).items()})
    simple = {
        int: NATURALS,
        str: st.text(max_size=10),
        bool: st.booleans(),
        bytes: st.binary(max_size=10),
        float: st.floats(allow_nan=False),
        datetime: st.datetimes(timezones=st.just(UTC)),
        type(None): st.none(),
    }
    return simple[hint]


def plain(value: Any) -> Any:
    """The value without what is not said: which sort of sequence it was."""
    if isinstance(value, pa.RecordBatch):
        value.validate(full=True)
        return value.schema, value.to_pylist()
    if isinstance(value, np.ndarray):
        assert value.dtype == np.int64
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return type(value), plain(msgspec.structs.asdict(value))
    if is_dataclass(value):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return value


ALONE = (Learn, Poll, ListConsumers, ListProblems, BackupStep, ReadBackup)
"""What is not asked of the share of one queue."""


def request_of(name: str) -> st.SearchStrategy[Any]:
    kind = peer.KINDS_OF_REQUESTS[name].request
    return of(kind) if kind in ALONE else st.builds(Ask, st.text(max_size=8), of(kind), st.booleans())


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(SluicewayError) as caught:
        call()
    assert caught.value.code == "invalid_body"
    return caught.value.detail


def test_all_that_can_be_asked_can_be_said() -> None:
    assert {kind.request for kind in peer.KINDS_OF_REQUESTS.values()} == {*get_args(get_type_hints(Ask)["request"]), *ALONE}


@pytest.mark.parametrize("name", peer.KINDS_OF_REQUESTS)
@given(data=st.data())
def test_a_request_comes_over_as_it_was_said(name: str, data: st.DataObject) -> None:
    request = data.draw(request_of(name))
    copy = peer.decode_request(peer.encode_request(request))
    assert type(copy) is type(request)
    assert plain(copy) == plain(request)


@pytest.mark.parametrize("name", peer.KINDS_OF_REQUESTS)
@given(data=st.data())
def test_an_answer_comes_over_as_it_was_said(name: str, data: st.DataObject) -> None:
    kind = peer.KINDS_OF_REQUESTS[name]
    answer = data.draw(of(type(None) if kind.answer is None else kind.answer, POSITION))
    request = kind.request if kind.request in ALONE else None
    asked = data.draw(request_of(name)) if request else Ask("k7f3q2ma", data.draw(of(kind.request)))
    copy = peer.decode_answer(asked, peer.encode_answer(asked, answer))
    assert type(copy) is type(answer)
    assert plain(copy) == plain(answer)


ERRORS = st.one_of(
    st.builds(SluicewayError, st.sampled_from(sorted(KINDS)), st.text(), st.none() | st.text()),
    st.builds(RateLimitedError, st.text(), NATURALS),
    st.builds(
        OtherQueueError,
        st.sampled_from(sorted(KINDS)),
        st.text(st.characters(exclude_characters="{}", exclude_categories=["Cs"])).map(lambda text: f"{text} {{other}}"),
        st.text(),
        st.text(),
    ),
)


@given(ERRORS)
def test_an_error_comes_over_as_itself(error: SluicewayError) -> None:
    copy = peer.decode_error(peer.encode_error(error))
    assert type(copy) is type(error)
    assert copy.__reduce__() == error.__reduce__()
    assert str(copy) == str(error)


# ---- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [OLDEST - 1, NEWEST + 1])
def test_a_peer_of_an_unknown_level_is_told_so(level: int) -> None:
    said = refused(lambda: peer.decode_request(peer.encode_request(Learn(5), level)))
    assert f"it is of compatibility level {level}, and this instance understands {OLDEST} to {NEWEST}" in said


def test_a_message_says_its_level() -> None:
    for body in (
        peer.encode_request(Learn(5), OLDEST),
        peer.encode_answer(Learn(5), True, OLDEST),
        peer.encode_error(SluicewayError("unavailable", ""), OLDEST),
    ):
        assert peer.level_of(body) == OLDEST


def test_a_level_keeps_its_form() -> None:
    """What has changed since: `python -m tests.wire.peer_form` notes it, which only a level that was never released allows."""
    assert noted()[NEWEST] == present()


def test_a_level_only_adds_what_earlier_releases_do_without() -> None:
    levels = sorted(noted().items())
    for (_, before), (level, after) in itertools.pairwise(levels):
        for kind, had in before.items():
            # In the same order: many types are arrays.
            assert list(had.items()) == list(after[kind].items())[: len(had)] or kind == "answers", f"level {level} changes {kind}"
            added = [each for name, each in after[kind].items() if name not in had]
            assert all(" = " in each for each in added), f"level {level} adds to {kind}, without a default"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"slw",
        b"slw\x01\xff\xff\xff\xff",
        b"slx\x01\x00\x00\x00\x00",
        b"slw\x01\x00\x00\x00\x00",
        b"slw\x01\x01\x00\x00\x00\xc1",
        b"{}" * 9,
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    refused(lambda: peer.decode_request(body))
    refused(lambda: peer.decode_answer(Learn(1), body))
    refused(lambda: peer.decode_error(body))


def spoken(head: object, *rows: pa.RecordBatch | bytes) -> bytes:
    """A message with any head and any rows."""
    said = msgspec.msgpack.encode(head)
    parts = [row if isinstance(row, bytes) else row.serialize().to_pybytes() for row in rows]
    return struct.pack("<3sBI", b"slw", NEWEST, len(said)) + said + bytes(-len(said) % 8) + b"".join(parts)


ROWS = pa.RecordBatch.from_arrays([pa.array([b"one", b"two"])], schema=pa.schema([PAYLOAD]))
MASK = 1 << len(POSITION)
PRODUCE = {"batch": 0, "request_timeout": 5}


def test_a_message_as_the_tests_write_it_is_taken() -> None:
    request = peer.decode_request(spoken(["Produce", PRODUCE, [MASK], "k7f3q2ma", True], ROWS))
    assert plain(request) == plain(Ask("k7f3q2ma", Produce(ROWS, 5)))


WITHOUT_PAYLOAD = pa.record_batch({"payload": [b"one", None]})
WITHOUT_VALUE = pa.record_batch({"payload": pa.array([b"one"]), "headers": pa.array([[("a", None)]], HEADERS)})
PLACED = served(0, 1, Slice(0, np.arange(2), np.arange(2), 1, 5), ROWS)
EMPTY = ROWS.slice(0, 0)
LONG = pa.RecordBatch.from_arrays([pa.array([b""] * (MAX_PAGE + 1))], schema=ROWS.schema)
HEADER_MASK = next(1 << bit for bit, field in enumerate(peer.COLUMNS) if field.name == "headers")


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        (["Nothing", {}, []], ()),
        (["Produce", PRODUCE, [MASK]], (ROWS,)),
        (["Learn", [5], [], "k7f3q2ma"], ()),
        (["Learn", [5], [], None, True, 7], ()),
        (["Learn", [5, 6], []], ()),
        (["Learn", ["5"], []], ()),
        (["Produce", {**PRODUCE, "batch": 1}, [MASK], "i"], (ROWS,)),
        (["Produce", {**PRODUCE, "batch": None}, [MASK], "i"], (ROWS,)),
        (["Produce", PRODUCE, [], "i"], (ROWS,)),
        (["Produce", PRODUCE, [MASK], "i"], ()),
        (["Produce", PRODUCE, [MASK, MASK], "i"], (ROWS, ROWS)),
        (["Produce", PRODUCE, [MASK], "i"], (ROWS, ROWS)),
        (["Produce", PRODUCE, [MASK], "i"], (ROWS, b"\0")),
        (["Produce", PRODUCE, [0], "i"], (ROWS,)),
        (["Produce", PRODUCE, [-1], "i"], (ROWS,)),
        (["Produce", PRODUCE, [1 << 40], "i"], (ROWS,)),
        (["Produce", PRODUCE, [MASK | 2 * MASK], "i"], (ROWS,)),
        (["Produce", PRODUCE, [2 * MASK], "i"], (ROWS,)),
        (["Produce", PRODUCE, [2 * MASK - 1], "i"], (PLACED,)),
        (["Produce", PRODUCE, [MASK], "i"], (EMPTY,)),
        (["Produce", PRODUCE, [MASK], "i"], (LONG,)),
        (["Produce", PRODUCE, [MASK], "i"], (ROWS.schema.serialize().to_pybytes(),)),
        (["Produce", PRODUCE, [MASK], "i"], (WITHOUT_PAYLOAD,)),
        (["Produce", PRODUCE, [MASK | HEADER_MASK], "i"], (WITHOUT_VALUE,)),
        (["DeleteItems", {"offsets": {1: bytes(7)}, "request_timeout": 5}, [], "i"], ()),
        (["DeleteItems", {"offsets": {1: "text"}, "request_timeout": 5}, [], "i"], ()),
        (["DeleteItems", {"offsets": {1: bytes(16)}, "request_timeout": 5}, [], "i"], ()),
        (["DeleteItems", {"offsets": {1: b"\xff" * 8}, "request_timeout": 5}, [], "i"], ()),
    ],
)
def test_a_message_that_does_not_fit_together_is_refused(head: object, rows: tuple[pa.RecordBatch | bytes, ...]) -> None:
    refused(lambda: peer.decode_request(spoken(head, *rows)))


@pytest.mark.parametrize(("ends", "text"), [((0, 2), b"\xff\xfe"), ((0, 1 << 30), b"ab"), ((0, -1), b"ab"), ((5, 2), b"ab")])
def test_rows_that_are_not_sound_are_refused(ends: tuple[int, int], text: bytes) -> None:
    """Text that is no UTF-8, and text that lies outside its buffer: to read that could end the process."""
    batch = pa.RecordBatch.from_arrays([pa.array([b"one"]), pa.array(["ab"])], names=["payload", "kind"])
    sound = batch.serialize().to_pybytes()
    head = ["Produce", PRODUCE, [MASK | 2 * MASK], "i"]
    last = struct.pack("<ii", 0, 2) + b"ab".ljust(8, b"\0")
    assert sound.endswith(last)
    assert peer.decode_request(spoken(head, sound))
    refused(lambda: peer.decode_request(spoken(head, sound[: -len(last)] + struct.pack("<ii", *ends) + text.ljust(8, b"\0"))))


def test_compressed_rows_are_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(ROWS)
    stream = pa.BufferReader(sink.getvalue())
    assert pa.ipc.read_message(stream).type == "schema"
    data = stream.read()[: -len(b"\xff\xff\xff\xff\0\0\0\0")]
    assert "compressed" in refused(lambda: peer.decode_request(spoken(["Produce", PRODUCE, [MASK], "i"], data)))


@pytest.mark.parametrize(
    "depth", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_a_head_of_endless_depth_or_length_is_refused(depth: bytes) -> None:
    refused(lambda: peer.decode_request(struct.pack("<3sBI", b"slw", NEWEST, len(depth)) + depth))


def test_an_answer_to_something_else_is_refused() -> None:
    asked, other = Ask("k7f3q2ma", Lease("c", 1)), Ask("k7f3q2ma", Count())
    body = peer.encode_answer(asked, Leased([LeaseInfo(0, 1, 2, 3)]))
    assert peer.decode_answer(asked, body) == Leased([LeaseInfo(0, 1, 2, 3)], [])
    assert "the request was 'Count'" in refused(lambda: peer.decode_answer(other, body))
    refused(lambda: peer.decode_error(body))


@pytest.mark.parametrize("text", ["{other.__class__}", "{other:>999999999}", "{0}", "{", "{other} {x}"])
def test_an_error_formats_nothing_but_the_name(text: str) -> None:
    error = ["not_found", "", "dead_queue", None, text, "q"]
    refused(lambda: peer.decode_error(spoken(["error", error, []])))
    refused(lambda: peer.decode_error(spoken(["error", ["no such code", "", None], []])))


def test_columns_that_items_do_not_have_are_a_mistake() -> None:
    for batch in (
        pa.record_batch({"payload": [b"a"], "colour": ["red"]}),
        pa.record_batch({"payload": ["text"]}),
    ):
        with pytest.raises(TypeError):
            peer.encode_request(Ask("k7f3q2ma", Produce(batch, 5)))
    with pytest.raises(TypeError):
        peer.encode_answer(Learn(1), object())


def test_columns_in_another_order_are_put_right() -> None:
    batch = pa.record_batch({"kind": ["k"], "payload": [b"a"]})
    request = peer.decode_request(peer.encode_request(Ask("k7f3q2ma", Produce(batch, 5))))
    assert isinstance(request, Ask)
    assert isinstance(request.request, Produce)
    assert request.request.batch.to_pylist() == batch.to_pylist()


def test_the_rows_are_not_copied_and_lie_where_numbers_may() -> None:
    asked: PeerRequest = Ask("k7f3q2ma", Peek(5))
    for text in ("", "a", "ab", "abc"):
        blob = pa.RecordBatch.from_arrays([pa.array([text.encode() * 9] * 3)], schema=ROWS.schema)
        batch = served(0, 0, Slice(0, np.arange(3), np.arange(3), 1, 5), blob)
        body = peer.encode_answer(asked, [batch, batch])
        start = pa.py_buffer(body).address
        for copy in peer.decode_answer(asked, body):
            for buffer in filter(None, copy.column("payload").buffers()):
                assert start <= buffer.address <= start + len(body)
                assert buffer.address % 8 == 0
    assert peer.decode_answer(Ask("i", Reload(5)), peer.encode_answer(Ask("i", Reload(5)), None)) is None
    assert HEAD == 8
