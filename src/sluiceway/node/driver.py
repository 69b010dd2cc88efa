"""Drives one logical queue: tells it the time and what happened, and carries out what it decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core import inspecting
from sluiceway.core.lane import LaneState
from sluiceway.core.logical_queue import LogicalQueue
from sluiceway.core.looking import explain, load, open_slices, ready_slices, waiting_slices
from sluiceway.core.tickets import Commit, Effect, Fault, Grant, Open, Reply, Request, TakeOut, Ticket, Transfer, TransferBegun
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import LeaseId
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.inspection import ItemsPage, ListItems
from sluiceway.model.items import decode_blob
from sluiceway.model.leased import Slice, served
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Explanation, Lease, Leased, LeaseInfo, Peek, QueueStats
from sluiceway.node.backends import Backend, BackendDownError
from sluiceway.node.blobs import BlobCache
from sluiceway.node.inspection import first_rows, fitting
from sluiceway.ports.partition_store import DamagedError, Fence, FencedError, PartitionRef, StoreUnavailableError

log = logging.getLogger(__name__)

Bury = Callable[[QueueRecord, int, Transfer, list[pa.RecordBatch]], Awaitable[None]]
"""Produces a transfer's rows (of that partition of that queue) into the dead queue; returns when they are durable there."""


class _Waiter(NamedTuple):
    future: asyncio.Future[Any]
    payload: bool


class QueueDriver:
    """One queue's logical queue at work. `grant` is part of the fence; `backends` has all that hold any of its partitions."""

    def __init__(self, record: QueueRecord, backends: Mapping[str, Backend], cache: BlobCache, grant: int, bury: Bury) -> None:
        self.record = record
        self._backends = {each.partition: backends[each.backend] for each in record.partitions}
        self._cache = cache
        self._grant = grant
        self._bury = bury
        self._queue = LogicalQueue(record.incarnation, [p.partition for p in record.partitions], record.lease_timeout)
        self._queue.configure(record)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._turn_due = False
        self._stopped = False
        self._ended = False
        self.closing = False
        """The queue is being deleted: no request is taken any more."""
        self._unopened = set(self._queue.lanes)
        self._moved = asyncio.Event()
        self._arrivals: dict[tuple[int, int], asyncio.Future[bool]] = {}
        """Who waits for a transfer (partition, number): whether its items have arrived, or stay here."""

    # ---- from the service -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open every partition; returns when each is open, or has failed once (it is then tried again in the background)."""
        for number, backend in self._backends.items():
            backend.attach(self._ref(number), self._retry)
        self._turn()
        await self._all_opened()

    async def _all_opened(self) -> None:
        while self._unopened:
            self._moved.clear()
            await self._moved.wait()

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
                await self._all_opened()
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
        if self._timer:
            self._timer.cancel()
        self._queue.close(final=False)
        self._turn()
        while self._tasks:
            await asyncio.wait(self._tasks)
            self._turn()
        for number, backend in self._backends.items():
            backend.detach(self._ref(number))
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
        self._check_serving()
        now = system.now()
        ticket = Ticket(request, now + request.request_timeout)
        ticket.waiter = _Waiter(asyncio.get_running_loop().create_future(), payload)
        self._queue.submit(ticket)
        self._turn_soon()
        try:
            return await ticket.waiter.future
        except asyncio.CancelledError:
            self._queue.cancel(ticket)
            if isinstance(request, Lease) and request.lease_key is None:
                self._give_back(ticket.waiter.future)
            raise

    def _check_serving(self) -> None:
        if self._stopped or self.closing:
            raise SluicewayError("unavailable", "the queue is being deleted" if self.closing else "the server is stopping")

    async def peek(self, request: Peek) -> list[pa.RecordBatch]:
        """Items of a lease, or those that come next. Raises lease_not_found, unavailable, partition_damaged."""
        if request.lease is not None:
            lane = self._queue.lanes.get(-1 if request.partition is None else request.partition)
            lease = lane.partition.leases.get(request.lease) if lane is not None and lane.takes_work else None
            if lane is not None and not lane.takes_work:
                raise lane.unavailable()
            if lane is None or lease is None:
                name = LeaseId(self.record.incarnation, request.partition or 0, request.lease)
                raise SluicewayError("lease_not_found", f"lease {name} is closed, has expired, or never existed", "lease_id")
            return await self._rows(lane.number, lease.number, open_slices(lease, request.start, request.limit))
        batches: list[pa.RecordBatch] = []
        wanted, room = request.limit, float(MAX_LEASE_BYTES)
        for lane in self._queue.lanes.values():
            if request.partition == lane.number and not lane.takes_work:
                raise lane.unavailable()
            if wanted > 0 and request.partition in (None, lane.number) and lane.takes_work:
                pieces, nbytes = fitting(lane.partition, ready_slices(lane.partition, wanted), room)
                wanted, room = wanted - sum(len(piece.rows) for piece in pieces), room - nbytes
                batches += await self._rows(lane.number, 0, pieces)
        return batches

    async def list_items(self, request: ListItems) -> ItemsPage:
        """Items by their place, fewer than asked for if they are more than an answer holds. Raises `unavailable`, `partition_damaged`."""
        lane = self._queue.lanes[request.partition]
        if not lane.takes_work:
            raise lane.unavailable()
        find = inspecting.scheduled if request.scheduled else inspecting.in_line
        found = find(lane.partition, request.start, request.limit + 1)
        wanted, _ = fitting(lane.partition, first_rows([listed.piece for listed in found], request.limit), MAX_LEASE_BYTES)
        shown = sum(len(piece.rows) for piece in wanted)
        more = shown < sum(len(listed.piece.rows) for listed in found)
        blobs = await self._blobs(lane.number, {piece.blob for piece in wanted})
        rows = [
            (served(lane.number, listed.lease, piece, blobs[piece.blob]), listed.standing)
            for piece, listed in zip(wanted, found, strict=False)
            if piece.blob in blobs
        ]
        return ItemsPage(rows, int(wanted[-1].offsets[-1]) if more else None)

    async def ready_rows(self) -> AsyncIterator[tuple[int, pa.RecordBatch]]:
        """All that waits in the line, extent by extent, as it is when its turn comes; each with its partition's opening."""
        for lane in self._queue.lanes.values():
            extents, opening = list(lane.partition.ready) if lane.takes_work else [], lane.opening
            for extent in extents:
                # One by one, and as it is by then: the line may be long, and is served meanwhile.
                for batch in await self._rows(lane.number, 0, waiting_slices(lane.partition, extent)):
                    yield opening, batch

    def may_send_to(self, queue_name: str) -> bool:
        """Items are on their way there, or nobody knows: a partition that is not open does not tell what it has."""
        for lane in self._queue.lanes.values():
            targets = {transfer.target or self.record.dead_queue for transfer in lane.partition.transfers.values()}
            if queue_name in targets or not lane.takes_work:
                return True
        return False

    async def send_away(self, request: TakeOut) -> tuple[int, asyncio.Future[bool]]:
        """Begin a transfer of those ready items. Returns how many they are, and what tells whether they have arrived."""
        partition = request.partition
        begun: TransferBegun = await self.ask(request)
        arrival: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if begun.number in self._queue.lanes[partition].partition.transfers:
            self._arrivals[partition, begun.number] = arrival
        else:
            arrival.set_result(True)
        return begun.items, arrival

    def explain(self, partition: int, offset: int) -> Explanation:
        """Where that item is, and why it is not being served."""
        lane = self._queue.lanes[partition]
        if not lane.takes_work:
            return Explanation("unavailable", str(lane.unavailable()))
        found = explain(lane.partition, offset)
        if found.state == "ready" and "lease" in self.record.paused:
            found.reason += "; the queue is paused for leases"
        if lane.degraded:
            found.reason += f"; its partition is slow: a commit takes {lane.slowness(system.now()):.0f} ms"
        return found

    def stats(self) -> QueueStats:
        stats = self._queue.stats()
        for each in stats.partitions:
            each.backend = self._backends[each.partition].name
        return stats

    def problems(self) -> list[str]:
        """What keeps partitions from serving, in words; not that their backend is down, which is the backend's to say."""
        return [
            f"queue {self.record.queue_name}, partition {lane.number}: {lane.state.value}: {lane.problem or 'not open yet'}"
            for lane in self._queue.lanes.values()
            if not lane.takes_work and self._backends[lane.number].problem is None
        ]

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
        for effect in self._queue.turn(system.now()):
            self._carry_out(effect)
        self._set_timer()

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
        elif isinstance(effect, Open):
            if not self._stopped:
                self._spawn(self._open(effect))
        elif isinstance(effect, Transfer):
            if not self._stopped:
                self._spawn(self._transfer(effect))
        elif isinstance(effect, Fault):
            log.error("queue %s, partition %d: a turn failed", self.record.queue_name, effect.partition, exc_info=effect.error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- effects ----------------------------------------------------------------------------------------------

    def _ref(self, partition: int) -> PartitionRef:
        return PartitionRef(self.record.incarnation, partition)

    def _fence(self, opening: int) -> Fence:
        return Fence(1, self._grant, opening)

    def _write_timeout(self, backend: Backend) -> Millis:
        own = self.record.write_timeout
        return backend.write_timeout if own is None else min(own, backend.write_timeout)

    def _retry(self, partition: int) -> bool:
        """Open the partition again at once if it waits to be. Whether it does."""
        if self._queue.lanes[partition].state is not LaneState.FAILED:
            return False
        self._queue.retry_now([partition], system.now())
        self._turn_soon()
        return True

    async def _commit(self, effect: Commit) -> None:
        ref = self._ref(effect.partition)
        for number, data in effect.changes.blobs.items():
            # Over the blob's own bytes: the fresh rows may be a few views of a large request body, and would keep all of it.
            self._cache.put((ref, number), pa.ipc.read_record_batch(pa.py_buffer(data), effect.fresh[number].schema))
        try:
            backend = self._backends[effect.partition]
            outcome = await backend.apply(ref, effect.changes, self._fence(effect.opening), self._write_timeout(backend))
        except Exception:
            log.exception("queue %s, partition %d: a commit failed", self.record.queue_name, effect.partition)
            outcome = Outcome.UNKNOWN
        for number in effect.changes.dropped_blobs:
            self._cache.drop((ref, number))
        self._queue.committed(effect.partition, effect.opening, outcome, system.now())
        self._turn()

    async def _open(self, effect: Open) -> None:
        ref = self._ref(effect.partition)
        final = False
        try:
            snapshot = await self._backends[effect.partition].open(ref, self._fence(effect.opening))
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
            rows = await self._rows(effect.partition, effect.number, effect.slices)
            if sum(batch.num_rows for batch in rows) == sum(len(piece.rows) for piece in effect.slices):
                await self._bury(self.record, effect.partition, effect, rows)
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
        if effect.number in self._queue.lanes[effect.partition].partition.transfers:
            error = DamagedError(f"blobs of transfer {effect.number} are missing")
            self._stop_partition(effect.partition, error)
            raise SluicewayError("partition_damaged", str(error))

    # ---- replies ----------------------------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        waiter: _Waiter = effect.ticket.waiter
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

    def _reply_lease(self, waiter: _Waiter, grants: list[Grant], keyed: bool) -> None:
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
                batches += await self._rows(grant.info.partition, grant.info.number, grant.slices)
                leases.append(grant.info)
            except SluicewayError as error:
                problem = error
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

    async def _rows(self, partition: int, lease: int, slices: list[Slice]) -> list[pa.RecordBatch]:
        """The rows of the slices. A blob that is gone was settled in the meantime: its rows are nobody's any more."""
        blobs = await self._blobs(partition, {piece.blob for piece in slices})
        return [served(partition, lease, piece, blobs[piece.blob]) for piece in slices if piece.blob in blobs]

    async def _blobs(self, partition: int, numbers: Iterable[int]) -> dict[int, pa.RecordBatch]:
        ref = self._ref(partition)
        blobs, missing = {}, []
        known = self._queue.lanes[partition].partition.blobs
        for number in numbers:
            batch = self._cache.get((ref, number))
            if batch is not None:
                blobs[number] = batch
            elif number in known:
                missing.append((number, known[number].columns))
        if missing:
            try:
                read = await self._backends[partition].read(ref, [number for number, _ in missing])
            except DamagedError as error:
                self._stop_partition(partition, error)
                raise SluicewayError("partition_damaged", str(error)) from error
            except StoreUnavailableError as error:
                raise SluicewayError("unavailable", f"partition {partition} cannot be read: {error}") from error
            for number, columns in missing:
                if number in read:
                    blobs[number] = decode_blob(read[number], columns)
                    self._cache.put((ref, number), blobs[number])
        return blobs

    def _stop_partition(self, partition: int, error: Exception) -> None:
        log.error("queue %s, partition %d is stopped: %s", self.record.queue_name, partition, error)
        self._queue.stop_lane(partition, str(error), system.now())
        self._turn_soon()
