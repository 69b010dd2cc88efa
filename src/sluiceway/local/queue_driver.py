"""Driver of one logical queue: feeds it the time and events, and carries out its effects."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.core.group.group_records import Token
from sluiceway.core.partition.compaction import Compaction
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.queries import load
from sluiceway.core.partition.recording import Recording
from sluiceway.core.partition.snapshots import Snapshot
from sluiceway.core.queue.consumer_activity import ConsumerBook
from sluiceway.core.queue.handler_times import HandlerTimes
from sluiceway.core.queue.loop_pressure import LoopPressure
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.partition_executor import ExecutorState, PartitionExecutor, not_here
from sluiceway.core.queue.tickets import (
    AdjustSlots,
    Commit,
    Compact,
    Effect,
    Fault,
    Forward,
    Grant,
    Open,
    Reply,
    Request,
    TakeOut,
    TakeTokens,
    Ticket,
    Transfer,
    TransferBegun,
)
from sluiceway.core.queue.timer_pacing import TimerPace
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import COMPACTION_INTERVAL, TIMER_BATCH
from sluiceway.local.backend import Backend, BackendDownError
from sluiceway.local.blob_cache import BlobCache
from sluiceway.local.clock_watch import ClockWatch
from sluiceway.local.commit_gate import CommitGate
from sluiceway.local.deletion_guard import DeletionGuard
from sluiceway.local.rate_tokens import RateTokens
from sluiceway.local.row_fetcher import Held, PartitionHandle, RowFetcher
from sluiceway.local.slot_quotas import SlotQuotas
from sluiceway.local.transfers import SendTransfer, Transfers
from sluiceway.model.changes import Snapshot as StoredPartition
from sluiceway.model.leased_items import Slice
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import MoveOut
from sluiceway.model.queue import QueueRecord
from sluiceway.model.queue_minutes import Tally
from sluiceway.model.requests import Lease, Leased, LeaseInfo, Produce, Produced, ProduceKey
from sluiceway.model.sparse import SparseBatch, compacted, encode_sparse
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import DamagedError, Fence, FencedError, PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

MIN_WAIT = 0.001
"""Minimum delay in seconds before the next cycle when something is due already."""

BLOCKING = frozenset(("queue_paused", "storage_full", "too_many_requests", "unavailable", "outcome_unknown"))
"""Errors of a produce that a repetition of the same request may not meet."""

MANY_RECORDS = 10_000
"""From this many records on, scanning the loaded objects would stop the event loop for tens of milliseconds."""


@contextlib.contextmanager
def _collector_paused(records: int) -> Iterator[None]:
    """Pause garbage collection while a partition with `records` records is loaded: all its objects stay, and scanning them again and again
    takes as long as loading. Large partitions are also excluded from later scans: reference counts free them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if records >= MANY_RECORDS:
                gc.collect()  # Collect first: garbage must not be frozen with the rest.
                gc.freeze()
            gc.enable()


_one_large = threading.Lock()
"""Held while a large partition is loaded: several at once would need the memory of all, and be no quicker."""


async def _loaded(snapshot: StoredPartition) -> Partition:
    """Load a partition: a large one in a thread, since it takes a second per million records. Raises DamagedError for records that cannot
    be understood."""
    try:
        if snapshot.size < MANY_RECORDS:
            with _collector_paused(snapshot.size):
                return load(snapshot)
        return await asyncio.to_thread(_load_large, snapshot)
    except (MemoryError, RuntimeError):
        # For lack of memory or threads.
        raise
    except Exception as error:
        log.exception("loading a partition failed")
        raise DamagedError(f"loading failed: {error!r}") from error


def _load_large(snapshot: StoredPartition) -> Partition:
    with _one_large, _collector_paused(snapshot.size):
        return load(snapshot)


class Waiter(NamedTuple):
    """The future that awaits a ticket's answer, for a lease with or without its items."""

    future: asyncio.Future[Any]
    payload: bool


class SharedContext(NamedTuple):
    """Context shared by all drivers of an instance. `backend` finds one by name; `holds` tells whether gained partitions are still its own;
    `may_reopen` whether a queue whose deletion was begun still exists, and stays; `snapshots` are those that partitions keep; `ask_owner`
    asks a partition's current owner; commits pass the `gate`; `name` is this
    instance's, once it has joined; `incarnation_of` finds a queue's incarnation by its name, None if there is none."""

    backend: Callable[[str], Backend]
    cache: BlobCache
    bury: SendTransfer
    holds: Callable[[], bool]
    may_reopen: Callable[[QueueRecord], Awaitable[bool]]
    snapshots: WeakSet[Snapshot]
    clock: ClockWatch
    ask_owner: Callable[[QueueRecord, int, Any], Awaitable[Any]]
    pace: TimerPace
    pressure: LoopPressure
    gate: CommitGate
    meta: MetaStore
    name: Callable[[], str]
    incarnation_of: Callable[[str], str | None]
    takeover_grace: Millis = 0
    spend: Callable[[int], None] = lambda nbytes: None
    """Called with the bytes that a produce is about to add."""
    note_cycle: Callable[[str], None] = lambda incarnation: None
    """Called after each cycle of a queue."""


class QueueDriver:
    """An instance's share of one queue at work: the partitions that it has gained and not lost."""

    def __init__(self, record: QueueRecord, context: SharedContext) -> None:
        self.record = record
        self._context = context
        self._dead_incarnation: str | None = None
        """The incarnation of the queue's dead queue, as the queue knows it."""
        self.numbers: frozenset[int] = frozenset()
        """The queue's partitions."""
        self._backends: dict[int, Backend] = {}
        self._tokens: dict[int, Token] = {}
        self.queue = OwnedQueue(record.incarnation, record.lease_timeout, context.takeover_grace)
        self._rate_tokens = RateTokens(context.meta, record.queue_name, record.incarnation)
        self._slot_quotas = SlotQuotas(context.meta, record.queue_name, record.incarnation)
        self._delivery = RowFetcher(context.cache, self._handle_of, self._serves, self._stop_partition, self._return)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self.consumers = ConsumerBook()
        self.handler_times = HandlerTimes()
        self.refused: Counter[str] = Counter()
        """Produces that the server could not take, by error code, since the driver was made."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._cycle_due = False
        self._stopped = False
        self._ended = False
        self.closing = DeletionGuard(lambda: context.may_reopen(self.record))
        self._rooms: dict[int, int] = {}
        """Bytes that produces may still add, for partitions whose disk is low."""
        self._told: dict[int, str] = {}
        """Why partitions could not be opened, as last logged."""
        self._unopened: set[int] = set()
        self._removed: set[int] = set()
        """Partitions that the queue no longer has, with work still in flight."""
        self._moved = asyncio.Event()
        self._changed = asyncio.Event()
        self.snapshots = context.snapshots
        self._circuit_open = False
        """Whether the circuit breaker was open when this was last logged."""
        self.watchers: set[asyncio.Event] = set()
        """Set after each cycle."""
        self.recordings: dict[int, Recording] = {}
        """Partitions whose stored records are followed, to be backed up."""
        self.transfers = Transfers(self.queue, lambda: self.record, self.rows, context.bury, self._stop_partition, self._cycle)
        self.configure(record)

    # ---- from the service -------------------------------------------------------------------------------------

    def gain(self, tokens: Mapping[int, Token]) -> None:
        """Serve these partitions, too: they are opened in the background. Those already served stay as they are.

        The queue's record must contain them.
        """
        for number, token in tokens.items():
            if number not in self.queue.executors:
                self._tokens[number] = token
                self.queue.gain(number)
                self._unopened.add(number)
                self._backends[number].attach(self._ref(number), self._retry)
        # A takeover gains thousands one by one: nothing here looks at all of them, and one cycle opens them all.
        if any(self._backends[number].is_low for number in tokens):
            self.note_room()
        self.cycle_soon()

    def prepare(self, number: int) -> None:
        """Let the partition's backend read ahead: the partition will probably be gained soon."""
        if number in self._backends:
            self._backends[number].prepare(self._ref(number))

    def note_room(self) -> None:
        """Apply changes of the backends' low-disk state."""
        low = [number for number in self.queue.executors if self._backends[number].is_low]
        self._rooms = {number: self._rooms.get(number, 0) for number in low}
        self.queue.set_rooms(self._rooms)
        self.cycle_soon()

    async def measure_room(self) -> None:
        """Let produces use half of the room freed inside files where the disk is low; the rest is left for everything else."""
        for number in list(self._rooms):
            if number in self._backends:
                self._rooms[number] = await self._backends[number].reusable(self._ref(number)) // 2
        self.note_room()

    async def opened(self) -> None:
        """Wait until each partition is open or has failed once (it is then retried in the background), and nothing is in flight in
        partitions that the queue no longer has."""
        while self._unopened or self._removed:
            self._moved.clear()
            await self._moved.wait()

    async def lose(self, number: int, patience: Millis) -> None:
        """Stop serving this partition. A commit in flight has `patience` ms to end; after that its outcome is not awaited."""
        gone = self.queue.lose(number)
        self._cycle()
        if not gone:
            turned = asyncio.Event()
            self.watchers.add(turned)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience / 1000):
                    while number in self.queue.executors:
                        await turned.wait()
                        turned.clear()
            self.watchers.discard(turned)
            self.queue.drop(number)
            self._cycle()
        self._forget(number)

    def _forget(self, number: int) -> None:
        if number in self._backends:
            self._backends[number].detach(self._ref(number))
        self._forget_rows(number)
        self._unopened.discard(number)
        self._removed.discard(number)
        self._moved.set()
        self.transfers.forget(number)

    def _forget_rows(self, number: int) -> None:
        # Without a token it was never served here.
        if number in self._tokens:
            self._delivery.forget((self._ref(number), self._tokens[number]))

    def _serves(self, held: Held) -> bool:
        """Whether that partition is served here under that token."""
        number = held[0].partition
        return not self._ended and number in self.queue.executors and self._tokens[number] == held[1]

    def owns(self, number: int) -> bool:
        """Whether that partition is served here."""
        self._drop_lapsed()
        return number in self.queue.executors

    async def reload(self, timeout: Millis) -> None:
        """Reopen every partition with a higher fence, including stopped ones, so that the served state is the stored one.

        Raises `unavailable`, also if a partition is not open in time, and `partition_damaged`.
        """
        self._check_serving()
        self._unopened = set(self.queue.executors)
        self.queue.retry_now(self.queue.executors, system.now(), anew=True)
        self._cycle()
        try:
            async with asyncio.timeout(timeout / 1000):
                await self.opened()
        except TimeoutError:
            raise SluicewayError("unavailable", "not every partition was reopened within request_timeout") from None
        for executor in self.queue.executors.values():
            if not executor.takes_work:
                raise executor.unavailable()

    async def stop(self) -> None:
        """Answer waiting leases empty, let commits in flight finish, and stop. Every request gets an answer."""
        await self._context.gate.opened()
        self._stopped = True
        # Release waiters for partitions that will not open now.
        self._unopened.clear()
        self._removed.clear()
        self._moved.set()
        self.closing.stop()
        if self._timer is not None:
            self._timer.cancel()
        for transfer in self._sending:
            transfer.cancel()  # The partition's next owner sends it again; its target may take long.
        self.queue.close(final=False)
        self._cycle()
        while self._tasks:
            await asyncio.wait(self._tasks)
            await self._context.gate.opened()
            self._cycle()
        for number in self.queue.executors:
            self._backends[number].detach(self._ref(number))
        # What is left was in flight to a partition that did not reopen.
        self.queue.close(final=True)
        self._ended = True
        for number in self._tokens:
            self._forget_rows(number)
        for effect in self.queue.cycle(system.now(), 0):
            if isinstance(effect, Reply):
                self._reply(effect)

    async def catch_up(self) -> None:
        """Run every cycle that is due, until none is and nothing is in flight. For use after the clock was moved ahead."""
        while True:
            await self._context.gate.opened()
            self._run_cycle(TIMER_BATCH)
            while self._tasks:
                await asyncio.wait(self._tasks)
            at = self.queue.wake_at()
            if not self._cycle_due and (at is None or at >= system.now()):
                return

    async def compact(self) -> None:
        """Compact the blobs that few open rows have kept since the last call, one at a time, at most half of the time."""
        for executor in self.executors:
            if executor.degraded or self._backends[executor.number].is_low:
                continue
            opening = executor.opening
            for each in executor.compactions():
                began = system.stopwatch()
                try:
                    await self._compact(executor.number, opening, each)
                except SluicewayError as error:
                    # Its partition has failed, or moves to another owner: the next call finds what is left.
                    log.debug("queue %s, partition %d: not compacted: %s", self.record.queue_name, executor.number, error)
                    break
                await asyncio.sleep(system.stopwatch() - began)

    async def _compact(self, partition: int, opening: int, wanted: Compaction) -> None:
        nothing = np.zeros(0, np.int64)
        blobs = await self.blobs(partition, [Slice(wanted.blob, nothing, nothing, 0, 0, wanted.columns)])
        if wanted.blob in blobs:
            kept = compacted(blobs[wanted.blob], wanted.rows)
            data = encode_sparse(kept)
            nbytes = int(kept.batch.nbytes)
            await self.ask(Compact(partition, opening, wanted.blob, len(kept.rows), nbytes, data, COMPACTION_INTERVAL))

    def fence_of(self, executor: PartitionExecutor) -> Fence:
        """The fence under which the partition was last opened here."""
        return self._fence(executor.number, executor.opening)

    async def follow_records(self, number: int) -> None:
        """Begin to follow the stored records of a partition served here, anew if they are followed already. Raises DamagedError,
        StoreUnavailableError."""
        recording = self.recordings[number] = Recording()
        recording.begin(await self._backends[number].browse(self._ref(number)))

    def configure(self, record: QueueRecord) -> None:
        """Apply a new record. Partitions that it no longer has are served no more: they were sealed before."""
        self.record = record
        self._dead_incarnation = self._find_dead_queue()
        self.queue.configure(record, self._dead_incarnation)
        there = {each.partition: each.backend for each in record.partitions}
        self.numbers = frozenset(there)
        for number in self.queue.executors.keys() - there.keys():
            self._removed.add(number)
            if self.queue.lose(number):
                self._forget(number)
        if not self._tasks:
            for number in self._backends.keys() - there.keys() - self.queue.executors.keys():
                del self._backends[number]
                self._tokens.pop(number, None)
        for number, backend in there.items():
            if number not in self._backends:
                self._backends[number] = self._context.backend(backend)
        self._changed.set()
        self._changed = asyncio.Event()
        self.cycle_soon()

    def _find_dead_queue(self) -> str | None:
        name = self.record.dead_queue
        return None if name is None else self._context.incarnation_of(name)

    async def changed(self, timeout: Millis) -> None:
        """Wait until the record has changed, or `timeout` ms are over."""
        changed = self._changed
        await system.wait(changed, timeout)

    async def ask(self, request: Request, payload: bool = True) -> Any:
        """Put a request through the queue. Raises SluicewayError; if the caller is cancelled, work not begun is dropped."""
        ticket = self.submit(request, payload)
        try:
            return await ticket.waiter.future
        except asyncio.CancelledError:
            self.abandon(ticket)
            raise

    def begin(self, request: Request) -> asyncio.Future[Any]:
        """Begin `ask`, whose result the future will have. It cannot be cancelled."""
        future: asyncio.Future[Any] = self.submit(request).waiter.future
        return future

    def submit(self, request: Request, payload: bool = True) -> Ticket:
        """Begin `ask`. The ticket's future must then be awaited, or the ticket withdrawn or abandoned."""
        self._check_serving()
        now = system.now()
        ticket = Ticket(request, now + request.request_timeout)
        ticket.waiter = Waiter(asyncio.get_running_loop().create_future(), payload)
        if isinstance(request, Produce):
            self._context.spend(request.batch.nbytes)
        self.queue.submit(ticket)
        if isinstance(request, Lease):
            self.consumers.saw(request.client_id, now)
        self.cycle_soon()
        return ticket

    def abandon(self, ticket: Ticket) -> None:
        """Give up on a ticket: work not begun is dropped, and a lease is given back."""
        self.queue.cancel(ticket)
        if isinstance(ticket.request, Lease) and ticket.request.lease_key is None:
            self._give_back(ticket.waiter.future)
        ticket.waiter.future.cancel()

    def _check_serving(self) -> None:
        if self._stopped or self.closing.closed:
            raise SluicewayError("unavailable", "the queue is being deleted" if self.closing.closed else "the server is stopping")

    def executor(self, number: int) -> PartitionExecutor:
        """The partition's executor, if it is open here. Raises `not_here`, `unavailable`, `partition_damaged`."""
        self._drop_lapsed()
        executor = self.queue.executors.get(number)
        if executor is None:
            raise not_here(number)
        if not executor.takes_work:
            raise executor.unavailable()
        return executor

    @property
    def executors(self) -> list[PartitionExecutor]:
        """The executors served here, by number; read-only."""
        self._drop_lapsed()
        return [self.queue.executors[number] for number in sorted(self.queue.executors)]

    def refuses(self, number: int, key: ProduceKey) -> bool:
        """Whether that partition is open here, and takes no produce with that key, whose home is, or will be, elsewhere."""
        executor = self.queue.executors.get(number)
        return executor is not None and executor.takes_work and executor.partition.admission.refuses(key)

    def backend(self, number: int) -> Backend:
        """The backend that holds that partition."""
        return self._backends[number]

    def counts(self) -> LogicalQueueStats:
        """The counts of the partitions served here."""
        self._drop_lapsed()
        return self.queue.stats()

    def tally(self) -> Tally:
        """Levels of the partitions served here, and counts since they came."""
        self._drop_lapsed()
        return self.queue.tally()

    def waiting(self) -> list[str]:
        """The client of each lease waiting here."""
        return [ticket.request.client_id for ticket in self.queue.lease_scheduler.waiters.values() if isinstance(ticket.request, Lease)]

    def note_refusal(self, code: str) -> None:
        """Count a produce that failed for a reason that is the server's, and not the request's."""
        if code in BLOCKING:
            self.refused[code] += 1

    async def send_away(self, request: TakeOut | MoveOut) -> tuple[int, asyncio.Future[bool]]:
        """Begin a transfer of ready or scheduled items. Returns their number, and a future for their arrival."""
        begun: TransferBegun = await self.ask(request)
        return begun.items, self.transfers.arrival(request.partition, begun.number)

    # ---- scheduling cycles ------------------------------------------------------------------------------------

    def cycle_soon(self) -> None:
        """Schedule a cycle two event-loop iterations later, so that requests arriving meanwhile share it."""
        if not self._cycle_due:
            self._cycle_due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._cycle)

    def _cycle(self) -> None:
        # A stop waits for commits: with timers, those of a mass expiry would go on until all is back.
        self._run_cycle(0 if self._stopped else self._context.pace.allowance(self.record.incarnation, system.stopwatch()))

    def _run_cycle(self, timers: int) -> None:
        """Run one cycle that handles at most `timers` expired leases and due entries."""
        self._cycle_due = False
        if self._ended or self._context.gate.holds(self._cycle):
            return
        self._drop_lapsed()
        if self._find_dead_queue() != self._dead_incarnation:
            # This instance has heard of the setting before it has heard of the queue that is named.
            self._dead_incarnation = self._find_dead_queue()
            self.queue.configure(self.record, self._dead_incarnation)
        pace, pressure, began = self._context.pace, self._context.pressure, system.stopwatch()
        if pressure.is_due(began):
            pressure.note(system.cpu_seconds(), began)
        # A system call, so only for the slices of a backlog.
        cpu_began = system.cpu_seconds() if pace.is_behind else None
        effects = self.queue.cycle(system.now(), timers, pressure.is_high)
        if self.queue.timers_done:
            now = system.stopwatch()
            spent = None if cpu_began is None else system.cpu_seconds() - cpu_began
            pace.note(self.record.incarnation, self.queue.timers_done, spent, now - began, now)
        for effect in effects:
            self._carry_out(effect)
        if self.queue.circuit is not None or self._circuit_open:
            self._tell_circuit()
        # Guarded: the set difference would scan all executors.
        for number in self._removed - self.queue.executors.keys() if self._removed else ():
            self._forget(number)
        self._set_timer()
        for watcher in self.watchers:
            watcher.set()
        self._context.note_cycle(self.record.incarnation)

    def _tell_circuit(self) -> None:
        """Log that the circuit breaker has opened or closed."""
        is_open = self.queue.circuit is not None and self.queue.circuit.state != "closed"
        if is_open and not self._circuit_open:
            log.warning("queue %s: too many items fail; the circuit breaker is open, and only probes are leased", self.record.queue_name)
        elif self._circuit_open and not is_open:
            log.warning("queue %s: the circuit breaker is closed, and items are leased again", self.record.queue_name)
        self._circuit_open = is_open

    def _drop_lapsed(self) -> None:
        """Drop partitions no longer surely owned, even before being told, rather than answer from them: the process may have been
        frozen."""
        if self.queue.executors and not self._context.holds():
            for number in list(self.queue.executors):
                self.queue.drop(number)
                self._forget(number)

    def _set_timer(self) -> None:
        at = None if self._stopped else self.queue.wake_at()
        if at is not None:
            loop = asyncio.get_running_loop()
            # A cycle that comes slightly early would find nothing and reschedule at once.
            ahead = max(MIN_WAIT, (at - system.now() + 1) / 1000)
            if ahead <= MIN_WAIT:
                # Due already: the cycle left it for after the rest.
                ahead = max(ahead, self._context.pace.wait(self.record.incarnation, system.stopwatch()))
            due = loop.time() + ahead
            if self._timer is not None and self._timer_due <= due:
                # The usual case. A cycle for something already over only reschedules itself.
                return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer, self._timer_due = loop.call_at(due, self._timed_cycle), due

    def _timed_cycle(self) -> None:
        self._timer = None
        self._cycle()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Commit):
            self._context.gate.enter()
            self._spawn(self._commit(effect))
        elif isinstance(effect, Open) and not self._stopped:
            self._spawn(self._open(effect))
        elif isinstance(effect, Transfer) and not self._stopped:
            sending = self._spawn(self.transfers.send(effect))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        elif isinstance(effect, Forward):
            forwarding = self._spawn(self._forward(effect))
            self._sending.add(forwarding)
            forwarding.add_done_callback(self._sending.discard)
        elif isinstance(effect, TakeTokens) and not self._stopped:
            self._spawn(self._take_tokens(effect))
        elif isinstance(effect, AdjustSlots) and not self._stopped:
            self._spawn(self._adjust_slots(effect))
        elif isinstance(effect, Fault):
            log.error("queue %s, partition %d: a cycle failed", self.record.queue_name, effect.partition, exc_info=effect.error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- effects ----------------------------------------------------------------------------------------------

    def _ref(self, partition: int) -> PartitionRef:
        return PartitionRef(self.record.incarnation, partition)

    def _handle_of(self, partition: int) -> PartitionHandle:
        return PartitionHandle(self._ref(partition), self._tokens[partition], self._backends[partition])

    def _fence(self, partition: int, opening: int) -> Fence:
        return Fence(*self._tokens[partition], opening)

    def _write_timeout(self, backend: Backend) -> Millis:
        own = self.record.write_timeout
        return backend.write_timeout if own is None else min(own, backend.write_timeout)

    def _retry(self, partition: int) -> bool:
        """Reopen the partition at once if it is waiting to be. Returns whether it does."""
        executor = self.queue.executors.get(partition)
        if executor is None or executor.state is not ExecutorState.FAILED:
            return False
        self.queue.retry_now([partition], system.now())
        self.cycle_soon()
        return True

    async def _commit(self, effect: Commit) -> None:
        ref, at_once = self._ref(effect.partition), False
        try:
            self._delivery.keep(effect)
            self._delivery.fetch(effect)
            backend = self._backends[effect.partition]
            outcome = await backend.apply(ref, effect.changes, self._fence(effect.partition, effect.opening), self._write_timeout(backend))
            at_once = backend.at_once(ref)
        except Exception:
            log.exception("queue %s, partition %d: a commit failed", self.record.queue_name, effect.partition)
            outcome = Outcome.UNKNOWN
        finally:
            # The rest awaits nothing, so a closing gate sees its effects.
            self._context.gate.leave()
        self._delivery.drop(effect)
        if outcome is Outcome.DONE and effect.partition in self.recordings:
            self.recordings[effect.partition].note(effect.changes)
        self.queue.committed(effect.partition, effect.opening, outcome, system.now(), at_once=at_once)
        self._cycle()

    async def _take_tokens(self, effect: TakeTokens) -> None:
        try:
            await self._rate_tokens.take(effect, self._context.name())
        except Exception:
            log.exception("queue %s: tokens of its rate could not be taken", self.record.queue_name)
            effect.rate.failed(system.now())
        self._cycle()

    async def _adjust_slots(self, effect: AdjustSlots) -> None:
        try:
            await self._slot_quotas.adjust(effect.slots, lambda: self.record, self._served_tokens)
        except Exception:
            log.exception("queue %s: the quotas of its concurrency could not be changed", self.record.queue_name)
            effect.slots.failed(system.now())
        self._cycle()

    def _served_tokens(self) -> dict[int, Token]:
        """The tokens of the partitions served here."""
        self._drop_lapsed()
        return {number: self._tokens[number] for number in self.queue.executors}

    async def _open(self, effect: Open) -> None:
        ref = self._ref(effect.partition)
        final, unforeseen = False, None
        try:
            snapshot = await self._backends[effect.partition].open(ref, self._fence(effect.partition, effect.opening))
            loaded: Any = await _loaded(snapshot)
            del snapshot
            self._context.clock.opened(self.record.queue_name, effect.partition, loaded.log.header.now)
        except StoreUnavailableError as error:
            loaded = error
        except (DamagedError, FencedError) as error:
            loaded, final = error, True
        except Exception as error:
            # It says nothing about what is stored: this process may be short of memory, threads or files.
            loaded, unforeseen = StoreUnavailableError(f"it could not be opened: {error!r}"), error
        if not isinstance(loaded, Exception):
            self._told.pop(effect.partition, None)
        elif not isinstance(loaded, BackendDownError) and self._told.get(effect.partition) != str(loaded):
            # Log a state once: it is retried about every second.
            self._told[effect.partition] = str(loaded)
            log.warning("queue %s, partition %d: %s", self.record.queue_name, effect.partition, loaded, exc_info=unforeseen)
        self.queue.opened(effect.partition, effect.opening, loaded, system.now(), final)
        # Openings that a backend's breaker refuses together share a cycle.
        self.cycle_soon()
        self._unopened.discard(effect.partition)
        self._moved.set()

    async def _forward(self, effect: Forward) -> None:
        # The default, also when cut off by a stop.
        unknown = SluicewayError("outcome_unknown", f"the owner of partition {effect.partition} did not answer")
        answer: Produced | SluicewayError = unknown
        try:
            answer = await self.ask_owner(effect.partition, effect.request)
        except SluicewayError as error:
            answer = error
        except Exception:
            log.exception("queue %s, partition %d: a produce could not be forwarded", self.record.queue_name, effect.partition)
        finally:
            self.queue.forwarded(effect.ticket, answer, system.now())
            self._cycle()

    async def ask_owner(self, partition: int, request: Any) -> Any:
        """Ask that partition's current owner."""
        return await self._context.ask_owner(self.record, partition, request)

    # ---- replies ----------------------------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        waiter: Waiter = effect.ticket.waiter
        if waiter.future.done():
            return
        if isinstance(effect.result, SluicewayError):
            waiter.future.set_exception(effect.result)
        elif isinstance(effect.result, list):
            self._reply_lease(waiter, effect.result, effect.ticket.keyed)
        else:
            waiter.future.set_result(effect.result)

    def _give_back(self, future: asyncio.Future[Any]) -> None:
        """Give back leases whose client disconnected as it was answered."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self._return(future.result().leases)

    def _return(self, leases: Sequence[LeaseInfo]) -> None:
        for lease in leases:
            self.queue.give_back(lease.partition, lease.number)
        self.cycle_soon()

    def _reply_lease(self, waiter: Waiter, grants: list[Grant], keyed: bool) -> None:
        if not grants or not waiter.payload:
            waiter.future.set_result(Leased([grant.info for grant in grants]))
            return
        try:
            leased = self._delivery.at_once(grants)
        except Exception:
            # It must not end the cycle, which answers other requests too. `deliver` reports it, to this request alone.
            log.exception("queue %s: leased items could not be handed out at once", self.record.queue_name)
            leased = None
        if leased is not None:
            waiter.future.set_result(leased)
        else:
            self._spawn(self._delivery.deliver(waiter.future, grants, keyed))

    async def rows(self, partition: int, lease: int, slices: Sequence[Slice]) -> list[pa.RecordBatch]:
        """The rows of the slices. A missing blob was settled meanwhile: none of its rows is needed."""
        if partition not in self.queue.executors:
            raise not_here(partition)
        return await self._delivery.rows(partition, lease, slices)

    async def blobs(self, partition: int, slices: Sequence[Slice], keep: bool = True) -> dict[int, pa.RecordBatch | SparseBatch]:
        """The blobs of the slices, by number, without those that are gone. Without `keep`, what is read is not cached."""
        return await self._delivery.blobs(partition, slices, keep)

    def _stop_partition(self, partition: int, error: Exception) -> None:
        log.error("queue %s, partition %d is stopped: %s", self.record.queue_name, partition, error)
        self.queue.stop_executor(partition, str(error), system.now())
        self.cycle_soon()
