"""A group member in this process: reads the group's records, carries out the machine's decisions, and notifies its user."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from sluiceway.adapters import system
from sluiceway.core.group.group_records import (
    Decision,
    GroupReader,
    GroupView,
    Keys,
    LoadReport,
    Parameters,
    Resource,
    Strategy,
    Token,
    Writes,
    decode_member,
    is_full,
)
from sluiceway.core.group.item_placement import begin
from sluiceway.core.group.levels import admits
from sluiceway.core.group.member import Member, hint_pace
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import Levels
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.names import check_queue_name, check_text, check_zone
from sluiceway.ports.meta_store import NOTHING, ConflictError, Entry, MetaStore, MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

AGAIN: Millis = 200
"""Delay before the next attempt after the meta store failed."""


class Gained(NamedTuple):
    """The member owns the item from now on, until it is lost."""

    item: str
    token: Token


class Lost(NamedTuple):
    """The member no longer owns the item. Another member gets it once the handler has returned, or when the lease has run out."""

    item: str


Change = Gained | Lost
Handler = Callable[[Change], Awaitable[None] | None]


async def define(
    store: MetaStore,
    group: str,
    items: Sequence[str],
    *,
    strategy: Strategy = "rounds",
    parameters: Parameters | None = None,
    restored: bool = False,
) -> Resource:
    """Set the group's items and strategy; its members follow within a round. Unchanged settings are not written.

    `parameters` None: unchanged. A change of strategy begins a new era, whose tokens are all greater. So does `restored`, each time: pass
    it once after the store was restored from a backup, before any member joins.
    Raises `invalid_request` (also for more items than a plan can hold), `unavailable`, `outcome_unknown`.
    """
    keys = Keys(check_queue_name(group, "group"))
    while True:
        try:
            entry = (await store.read([keys.resource])).entries.get(keys.resource)
            resource, writes = begin(keys, entry, items, strategy, parameters, restored=restored)
            if writes.puts:
                await store.commit(writes.checks, puts=writes.puts)
            return resource
        except ConflictError:
            continue
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", str(error)) from error
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", str(error)) from error


class GroupMember:
    """One member of a group. After `join`, `handler` is called for each item gained or lost; `leave` hands all items over.

    The handler may be a function or a coroutine function. It is called with one change at a time. Once it has returned from `Lost`, another
    member may serve the item, so it must have stopped by then. It has about a second for that: a member that is busy for longer than its
    lease loses all its items. Its exceptions are logged and count as returned. Use on one event loop.

    `on_look` is called with each look at the group that shows other owners, members, addresses or another level than the one before, before
    the handler learns the consequences. `on_expect` is called with items that the member will probably gain within moments, as their owner
    seems dead. Exceptions of both are logged. `lapse_level`: log level for a lease that ran out. `levels`: the compatibility levels that
    this process understands, if the group has a level; the member stays outside while it does not understand it. `release`: for display.
    `zone`: the member's failure domain, such as a data centre. The items of a queue (equal names up to their last dot) are spread over the
    zones of the members. Only the strategy `rounds` does so.
    """

    def __init__(
        self,
        store: MetaStore,
        group: str,
        handler: Handler,
        *,
        name: str | None = None,
        address: str = "",
        on_look: Callable[[GroupView], None] | None = None,
        on_expect: Callable[[frozenset[str]], None] = lambda _: None,
        lapse_level: int = logging.WARNING,
        levels: Levels | None = None,
        release: str = "",
        zone: str = "",
    ) -> None:
        self._keys = Keys(check_queue_name(group, "group"))
        self._store = store
        self._handler = handler
        # Names are never reused, so each start adds its own suffix.
        self.name = f"{check_queue_name(name or 'member', 'name')}-{system.new_incarnation()}"
        self._levels = levels
        self._member = Member(self._keys, self.name, check_text(address, "address"), levels, release, check_zone(zone))
        self.look: GroupView | None = None
        """The last look at the group."""
        self._on_look = on_look
        self._on_expect = on_expect
        self._expected: frozenset[str] = frozenset()
        self._lapse_level = lapse_level
        self._reader = GroupReader(self._keys)
        self._followed: Stamp = -1
        """Stamp of the last look that was carried out."""
        self._looked = asyncio.Event()
        """Set, and replaced by a new event, each time a look has been carried out."""
        self._held: dict[str, Token] = {}
        self._lease_deadline: Millis = 0
        self._telling = asyncio.Lock()
        self._lapse: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._outside: str | None = None
        """Why it cannot join now, in words."""
        self.lapses = 0
        """Number of times the lease ran out while the member owned items."""
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Join the group. Returns at once; ownership comes with the next round."""
        assert self._task is None, "a member joins once"
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Stop all items, then leave the group. Waits until that is recorded; cancel it to leave without."""
        if self._task is None:
            return
        self._member.leave()
        self._changed.set()
        await self._task

    async def stop(self) -> None:
        """Stop at once: the items are lost here, and other members get them when this member's lease has run out."""
        # First, since a store that hangs may delay the rest.
        await self._serve({}, 0)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def holds(self) -> bool:
        """Whether the member still owns its items. A process that was frozen learns their loss here, before its handler does."""
        return system.steady() < self._lease_deadline

    @property
    def items(self) -> dict[str, Token]:
        """The items that this member owns now, each with its token."""
        return dict(self._held) if system.steady() < self._lease_deadline else {}

    def token(self, item: str) -> Token | None:
        """Proof that this member owns the item now; None if it does not. Ask before each use, and check the token at the place of use."""
        return self._held.get(item) if system.steady() < self._lease_deadline else None

    def late(self) -> frozenset[str]:
        """Members not seen alive for a while: not given up yet, but given no new items (`place`)."""
        return self._member.late(self.look, system.steady()) if self.look is not None else frozenset()

    def still(self) -> dict[str, Millis]:
        """Time since each member's beat last changed, as observed by this member."""
        return self._member.still(self.look, system.steady()) if self.look is not None else {}

    def report(self, report: LoadReport) -> None:
        """Tell the group what this member's items cost it, with one of the next heartbeats."""
        self._member.report(report)

    async def refresh(self, min_stamp: Stamp) -> None:
        """Look at once. Returns when a look of `min_stamp` or later was carried out and the handler told, or when the member has left.

        The handler must not await it: it would wait for itself.
        """
        assert self._task is not None, "it looks once it has joined"
        while self._followed < min_stamp and not self._task.done():
            looked = self._looked
            self._changed.set()
            await looked.wait()

    # ---- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        hints = asyncio.create_task(self._hear())
        known: GroupView | None = None
        try:
            while True:
                look, known = None if self._changed.is_set() else known, None
                self._changed.clear()
                try:
                    decision = self._decide(look or await self._look())
                    await self._serve(decision.owned, decision.lease_deadline)
                    self._carried_out()
                    self._expect(decision.expected)
                    if decision.left:
                        return
                    if decision.writes is not None:
                        known = await self._commit(decision.writes)
                        continue
                    wait = decision.wake_at - system.steady()
                except StoreUnavailableError as error:
                    log.warning("group %s: %s", self._keys.group, error)
                    wait = AGAIN
                except Exception:
                    # The lease runs out meanwhile, so unreadable records stop this member from serving.
                    log.exception("group %s: %s could not process the group's records", self._keys.group, self.name)
                    wait = AGAIN
                await system.wait(self._changed, max(0, wait))
        finally:
            hints.cancel()
            self._looked.set()

    def _carried_out(self) -> None:
        assert self.look is not None
        self._followed = self.look.view.stamp
        self._looked.set()
        self._looked = asyncio.Event()

    async def _hear(self) -> None:
        heard_at: Millis = 0
        async for _ in self._store.watch(self._keys.prefix):
            if self.look is not None and (pause := heard_at + hint_pace(self.look) - system.steady()) > 0:
                # What changes meanwhile is the same hint.
                await asyncio.sleep(pause / 1000)
            heard_at = system.steady()
            self._changed.set()

    async def _look(self) -> GroupView:
        view = await self._store.refresh(NOTHING if self.look is None else self.look.view, self._keys.prefix)
        return self._reader.read(view, system.steady(), system.now())

    def _decide(self, look: GroupView) -> Decision:
        outside = None if self.name in look.members else self._kept_out_by(look)
        if outside is not None and outside != self._outside:
            log.warning("group %s: %s waits outside, since %s", self._keys.group, self.name, outside)
        self._outside = outside
        before, self.look = self.look, look
        if self._on_look is not None and (before is None or _shown(before) != _shown(look)):
            try:
                self._on_look(look)
            except Exception:
                log.exception("group %s: a callback of the group failed", self._keys.group)
        return self._member.look(look)

    def _kept_out_by(self, look: GroupView) -> str | None:
        if not admits(look.level, self._levels):
            return "this release does not understand the group's compatibility level"
        return f"the group has {len(look.members)} members already" if is_full(look.members) else None

    def _expect(self, expected: frozenset[str]) -> None:
        before, self._expected = self._expected, expected
        if new := expected - before:
            try:
                self._on_expect(new)
            except Exception:
                log.exception("group %s: a callback of the group failed", self._keys.group)

    async def _commit(self, writes: Writes) -> GroupView | None:
        """Commit. Returns the look that follows, if it is known: the next one shows the outcome otherwise, also of a conflict, which is no
        error. Raises StoreUnavailableError for an unknown outcome."""
        try:
            stamp = await self._store.commit(writes.checks, writes.unchanged, writes.puts, writes.deletes, hint=writes.hint)
        except ConflictError:
            return None
        except MetaUnknownError as error:
            raise StoreUnavailableError(str(error)) from error
        return self._after_beat(writes, stamp)

    def _after_beat(self, writes: Writes, stamp: Stamp) -> GroupView | None:
        """The last look with this member's own beat in it, if that is all that was committed: to see that it is recorded needs no look.

        Only in large groups, as in small ones all look at each beat; and not if the commit took as long as its lease may have. The view
        keeps its stamp: what others have committed since is not in it, and the next look fetches it.
        """
        look, key = self.look, self._keys.member(self.name)
        if look is None or writes.hint or writes.deletes or not writes.puts.keys() <= {key, self._keys.load(self.name)}:
            return None
        if look.resource is None or system.steady() - look.seen_at > look.resource.parameters.beat_interval:
            return None
        record = decode_member(writes.puts[key], look.view.entries[self._keys.about(self.name)].value)
        view = View(look.view.stamp, {**look.view.entries, key: Entry(writes.puts[key], stamp)})
        return replace(look, view=view, members={**look.members, self.name: record})

    # ---- handler ----------------------------------------------------------------------------------------------

    async def _serve(self, owned: Mapping[str, Token], lease_deadline: Millis) -> None:
        """Own exactly these items until the deadline: notify the handler of the lost ones first, then of the gained ones."""
        if self._lapse is not None:
            self._lapse.cancel()
        async with self._telling:
            # Callers may have seen in between that this member held nothing, so the handler must lose and gain all of it again.
            lapsed = not self.holds
            self._lease_deadline = lease_deadline
            for item in [item for item, token in self._held.items() if lapsed or owned.get(item) != token]:
                del self._held[item]
                await self._tell(Lost(item))
            for item, token in owned.items():
                if item not in self._held:
                    self._held[item] = token
                    await self._tell(Gained(item, token))
        if self._held:
            loop = asyncio.get_running_loop()
            self._lapse = loop.call_later(max(0, lease_deadline - system.steady()) / 1000, self._lapsed)

    def _lapsed(self) -> None:
        """Stop serving: the store did not confirm the lease in time."""
        log.log(self._lapse_level, "group %s: the lease of %s ran out", self._keys.group, self.name)
        self.lapses += 1
        self._lapsing = asyncio.ensure_future(self._serve({}, 0))

    async def _tell(self, change: Change) -> None:
        try:
            done = self._handler(change)
            if inspect.isawaitable(done):
                await done
        except Exception:
            log.exception("group %s: the handler failed at %r", self._keys.group, change)


def _shown(look: GroupView) -> tuple[object, ...]:
    """The parts of a look that `on_look` reports: the owners, the members' addresses, and the level."""
    addresses = {name: record.address for name, record in look.members.items()}
    return look.resource, look.plan, look.claims, addresses, look.level
