"""Transfer sender: produces the items of a transfer in their target, exactly once, however often it is tried."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)

SEND_TIMEOUT: Millis = 30_000
MAX_BYTES = 24 << 20
"""Maximum size of one produce, which must fit into a request between instances. A transfer's limit counts payloads only."""


class Piece(NamedTuple):
    """Rows of one produce; `lives`: their metadata if they are moved, else empty."""

    batch: pa.RecordBatch
    lives: tuple[MovedItem, ...]


class TransferSender:
    """Sends transfers. `queue` finds a queue's record in this instance's catalog; `fresh` updates the catalog, within a timeout in ms."""

    def __init__(self, router: Router, queue: Callable[[str], QueueRecord | None], fresh: Callable[[Millis], Awaitable[None]]) -> None:
        self._router = router
        self._queue = queue
        self._fresh = fresh

    async def send(self, source: QueueRecord, partition: int, transfer: Transfer, rows: list[pa.RecordBatch]) -> TransferEnd:
        """Produce the transfer's items, once: the transfer is the idempotency key, and items for one target stay in order.

        The result is `done` once they are durable. Raises `queue_not_found` if there certainly is no target.
        """
        place = f"{source.incarnation}.{partition}"
        if transfer.moves_to is not None:
            await self._move(source, transfer.moves_to, f"{MOVE_GROUP}{place}", transfer, moved_rows(source, rows))
            return TransferEnd(done=True)
        group = f"{TRANSFER_GROUP}{place}"
        if transfer.reason:
            return await self._bury(source, group, transfer, dead_rows(source, transfer.reason, rows, transfer.failures))
        target = await self._redriven_to(transfer)
        if transfer.incarnation is None:
            return TransferEnd(bound=target.incarnation)
        for key, piece in _keyed(group, transfer.number, redriven_rows(source, rows), ()):
            await self._router.produce(target, Produce(piece.batch, SEND_TIMEOUT, key))
        return TransferEnd(done=True)

    async def _redriven_to(self, transfer: Transfer) -> QueueRecord:
        """Find exactly the bound incarnation of the target: a new queue of that name may have other readers, with other rights."""
        name = transfer.target or ""
        target = await self._bound(name, transfer)
        if target is None:
            why = f"the target queue {name!r} of the items was deleted; they stay in this queue"
            raise SluicewayError("queue_not_found", why, "target")
        return target

    async def _bound(self, name: str, transfer: Transfer) -> QueueRecord | None:
        """The queue of that name, if it is the incarnation that the transfer is bound to; None: that one was deleted."""
        target = self._queue(name)
        if target is None or transfer.incarnation not in (None, target.incarnation):
            # Another instance may have bound it to a queue that this one does not know yet.
            await self._fresh(SEND_TIMEOUT)
            target = self._queue(name)
        return None if target is None or transfer.incarnation not in (None, target.incarnation) else target

    async def _bury(self, source: QueueRecord, group: str, transfer: Transfer, batch: pa.RecordBatch) -> TransferEnd:
        """Send dead items to the dead queue; to the present one if the former target has not taken them, and never will."""
        name = transfer.target or source.dead_queue
        target = None if name is None else await self._bound(name, transfer)
        if target is None and transfer.instead is not None:
            # The former dead queue was deleted by force, which gave up the items on their way there: the present one takes them. Items
            # that had arrived unreported, and were handled there before the deletion, are handled twice.
            return TransferEnd(elsewhere=transfer.instead)
        # The look for the target may have brought a new setting.
        present = self._queue(source.queue_name)
        if target is None and source.dead_queue is None and (present is None or present.dead_queue is None):
            what = "%d dead items of queue %s are dropped: their dead queue %s was deleted, and the queue has no other"
            log.warning(what, batch.num_rows, source.queue_name, name)
            return TransferEnd(done=True)
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
                    # It was taken back before, and the source's owner stopped before it recorded the new target.
                    return TransferEnd(elsewhere=target.queue_name)
                raise
        return TransferEnd(done=True)

    async def _take_back(self, target: QueueRecord, key: ProduceKey, first: Piece) -> bool:
        """Whether the target has not taken the transfer, and never will: an empty produce under its key makes it refuse a late one.

        Pieces are sent in order: if the first has not arrived, none has.
        """
        try:
            await self._router.produce(target, Produce(first.batch.slice(0, 0), SEND_TIMEOUT, key))
        except SluicewayError as error:
            if error.code != "key_conflict":
                raise
            return False
        return True

    async def _move(self, source: QueueRecord, target: int, group: str, transfer: Transfer, batch: pa.RecordBatch) -> None:
        """Move items to another partition of the queue, which takes them in any state except sealed.

        A move is never called back: a removed target may have taken the items and handed them on, and its memory of them went with it.
        Instead no target is removed while a move to it is in flight. A move to a partition that this rebalance adds or keeps ends before
        the rebalance does, as its source is not sealed earlier, and until then no other rebalance can remove the target. A cancelled
        rebalance, which drains the targets of its own moves, seals none of them before each source that it reopens shows no move in flight
        (`Shutted.moving`), after a Shut whose cursor lets no more moves begin there.
        So a missing target is a bug: the items are kept, neither lost nor doubled, and the move is tried again.
        """
        for key, piece in _keyed(group, transfer.number, batch, transfer.lives):
            try:
                await self._router.produce(source, Produce(piece.batch, SEND_TIMEOUT, key, target, piece.lives))
            except SluicewayError as error:
                if error.code == "queue_not_found":
                    # The code would be taken for the deleted target of redriven items, which come back.
                    raise SluicewayError("unavailable", f"the queue of the items is being deleted: {error.detail}") from error
                raise


def _keyed(group: str, number: int, batch: pa.RecordBatch, lives: Sequence[MovedItem]) -> Iterator[tuple[ProduceKey, Piece]]:
    """Split the transfer's rows into produces, each with its key. All of these keys live until the group's next transfer."""
    for at, piece in enumerate(pieces(Piece(batch, tuple(lives)))):
        name = f"{group}/{number}" if not at else f"{group}/{number}/{at}"
        yield ProduceKey(name, group, number), piece


def pieces(whole: Piece) -> list[Piece]:
    """Split the rows into pieces of up to MAX_BYTES, or of one row. The same rows always give the same pieces."""
    count = whole.batch.num_rows
    if count == 1 or whole.batch.nbytes <= MAX_BYTES:
        return [whole]
    half = count // 2
    first, second = whole.batch.slice(0, half), whole.batch.slice(half)
    return [*pieces(Piece(first, _lives(whole.lives, 0, half))), *pieces(Piece(second, _lives(whole.lives, half, count)))]


def _lives(lives: Sequence[MovedItem], first: int, end: int) -> tuple[MovedItem, ...]:
    """Metadata of the rows from `first` to before `end`."""
    found, at = [], 0
    for life in lives:
        rows = min(end, at + life.rows) - max(first, at)
        if rows > 0:
            found.append(life._replace(rows=rows))
        at += life.rows
    return tuple(found)
