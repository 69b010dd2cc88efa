"""Drives one logical queue: tells it the time and what happened, and carries out what it decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core.assignment.group import Token
from sluiceway.core.lane import Lane, LaneState, not_here
from sluiceway.core.looking import load
from sluiceway.core.share import Share
from sluiceway.core.tickets import Commit, Effect, Fault, Grant, Open, Reply, Request, TakeOut, Ticket, Transfer, TransferBegun
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import decode_blob
from sluiceway.model.leased import Slice, served
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import Load
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Lease, Leased, LeaseInfo, QueueStats
from sluiceway.node.backends import Backend, BackendDownError
from sluiceway.node.blobs import BlobCache
from sluiceway.node.closing import Closing
from sluiceway.ports.partition_store import DamagedError, Fence, FencedError, PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

Bury = Callable[[QueueRecord, int, Transfer, list[pa.RecordBatch]], Awaitable[None]]
"""Produces a transfer's rows (of that partition of that queue) into the dead queue; returns when they are durable there."""
Held = tuple[PartitionRef, Token]


class Waiter(NamedTuple):
    """Who waits for a ticket's answer: for a lease with its items, or without."""

    future: asyncio.Future[Any]
    payload: bool


class Around(NamedTuple):
    """What all drivers of an instance share. `backend` finds one by its name; `holds` says whether what was gained is still its own;
    `may_reopen` whether a queue that was about to be deleted is still there, and stays."""

    backend: Callable[[str], Backend]
    cache: BlobCache
    bury: Bury
    holds: Callable[[], bool]
    may_reopen: Callable[[QueueRecord], Awaitable[bool]]
    takeover_grace: Millis = 0


class QueueDriver:
    """An instance's share of one queue at work: of the partitions that it has gained and not lost."""

    def __init__(self, record: QueueRecord, around: Around) -> None:
        self.record = record
        self._around = around
        self._cache = around.cache
        self._backends = {each.partition: around.backend(each.backend) for each in record.partitions}
        self._tokens: dict[int, Token] = {}
        self._queue = Share(record.incarnation, self._backends, record.lease_timeout, around.takeover_grace)
        self._queue.configure(record)
        self.measure = self._queue.measure
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._turn_due = False
        self._stopped = False
        self._ended = False
        self._closing = Closing(lambda: around.may_reopen(self.record))
        self._unopened: set[int] = set()
        self._moved = asyncio.Event()
        self.watchers: set[asyncio.Event] = set()
        """Set after each turn."""
        self._arrivals: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Who waits for a transfer (partition, number): whether its items have arrived, or stay here."""

    # ---- from the service -------------------------------------------------------------------------------------

    def gain(self, tokens: Mapping[int, Token]) -> None:
        """Serve these partitions, too, which it has not: they are opened in the background. Those that it has stay as they are."""
        for number, token in tokens.items():
            if number not in self._queue.lanes:
                self._tokens[number] = token
                self._queue.gain(number)
                self._unopened.add(number)
                self._backends[number].attach(self._ref(number), self._retry)
        self._turn()

    async def opened(self) -> None:
        """Returns when each partition is open, or has failed once (it is then tried again in the background)."""
        while self._unopened:
            self._moved.clear()
            await self._moved.wait()

    async def lose(self, number: int, patience: Millis) -> None:
        """Serve this partition no more. A commit in flight has so long to end; after that nobody here will hear of it."""
        gone = self._queue.lose(number)
        self._turn()
        if not gone:
            turned = asyncio.Event()
            self.watchers.add(turned)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience / 1000):
                    while number in self._queue.lanes:
                        await turned.wait()
                        turned.clear()
            self.watchers.discard(turned)
            self._queue.drop(number)
            self._turn()
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._backends[number].detach(self._ref(number))
        self._unopened.discard(number)
        self._moved.set()
        for place in [place for place in self._arrivals if place[0] == number]:
            self._arrivals.pop(place).cancel()

    def owns(self, number: int) -> bool:
        """Whether that partition is served here."""
        self._drop_lapsed()
        return number in self._queue.lanes

    async def reload(self, timeout: Millis) -> None:
        """Open every partition anew, with a higher fence: what is served from then on is what is stored. Those that were stopped, too.

        Raises `unavailable`, also for what is not open in time, and `partition_damaged`.
        """
        self._check_serving()
        self._unopened = set(self._queue.lanes)
        self._queue.retry_now(self._queue.lanes, system.now(), anew=True)
        self._turn()
        try:
            async with asyncio.timeout(timeout / 1000):
                await self.opened()
        except TimeoutError:
            raise SluicewayError("unavailable", "not every partition was open again within request_timeout") from None
        for lane in self._queue.lanes.values():
            if not lane.takes_work:
                raise lane.unavailable()

    async def stop(self) -> None:
        """Answer waiting leases empty, let commits in flight finish, and do no more. Nobody is left without an answer."""
        self._stopped = True
        # Who waits for partitions to open need not: they will not.
        self._unopened.clear()
        self._moved.set()
        self._closing.stop()
        if self._timer is not None:
            self._timer.cancel()
        for transfer in self._sending.values():
            transfer.cancel()  # Who serves the partition next sends it again; its target may be long in coming.
        self._queue.close(final=False)
        self._turn()
        while self._tasks:
            await asyncio.wait(self._tasks)
            self._turn()
        for number in self._queue.lanes:
            self._backends[number].detach(self._ref(number))
        # What is left was in flight to a partition that did not open again.
        self._queue.close(final=True)
        self._ended = True
        for effect in self._queue.turn(system.now()):
            if isinstance(effect, Reply):
                self._reply(effect)

    async def catch_up(self) -> None:
        """Take every turn that is due, and return when none is and nothing is in flight: the clock was moved ahead."""
        while True:
            self._turn()
            while self._tasks:
                await asyncio.wait(self._tasks)
            at = self._queue.wake_at()
            if at is None or at >= system.now():
                return

    def configure(self, record: QueueRecord) -> None:
        """The queue's settings have changed."""
        self.record = record
        self._queue.configure(record)
        self._turn_soon()

    async def ask(self, request: Request, payload: bool = True) -> Any:
        """Put a request through the queue. Raises SluicewayError; if the caller is cancelled, what has not begun is not begun."""
        return await self.answer(self.submit(request, payload))

    def submit(self, request: Request, payload: bool = True) -> Ticket:
        """Begin what `ask` does; its `answer` must be waited for, or it be withdrawn."""
        self._check_serving()
        ticket = Ticket(request, system.now() + request.request_timeout)
        ticket.waiter = Waiter(asyncio.get_running_loop().create_future(), payload)
        self._queue.submit(ticket)
        self._turn_soon()
        return ticket

    async def answer(self, ticket: Ticket) -> Any:
        """The end of what was submitted."""
        try:
            return await ticket.waiter.future
        except asyncio.CancelledError:
            self._queue.cancel(ticket)
            if isinstance(ticket.request, Lease) and ticket.request.lease_key is None:
                self._give_back(ticket.waiter.future)
            raise

    def withdraw(self, ticket: Ticket) -> bool:
        """Take back a lease that waits. False: its answer is on its way."""
        return self._queue.withdraw(ticket)

    def close_for(self, timeout: Millis) -> None:
        """Take no request for so long, as the queue may be about to be deleted; 0: take them again."""
        self._closing.close_for(timeout)

    def _check_serving(self) -> None:
        if self._stopped or self._closing.closed:
            raise SluicewayError("unavailable", "the queue is being deleted" if self._closing.closed else "the server is stopping")

    def lane(self, number: int) -> Lane:
        """The partition, if it is open here. Raises `not_here`, `unavailable`, `partition_damaged`."""
        self._drop_lapsed()
        lane = self._queue.lanes.get(number)
        if lane is None:
            raise not_here(number)
        if not lane.takes_work:
            raise lane.unavailable()
        return lane

    @property
    def lanes(self) -> list[Lane]:
        """Those that are served here, by number; only to be looked at."""
        self._drop_lapsed()
        return [self._queue.lanes[number] for number in sorted(self._queue.lanes)]

    def backend(self, number: int) -> Backend:
        """Where that partition lies."""
        return self._backends[number]

    def counts(self) -> QueueStats:
        """The counts of what is served here."""
        self._drop_lapsed()
        return self._queue.stats()

    def load(self) -> Load:
        """What other instances need to know of it."""
        return self._queue.load()

    async def send_away(self, request: TakeOut) -> tuple[int, asyncio.Future[bool]]:
        """Begin a transfer of those ready items. Returns how many they are, and what tells whether they have arrived."""
        partition = request.partition
        begun: TransferBegun = await self.ask(request)
        arrival: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        lane = self._queue.lanes.get(partition)
        if lane is not None and begun.number in lane.partition.transfers:
            self._arrivals[partition, begun.number] = arrival
        else:
            arrival.set_result(True)
        return begun.items, arrival

    # ---- turns ------------------------------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        """Requests that arrive in the same round of the event loop share a turn."""
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._ended:
            return
        self._drop_lapsed()
        for effect in self._queue.turn(system.now()):
            self._carry_out(effect)
        self._set_timer()
        for watcher in self.watchers:
            watcher.set()

    def _drop_lapsed(self) -> None:
        """What is no longer surely this instance's, though it was not told yet, must not be answered from: it may have been frozen."""
        if self._queue.lanes and not self._around.holds():
            for number in list(self._queue.lanes):
                self._queue.drop(number)
                self._forget(number)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = None if self._stopped else self._queue.wake_at()
        if at is not None:
            # A turn a little early would find nothing to do and come at once again.
            delay = max(1, at - system.now() + 1) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect)
        elif isinstance(effect, Commit):
            self._spawn(self._commit(effect))
        elif isinstance(effect, Open) and not self._stopped:
            self._spawn(self._open(effect))
        elif isinstance(effect, Transfer) and not self._stopped:
            self._sending[effect.partition] = self._spawn(self._transfer(effect))
        elif isinstance(effect, Fault):
            log.error("queue %s, partition %d: a turn failed", self.record.queue_name, effect.partition, exc_info=effect.error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- effects ----------------------------------------------------------------------------------------------

    def _ref(self, partition: int) -> PartitionRef:
        return PartitionRef(self.record.incarnation, partition)

    def _held(self, partition: int) -> Held:
        """Under this the blobs of the partition are remembered: another owner may give the number of one that did not land to another."""
        return self._ref(partition), self._tokens[partition]

    def _fence(self, partition: int, opening: int) -> Fence:
        return Fence(*self._tokens[partition], opening)

    def _write_timeout(self, backend: Backend) -> Millis:
        own = self.record.write_timeout
        return backend.write_timeout if own is None else min(own, backend.write_timeout)

    def _retry(self, partition: int) -> bool:
        """Open the partition again at once if it waits to be. Whether it does."""
        lane = self._queue.lanes.get(partition)
        if lane is None or lane.state is not LaneState.FAILED:
            return False
        self._queue.retry_now([partition], system.now())
        self._turn_soon()
        return True

    async def _commit(self, effect: Commit) -> None:
        ref, held = self._ref(effect.partition), self._held(effect.partition)
        for number, data in effect.changes.blobs.items():
            # Over the blob's own bytes: the fresh rows may be a few views of a large request body, and would keep all of it.
            self._cache.put((held, number), pa.ipc.read_record_batch(pa.py_buffer(data), effect.fresh[number].schema))
        try:
            backend = self._backends[effect.partition]
            outcome = await backend.apply(ref, effect.changes, self._fence(effect.partition, effect.opening), self._write_timeout(backend))
        except Exception:
            log.exception("queue %s, partition %d: a commit failed", self.record.queue_name, effect.partition)
            outcome = Outcome.UNKNOWN
        for number in effect.changes.dropped_blobs:
            self._cache.drop((held, number))
        self._queue.committed(effect.partition, effect.opening, outcome, system.now())
        self._turn()

    async def _open(self, effect: Open) -> None:
        ref = self._ref(effect.partition)
        final = False
        try:
            snapshot = await self._backends[effect.partition].open(ref, self._fence(effect.partition, effect.opening))
            loaded: Any = load(snapshot)
        except StoreUnavailableError as error:
            loaded = error
        except (DamagedError, FencedError) as error:
            loaded, final = error, True
        except Exception as error:
            log.exception("queue %s, partition %d: loading failed", self.record.queue_name, effect.partition)
            loaded, final = DamagedError(f"loading failed: {error!r}"), True
        if isinstance(loaded, Exception) and not isinstance(loaded, BackendDownError):
            log.warning("queue %s, partition %d: %s", self.record.queue_name, effect.partition, loaded)
        self._queue.opened(effect.partition, effect.opening, loaded, system.now(), final)
        # Those that a backend's breaker answers at once share a turn.
        self._turn_soon()
        self._unopened.discard(effect.partition)
        self._moved.set()

    async def _transfer(self, effect: Transfer) -> None:
        done, nowhere = False, False
        try:
            rows = await self.rows(effect.partition, effect.number, effect.slices)
            if sum(batch.num_rows for batch in rows) == sum(len(piece.rows) for piece in effect.slices):
                await self._around.bury(self.record, effect.partition, effect, rows)
            else:
                self._check_over(effect)
            done = True
        except SluicewayError as error:
            nowhere = error.code == "queue_not_found" and not effect.reason
            log.warning("queue %s, partition %d: transfer %d: %s", self.record.queue_name, effect.partition, effect.number, error)
        except Exception:
            log.exception("queue %s, partition %d: transfer %d failed", self.record.queue_name, effect.partition, effect.number)
        self._queue.transferred(effect.partition, effect.number, done, system.now(), nowhere=nowhere)
        self._turn()
        arrival = self._arrivals.pop((effect.partition, effect.number), None) if done or nowhere else None
        if arrival is not None and not arrival.done():
            arrival.set_result(done)

    def _check_over(self, effect: Transfer) -> None:
        """Rows of a transfer are gone. So they should be once it is over; before, they are lost, and to say it is done would hide that."""
        lane = self._queue.lanes.get(effect.partition)
        if lane is not None and effect.number in lane.partition.transfers:
            error = DamagedError(f"blobs of transfer {effect.number} are missing")
            self._stop_partition(effect.partition, error)
            raise SluicewayError("partition_damaged", str(error))

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
        """The client went away in the moment in which it was answered."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self._return(future.result().leases)

    def _return(self, leases: Sequence[LeaseInfo]) -> None:
        for lease in leases:
            self._queue.give_back(lease.partition, lease.number)
        self._turn_soon()

    def _reply_lease(self, waiter: Waiter, grants: list[Grant], keyed: bool) -> None:
        leased = Leased([grant.info for grant in grants])
        if grants and waiter.payload:
            self._spawn(self._deliver(waiter.future, leased, grants, keyed))
        else:
            waiter.future.set_result(leased)

    async def _deliver(self, future: asyncio.Future[Any], leased: Leased, grants: list[Grant], keyed: bool) -> None:
        """A lease that cannot be read is left out, to run out: the others need not wait for that, too. An error if none is left."""
        leases: list[LeaseInfo] = []
        batches: list[pa.RecordBatch] = []
        problem: SluicewayError | None = None
        for grant in grants:
            try:
                # Also if the partition has gone by now: the lease is durable, and nobody else is told of it.
                batches += await self._rows(grant.info.partition, grant.info.number, grant.slices)
                leases.append(grant.info)
            except SluicewayError as error:
                # Not `not_here`: to ask elsewhere would take another lease.
                gone = error.code == "not_here"
                problem = SluicewayError("unavailable", "the items went to another instance; their lease will run out") if gone else error
            except Exception:
                log.exception("queue %s: reading leased items failed", self.record.queue_name)
                problem = SluicewayError("internal", "the server made a mistake while it read the items; their lease will run out")
        leased.leases, leased.batches = leases, batches
        if future.done():
            if not keyed:
                self._return(leases)
            return
        if problem is not None and not leases:
            future.set_exception(problem)
        else:
            future.set_result(leased)

    async def rows(self, partition: int, lease: int, slices: list[Slice]) -> list[pa.RecordBatch]:
        """The rows of the slices. A blob that is gone was settled in the meantime: its rows are nobody's any more."""
        if partition not in self._queue.lanes:
            raise not_here(partition)
        return await self._rows(partition, lease, slices)

    async def _rows(self, partition: int, lease: int, slices: list[Slice]) -> list[pa.RecordBatch]:
        blobs = await self.blobs(partition, slices)
        return [served(partition, lease, piece, blobs[piece.blob]) for piece in slices if piece.blob in blobs]

    async def blobs(self, partition: int, slices: Sequence[Slice]) -> dict[int, pa.RecordBatch]:
        """Those that the slices are of, by number, but for what is gone."""
        ref, held = self._ref(partition), self._held(partition)
        found = {piece.blob: self._cache.get((held, piece.blob)) for piece in slices}
        blobs = {number: batch for number, batch in found.items() if batch is not None}
        missing = {piece.blob: piece.columns for piece in slices if piece.blob not in blobs}
        if missing:
            try:
                read = await self._backends[partition].read(ref, list(missing))
            except DamagedError as error:
                self._stop_partition(partition, error)
                raise SluicewayError("partition_damaged", str(error)) from error
            except StoreUnavailableError as error:
                raise SluicewayError("unavailable", f"partition {partition} cannot be read: {error}") from error
            for number, columns in missing.items():
                if number in read:
                    blobs[number] = decode_blob(read[number], columns)
                    self._cache.put((held, number), blobs[number])
        return blobs

    def _stop_partition(self, partition: int, error: Exception) -> None:
        log.error("queue %s, partition %d is stopped: %s", self.record.queue_name, partition, error)
        self._queue.stop_lane(partition, str(error), system.now())
        self._turn_soon()
