"""Transfers of a queue's items from a partition served here to their destination, and futures for their arrival."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.tickets import Transfer, TransferEnd
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.leased_items import Slice
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.partition_store import DamagedError

log = logging.getLogger(__name__)

SendTransfer = Callable[[QueueRecord, int, Transfer, list[pa.RecordBatch]], Awaitable[TransferEnd]]
"""Produces a transfer's rows (of that partition of that queue) at its destination; `done` when they are durable there."""
Rows = Callable[[int, int, Sequence[Slice]], Awaitable[list[pa.RecordBatch]]]


class Transfers:
    """The transfers of one queue's share. `record` returns the queue's current record, `rows` reads a transfer's rows; `stop_partition` is
    called for damaged data, and `cycle` runs the share's next cycle."""

    def __init__(
        self,
        queue: OwnedQueue,
        record: Callable[[], QueueRecord],
        rows: Rows,
        bury: SendTransfer,
        stop_partition: Callable[[int, Exception], None],
        cycle: Callable[[], None],
    ) -> None:
        self._queue, self._record, self._rows, self._bury = queue, record, rows, bury
        self._stop_partition, self._cycle = stop_partition, cycle
        self._arrivals: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Futures by (partition, number): True when the transfer's items have arrived, False when they stay here."""

    def arrival(self, partition: int, number: int) -> asyncio.Future[bool]:
        """A future that tells whether a transfer's items have arrived or stay here; cancelled when another instance takes over."""
        executor = self._queue.executors.get(partition)
        if executor is not None and number in executor.partition.transfers.by_number:
            return self._arrivals.setdefault((partition, number), asyncio.get_running_loop().create_future())
        known: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if executor is None:
            known.cancel()
        else:
            known.set_result(True)
        return known

    def forget(self, partition: int) -> None:
        """Cancel the partition's futures: another instance has taken over."""
        for place in [place for place in self._arrivals if place[0] == partition]:
            self._arrivals.pop(place).cancel()

    async def send(self, effect: Transfer) -> None:
        """Attempt a transfer, and report its end."""
        end = TransferEnd()
        try:
            rows = await self._rows(effect.partition, effect.number, effect.slices)
            if sum(batch.num_rows for batch in rows) == sum(len(piece.rows) for piece in effect.slices):
                end = await self._bury(self._record(), effect.partition, effect, rows)
            else:
                self._check_over(effect)
                end = TransferEnd(done=True)
        except SluicewayError as error:
            end = TransferEnd(nowhere=error.code == "queue_not_found" and not effect.reason)
            log.warning("queue %s, partition %d: transfer %d: %s", self._record().queue_name, effect.partition, effect.number, error)
        except Exception:
            log.exception("queue %s, partition %d: transfer %d failed", self._record().queue_name, effect.partition, effect.number)
        self._queue.transferred(effect.partition, effect.number, end, system.now())
        self._cycle()
        arrival = self._arrivals.pop((effect.partition, effect.number), None) if end.done or end.nowhere else None
        if arrival is not None and not arrival.done():
            arrival.set_result(end.done)

    def _check_over(self, effect: Transfer) -> None:
        """Check that a transfer with missing rows has ended. If not, the rows are lost, and reporting it as done would hide that."""
        executor = self._queue.executors.get(effect.partition)
        if executor is not None and effect.number in executor.partition.transfers.by_number:
            error = DamagedError(f"blobs of transfer {effect.number} are missing")
            self._stop_partition(effect.partition, error)
            raise SluicewayError("partition_damaged", str(error))
