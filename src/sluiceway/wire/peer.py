"""Codec of the messages between a cluster's instances: a head in msgpack, then the rows as Arrow record batches.

    b"slw" · level (1 byte) · length of the head (4 bytes, little-endian) · the head · zeros up to a multiple of 8 · the record batches

A batch has no schema. Both sides know all columns that items can have, so a bit mask names the batch's columns.

Each message is of one compatibility level (`kernel/compatibility.py`), that of the cluster; an answer is of its request's. A later release
may add fields with defaults, columns at the end, and kinds of requests. What uses them is sent only once the cluster is at their level.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.kernel.compatibility import NEWEST, OLDEST
from sluiceway.kernel.errors import KINDS, OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_PAGE
from sluiceway.model.consumers import Consumers
from sluiceway.model.inspection import (
    Browse,
    BrowsedPage,
    Deleted,
    DeleteItems,
    ItemsPage,
    ListItems,
    MadeReady,
    MovedAway,
    MoveItems,
    RunNow,
    Search,
    SearchedPage,
)
from sluiceway.model.items import ENQUEUE_AT, HEADERS, OPTIONAL, PAYLOAD
from sluiceway.model.leased_items import POSITION
from sluiceway.model.peers import (
    Ask,
    BackupStep,
    Close,
    Count,
    CountKeys,
    CountReasons,
    Explain,
    FindLeases,
    FrozenFence,
    GiveKeys,
    HandOverKeys,
    KeysGiven,
    Learn,
    LeaseAnywhere,
    ListConsumers,
    ListProblems,
    Moved,
    MoveOut,
    NoteKeys,
    PeerRequest,
    Poll,
    Polled,
    ReadBackup,
    Reload,
    RemainingItems,
    ServeSlots,
    ShareKeys,
    ShareReasons,
    Shut,
    Shutted,
    TakeKeys,
)
from sluiceway.model.problems import Problems
from sluiceway.model.requests import (
    BundleCounts,
    Clear,
    Cleared,
    CountBundles,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    Offsets,
    Peek,
    Produce,
    Produced,
    Redrive,
    Redriven,
    Settle,
    Settled,
)
from sluiceway.model.small_batch import Served, SmallBatch, in_columns
from sluiceway.wire.arrow_codec import check_buffers
from sluiceway.wire.ipc_header import batch_header, check_metadata, metadata_at

CONTENT_TYPE: Final = "application/x-sluiceway-peer"
PATH: Final = "/cluster/ask"
"""Path of the peers' endpoint, below the URL in an instance's member record."""
COLUMNS: Final = (*POSITION, PAYLOAD, *OPTIONAL, ENQUEUE_AT)
"""The columns that items can have. Bit n of a batch's mask stands for the n-th one."""
_POSITION: Final = (1 << len(POSITION)) - 1
_PAYLOAD: Final = 1 << len(POSITION)


class Kind(NamedTuple):
    """A request type and the type of its answer."""

    request: type
    answer: Any


KINDS_OF_REQUESTS: Final = {
    kind.request.__name__: kind
    for kind in (
        Kind(Produce, Produced),
        Kind(Lease, Leased),
        Kind(Settle, Settled),
        Kind(Extend, Extended),
        Kind(Clear, Cleared),
        Kind(CountBundles, BundleCounts),
        Kind(DeleteItems, Deleted),
        Kind(RunNow, MadeReady),
        Kind(MoveItems, MovedAway),
        Kind(Search, SearchedPage),
        Kind(Redrive, Redriven),
        Kind(ListItems, ItemsPage),
        Kind(Browse, BrowsedPage),
        Kind(Peek, list[pa.RecordBatch]),
        Kind(Explain, Explanation),
        Kind(Count, LogicalQueueStats),
        Kind(CountReasons, ShareReasons),
        Kind(CountKeys, ShareKeys),
        Kind(Reload, None),
        Kind(Close, RemainingItems),
        Kind(FindLeases, int),
        Kind(Shut, Shutted),
        Kind(GiveKeys, KeysGiven),
        Kind(TakeKeys, int),
        Kind(HandOverKeys, int),
        Kind(NoteKeys, int),
        Kind(ServeSlots, int),
        Kind(MoveOut, Moved),
        Kind(LeaseAnywhere, Leased),
        Kind(Learn, bool),
        Kind(Poll, Polled),
        Kind(ListConsumers, dict[str, Consumers]),
        Kind(ListProblems, Problems),
        Kind(BackupStep, tuple[FrozenFence, ...]),
        Kind(ReadBackup, bytes),
    )
}
_OF_INSTANCES: Final = (Learn, Poll, ListConsumers, ListProblems, BackupStep, ReadBackup)
"""Requests that are about no single queue."""
_ERROR: Final = "error"
_MAGIC: Final = b"slw"
_START: Final = struct.Struct("<3sBI")
_ALIGNED: Final = 8
_LITTLE: Final = np.dtype("<i8")
_SHOWN: Final = 200


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The head of a message. `kind`: the request's type, also in an answer. `columns`: the masks of the batches that follow."""

    kind: str
    body: msgspec.Raw
    columns: list[int]
    incarnation: str | None = None
    payload: bool = True


class _Error(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    code: str
    detail: str
    field: str | None
    retry_after: int | None = None
    text: str | None = None
    other: str | None = None


def encode_request(request: PeerRequest, level: int = NEWEST) -> bytes:
    """Encode a request at that level. Payloads are copied twice."""
    if isinstance(request, Ask):
        return _encode(level, type(request.request).__name__, request.request, request.incarnation, request.payload)
    return _encode(level, type(request).__name__, request)


def level_of(body: bytes) -> int:
    """The level of a message that was decoded."""
    return body[len(_MAGIC)]


def decode_request(body: bytes) -> PeerRequest:
    """Decode a request. Its rows are views of `body`. Raises `invalid_body` for a body of an unknown level or a damaged one."""
    message = _decode(body, 0)
    kind = KINDS_OF_REQUESTS.get(message.head.kind)
    if kind is None or (kind.request in _OF_INSTANCES) is not (message.head.incarnation is None):
        raise _unreadable(f"there is no request {message.head.kind[:_SHOWN]!r} of this form")
    request = message.read(kind.request)
    return request if message.head.incarnation is None else Ask(message.head.incarnation, request, message.head.payload)


def encode_answer(request: PeerRequest, answer: Any, level: int = NEWEST) -> bytes:
    """Encode the answer to a request of that level."""
    return _encode(level, _kind(request), answer)


def decode_answer(request: PeerRequest, body: bytes) -> Any:
    """Decode the answer to a request. Raises `invalid_body` as `decode_request` does."""
    message, name = _decode(body, _POSITION), _kind(request)
    if message.head.kind != name:
        raise _unreadable(f"it answers {message.head.kind[:_SHOWN]!r}, but the request was {name!r}")
    return message.read(KINDS_OF_REQUESTS[name].answer)


def encode_error(error: SluicewayError, level: int = NEWEST) -> bytes:
    """Encode an error, which the peer raises in place of an answer to a request of that level."""
    said = _Error(error.code, error.detail, error.field)
    if isinstance(error, RateLimitedError):
        said.retry_after = error.retry_after
    elif isinstance(error, OtherQueueError):
        said.text, said.other = error.text, error.other
    return _encode(level, _ERROR, said)


def decode_error(body: bytes) -> SluicewayError:
    """Decode an error that a peer sent. Raises `invalid_body` as `decode_request` does."""
    message = _decode(body, 0)
    said: _Error = message.read(_Error)
    if message.head.kind != _ERROR or said.code not in KINDS:
        raise _unreadable("it is not an error")
    if said.retry_after is not None:
        return RateLimitedError(said.detail, said.retry_after)
    if said.text is None or said.other is None or said.field is None:
        return SluicewayError(said.code, said.detail, said.field)
    # `str.format` would evaluate any other expression in braces.
    if set("{}") & set(said.text.replace("{other}", "")):
        raise _unreadable("its text has a placeholder other than {other}")
    return OtherQueueError(said.code, said.text, said.other, said.field)


def _kind(request: PeerRequest) -> str:
    return type(request.request if isinstance(request, Ask) else request).__name__


# ---- writing ----------------------------------------------------------------------------------------------------------


def _encode(level: int, kind: str, content: Any, incarnation: str | None = None, payload: bool = True) -> bytes:
    batches: list[pa.RecordBatch] = []

    def write(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.astype(_LITTLE, copy=False).tobytes()
        if isinstance(value, pa.RecordBatch | SmallBatch | Served):
            batches.append(in_columns(value))
            return len(batches) - 1
        raise TypeError(f"{type(value).__name__} cannot be sent to a peer")

    body = msgspec.Raw(msgspec.msgpack.encode(content, enc_hook=write))
    fitted = [_fitted(batch) for batch in batches]
    head = msgspec.msgpack.encode(_Head(kind, body, [mask for mask, _ in fitted], incarnation, payload))
    gap = bytes(-len(head) % _ALIGNED)
    return b"".join((_START.pack(_MAGIC, level, len(head)), head, gap, *(batch.serialize() for _, batch in fitted)))


def _fitted(batch: pa.RecordBatch) -> tuple[int, pa.RecordBatch]:
    """The batch's mask, and the batch with its columns in the order of COLUMNS."""
    names = set(batch.schema.names)
    mask = sum(1 << bit for bit, field in enumerate(COLUMNS) if field.name in names)
    schema = _schema(mask)
    if not batch.schema.equals(schema):
        batch = batch.select(schema.names)
        if len(names) != len(schema) or batch.schema.types != schema.types:
            raise TypeError(f"columns that items do not have: {batch.schema}")
    return mask, batch


@cache
def _schema(mask: int) -> pa.Schema:
    return pa.schema([field for bit, field in enumerate(COLUMNS) if mask >> bit & 1])


# ---- reading ----------------------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    head: _Head
    batches: Sequence[pa.RecordBatch]

    def read(self, kind: Any) -> Any:
        """Decode the content as type `kind`. Raises `invalid_body`."""
        used = 0

        def read(wanted: Any, value: object) -> object:
            nonlocal used
            if wanted is not pa.RecordBatch:
                return _offsets(value)
            if value != used:
                raise ValueError("the batches are not in order")
            used += 1
            return self.batches[used - 1]

        try:
            content = msgspec.msgpack.decode(self.head.body, type=kind, dec_hook=read)
        except (msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
            raise _unreadable(str(error)) from None
        if used != len(self.batches):
            raise _unreadable("it has unexpected batches")
        return content


def _offsets(value: object) -> Offsets:
    if not isinstance(value, bytes):
        raise ValueError("offsets must be bytes")
    offsets = np.frombuffer(value, _LITTLE).astype(np.int64, copy=False)
    if len(offsets) and (offsets[0] < 0 or (offsets[1:] <= offsets[:-1]).any()):
        raise ValueError("offsets must be ascending and not negative")
    return offsets


def _decode(body: bytes, position: int) -> _Message:
    """`position`: mask of the position columns that the rows must have. They must also have payloads."""
    if len(body) < _START.size or body[:3] != _MAGIC:
        raise _unreadable("it has no header")
    _, level, length = _START.unpack_from(body)
    if not OLDEST <= level <= NEWEST:
        raise _unreadable(f"it is of compatibility level {level}, and this instance understands {OLDEST} to {NEWEST}")
    end = _START.size + length
    start = end + -end % _ALIGNED
    if start > len(body):
        raise _unreadable("it is cut off")
    view = memoryview(body)
    try:
        head = msgspec.msgpack.decode(view[_START.size : end], type=_Head)
        batches = _batches(view[start:], head.columns, position | _PAYLOAD)
    except (msgspec.DecodeError, pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(str(error).partition("\n")[0]) from None
    return _Message(head, batches)


def _batches(data: memoryview, masks: Sequence[int], needed: int) -> list[pa.RecordBatch]:
    """Read and fully validate the batches, as for clients' requests: a malformed batch could crash the process."""
    source = pa.BufferReader(pa.py_buffer(data))
    batches = []
    for mask in masks:
        if not 0 < mask < 1 << len(COLUMNS) or mask & (_POSITION | _PAYLOAD) != needed:
            raise ValueError("a batch has unexpected columns")
        metadata = metadata_at(data, source.tell())
        if metadata is None:
            raise ValueError("a batch is missing")
        check_metadata(metadata)
        message = pa.ipc.read_message(source)
        if message.type != "record batch":
            raise ValueError(f"a {message.type} message where a record batch was expected")
        header = batch_header(message.metadata)
        if header.compressed or not 0 < header.rows <= MAX_PAGE:
            raise ValueError(f"a batch is compressed or has {header.rows} rows")
        batch = pa.ipc.read_record_batch(message, _schema(mask))
        batch.validate(full=True)
        for field, column in zip(batch.schema, batch.columns, strict=True):
            check_buffers(column, field.name)
            if (column.null_count and not field.nullable) or (field.type == HEADERS and column.items.null_count):
                raise ValueError(f"the column {field.name!r} has nulls")
        batches.append(batch)
    if source.tell() != len(data):
        raise ValueError("data follows its end")
    return batches


def _unreadable(why: str) -> SluicewayError:
    return SluicewayError("invalid_body", f"the peer's message cannot be read: {why[:_SHOWN]}")
