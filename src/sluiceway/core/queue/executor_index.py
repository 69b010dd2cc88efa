"""Executor index: finds the executors with work, so that the cost of a scheduling cycle depends on them, not on all executors.

The executors are the only truth. A change touches its executor (`PartitionExecutor.touch`), which is reindexed before the next query.
`overlooked` finds executors that were changed without a touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from sluiceway.core.queue.distribution import Candidate
from sluiceway.core.queue.executor_health import DEGRADED
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor
from sluiceway.kernel.clock import Millis

MAX_REMEMBERED_CLIENTS = 1_000
"""Clients, most recent first, whose last leased partition is remembered."""

_Rank = TypeVar("_Rank", int, Candidate, tuple[int, int])


class _Least(Generic[_Rank]):
    """Minimum over ranked numbers: a heap in which superseded entries stay until they reach the top."""

    def __init__(self) -> None:
        self.ranks: dict[int, _Rank] = {}
        self._heap: list[tuple[_Rank, int]] = []

    def note(self, number: int, rank: _Rank | None) -> None:
        """Set the number's rank; None removes it."""
        if rank is None:
            self.ranks.pop(number, None)
        elif self.ranks.get(number) != rank:
            self.ranks[number] = rank
            heappush(self._heap, (rank, number))
            if len(self._heap) > 2 * len(self.ranks) + 64:
                self._heap = [(each, of) for of, each in self.ranks.items()]
                heapify(self._heap)

    def first(self) -> tuple[_Rank, int] | None:
        while self._heap and self.ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0] if self._heap else None


class _Rounds(_Least[tuple[int, int]]):
    """Leasable executors, ranked by when each last served. Each serves once per round, in the order that clients ask for. So no executor
    waits longer than the rest of a round plus the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._newest = self._began = 0
        self._owed: list[int] = []
        """The executors that have not served in this round yet, sorted by number."""

    def note(self, number: int, rank: tuple[int, int] | None) -> None:
        if self.ranks.get(number) == rank:
            return
        super().note(number, rank)
        if rank is not None and rank[0] > self._newest:
            self._newest = rank[0]
        at = bisect_left(self._owed, number)
        was = at < len(self._owed) and self._owed[at] == number
        owed = rank is not None and rank[0] < self._began
        if owed and not was:
            self._owed.insert(at, number)
        elif was and not owed:
            del self._owed[at]

    def after(self, number: int | None) -> int | None:
        """The executor whose turn it is: the next by number after `number`, or (None) the one that has waited longest."""
        first = self.first()
        if first is None:
            return None
        if not self._owed:
            self._began = self._newest + 1
            self._owed = sorted(self.ranks)
        if number is None:
            return first[1]
        at = bisect_right(self._owed, number)
        return self._owed[at] if at < len(self._owed) else self._owed[0]


class ExecutorIndex:
    """The executors of a logical queue, indexed by what a cycle asks of them."""

    def __init__(self, executors: Iterable[PartitionExecutor]) -> None:
        self.executors: dict[int, PartitionExecutor] = {}
        self._touched: set[int] = set()
        """Not reindexed since they changed."""
        self._changed: set[int] = set()
        """Reindexed ones that changed since the last cycle."""
        self._writing: dict[int, PartitionExecutor] = {}
        self._closed: dict[int, PartitionExecutor] = {}
        self._slow: set[int] = set()
        """Executors whose commits may be too slow."""
        self._wakes: _Least[int] = _Least()
        self._takers: _Least[Candidate] = _Least()
        self._stocked = _Rounds()
        self._preferred: _Least[tuple[int, int]] = _Least()
        """Those of the stocked executors with items that should not wait for the others."""
        self._jumped = False
        """Whether the last of the stocked executors was one of these, out of turn."""
        self._served: OrderedDict[str, int] = OrderedDict()
        """Each client's last executor."""
        for executor in executors:
            self.add(executor)

    def add(self, executor: PartitionExecutor) -> None:
        self.executors[executor.number] = executor
        executor.touched = self._touched
        executor.touch()

    def remove(self, number: int) -> PartitionExecutor | None:
        """Remove an executor, and return it."""
        self._touched.add(number)
        return self.executors.pop(number, None)

    # ---- scheduling cycle -------------------------------------------------------------------------------------

    def begin_cycle(self, now: Millis) -> list[PartitionExecutor]:
        """Return the executors for this cycle to visit: those with work due by now, and those changed since the last cycle."""
        self._file()
        while (first := self._wakes.first()) is not None and first[0] <= now:
            self._wakes.note(first[1], None)
            self._touched.add(first[1])
        return self.visited()

    def visited(self) -> list[PartitionExecutor]:
        """These executors, plus those changed in this cycle so far, by number."""
        numbers = self._touched | self._changed
        return [self.executors[number] for number in (sorted(numbers) if len(numbers) > 1 else numbers) if number in self.executors]

    def end_cycle(self) -> None:
        self._file()
        self._changed.clear()

    def wake_at(self) -> Millis | None:
        """The next time an executor has work without an event announcing it."""
        self._file()
        first = self._wakes.first()
        return None if first is None else first[0]

    # ---- queries ----------------------------------------------------------------------------------------------

    @property
    def working(self) -> int:
        """The number of executors that take work now."""
        self._file()
        return len(self.executors) - len(self._closed)

    def writing(self) -> Iterable[PartitionExecutor]:
        """The executors with a commit in flight."""
        self._file()
        return self._writing.values()

    def closed(self) -> Iterable[PartitionExecutor]:
        """The executors that take no work now."""
        self._file()
        return self._closed.values()

    def may_be_slow(self, now: Millis) -> bool:
        """Whether any executor's commits are slow enough that the executors must be compared."""
        self._file()
        return bool(self._slow) or any(now - executor.committing_since > DEGRADED[0] for executor in self._writing.values())

    def emptiest(self) -> PartitionExecutor | None:
        """The executor for the next unkeyed produce, when none is far slower than the others."""
        self._file()
        first = self._takers.first()
        return None if first is None else self.executors[first[1]]

    def take_stocked(self, client_id: str) -> PartitionExecutor | None:
        """The executor for this client's lease: among those that have not served in this round, the next by number after the client's
        last one, or for a new client the one that has waited longest. It is not returned again until it is touched.

        Every other time, an executor with such items goes first: of keys that were at rest, in a fair queue, or above the default priority.
        So they wait for no flood in the others, and the others go on.
        """
        self._file()
        preferred = None if self._jumped else self._preferred.first()
        self._jumped = preferred is not None
        number = self._stocked.after(self._served.get(client_id)) if preferred is None else preferred[1]
        if number is None:
            return None
        self._stocked.note(number, None)
        self._preferred.note(number, None)
        return self.executors[number]

    def serves(self, client_id: str, number: int) -> None:
        """Remember the client's last executor. A forgotten client starts again at the executor that has waited longest."""
        if len(self.executors) == 1:
            return
        self._served[client_id] = number
        self._served.move_to_end(client_id)
        if len(self._served) > MAX_REMEMBERED_CLIENTS:
            self._served.popitem(last=False)

    # ---- indexing ---------------------------------------------------------------------------------------------

    def _file(self) -> None:
        if not self._touched:
            return
        for number in self._touched:
            executor = self.executors.get(number)
            if executor is not None and executor.state is ExecutorState.COMMITTING:
                self._writing[number] = executor
            else:
                self._writing.pop(number, None)
            if executor is not None and not executor.takes_work:
                self._closed[number] = executor
            else:
                self._closed.pop(number, None)
            if executor is not None and _may_be_slow(executor):
                self._slow.add(number)
            else:
                self._slow.discard(number)
            self._wakes.note(number, None if executor is None else executor.wakes_at())
            self._takers.note(number, None if executor is None else _as_taker(executor))
            rank = None if executor is None else _as_stocked(executor)
            self._stocked.note(number, rank)
            self._preferred.note(number, rank if executor is not None and executor.partition.log.has_precedence else None)
        self._changed |= self._touched
        self._touched.clear()

    def overlooked(self) -> list[int]:
        """The executors whose index entries are stale. Empty, unless a change was made without a touch."""
        self._file()
        return sorted(
            {
                number
                for number in self.executors.keys() | self._writing.keys() | self._closed.keys() | self._wakes.ranks.keys()
                if (executor := self.executors.get(number)) is None
                or (number in self._writing) != (executor.state is ExecutorState.COMMITTING)
                or (number in self._closed) == executor.takes_work
                or (number in self._slow) != _may_be_slow(executor)
                or self._wakes.ranks.get(number) != executor.wakes_at()
                or self._takers.ranks.get(number) != _as_taker(executor)
                or self._stocked.ranks.get(number) != _as_stocked(executor)
                or (number in self._preferred.ranks) != (_as_stocked(executor) is not None and executor.partition.log.has_precedence)
            }
        )


def _may_be_slow(executor: PartitionExecutor) -> bool:
    return executor.takes_work and executor.commit_time > DEGRADED[0]


def _as_taker(executor: PartitionExecutor) -> Candidate | None:
    return executor.candidate() if executor.takes_items else None


def _as_stocked(executor: PartitionExecutor) -> tuple[int, int] | None:
    """Rank for leasing: least recently served first; among those never served, most ready items first."""
    return (
        (executor.last_leased, -executor.partition.log.ready_count) if executor.state is ExecutorState.READY and executor.servable else None
    )
