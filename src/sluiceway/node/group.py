"""A member of a group in this process: reads the group's records, does what the machine decides, tells its user."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from sluiceway.adapters import system
from sluiceway.core.assignment.group import Decision, Keys, Parameters, Resource, Strategy, Writes, read_group
from sluiceway.core.assignment.member import Member
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

AGAIN: Millis = 200
"""How long to wait after the meta store failed."""


def _now() -> Millis:
    """By a clock that nobody sets: leases are measured with it, never compared between machines."""
    return int(system.stopwatch() * 1000)


class Token(NamedTuple):
    """Proof of ownership. Tokens of an item compare: a later owner's is greater, so whoever stores the greatest can refuse the rest."""

    era: int
    grant: int


class Gained(NamedTuple):
    """The item is this member's from now on, until it is lost."""

    item: str
    token: Token


class Lost(NamedTuple):
    """The item is not this member's any more. It goes to another once the handler has returned, or when the lease has run out."""

    item: str


Change = Gained | Lost
Handler = Callable[[Change], Awaitable[None] | None]


async def define(
    store: MetaStore, group: str, items: Sequence[str], *, strategy: Strategy = "rounds", parameters: Parameters | None = None
) -> Resource:
    """Say what the group divides, and how; its members follow within a round. What is the same already is not written.

    `parameters` None: as they are. A change of the strategy begins a new era, whose tokens are all greater.
    Raises `invalid_request`, `unavailable`, `outcome_unknown`.
    """
    keys = Keys(check_queue_name(group, "group"))
    for item in items:
        check_item(item)
    wanted = tuple(sorted(set(items)))
    while True:
        try:
            entry = (await store.read([keys.resource])).entries.get(keys.resource)
            before = None if entry is None else msgspec.json.decode(entry.value, type=Resource)
            after = _changed(before, wanted, strategy, parameters)
            if after == before:
                return after
            await store.commit({keys.resource: entry.stamp if entry else None}, puts={keys.resource: msgspec.json.encode(after)})
            return after
        except ConflictError:
            continue
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", str(error)) from error
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", str(error)) from error


def check_item(item: object) -> str:
    """An item of a resource: 1 to 200 printable ASCII characters. Raises `invalid_request`."""
    if not isinstance(item, str) or not 1 <= len(item) <= 200 or not (item.isascii() and item.isprintable()):
        raise invalid("items", f"{str(item)[:80]!r} is not an item's name: 1 to 200 printable ASCII characters")
    return item


def _changed(before: Resource | None, items: tuple[str, ...], strategy: Strategy, parameters: Parameters | None) -> Resource:
    if before is None:
        return Resource(items=items, strategy=strategy, parameters=parameters or Parameters())
    after = msgspec.structs.replace(before, items=items, strategy=strategy, parameters=parameters or before.parameters)
    if after == before:
        return before
    era = before.era + (strategy != before.strategy)
    return msgspec.structs.replace(after, version=before.version + 1, era=era)


class GroupMember:
    """One member. `join` it, and its `handler` is told what it gains and loses; `leave` hands everything over.

    The handler may be a function or a coroutine function. It is called with one change at a time; when it has returned from `Lost`, the
    item may be served by another, so it must have stopped by then. It has about a second for that: a member that is busy for longer than
    its lease loses everything. What it raises is logged and counts as returned. Use on one event loop.
    """

    def __init__(self, store: MetaStore, group: str, handler: Handler, *, name: str | None = None, address: str = "") -> None:
        self._keys = Keys(check_queue_name(group, "group"))
        self._store = store
        self._handler = handler
        # A name is never used again, so every start has a part of its own.
        self.name = f"{check_queue_name(name or 'member', 'name')}-{system.new_incarnation()}"
        self._member = Member(self._keys, self.name, address)
        self._held: dict[str, Token] = {}
        self._lease_deadline: Millis = 0
        self._telling = asyncio.Lock()
        self._lapse: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Take part from now on. Returns at once; ownership comes with the next round."""
        assert self._task is None, "a member joins once"
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Lose everything in good order, and be no member any more. Waits until that is recorded; cancel it to go without."""
        if self._task is None:
            return
        self._member.leave()
        self._changed.set()
        await self._task

    async def stop(self) -> None:
        """Go at once: what it holds is lost here, and others get it when its lease has run out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._serve({}, 0)

    @property
    def items(self) -> dict[str, Token]:
        """What this member owns now, each with its token."""
        return dict(self._held) if _now() < self._lease_deadline else {}

    def token(self, item: str) -> Token | None:
        """Proof that the item is this member's now; None: it is not. To be asked for before each use, and checked where it is used."""
        return self._held.get(item) if _now() < self._lease_deadline else None

    # ---- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        hints = asyncio.create_task(self._hear())
        try:
            while True:
                self._changed.clear()
                try:
                    decision, era = await self._look()
                    await self._serve({item: Token(era, grant) for item, grant in decision.owned.items()}, decision.lease_deadline)
                    if decision.left:
                        return
                    if decision.writes is not None:
                        await self._commit(decision.writes)
                        continue
                    wait = decision.wake_at - _now()
                except StoreUnavailableError as error:
                    log.warning("group %s: %s", self._keys.group, error)
                    wait = AGAIN
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), max(0, wait) / 1000)
        finally:
            hints.cancel()

    async def _hear(self) -> None:
        async for _ in self._store.watch(self._keys.prefix):
            self._changed.set()

    async def _look(self) -> tuple[Decision, int]:
        view = await self._store.read(prefixes=[self._keys.prefix])
        look = read_group(view, self._keys, _now())
        return self._member.look(look), look.resource.era if look.resource else 0

    async def _commit(self, writes: Writes) -> None:
        """Whatever becomes of it, the next look shows it."""
        try:
            await self._store.commit(writes.checks, writes.unchanged, writes.puts, writes.deletes)
        except ConflictError:
            pass
        except MetaUnknownError as error:
            raise StoreUnavailableError(str(error)) from error

    # ---- telling ----------------------------------------------------------------------------------------------

    async def _serve(self, owned: dict[str, Token], lease_deadline: Millis) -> None:
        """Own exactly these until the deadline: first tell what is lost, then what is gained."""
        if self._lapse is not None:
            self._lapse.cancel()
        async with self._telling:
            self._lease_deadline = lease_deadline
            for item in [item for item, token in self._held.items() if owned.get(item) != token]:
                del self._held[item]
                await self._tell(Lost(item))
            for item, token in owned.items():
                if item not in self._held:
                    self._held[item] = token
                    await self._tell(Gained(item, token))
        if self._held:
            loop = asyncio.get_running_loop()
            self._lapse = loop.call_later(max(0, lease_deadline - _now()) / 1000, self._lapsed)

    def _lapsed(self) -> None:
        """The store did not confirm the lease in time: serve nothing until it does."""
        log.warning("group %s: the lease of %s ran out", self._keys.group, self.name)
        self._lapsing = asyncio.ensure_future(self._serve({}, 0))

    async def _tell(self, change: Change) -> None:
        try:
            done = self._handler(change)
            if inspect.isawaitable(done):
                await done
        except Exception:
            log.exception("group %s: the handler failed at %r", self._keys.group, change)
