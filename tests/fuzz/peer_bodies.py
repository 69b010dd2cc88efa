"""Damaged messages between the instances of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats
from sluiceway.kernel.errors import OtherQueueError, RateLimitedError, SluicewayError
from sluiceway.kernel.ids import ItemId
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
    Place,
    RunNow,
    Search,
    SearchedPage,
    Standing,
)
from sluiceway.model.item_filter import ItemFilter
from sluiceway.model.items import batch_from_rows, digest, fit
from sluiceway.model.leased_items import Slice, common_schema, served
from sluiceway.model.peers import Ask, Count, Learn, Load, PeerRequest, Poll, Polled
from sluiceway.model.requests import (
    DONE,
    Disposition,
    Extend,
    Lease,
    Leased,
    LeaseInfo,
    Peek,
    Produce,
    ProduceKey,
    Selection,
    Settle,
    Settled,
)
from sluiceway.wire import peer
from tests.fuzz.arrow_bodies import NOW, damaged

_INCARNATION: Final = "k7f3q2ma"
_ROWS: Final = batch_from_rows(
    [
        {"payload": b"one", "kind": "k", "headers": [("a", "b"), ("c", "")], "enqueue_at": NOW + 5},
        {"payload": b"", "kind": None, "headers": None, "enqueue_at": None},
        {"payload": b"three" * 20, "kind": "é" * 9, "headers": [], "enqueue_at": 0},
    ]
)
_BLOB: Final = batch_from_rows([{"payload": b"x" * 50, "reference": str(number)} for number in range(100)])


def _ask(request: Any) -> Ask:
    return Ask(_INCARNATION, request)


def _answers() -> list[tuple[PeerRequest, Any]]:
    some = np.array([3, 4, 9, 50], np.int64)
    batches = [served(1, 4, Slice(0, some, some + 7, 2, NOW), _BLOB), served(0, 5, Slice(0, some, some, 1, NOW), _BLOB.select(["payload"]))]
    return [
        (_ask(Lease("c", 9)), Leased([LeaseInfo(1, 4, 4, NOW), LeaseInfo(0, 5, 4, NOW)], batches)),
        (_ask(Peek(5)), batches),
        (_ask(Browse(1, ("ready",), 9)), BrowsedPage([(batches[0], Standing(NOW)), (batches[1], Standing(None, NOW, 5))], "0a" * 24, 57)),
        (_ask(ListItems(1, 0, 9)), ItemsPage([(batches[0], Standing(NOW)), (batches[1], Standing(None, NOW, 5))], 57)),
        (_ask(Settle({}, 5)), Settled(1, 2, 3, 4, [("k7f3q2ma.0.5", "not_yours")])),
        (_ask(DeleteItems({}, 5)), Deleted(5, [("k7f3q2ma.0.5", "leased")])),
        (_ask(RunNow({}, 5)), MadeReady(5, [("k7f3q2ma.0.5", "ready")])),
        (_ask(MoveItems({}, 5)), MovedAway(5, 4, {"other": 4}, [("k7f3q2ma.0.5", "no_source")])),
        (_ask(Search(1, ("ready",), ItemFilter(), 9, 9, 5)), SearchedPage([(batches[0], Standing(NOW))], 57, Place(True, 3, 4))),
        (
            _ask(Count()),
            LogicalQueueStats(
                produce_waiting=1,
                lease_waiting=2,
                complete_waiting=3,
                in_flight=4,
                partitions=[PartitionStats(partition=0), PartitionStats(partition=1, state="closed")],
            ),
        ),
        (Poll((), 0), Polled({_INCARNATION: Load(5, 6), "other": Load(0, None)})),
    ]


@cache
def sound() -> tuple[list[bytes], list[tuple[PeerRequest, bytes]], list[bytes]]:
    """Requests, answers and errors that are taken."""
    some = np.array([3, 4, 9, 50], np.int64)
    wanted = ItemFilter(ItemId(_INCARNATION, 1, 5), "k", "r", "key", "unique", {"a": None, "b": "x"}, b"\xff", "why")
    requests: list[PeerRequest] = [
        _ask(Produce(_ROWS, 5_000, ProduceKey("key", "group", 7), 2)),
        _ask(Produce(_BLOB.slice(10, 80), 5_000)),
        _ask(Settle({0: [Selection(DONE, some), Selection(Disposition("retry", NOW, None, "é"), lease=7)]}, 5, foreign=["x"], strict=True)),
        _ask(Extend([(1, 2)], 5, 6, offsets={3: some}, client_id="c")),
        _ask(DeleteItems({1: some, 2: some}, 5)),
        _ask(RunNow({1: some}, 5)),
        _ask(MoveItems({1: some}, 5, (), "other")),
        _ask(Search(1, ("ready",), wanted, 9, 9, 5, Place(True, 3, 4))),
        _ask(Lease("c", 9, 5_000, None, 3, "key")),
        _ask(Browse(1, ("ready", "leased"), 9)),
        _ask(Browse(1, (), 9, "0a" * 24, 57, False)),
        Learn(77),
        Poll((_INCARNATION, "other"), 5_000),
    ]
    errors = [
        SluicewayError("not_here", "3"),
        RateLimitedError("slow", 5),
        OtherQueueError("queue_in_use", "{other} is", "d", "dead_queue"),
    ]
    return (
        [peer.encode_request(request) for request in requests],
        [(request, peer.encode_answer(request, answer)) for request, answer in _answers()],
        [peer.encode_error(error) for error in errors],
    )


def attempt(chance: Random) -> Callable[[], None]:
    """One message, and the decoder that it is for."""
    requests, answers, errors = sound()
    which = chance.random()
    if which < 0.5:
        body = damaged(chance, requests)
        return lambda: _take(body)
    if which < 0.9:
        request, said = chance.choice(answers)
        body = damaged(chance, [said])
        return lambda: _pass_on(request, body)
    body = damaged(chance, errors)
    return lambda: _raise(body)


def _take(body: bytes) -> None:
    """What a logical queue does first with rows; and whatever was read can be said again."""
    request = peer.decode_request(body)
    if isinstance(request, Ask) and isinstance(request.request, Produce):
        digest(request.request.batch)
    peer.encode_request(request)


def _pass_on(request: PeerRequest, body: bytes) -> None:
    """Rows are put together for a client."""
    answer = peer.decode_answer(request, body)
    if isinstance(answer, ItemsPage):
        answer = [batch for batch, _ in answer.rows]
    batches: list[pa.RecordBatch] = list(answer.batches) if isinstance(answer, Leased) else answer if isinstance(answer, list) else []
    for batch in batches:
        fit(batch, common_schema(batches)).serialize()


def _raise(body: bytes) -> None:
    assert str(peer.decode_error(body)) is not None
