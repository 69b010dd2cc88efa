"""The state machine of a producer: it groups items into batches and decides when each batch is sent. No I/O; its caller passes the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from sluiceway.client.answers import Produced
from sluiceway.client.item_calls import Item
from sluiceway.kernel.clock import Millis

F = TypeVar("F")
ITEM_COST = 200
"""Approximate memory of a waiting item in bytes, without its payload. It bounds a buffer of tiny items, too."""
MAX_FAILED = 16
"""Failed batches that are kept for `unheard`: the error of each holds its call, and many programs never flush."""


class BatchLimits(NamedTuple):
    """Limits of a producer. `linger`: how long an item waits for others while batches are in flight, in milliseconds.

    A batch has at most `max_batch` items and `max_bytes` bytes, unless a single item has more. At most `max_in_flight` batches are sent at
    once. Waiting and sent items take at most `max_buffered` bytes together, unless it is a single item.
    """

    linger: Millis
    max_batch: int
    max_bytes: int
    max_in_flight: int
    max_buffered: int


class Batch(Generic[F]):
    """The items of one call. `done`: the caller's object that is completed when the batch ends."""

    __slots__ = ("asked", "bytes", "count", "done", "error", "items", "linger_deadline", "produced", "refused", "trace")

    def __init__(self, done: F, linger_deadline: Millis) -> None:
        self.done = done
        self.linger_deadline = linger_deadline
        self.items: list[Item | None] = []
        """None in place of a refused item. Empty once the batch has ended."""
        self.count = self.bytes = 0
        self.refused: dict[int, Exception] = {}
        self.produced: Produced | None = None
        self.error: Exception | None = None
        self.trace: TracebackType | None = None
        """Where the error was raised when the batch ended."""
        self.asked: set[int] = set()
        """Indexes of the items whose results the caller has asked for."""

    @property
    def left(self) -> list[Item]:
        """The items to send, without refused ones."""
        return [item for item in self.items if item is not None]

    def refuse(self, place: int, error: Exception) -> bool:
        """Drop the item at index `place` of `left`, which the server refused. Returns whether other items are left."""
        at = [number for number, item in enumerate(self.items) if item is not None][place]
        self.items[at] = None
        self.refused[at] = error
        return len(self.refused) < self.count

    def id_of(self, at: int) -> str:
        """The id of the item that was added as number `at`. Raises the error that it failed with."""
        error = self.refused.get(at, self.error)
        if error is not None:
            # All items of the batch raise it: it must not gather the frames, and with them the memory, of everyone who has asked.
            raise error.with_traceback(self.trace if error is self.error else None)
        assert self.produced is not None, "the batch has not ended"
        at -= sum(1 for refused in self.refused if refused < at)
        return self.produced.id_at(at)

    def unheard(self) -> Exception | None:
        """The error of a failed item whose result the caller has not asked for; None: there is none."""
        failed = self.refused if self.error is None else range(self.count)
        at = next((at for at in failed if at not in self.asked), None)
        return None if at is None else self.refused.get(at, self.error)


class Batching(Generic[F]):
    """The batches of one producer. They are taken in the order in which their items were added. `new` makes a batch's `done`.

    While no batch is in flight, the next one is due at once. While any is, the next one gathers items until all of those have ended, it is
    full, or `linger` is over. So an item sent alone does not wait, and batches grow with the load.
    """

    def __init__(self, limits: BatchLimits, new: Callable[[], F]) -> None:
        self._limits = limits
        self._new = new
        self._waiting: deque[Batch[F]] = deque()
        """All but the last are full."""
        self._in_flight: set[Batch[F]] = set()
        self._buffered = 0
        self._failed: list[Batch[F]] = []

    @property
    def unfinished(self) -> list[Batch[F]]:
        return [*self._in_flight, *self._waiting]

    def has_room(self, size: int) -> bool:
        """Whether an item of `size` bytes can be added now."""
        return not self._buffered or self._buffered + size + ITEM_COST <= self._limits.max_buffered

    def add(self, item: Item, size: int, now: Millis) -> tuple[Batch[F], int]:
        """Add an item of `size` bytes. Returns its batch and its index there."""
        batch = self._waiting[-1] if self._waiting else None
        if batch is None or batch.count >= self._limits.max_batch or batch.bytes + size > self._limits.max_bytes:
            batch = Batch(self._new(), now + self._limits.linger)
            self._waiting.append(batch)
        batch.items.append(item)
        batch.count += 1
        batch.bytes += size
        self._buffered += size + ITEM_COST
        return batch, batch.count - 1

    def flush(self, now: Millis) -> None:
        """Stop the items added so far from waiting for others."""
        if self._waiting:
            self._waiting[-1].linger_deadline = now

    def is_full(self, batch: Batch[F]) -> bool:
        """Whether the batch takes no more items."""
        return batch.count >= self._limits.max_batch or batch.bytes >= self._limits.max_bytes

    def take(self, now: Millis) -> Batch[F] | None:
        """Return the next batch if it is due. Report its end with `ended`."""
        if not self.is_due(now):
            return None
        batch = self._waiting.popleft()
        self._in_flight.add(batch)
        return batch

    def is_due(self, now: Millis) -> bool:
        """Whether a batch is due."""
        at = self.wake_at()
        return at is not None and at <= now

    def wake_at(self) -> Millis | None:
        """When the next batch is due if no event comes first; None: never."""
        if not self._waiting or len(self._in_flight) >= self._limits.max_in_flight:
            return None
        first = self._waiting[0]
        full = len(self._waiting) > 1 or self.is_full(first)
        return 0 if full or not self._in_flight else first.linger_deadline

    def ended(self, batch: Batch[F]) -> None:
        """A batch that was taken is stored, or has failed permanently."""
        self._in_flight.remove(batch)
        self._buffered -= batch.bytes + ITEM_COST * batch.count
        batch.items = []
        if batch.error is not None:
            batch.trace = batch.error.__traceback__
        if batch.error is not None or batch.refused:
            # The first ones stay: `flush` raises the first failure.
            kept = [each for each in self._failed if each.unheard() is not None]
            self._failed = [*kept[: MAX_FAILED - 1], batch]

    def unheard(self) -> Exception | None:
        """An error that the caller has not seen, from the batches that ended since the last call of this method; None: there is none."""
        failed, self._failed = self._failed, []
        return next((error for batch in failed if (error := batch.unheard()) is not None), None)
