"""What becomes of a transfer: its items are produced where they go, exactly once, however often that is tried."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from sluiceway.cluster.router import Router
from sluiceway.core.queue.tickets import Transfer, TransferEnd
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.dead_letters import dead_rows, moved_rows, redriven_rows
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import MOVE_GROUP, TRANSFER_GROUP, MovedItem, Produce, ProduceKey

SEND_TIMEOUT: Millis = 30_000
MAX_BYTES = 24 << 20
"""In one produce, which has to fit into what one instance may send to another. A transfer's bound is on its payloads alone."""


class Piece(NamedTuple):
    batch: pa.RecordBatch
    lives: tuple[MovedItem, ...]


class Sending:
    """`queue` finds the record of a queue as far as it is known here, and `fresh` returns when all are known as they are now."""

    def __init__(self, router: Router, queue: Callable[[str], QueueRecord | None], fresh: Callable[[Millis], Awaitable[None]]) -> None:
        self._router = router
        self._queue = queue
        self._fresh = fresh

    async def send(self, source: QueueRecord, partition: int, transfer: Transfer, rows: list[pa.RecordBatch]) -> TransferEnd:
        """Produce the items of that transfer of that partition, once: the key is the transfer, and those to one target come in order.

        `done` when they are durable. Raises `queue_not_found` if it is sure that there is nowhere to send them.
        """
        place = f"{source.incarnation}.{partition}"
        if transfer.moves_to is not None:
            await self._move(source, transfer.moves_to, f"{MOVE_GROUP}{place}", transfer, moved_rows(source, rows))
            return TransferEnd(done=True)
        group = f"{TRANSFER_GROUP}{place}"
        if transfer.reason:
            return await self._bury(source, group, transfer, dead_rows(source, transfer.reason, rows))
        target = await self._redriven_to(transfer)
        if transfer.incarnation is None:
            return TransferEnd(bound=target.incarnation)
        for key, piece in _keyed(group, transfer.number, redriven_rows(source, rows), ()):
            await self._router.produce(target, Produce(piece.batch, SEND_TIMEOUT, key))
        return TransferEnd(done=True)

    async def _redriven_to(self, transfer: Transfer) -> QueueRecord:
        """That incarnation of the target, and no other of its name: those who may read the one need not be those who may read the other."""
        name = transfer.target or ""
        target = self._queue(name)
        if target is None or transfer.incarnation not in (None, target.incarnation):
            # Another instance may have bound it to a queue that is not known here yet.
            await self._fresh(SEND_TIMEOUT)
            target = self._queue(name)
        if target is None or transfer.incarnation not in (None, target.incarnation):
            why = f"the queue {name!r} to which the items were sent was deleted; they stay"
            raise SluicewayError("queue_not_found", why, "target")
        return target

    async def _bury(self, source: QueueRecord, group: str, transfer: Transfer, batch: pa.RecordBatch) -> TransferEnd:
        """To the dead queue; to the present one if the target has not taken them, and never will."""
        name = transfer.target or source.dead_queue
        target = None if name is None else self._queue(name)
        if target is None and transfer.instead is not None:
            # The dead queue of that time was deleted by force, which gave up what was on its way there: the present one takes it. What had
            # arrived unheard of, and was handled there before the deletion, is handled twice.
            return TransferEnd(elsewhere=transfer.instead)
        if target is None and source.dead_queue is None:
            return TransferEnd(done=True)  # The queue has no dead queue any more: what dies is dropped.
        if target is None:
            raise SluicewayError("queue_not_found", f"there is no dead queue {name!r}: create it, or name another one", "dead_queue")
        sent = list(_keyed(group, transfer.number, batch, ()))
        if transfer.instead is not None:
            if await self._take_back(target, *sent[0]):
                return TransferEnd(elsewhere=transfer.instead)
            if len(sent) == 1:
                return TransferEnd(done=True)
        for key, piece in sent:
            try:
                await self._router.produce(target, Produce(piece.batch, SEND_TIMEOUT, key))
            except SluicewayError as error:
                if error.code == "key_conflict" and await self._take_back(target, *sent[0]):
                    # It was taken back before, and its owner stopped before it had recorded where it goes instead.
                    return TransferEnd(elsewhere=target.queue_name)
                raise
        return TransferEnd(done=True)

    async def _take_back(self, target: QueueRecord, key: ProduceKey, first: Piece) -> bool:
        """Whether the target has not taken the transfer, and never will: an empty produce under its key makes it refuse what comes late.

        Pieces are sent in order, so where the first is not, none is.
        """
        try:
            await self._router.produce(target, Produce(first.batch.slice(0, 0), SEND_TIMEOUT, key))
        except SluicewayError as error:
            if error.code != "key_conflict":
                raise
            return False
        return True

    async def _move(self, source: QueueRecord, target: int, group: str, transfer: Transfer, batch: pa.RecordBatch) -> None:
        """To another partition of the queue, which takes it whatever its state is, unless it is sealed.

        A move is never called back: a target that has gone may have had the items, and handed them on, and what it remembered of them went
        with it. Instead no target goes while a move to it is under way. One to a partition that this rebalance makes or keeps is over
        before this one ends, as its source is not sealed before, and until then there is no other rebalance that could remove the target.
        A cancelled one, which drains the targets of its own moves, seals none of them before it has seen, in each source that it reopens,
        that nothing is moving out of it any more (`Shutted.moving`), after a Shut whose cursor lets no more moves begin there.
        So if a target is not there after all, something is wrong: the items are kept, neither lost nor doubled, and this is tried again.
        """
        for key, piece in _keyed(group, transfer.number, batch, transfer.lives):
            try:
                await self._router.produce(source, Produce(piece.batch, SEND_TIMEOUT, key, target, piece.lives))
            except SluicewayError as error:
                if error.code == "queue_not_found":
                    # It would be taken for a queue to which redriven items go: these come back.
                    raise SluicewayError("unavailable", f"the queue of the items is being deleted: {error.detail}") from error
                raise


def _keyed(group: str, number: int, batch: pa.RecordBatch, lives: Sequence[MovedItem]) -> Iterator[tuple[ProduceKey, Piece]]:
    """The transfer's rows, in as many produces as it takes. All of their keys live until the group's next transfer."""
    for at, piece in enumerate(pieces(Piece(batch, tuple(lives)))):
        name = f"{group}/{number}" if not at else f"{group}/{number}/{at}"
        yield ProduceKey(name, group, number), piece


def pieces(whole: Piece) -> list[Piece]:
    """The rows in pieces of up to MAX_BYTES, or of one row. The same rows always give the same pieces."""
    count = whole.batch.num_rows
    if count == 1 or whole.batch.nbytes <= MAX_BYTES:
        return [whole]
    half = count // 2
    first, second = whole.batch.slice(0, half), whole.batch.slice(half)
    return [*pieces(Piece(first, _lives(whole.lives, 0, half))), *pieces(Piece(second, _lives(whole.lives, half, count)))]


def _lives(lives: Sequence[MovedItem], first: int, end: int) -> tuple[MovedItem, ...]:
    """Those of the rows from `first` to before `end`."""
    found, at = [], 0
    for life in lives:
        rows = min(end, at + life.rows) - max(first, at)
        if rows > 0:
            found.append(life._replace(rows=rows))
        at += life.rows
    return tuple(found)
