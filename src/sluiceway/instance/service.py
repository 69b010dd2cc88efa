"""The instance's service: the queues, its own shares of them, and requests to other instances. The HTTP server builds on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.adapters.disk import keep_private
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.bucket_requests import BucketRequests
from sluiceway.cluster.autoscaler import Autoscaler
from sluiceway.cluster.cluster_secret import secret_of
from sluiceway.cluster.compatibility_level import begin_level, check_understood
from sluiceway.cluster.consumer_reports import ConsumerView
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.load_balancer import LoadBalancer
from sluiceway.cluster.meta_watch import MetaWatch
from sluiceway.cluster.ownership import GRANT, PARAMETERS, Clustered, Ownership, SoleOwnership
from sluiceway.cluster.peer_counts import CountedTransport
from sluiceway.cluster.queue_changes import QueueChanges
from sluiceway.cluster.rebalance_service import Rebalancing
from sluiceway.cluster.remote_demand import Demand
from sluiceway.cluster.remote_leases import RemoteLeases
from sluiceway.cluster.router import Router
from sluiceway.cluster.transfer_sender import TransferSender
from sluiceway.contract.item_answers import Reasons
from sluiceway.contract.queue_settings import Verb
from sluiceway.contract.queue_stats import LogicalQueueStats, QueueKeys, QueueStats
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.group.group_records import Level, Parameters, Pin, Strategy, Token
from sluiceway.core.queue.handler_times import HandlerTimes
from sluiceway.core.queue.loop_pressure import LoopPressure
from sluiceway.core.queue.partition_executor import not_here
from sluiceway.core.queue.routing import HERE, Peer, numbers_of
from sluiceway.core.queue.timer_pacing import TimerPace
from sluiceway.instance.adoption_mark import check_not_adopted
from sluiceway.instance.backend_changes import BackendChanges
from sluiceway.instance.backups import Backups
from sluiceway.instance.bundle_catalog import Bundles
from sluiceway.instance.bundle_driver import BundleDriver
from sluiceway.instance.health import check_backends, check_meta, check_partitions
from sluiceway.instance.problem_watch import ProblemWatch
from sluiceway.instance.schedule_catalog import Schedules
from sluiceway.instance.schedule_driver import ScheduleDriver
from sluiceway.instance.upgrades import Upgrades
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import COMPACTION_INTERVAL
from sluiceway.local import queries
from sluiceway.local.answer_budget import Asked
from sluiceway.local.audit_trail import AuditTrail, detail_of
from sluiceway.local.backend_pool import BackendInfo, BackendPool, OpenStore
from sluiceway.local.blob_cache import BlobCache
from sluiceway.local.clock_watch import ClockWatch
from sluiceway.local.commit_gate import CommitGate
from sluiceway.local.disk_room import DATA, LOOK_INTERVAL, DiskRoom
from sluiceway.local.dispatch import perform
from sluiceway.local.queue_catalog import Catalog
from sluiceway.local.queue_driver import QueueDriver, SharedContext
from sluiceway.local.stores import open_store
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings
from sluiceway.model.configuration import Configuration
from sluiceway.model.health import Check
from sluiceway.model.inspection import (
    Browse,
    BrowsedPage,
    ByItems,
    Deleted,
    DeleteItems,
    ItemsPage,
    ListItems,
    MadeReady,
    MovedAway,
    MoveItems,
    RunNow,
    Search,
    SearchedQueue,
)
from sluiceway.model.meta import Stamp
from sluiceway.model.peers import (
    Ask,
    BackupStep,
    Close,
    Learn,
    LeaseAnywhere,
    ListConsumers,
    ListProblems,
    PeerRequest,
    ReadBackup,
    ShareRequest,
)
from sluiceway.model.queue import QueueRecord
from sluiceway.model.queue_minutes import Tally
from sluiceway.model.rebalance import Plan, Rebalance, RebalanceBatch, RebalanceProgress
from sluiceway.model.requests import (
    Clear,
    Cleared,
    Explanation,
    Extend,
    Extended,
    Lease,
    Leased,
    Peek,
    Produce,
    Produced,
    QueuePatch,
    QueueSpec,
    Redrive,
    Redriven,
    Settle,
    Settled,
)
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.transport import Transport

log = logging.getLogger(__name__)

LET_GO: Millis = 800
"""Time for commits in flight in partitions that move to another instance; within it the group learns that this one has stopped."""
CONFIRM_WITHIN = 1.0
"""Seconds that a call which completes and leases waits for the completion once it has the leases, which are running out."""
TAKEOVER_GRACE: Millis = 5_000
"""Grace for leases of a partition that has just moved here: its clients may have had no instance to extend them."""


@dataclass(frozen=True)
class Membership:
    """Membership of an instance in a cluster. `address`: URL by which others reach it; `open_transport` takes the cluster's secret, and
    what tells the compatibility level of each message."""

    open_meta: Callable[[], MetaStore]
    open_transport: Callable[[str, Callable[[], int]], Transport]
    address: str
    name: str = "instance"
    strategy: Strategy | None = None
    """None: the cluster's."""
    parameters: Parameters = PARAMETERS
    times: Mapping[str, Millis] = field(default_factory=dict)
    """Timing parameters to set for the cluster; it keeps the others."""
    zone: str = ""
    """The instance's failure domain; empty: none."""


class Service:
    """The queues of one data directory, served by this process alone; with `membership`, those of a cluster, served by all its instances.

    A call that returns is done, durably; a `SluicewayError` means refused or unknown. A call on a queue that does not exist raises
    `queue_not_found`. A call may be cancelled: its parts that have not begun do not begin. A lease whose commit is in flight is
    taken all the same, and ends by its deadline. Every change leaves an audit entry that names its author, `by`.

    Call `start` before use, or `prepare`, `join` and `wait_until_open` in turn; `stop` after. Partitions lie on the configured `backends`;
    partitions on any other backend are not served.
    With memory backends nothing outlives the process, not even queues. `disk_reserve`: bytes that produces leave free on each disk.
    `bucket_requests`: counts that the membership's meta store is in, too.
    """

    def __init__(
        self,
        data: Path,
        backends: Mapping[str, BackendSettings] = DEFAULT_BACKENDS,
        *,
        open_store: OpenStore | None = None,
        membership: Membership | None = None,
        disk_reserve: int = 0,
        bucket_requests: BucketRequests | None = None,
    ) -> None:
        self._data = data
        self.bucket_requests = bucket_requests or BucketRequests()
        """Counts of the requests to buckets, of backends and of the meta store."""
        self.room = DiskRoom(disk_reserve, self._note_room)
        self._membership = membership
        self._backends = BackendPool(data, backends, open_store or _opens(membership is not None, self.bucket_requests), self.room)
        self._meta: MetaStore | None = None
        self._audit: AuditTrail | None = None
        self._lock: DirectoryLock | None = None
        self._transport: Transport | None = None
        self.peer_calls: CountedTransport | None = None
        """Counters of requests to other instances; None: there are none."""
        self.secret = ""
        """Secret by which the cluster's instances authenticate one another."""
        self.clock = ClockWatch()
        self._cache = BlobCache()
        self._drivers: dict[str, QueueDriver] = {}
        self._settling: set[asyncio.Future[Settled]] = set()
        """Completions beside a lease."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._let_go_until: Millis = -LET_GO
        self._measuring = False
        self.outdated: SluicewayError | None = None
        """Set once the cluster has been upgraded to a level that this release does not understand. The instance must stop."""
        self.on_outdated: Callable[[], None] = lambda: None
        self.ownership: Ownership = SoleOwnership()
        if membership is not None:
            self.ownership = Clustered(
                membership.name, membership.address, membership.strategy, membership.parameters, membership.times, membership.zone
            )
            self.ownership.on_outdated = self._note_outdated
        self.load_balancer: LoadBalancer | None = None
        """None: this instance is alone, or has not joined."""
        self.instances = Instances(self.ownership, self.queues, lambda: self.audit)

    # ---- lifecycle --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """All of it, until this instance's partitions are open."""
        await self.prepare()
        await self.join()
        await self.wait_until_open()

    async def prepare(self) -> None:
        """Lock the data directory and open the meta store; in a cluster, load the queues: all that takes time before it has partitions."""
        keep_private(self._data)
        # Before anything is written: on a full disk the reserve is released for it.
        self.room.watch(DATA, self._data)
        self._lock = DirectoryLock(self._data, shared=self._membership is not None)
        self._meta = self._open_meta()
        await check_not_adopted(self._meta, self._data)
        self.ownership.level_is(await begin_level(self._meta))
        self._audit = AuditTrail(self._meta)
        await self._backends.start(self._meta)
        self._backends.note_room()
        if self._membership is not None:
            self.secret = await secret_of(self._meta)
            self._transport = self.peer_calls = CountedTransport(self._membership.open_transport(self.secret, lambda: self.ownership.level))
        self.watch = ProblemWatch(self, self._drivers, self.ownership, self._transport)
        self.consumers = ConsumerView(self._driver_of, self.ownership, self._transport)
        self._demand = (
            None if self._transport is None else Demand(self._transport, self._driver_of, self._owners_of, lambda: self.ownership.name)
        )
        self._catalog = Catalog(self._meta, self)
        self._following = MetaWatch(self._meta, self._catalog, self.ownership, self._transport)
        self._router = Router(self._driver, self.ownership, self._transport, self._perform, self._loads, self._following)
        send = TransferSender(self._router, self._catalog.find, self._following.fresh).send
        self._leasing = None if self._demand is None else RemoteLeases(self._router, self._demand)
        self._changes = QueueChanges(self._meta, self._catalog, self.ownership, self._router, self._audit, self._backends, self)
        self._rebalancing = Rebalancing(
            self._meta, self._catalog, self.ownership, self._router, self._audit, self._backends, self._changes, self
        )
        self._backend_changes = BackendChanges(self._meta, self._catalog, self.ownership, self._audit, self._backends, self._changes)
        self.schedules = Schedules(self._meta, self._audit)
        self.schedule_driver = ScheduleDriver(self.schedules, self.ownership, self._meta, self._catalog.find, self.produce)
        self.bundles = Bundles(self._meta, self._audit)
        self.bundle_driver = BundleDriver(self.bundles, self.ownership, self._meta, self.look_up, self._router.count_bundles, self.produce)
        grace = 0 if self.ownership.is_alone else TAKEOVER_GRACE
        self._context = SharedContext(
            self._backends.get,
            self._cache,
            send,
            self.ownership.holds,
            self._changes.may_reopen,
            WeakSet(),
            self.clock,
            self._router.owner_of,
            TimerPace(),
            LoopPressure(),
            gate := CommitGate(),
            self._meta,
            lambda: self.ownership.name,
            self._incarnation_of,
            grace,
            self.room.spend,
            self._demand.look if self._demand is not None else lambda incarnation: None,
        )
        self.upgrades = Upgrades(self._meta, self.ownership, self._audit)
        self.backups = Backups(self._drivers, self.ownership, self._transport, self._meta, self._audit, gate)
        if not self.ownership.is_alone:
            await self._load()

    async def join(self) -> None:
        """Get this instance's partitions: from now on it is to take requests. Without a cluster, also open them."""
        await self.ownership.start(self.meta, self)
        if self.outdated is not None:
            raise self.outdated
        if self.ownership.is_alone:
            await self._load()
            await self.wait_until_open()
        else:
            # It may have got partitions of queues that are newer than those that it has loaded.
            await self._catalog.follow()
            self._begin_to_follow()
        await self.schedule_driver.start()
        await self.bundle_driver.start()
        self._spawn(self._rebalancing.coordinator.run())
        self._spawn(self._keep_compact())
        if self.room.disks:
            self._spawn(self._keep_room())

    def _note_outdated(self, level: Level) -> None:
        try:
            check_understood(level, "cluster.meta")
        except SluicewayError as error:
            self.outdated = error
            self.on_outdated()

    async def _load(self) -> None:
        """Finish interrupted deletions, and load all queues before the first opens: it may have items on their way to another one."""
        await self._changes.drop_rest()
        await self._catalog.follow()

    async def wait_until_open(self) -> None:
        """Wait until each partition is open, or has failed once."""
        await asyncio.gather(*(driver.opened() for driver in self._drivers.values()))

    async def _keep_compact(self) -> None:
        while True:
            await asyncio.sleep(COMPACTION_INTERVAL / 1000)
            for driver in list(self._drivers.values()):
                try:
                    await driver.compact()
                except Exception:
                    log.exception("queue %s: compaction failed; nothing was changed", driver.record.queue_name)

    async def _keep_room(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL / 1000)
            try:
                self.room.look()
                if self.room.any_low:
                    await self._measure_room()
            except Exception:
                # It must not end the watch: a full disk would be found only by what cannot be written.
                log.exception("the room on the disks could not be looked at, will retry")

    async def _measure_room(self) -> None:
        await asyncio.gather(*(driver.measure_room() for driver in list(self._drivers.values())))
        # Look again: room that the logs owed may be free now.
        self.room.look()

    def _note_room(self) -> None:
        """Handle a disk that has become low, or is no longer low."""
        self._backends.note_room()
        for driver in self._drivers.values():
            driver.note_room()
        if self.room.any_low and not self._measuring:
            # At once: if only logs owe the room, requests are refused no longer than it takes to write them.
            self._measuring = True
            self._spawn(self._measure_once())

    async def _measure_once(self) -> None:
        try:
            await self._measure_room()
        finally:
            self._measuring = False

    def _open_meta(self) -> MetaStore:
        if self._membership is not None:
            return self._membership.open_meta()
        return MemoryMetaStore() if self._backends.keeps_nothing else SqliteMetaStore(self._data / "meta.sqlite")

    async def hand_over(self) -> None:
        """Give all partitions to the other instances, and go on serving by forwarding. Does nothing without a cluster."""
        await self.ownership.leave()

    async def stop(self) -> None:
        """Finish requests in flight and release the directory. Waiting leases are answered empty.

        One step that fails, such as the end of a store whose disk has failed, keeps no other from being taken; then its error is raised.
        """
        async with contextlib.AsyncExitStack() as steps:
            for step in reversed(list(self._last_steps())):
                steps.push_async_callback(step)

    def _last_steps(self) -> Iterator[Callable[[], Awaitable[None]]]:
        yield from (self.schedule_driver.stop, self.bundle_driver.stop, self.backups.stop, self._stop_tasks)
        yield from (self._rebalancing.coordinator.close, self._stop_following)
        if self._demand is not None:
            yield self._demand.stop
        yield from (self._stop_drivers, self.ownership.stop)
        if self._transport is not None:
            yield self._transport.close
        yield from (self._backends.close, self.audit.close, self.meta.close, self._release)

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _stop_following(self) -> None:
        self._following.stop()

    async def _stop_drivers(self) -> None:
        stops = [*(asyncio.create_task(driver.stop()) for driver in self._drivers.values()), *self._endings.values()]
        if stops:
            await asyncio.wait(stops)
        # Not before: some send their dead items to others.
        self._drivers.clear()
        await asyncio.gather(*stops)

    async def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    async def catch_up(self) -> None:
        """Carry out all that is due, after the clock was moved ahead."""
        await self.schedule_driver.catch_up()
        await asyncio.gather(*(driver.catch_up() for driver in self._drivers.values()))
        await self.bundle_driver.catch_up()

    @property
    def meta(self) -> MetaStore:
        assert self._meta is not None, "the service is not started"
        return self._meta

    @property
    def audit(self) -> AuditTrail:
        assert self._audit is not None, "the service is not started"
        return self._audit

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- ownership changes ------------------------------------------------------------------------------------

    def learnt(self, record: QueueRecord) -> None:
        """Handle a new or changed queue."""
        driver = self._drivers.get(record.queue_name)
        if driver is not None:
            driver.configure(record)
        else:
            driver = self._drivers[record.queue_name] = QueueDriver(record, self._context)
        # Ownership of a partition may have arrived before the record that lists it.
        driver.gain(self.ownership.tokens(record))
        if self._demand is not None:
            self._demand.moved(record.incarnation)
        self._rebalancing.coordinator.heard(record)
        self.schedule_driver.poke()

    def forgotten(self, record: QueueRecord) -> None:
        """Handle a deleted queue."""
        self._rebalancing.coordinator.heard(record)
        self.schedule_driver.poke()
        task = asyncio.create_task(self._drivers.pop(record.queue_name).stop())
        self._endings[record.incarnation] = task
        task.add_done_callback(lambda _: self._endings.pop(record.incarnation, None))

    def gained(self, incarnation: str, partition: int, token: Token) -> None:
        driver = self._driver_of(incarnation)
        if driver is not None and partition in driver.numbers:
            driver.gain({partition: token})
            self.schedule_driver.poke()
        elif driver is None or partition >= driver.record.given:
            # Another instance has just created the partition, or its queue. Once the record is known, its owned partitions are looked up.
            self._spawn(self._following.follow())

    def expects(self, incarnation: str, partition: int) -> None:
        driver = self._driver_of(incarnation)
        if driver is not None:
            driver.prepare(partition)

    async def lost(self, incarnation: str, partition: int) -> None:
        driver = self._driver_of(incarnation)
        self.schedule_driver.poke()
        if driver is not None:
            # Losses arrive one by one. Together they get the time of one, or the lease would run out meanwhile.
            now = system.steady()
            if now > self._let_go_until + LET_GO:
                self._let_go_until = now + LET_GO
            await driver.lose(partition, max(0, self._let_go_until - now))

    async def opened(self, record: QueueRecord) -> None:
        driver = self._driver_of(record.incarnation)
        if driver is not None:
            await driver.opened()

    async def ended(self, record: QueueRecord) -> None:
        if record.incarnation in self._endings:
            await asyncio.wait([self._endings[record.incarnation]])

    async def tell(self, stamp: Stamp) -> None:
        await self._following.tell(stamp)

    def has_bundles(self, record: QueueRecord) -> bool:
        return self.bundles.any_left(record)

    def _begin_to_follow(self) -> None:
        """Follow the changes and the membership of other instances."""
        assert isinstance(self.ownership, Clustered), "the others are those of a cluster"
        assert self._demand is not None, "the others are reached by a transport"
        demand, ownership = self._demand, self.ownership
        self.load_balancer = LoadBalancer(ownership, self.meta, self._drivers.values)
        ownership.on_change = lambda moved: demand.follow(ownership.peers(), moved=moved)
        demand.follow(ownership.peers())
        for work in (
            Autoscaler(ownership, demand, self._drivers.values, self._changes.spread).run(),
            self.load_balancer.run(),
            self._following.watch(),
            self._following.look_again(),
        ):
            self._spawn(work)

    # ---- requests of other instances --------------------------------------------------------------------------

    async def answer(self, request: PeerRequest) -> Any:
        """Answer another instance's request. Only `LeaseAnywhere` asks further instances, and only about their shares."""
        if isinstance(request, Ask):
            return await self._answer(request)
        if isinstance(request, Learn):
            await self._catalog.follow(request.stamp)
            await self.ownership.follow(request.stamp)
            await asyncio.gather(*(driver.opened() for driver in self._drivers.values()))
            return True
        if isinstance(request, ListConsumers):
            return await self.consumers.here(request)
        if isinstance(request, ListProblems):
            return self.watch.here(request.queue_name)
        if isinstance(request, BackupStep | ReadBackup):
            return await self.backups.answer(request)
        assert self._demand is not None, "only instances of a cluster ask"
        return await self._demand.answer(request, self._drivers.values())

    async def _answer(self, asked: Ask) -> Any:
        driver = self._driver_of(asked.incarnation)
        if driver is None:
            await self._catalog.follow()
            driver = self._driver_of(asked.incarnation)
        if driver is None:
            raise not_here(None)
        if isinstance(asked.request, LeaseAnywhere):
            assert self._leasing is not None, "only instances of a cluster ask"
            if self._leasing.home(driver.record, asked.request.lease) is not HERE:
                raise not_here(None)
            return await self._leasing.keyed(driver.record, driver, asked.request.lease, asked.payload)
        return await self._perform(driver, asked.request, asked.payload)

    async def _perform(self, driver: QueueDriver, request: ShareRequest, payload: bool) -> Any:
        done = await perform(driver, request, payload, self._incarnation_of)
        return done._replace(sender=self._sender_to(driver)) if isinstance(request, Close) else done

    def _incarnation_of(self, queue_name: str) -> str | None:
        found = self._catalog.find(queue_name)
        return None if found is None else found.incarnation

    def _sender_to(self, target: QueueDriver) -> str | None:
        """Return a queue whose items here are, or may be, on their way to the target; None if there is none."""
        record = target.record
        senders = (other for other in self._drivers.values() if other is not target and queries.may_send_to(other, record))
        return next((other.record.queue_name for other in senders), None)

    def _loads(self, incarnation: str) -> Mapping[Any, Any]:
        return {} if self._demand is None else self._demand.loads(incarnation)

    # ---- backends ---------------------------------------------------------------------------------------------

    def backends(self) -> list[BackendInfo]:
        """List the backends by name."""
        return self._backends.infos()

    async def reconfigure(self, old: Configuration, new: Configuration, also: Sequence[str] = (), by: Actor = SYSTEM) -> list[str]:
        """Apply a new configuration's backends (see `BackendChanges.make`), cluster times and strategy. Returns the changed keys.

        Repeating it is safe, and makes up for cluster times and strategy that could not be changed: the error says so.
        """
        changed = await self._backend_changes.make(old, new, also, by)
        times, strategy = new.cluster.changed_times(old.cluster), new.cluster.strategy
        if times or strategy != old.cluster.strategy:
            try:
                await self.instances.redefine(times, strategy or None, by)
            except SluicewayError as error:
                rest = "reload again to change the cluster's times and strategy; changes of backends are in force"
                raise SluicewayError(error.code, f"{error.detail}; {rest}", error.field) from error
        return changed

    # ---- queues -----------------------------------------------------------------------------------------------

    async def create_queue(self, spec: QueueSpec, by: Actor = SYSTEM) -> QueueRecord:
        """Create a queue. Raises `queue_exists`, and `invalid_request` for a dead queue that does not exist or is the queue itself."""
        return await self._changes.create(spec, by)

    async def update_queue(self, queue_name: str, patch: QueuePatch, by: Actor = SYSTEM) -> QueueRecord:
        """Change only these settings. Raises `version_conflict`, and `invalid_request` as `create_queue` does."""
        await self.look_up(queue_name)
        return await self._changes.update(queue_name, patch, "queues.update", by)

    async def pause(self, queue_name: str, verbs: Sequence[Verb], paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        """Pause or resume these verbs, durably; other verbs stay as they are."""
        await self.look_up(queue_name)
        return await self._changes.pause(queue_name, verbs, paused, by)

    async def delete_queue(self, queue_name: str, force: bool, by: Actor = SYSTEM) -> None:
        """Delete a queue. Raises `queue_not_empty` unless `force`, and `queue_in_use`."""
        await self.look_up(queue_name)
        await self._changes.delete(queue_name, force, by)

    # ---- rebalances -------------------------------------------------------------------------------------------

    async def plan_rebalance(self, queue_name: str, requested: int | None) -> tuple[str, Plan, QueueRecord]:
        """Plan a rebalance. Returns the plan's id, the plan, and the queue."""
        record = await self.look_up(queue_name)
        return *self._rebalancing.plan(record, requested), record

    async def rebalance(
        self, queue_name: str, requested: int | None, drain: DrainMode, rate: int | None, plan_id: str | None, by: Actor = SYSTEM
    ) -> Rebalance:
        """Begin a rebalance; it is carried out from then on, even if this process stops. With `plan_id`, only if that is still the plan's.

        Raises as `plan_rebalance`, `plan_changed` and `nothing_to_rebalance`.
        """
        await self.look_up(queue_name)
        return await self._rebalancing.begin(queue_name, requested, drain, rate, plan_id, by)

    async def rebalance_many(
        self, match: str, requested: int | None, drain: DrainMode, rate: int | None, by: Actor = SYSTEM
    ) -> RebalanceBatch:
        """Begin a rebalance of each queue whose name matches, to be carried out one after the other."""
        return await self._rebalancing.begin_many(match, requested, drain, rate, by)

    async def rebalances(self, queue_name: str | None, only_open: bool) -> list[Rebalance]:
        """List the open rebalances and the last ended ones, newest first. Raises `unavailable`."""
        return await self._rebalancing.list(queue_name, only_open=only_open)

    async def get_rebalance(self, id: str) -> Rebalance:
        """Return a rebalance. Raises `rebalance_not_found`."""
        return await self._rebalancing.get(id)

    async def cancel_rebalance(self, id: str, by: Actor = SYSTEM) -> Rebalance:
        """Cancel a rebalance, which then reverts. Raises `rebalance_not_found`, `not_cancellable`."""
        return await self._rebalancing.cancel(id, by)

    async def rebalance_progress(self, rebalance: Rebalance) -> RebalanceProgress:
        """Return the progress, as far as the owners of the partitions answer."""
        return await self._rebalancing.progress(rebalance)

    async def set_partition(self, queue_name: str, partition: int, paused: bool, by: Actor = SYSTEM) -> QueueRecord:
        """Pause or resume one of the queue's partitions. Raises `rebalance_open` for a partition of an open rebalance."""
        await self.look_up(queue_name)
        return await self._changes.set_partition(queue_name, partition, paused, by)

    async def pin_partition(self, queue_name: str, partition: int, where: Pin | None, by: Actor = SYSTEM) -> None:
        """Pin one of the queue's partitions to an instance or a zone; None: unpin it. Raises `invalid_request`."""
        await self.look_up(queue_name)
        await self._changes.pin(queue_name, partition, where, by)

    def queue(self, queue_name: str) -> QueueRecord:
        """Return the queue's record as this instance knows it. Raises queue_not_found."""
        return self._catalog.get(queue_name)

    async def look_up(self, queue_name: str) -> QueueRecord:
        """Return the queue's record, after a look for a queue that another instance has just created. Raises queue_not_found."""
        known = self._drivers.get(queue_name)
        if known is not None:
            return known.record
        return self._catalog.get(queue_name) if self.ownership.is_alone else await self._catalog.look_up(queue_name)

    def queues(self) -> list[QueueRecord]:
        """List all queues by name."""
        return list(self._catalog)

    def _driver(self, queue_name: str) -> QueueDriver:
        driver = self._drivers.get(queue_name)
        if driver is None:
            raise SluicewayError("queue_not_found", f"there is no queue {queue_name[:64]!r}", "queue_name")
        return driver

    def _driver_of(self, incarnation: str) -> QueueDriver | None:
        record = self._catalog.of(incarnation)
        return None if record is None else self._drivers.get(record.queue_name)

    def _owners_of(self, incarnation: str) -> list[Peer]:
        """Return the other instances that own partitions of the queue."""
        driver = self._driver_of(incarnation)
        return [] if driver is None else [peer for peer in self._router.owners(driver.record) if peer is not HERE]

    # ---- items ------------------------------------------------------------------------------------------------

    async def produce(self, queue_name: str, request: Produce) -> Produced:
        """Store items, in one partition unless the queue keeps keys together. Raises `key_conflict`, `stale_sequence`, `bundle_not_found`,
        `bundle_closed`, `unavailable`, `outcome_unknown`."""
        record = self.queue(queue_name)
        if request.bundle is not None:
            await self.bundles.check(request.bundle, record)
        try:
            return await self._router.produce(record, request)
        except SluicewayError as error:
            if queue_name in self._drivers:
                self._drivers[queue_name].note_refusal(error.code)
            raise

    async def lease(self, queue_name: str, request: Lease, payload: bool = True) -> Leased:
        """Lease items, waiting up to the request's `request_timeout`; then returns no leases. Without `payload`, no batches."""
        driver = self._driver(queue_name)
        if self._leasing is not None:
            return await self._leasing.lease(driver.record, driver, request, payload)
        if request.partition is not None:
            only: Leased = await self._router.owner_of(
                driver.record, request.partition, request, payload, repeats=request.lease_key is not None
            )
            return only
        leased: Leased = await driver.ask(request, payload)
        return leased

    async def settle(self, queue_name: str, request: Settle) -> Settled:
        """Complete, retry, release, or (staging) state outcomes. A `strict` request, too, returns the ignored ids."""
        settled = await self._router.settle(self.queue(queue_name), request)
        self._note_settled(queue_name, request)
        return settled

    async def complete_and_lease(
        self, queue_name: str, request: Settle, leasing: Coroutine[Any, Any, Leased]
    ) -> tuple[Leased, Settled | None]:
        """Settle, and carry out `leasing`, a `lease` of the same queue, at once, so that both share a commit where they can.

        The leases do not wait: None for what was settled says that this is not confirmed CONFIRM_WITHIN after they were taken, or that it
        failed. Raises the error of the leasing, which says nothing of the settling.
        """
        try:
            settling = self._begin_settle(self._driver(queue_name), request)
        except SluicewayError:
            leasing.close()
            raise
        self._settling.add(settling)
        settling.add_done_callback(lambda settled: self._settled(queue_name, request, settled))
        leased = await leasing
        if not settling.done():
            await asyncio.wait([settling], timeout=CONFIRM_WITHIN)
        if not settling.done() or settling.cancelled() or settling.exception() is not None:
            return leased, None
        return leased, settling.result()

    def _begin_settle(self, driver: QueueDriver, request: Settle) -> asyncio.Future[Settled]:
        if self.ownership.is_alone and driver.numbers.issuperset(numbers_of(request)):
            return driver.begin(request)
        return asyncio.ensure_future(self._router.settle(driver.record, request))

    def _settled(self, queue_name: str, request: Settle, settling: asyncio.Future[Settled]) -> None:
        """Handle the end of a completion beside a lease, which may wait for items long after it, or have ended before."""
        self._settling.discard(settling)
        # Read in any case: asyncio logs an error that nothing has read, and the caller may have its answer already.
        if not settling.cancelled() and settling.exception() is None:
            self._note_settled(queue_name, request)

    def _note_settled(self, queue_name: str, request: Settle) -> None:
        self.bundle_driver.note_settled(queue_name)
        driver = self._drivers.get(queue_name)
        if driver is None:
            # Deleted meanwhile.
            return
        if request.handler_times:
            driver.handler_times.note(request.handler_times, system.now(), is_done=True)
        elif failed := request.failed_handler_times():
            driver.handler_times.note(failed, system.now(), is_done=False)

    async def extend(self, queue_name: str, request: Extend) -> Extended:
        return await self._router.extend(self.queue(queue_name), request)

    async def clear(self, queue_name: str, request: Clear, by: Actor = SYSTEM) -> Cleared:
        """Drop waiting items. Raises `unavailable` for a partition that is not open; items dropped elsewhere stay dropped."""
        record = await self.look_up(queue_name)
        cleared = await self.audit.recorded("queue.clear", by, queue_name, detail_of(request), lambda: self._router.clear(record, request))
        self.bundle_driver.note_settled(queue_name)
        return cleared

    async def redrive(self, queue_name: str, request: Redrive, by: Actor = SYSTEM) -> Redriven:
        """Send dead items back. Raises `invalid_request` for a target that does not exist."""
        record = await self.look_up(queue_name)
        if request.dry_run:
            return await self._router.redrive(record, request)
        return await self.audit.recorded("queue.redrive", by, queue_name, detail_of(request), lambda: self._router.redrive(record, request))

    async def list_items(self, queue_name: str, request: ListItems) -> ItemsPage:
        """List items by offset, in one of the queue's partitions. Raises `unavailable` while it is not open."""
        return await self._router.list_items(self.queue(queue_name), request)

    async def import_items(self, queue_name: str, request: Produce, by: Actor = SYSTEM) -> Produced:
        """Produce, with an audit entry."""
        asked = detail_of(Asked(request.batch.num_rows))
        return await self.audit.recorded("storage/items.import", by, queue_name, asked, lambda: self.produce(queue_name, request))

    async def delete_items(self, queue_name: str, request: DeleteItems, by: Actor = SYSTEM) -> Deleted:
        """Drop waiting items by id. Raises as `clear`."""
        record = self.queue(queue_name)
        deleted = await self.audit.recorded(
            "storage/items.delete", by, queue_name, _asked(request), lambda: self._router.delete_items(record, request)
        )
        self.bundle_driver.note_settled(queue_name)
        return deleted

    async def run_now(self, queue_name: str, request: RunNow, by: Actor = SYSTEM) -> MadeReady:
        """Make scheduled items ready by id. Raises as `clear`."""
        record = self.queue(queue_name)
        return await self.audit.recorded(
            "storage/items.run_now", by, queue_name, _asked(request), lambda: self._router.run_now(record, request)
        )

    async def move_items(self, queue_name: str, request: MoveItems, by: Actor = SYSTEM) -> MovedAway:
        """Send waiting items by id to another queue. Raises as `clear`, and `queue_not_found` for a target that does not exist.

        Once items have moved it raises nothing: items of partitions that failed are ignored with the error's code.
        """
        record, asked = self.queue(queue_name), _asked(request, request.target)
        moved = await self.audit.recorded("storage/items.move", by, queue_name, asked, lambda: self._router.move_items(record, request))
        self.bundle_driver.note_settled(queue_name)
        return moved

    async def search(self, queue_name: str, request: Search) -> SearchedQueue:
        """Find items in the queue's partitions, from a place on. Partitions that are not open are skipped."""
        return await self._router.search(self.queue(queue_name), request)

    async def reload(self, queue_name: str, timeout: Millis, by: Actor = SYSTEM) -> None:
        """Reopen every partition from its store, within `timeout` ms. Raises `unavailable`, `partition_damaged`."""
        await self._router.reload(self.queue(queue_name), timeout)
        await self.audit.record("queue.reload", by, queue_name)

    async def explain(self, queue_name: str, partition: int, offset: int) -> Explanation:
        """Explain the item that was given that offset in one of the queue's partitions."""
        return await self._router.explain(self.queue(queue_name), partition, offset)

    async def browse(self, queue_name: str, request: Browse) -> BrowsedPage:
        """Read a snapshot of a partition. Raises as `list_items`; `snapshot_gone`, `too_many_items`, `too_many_requests`."""
        return await self._router.browse(self.queue(queue_name), request)

    async def peek(self, queue_name: str, request: Peek) -> list[pa.RecordBatch]:
        """Return items without leasing them. Raises `lease_not_found`."""
        return await self._router.peek(self.queue(queue_name), request)

    async def count(self, queue_name: str) -> QueueStats:
        """Count the whole queue, by instance."""
        return await self._router.count(self.queue(queue_name))

    async def reasons(self, queue_name: str) -> Reasons:
        """Count the items of the queue by why they died."""
        return await self._router.reasons(self.queue(queue_name))

    async def keys(self, queue_name: str, limit: int) -> QueueKeys:
        """The busiest keys of the queue, and those that wait longest, up to `limit` of each."""
        return await self._router.keys(self.queue(queue_name), limit)

    def stats(self, queue_name: str) -> LogicalQueueStats:
        """Count this instance's share of the queue."""
        return queries.stats(self._driver(queue_name))

    def handler_times(self, queue_name: str) -> HandlerTimes:
        """How long the queue's items were handled, as far as their consumers told this instance."""
        return self._driver(queue_name).handler_times

    def tally(self, queue_name: str) -> Tally:
        """Return the present levels of this instance's share of the queue, and its counts since it began."""
        return self._driver(queue_name).tally()

    def problems(self) -> list[str]:
        """List the reasons why the instance is not fully ready; empty when it is."""
        of_partitions = [each for driver in self._drivers.values() for each in queries.problems(driver)]
        return self.instances.problems() + self.room.problems() + self._backends.problems() + of_partitions

    async def checks(self) -> list[Check]:
        """Run the health checks now."""
        partitions = check_partitions(queries.stats(driver) for driver in self._drivers.values())
        return [
            await check_meta(self.meta, GRANT),
            *self.instances.checks(),
            *check_backends(self.backends()),
            *self.room.checks(),
            partitions,
            self.clock.check(),
        ]


def _asked(request: ByItems, target: str | None = None) -> dict[str, Any]:
    return detail_of(Asked(sum(map(len, request.offsets.values())) + len(request.foreign), target))


def _opens(shared: bool, requests: BucketRequests) -> OpenStore:
    return lambda name, settings, data: open_store(name, settings, data, shared=shared, requests=requests)
