"""The coordinator: the one instance that carries out the rebalances, named by a key of the meta store.

Each of its commits checks that key, so a replaced coordinator commits nothing more. Requests that it still sends to partitions are
rejected by their cursor, or may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.ownership import PARAMETERS, Ownership
from sluiceway.cluster.queue_changes import Shares
from sluiceway.cluster.rebalance_records import Elected, StaleError, Stored, said
from sluiceway.cluster.rebalance_run import RebalanceContext, Run
from sluiceway.core.group.group_records import PATIENCE, GroupView
from sluiceway.core.rebalance import steps as machine
from sluiceway.core.rebalance.partition_plan import plan
from sluiceway.core.rebalance.steps import Change
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.meta import Stamp
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

POLL: Millis = 3_000
"""Interval between two reads of the open rebalances: other instances may have begun one, or have died."""
AGAIN: Millis = 500
"""The interval while a batch waits, or after an error."""
DROP_AGAIN: Millis = 5_000
"""Interval between two attempts to remove a partition's data while its backend does not answer."""


class Coordinator:
    """Candidate for coordinator on this instance; `run` until cancelled. `affinities` returns those of the configured backends."""

    def __init__(self, parts: RebalanceContext, ownership: Ownership, affinities: Callable[[], dict[str, float]]) -> None:
        self._parts = parts
        self._ownership = ownership
        self._affinities = affinities
        self._runs: dict[str, Run] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._drops: dict[str, asyncio.Task[None]] = {}
        """Removals in progress, by their keys in the meta store."""
        self._wake = asyncio.Event()
        self._wait: Millis | None = None
        """Time until the next look; None: until a rebalance begins here."""

    def poke(self) -> None:
        """Look again: a rebalance may have begun or changed."""
        self._wake.set()
        for run in self._runs.values():
            run.poke()

    def heard(self, record: QueueRecord) -> None:
        """Handle a change or the deletion of the queue."""
        if record.rebalance is not None or self._runs:
            self.poke()

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                except (SluicewayError, StaleError, MetaUnknownError, StoreUnavailableError) as error:
                    log.warning("rebalances are interrupted, will retry: %s", error)
                    self._wait = AGAIN
                except Exception:
                    log.exception("reading the rebalances failed")
                    self._wait = POLL
                await system.wait(self._wake, self._wait)
        finally:
            await self._stop()

    async def _stop(self, but: Iterable[str] = ()) -> None:
        """Stop the runs of all rebalances except those in `but`."""
        tasks = [self._running.pop(id) for id in [*self._running] if id not in but]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for id in [*self._runs]:
            if id not in but:
                del self._runs[id]

    async def close(self) -> None:
        """Cancel the removals of data; the next start completes them."""
        tasks = [*self._drops.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---- election and runs ------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Run the open rebalances if this instance is the coordinator, or becomes it now."""
        self._wait = None if self._ownership.is_alone else POLL
        if not self._ownership.holds():
            await self._stop()
            return
        stored, dropping, elected, stamp = await self._parts.records.look()
        if not (stored or dropping):
            await self._stop()
            return
        held = await self._elected(elected, stamp)
        if held is None:
            # Another instance is, or the commit failed: then nothing else would make an instance that is alone look again.
            self._wait = POLL
            await self._stop()
            return
        for key, partitions in dropping.items():
            # The instance that removed them may have died, or may not know that its commit succeeded.
            self.drop(key, partitions)
        there = {each.rebalance.id for each in stored}
        await self._stop(there)
        for each in stored:
            if each.rebalance.state == "waiting":
                self._wait = min(self._wait or AGAIN, AGAIN)
                if each.rebalance.after not in there:
                    each_begun = await self._begin(each, held)
                    if each_begun is not None:
                        self._start(each_begun, held)
            elif each.rebalance.id not in self._running:
                self._start(each, held)

    async def _elected(self, elected: Elected | None, stamp: Stamp | None) -> Stamp | None:
        """Return the stamp of this instance's election; None if another live instance is the coordinator, or this one was not elected."""
        name = self._ownership.name
        if elected is not None and elected.name == name:
            return stamp
        look = self._ownership.look
        if elected is not None and look is not None and not self._ownership.is_alone:
            holder = look.members.get(elected.name)
            if holder is not None and not holder.leaving:
                return None
        if look is not None and not self._ownership.is_alone and (name not in look.members or look.members[name].leaving):
            return None
        held = await self._parts.records.elect(name, elected, stamp)
        if held is not None:
            log.info("this instance is the coordinator of rebalances now")
            await self._stop()
        return held

    def _start(self, stored: Stored, held: Stamp) -> None:
        id = stored.rebalance.id
        run = self._runs[id] = Run(self._parts, stored, held, self._ownership.name)
        task = self._running[id] = asyncio.create_task(self._carry_out(run))
        task.add_done_callback(lambda _: self._ended(id, task))

    async def _carry_out(self, run: Run) -> None:
        try:
            await run.run()
        except StaleError:
            log.info("another instance is carrying out rebalance %s", run.rebalance.id)
        except Exception:
            log.exception("rebalance %s could not be carried out", run.rebalance.id)
            await asyncio.sleep(AGAIN / 1000)
        else:
            await self._parts.records.trim_now_and_then()

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(id) is task:
            del self._running[id]
            self._runs.pop(id, None)
        self._wake.set()

    # ---- waiting rebalances -----------------------------------------------------------------------------------

    async def _begin(self, stored: Stored, held: Stamp) -> Stored | None:
        """Plan and begin a waiting rebalance whose turn has come. None: it has ended at once, or another one of its queue is open."""
        rebalance = stored.rebalance

        async def change() -> tuple[Change, Stamp] | None:
            record = self._parts.catalog.of(rebalance.incarnation)
            if record is not None and record.rebalance is not None:
                return None
            decided = self._decided(rebalance, record)
            try:
                return decided, await self._write(stored, decided, record, held)
            except SluicewayError as error:
                if error.code != "invalid_request":
                    raise
                failed = machine.failed(rebalance, error.detail, system.now())
                return failed, await self._write(stored, failed, record, held)

        async with self._parts.changes.lock:
            done = await self._parts.changes.decide(change)
        if done is None:
            return None
        decided, stamp = done
        if decided.record is not None:
            await self._parts.shares.tell(stamp)
        self._wake.set()
        return Stored(decided.rebalance, stamp) if decided.rebalance.is_open else None

    def _decided(self, rebalance: Rebalance, record: QueueRecord | None) -> Change:
        now = system.now()
        if record is None:
            return machine.failed(rebalance, "the queue was deleted", now)
        try:
            made = plan(record, rebalance.requested_partitions, self._affinities())
            check_bundles(made, record, self._parts.shares)
        except SluicewayError as error:
            return machine.failed(rebalance, error.detail, now)
        if made.is_empty:
            return machine.nothing_to_do(rebalance, now)
        if made.drains_naturally:
            # A rebalance of a batch: its `drain` was meant for the queues where it is possible.
            rebalance = msgspec.structs.replace(rebalance, drain="natural", rate=None)
        return machine.begin(record, rebalance, made, now)

    async def _write(self, stored: Stored, change: Change, record: QueueRecord | None, held: Stamp) -> Stamp:
        by = Actor(stored.rebalance.actor, stored.rebalance.request_id)
        name = stored.rebalance.queue_name
        if change.rebalance.state == "running":
            entry = self._parts.audit.entry("queue.rebalance", by, name, begun_detail(change, record))
        else:
            action = "rebalance.failed" if change.rebalance.state == "failed" else "rebalance.finish"
            entry = self._parts.audit.entry(action, SYSTEM, name, said(change, record, stored.rebalance))
        return await self._parts.records.write(stored, change, [entry], held)

    # ---- removal of data --------------------------------------------------------------------------------------

    def drop(self, key: str, partitions: tuple[PartitionRecord, ...]) -> None:
        """Remove the data of removed partitions in the background."""
        if key not in self._drops:
            task = self._drops[key] = asyncio.create_task(self._drop(key, partitions))
            task.add_done_callback(lambda _: self._drops.pop(key, None))

    async def _drop(self, key: str, partitions: tuple[PartitionRecord, ...]) -> None:
        if not self._ownership.is_alone:
            # An isolated former owner may open the partition again. Without the data it would find a new partition, which takes items;
            # with the data it finds a sealed one. After this wait its lease has run out.
            await asyncio.sleep(drop_after(self._ownership.look) / 1000)
        while True:
            try:
                # Once the owners know of the removal, none of their requests to the partition is in flight any more.
                await self._parts.changes.follow()
                await self._parts.shares.tell(self._parts.catalog.stamp)
                if await self._parts.changes.drop(key, partitions):
                    return
            except SluicewayError as error:
                log.warning("data of a removed partition was not deleted, will retry: %s", error)
            except Exception:
                # Otherwise a server that is alone would not try again before its restart.
                log.exception("data of a removed partition was not deleted, will retry")
            await asyncio.sleep(DROP_AGAIN / 1000)


def drop_after(look: GroupView | None) -> Millis:
    """Retention of a removed partition's data: longer than an isolated instance can consider itself the owner."""
    longest = PARAMETERS.member_timeout
    if look is not None and look.resource is not None:
        # A member's lease is as long as its own record says: it may not have seen that the operator has changed the times.
        leases = (math.ceil(PATIENCE * each.lease_timeout) for each in look.members.values())
        longest = max(longest, look.resource.parameters.member_timeout, *leases)
    return 2 * longest + 2_000


IN_ORDER = "the queue is ordered, so its consumers must empty the old partition; use natural"
BY_KEY = "the queue keeps the items of a key together, so its consumers must empty the old partitions; use natural"


def begun_detail(change: Change, record: QueueRecord | None) -> dict[str, object]:
    """Audit detail of a rebalance that begins."""
    rebalance, made = change.rebalance, change.rebalance.plan
    return {
        **said(change, record, rebalance),
        "drain": rebalance.drain,
        "requested_partitions": rebalance.requested_partitions,
        **_plan_detail(made),
        **({"rate": rebalance.rate} if rebalance.rate is not None else {}),
        **({"batch": rebalance.batch} if rebalance.batch is not None else {}),
    }


def _plan_detail(made: Plan) -> dict[str, object]:
    few = len(made.creates) + len(made.drains) <= 40
    if few:
        return {"creates": [msgspec.to_builtins(each) for each in made.creates], "drains": list(made.drains), "keeps": len(made.keeps)}
    return {"creates": len(made.creates), "drains": len(made.drains), "keeps": len(made.keeps)}


def check_bundles(made: Plan, record: QueueRecord, shares: Shares) -> None:
    """Refuse to replace a queue's only partition, in order, while bundles need its counts: it would not go, and the new one gives out
    nothing before that. Raises `invalid_request`."""
    if made.in_order and shares.has_bundles(record):
        detail = f"the only partition of queue {record.queue_name!r} is not replaced while the queue has bundles that are not over"
        raise invalid("queue_name", detail)
