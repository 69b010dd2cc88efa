"""When a producer sends what: items become batches, and batches calls. It is told the time and what happened, and says what to send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from sluiceway.client.answers import Produced
from sluiceway.client.item_calls import Item
from sluiceway.kernel.clock import Millis

F = TypeVar("F")
ITEM_COST = 200
"""Bytes that a waiting item takes up beside its payload, about, so that a buffer of tiny items is bounded, too."""


class BatchLimits(NamedTuple):
    """`linger` is how long an item waits for others. A batch has at most `max_batch` items and `max_bytes`, unless one item alone has more.

    At most `max_in_flight` batches are under way at once, and what waits or is under way has at most `max_buffered` bytes, unless it is
    one item.
    """

    linger: Millis
    max_batch: int
    max_bytes: int
    max_in_flight: int
    max_buffered: int


class Batch(Generic[F]):
    """Items that go into one call. `done` is whatever waits for its end."""

    __slots__ = ("asked", "bytes", "count", "done", "error", "items", "linger_deadline", "produced", "refused")

    def __init__(self, done: F, linger_deadline: Millis) -> None:
        self.done = done
        self.linger_deadline = linger_deadline
        self.items: list[Item | None] = []
        """None for one that was refused; empty once the batch has ended."""
        self.count = self.bytes = 0
        self.refused: dict[int, Exception] = {}
        self.produced: Produced | None = None
        self.error: Exception | None = None
        self.asked: set[int] = set()
        """The items of which somebody has asked what became of them."""

    @property
    def left(self) -> list[Item]:
        """The items that are to be sent."""
        return [item for item in self.items if item is not None]

    def refuse(self, place: int, error: Exception) -> bool:
        """The server refused the batch for the item at that place of `left`. Whether any others are left."""
        at = [number for number, item in enumerate(self.items) if item is not None][place]
        self.items[at] = None
        self.refused[at] = error
        return len(self.refused) < self.count

    def id_of(self, at: int) -> str:
        """The id of the item that was put in as the `at`-th. Raises what it failed with."""
        error = self.refused.get(at, self.error)
        if error is not None:
            raise error
        assert self.produced is not None, "the batch has not ended"
        place, _, first = self.produced.first_id.rpartition(".")
        return f"{place}.{int(first) + at - sum(1 for refused in self.refused if refused < at)}"

    def unheard(self) -> Exception | None:
        """What an item failed with of which nobody has asked."""
        failed = self.refused if self.error is None else range(self.count)
        at = next((at for at in failed if at not in self.asked), None)
        return None if at is None else self.refused.get(at, self.error)


class Batching(Generic[F]):
    """The batches of one producer. Items leave in the order in which they were added; `new` makes what waits for a batch's end."""

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
        """Whether an item of so many bytes can be added now."""
        return not self._buffered or self._buffered + size + ITEM_COST <= self._limits.max_buffered

    def add(self, item: Item, size: int, now: Millis) -> tuple[Batch[F], int]:
        """Put it into a batch. Which, and its place in it."""
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
        """What was added so far waits for no others."""
        if self._waiting:
            self._waiting[-1].linger_deadline = now

    def take(self, now: Millis) -> Batch[F] | None:
        """A batch that is to be sent now."""
        if not self.is_due(now):
            return None
        batch = self._waiting.popleft()
        self._in_flight.add(batch)
        return batch

    def is_due(self, now: Millis) -> bool:
        at = self.wake_at()
        return at is not None and at <= now

    def wake_at(self) -> Millis | None:
        """When there is something to send though nothing else happens; None: never."""
        if not self._waiting or len(self._in_flight) >= self._limits.max_in_flight:
            return None
        first = self._waiting[0]
        full = len(self._waiting) > 1 or first.count >= self._limits.max_batch or first.bytes >= self._limits.max_bytes
        return 0 if full else first.linger_deadline

    def ended(self, batch: Batch[F]) -> None:
        """A batch that was taken is stored, or has failed for good."""
        self._in_flight.remove(batch)
        self._buffered -= batch.bytes + ITEM_COST * batch.count
        batch.items = []
        if batch.error is not None or batch.refused:
            self._failed.append(batch)

    def unheard(self) -> Exception | None:
        """A failure of which nobody knows, among the batches that have ended since this was asked last."""
        failed, self._failed = self._failed, []
        return next((error for batch in failed if (error := batch.unheard()) is not None), None)
