"""Ownership of partitions: all are this instance's, by a lock, or the instances of a cluster divide them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from sluiceway import __version__
from sluiceway.adapters import system
from sluiceway.cluster.group_member import Change, Gained, GroupMember
from sluiceway.core.group.group_records import (
    GroupView,
    Keys,
    Level,
    LoadReport,
    Parameters,
    Pin,
    Resource,
    SealedRound,
    Strategy,
    Token,
    Writes,
    base_name,
    decode_record,
    owners,
    rounds_of,
    with_times,
)
from sluiceway.core.group.item_placement import begin, limit, pin, place, remove
from sluiceway.core.group.levels import admits
from sluiceway.core.group.load_balance import reports_of
from sluiceway.core.group.plan import UNLIMITED
from sluiceway.core.queue.routing import HERE, Peer
from sluiceway.core.queue.scaling_policy import wanted
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import KNOWN, OLDEST
from sluiceway.kernel.errors import invalid
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import Stamp
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import ConflictError, MetaStore

log = logging.getLogger(__name__)

GRANT = "grant"
GROUP = "partitions"
KEYS = Keys(GROUP)
FIRST_PLAN: Millis = 10_000
"""Maximum wait of a joining instance for its share. After it the instance only forwards requests."""
FOLLOW: Millis = 2_000


PARAMETERS = Parameters(settle_timeout=100, round_interval=200, beat_interval=500, lease_timeout=3_000, member_timeout=4_000)
"""Tolerant of a busy machine: taking partitions from a live instance costs more than waiting a second longer for a dead one."""


NO_TIMES: Mapping[str, Millis] = {}

Also = Callable[[Resource, Resource], Mapping[str, bytes]]


def nothing_also(before: Resource, after: Resource) -> Mapping[str, bytes]:
    """Put nothing else into the commit of a change."""
    return {}


def item_of(incarnation: str, partition: int) -> str:
    """Name of the partition as an item of the group."""
    return f"{incarnation}.{partition}"


def items_of(record: QueueRecord) -> list[str]:
    """Names of the queue's partitions as items of the group."""
    return [item_of(record.incarnation, each.partition) for each in record.partitions]


def partition_of(item: str) -> tuple[str, int]:
    """Split an item's name into the queue's incarnation and the partition's number."""
    incarnation, _, number = item.rpartition(".")
    return incarnation, int(number)


class OwnershipListener(Protocol):
    """Receiver of ownership changes: partitions that this instance gains and loses."""

    def gained(self, incarnation: str, partition: int, token: Token) -> None: ...

    def expects(self, incarnation: str, partition: int) -> None:
        """This instance will probably gain the partition within moments. Its owner may still serve it."""
        ...

    async def lost(self, incarnation: str, partition: int) -> None:
        """Stop the partition; returns when nothing more can be written or answered from here. Immediate if need be."""
        ...


class Ownership(Protocol):
    """Owners of all partitions. Its view of others may be outdated; its view of this instance is true while it `holds`."""

    @property
    def is_alone(self) -> bool:
        """Whether no other instance can ever own a partition."""
        ...

    @property
    def name(self) -> str:
        """Name of this instance in the cluster."""
        ...

    @property
    def address(self) -> str:
        """URL by which other instances reach this one; empty: not known."""
        ...

    @property
    def era(self) -> int: ...

    @property
    def look(self) -> GroupView | None:
        """Last look at the cluster; None without a cluster, or before the first look."""
        ...

    @property
    def lapses(self) -> int:
        """Number of times this instance lost its ownership without a look that said so."""
        ...

    def still(self) -> dict[str, Millis]:
        """Time since this instance last saw each member alive."""
        ...

    async def rounds(self) -> list[SealedRound]:
        """The last rounds, newest first. Raises StoreUnavailableError."""
        ...

    async def reports(self) -> dict[str, LoadReport]:
        """What the instances have reported of their loads, by name. Raises StoreUnavailableError."""
        ...

    async def start(self, meta: MetaStore, tell: OwnershipListener) -> None: ...

    def level_is(self, level: int) -> None:
        """Take the compatibility level that was just read or raised."""
        ...

    @property
    def level(self) -> int:
        """Compatibility level in use."""
        ...

    async def redefine(
        self, times: Mapping[str, Millis], strategy: Strategy | None, load_moves: int | None = None, also: Also = nothing_also
    ) -> tuple[Resource, Resource]:
        """Change the cluster's timing parameters, strategy and bound of moves for loads from the next round on. Parameters not in `times`,
        and what is None, stay. `also`: what to put into the commit of a change, by the resource before and after.

        Returns the recorded resource before and after. Raises `invalid_request`, StoreUnavailableError, MetaUnknownError.
        """
        ...

    async def leave(self) -> None:
        """Hand over all partitions, then leave the cluster."""
        ...

    async def stop(self) -> None: ...

    def holds(self) -> bool:
        """Whether this instance still owns the partitions it gained and has not lost."""
        ...

    def tokens(self, record: QueueRecord) -> dict[int, Token]:
        """Tokens of this instance's partitions of the queue, by number."""
        ...

    def owner(self, incarnation: str, partition: int) -> Peer | None: ...

    def peers(self) -> list[Peer]:
        """All other instances."""
        ...

    def placing(self, items: Sequence[str], limits: Mapping[str, int] = UNLIMITED) -> Writes:
        """Writes that give the items to owners in the same commit. `limits`: maximum number of owners of a new queue, by incarnation."""
        ...

    def limiting(self, incarnation: str, most: int | None) -> Writes:
        """Writes that limit the queue to `most` instances from the next round on; None: unlimited."""
        ...

    def pinning(self, item: str, where: Pin | None) -> Writes:
        """Writes that pin the item from the next round on; None: unpin it. Raises `invalid_request`."""
        ...

    def removing(self, items: Iterable[str]) -> Writes:
        """Writes that remove the items from the group."""
        ...

    async def follow(self, stamp: Stamp) -> None:
        """Wait until the commit with that stamp is followed, up to FOLLOW ms; after that it is followed once the meta store answers."""
        ...

    async def changed(self, timeout: Millis) -> None:
        """Wait until the owners have changed, or `timeout` ms are over."""
        ...


async def take_grant(meta: MetaStore) -> Token:
    """Become the only owner of all partitions. The token's fences shut out commits that an earlier process may have left in flight.

    The caller holds the lock on the data directory. Raises StoreUnavailableError, MetaUnknownError.
    """
    while True:
        view = await meta.read([GRANT, KEYS.resource])
        entry, recorded = view.entries.get(GRANT), view.entries.get(KEYS.resource)
        grant = (int(entry.value) if entry else 0) + 1
        writes = Writes(checks={GRANT: entry.stamp if entry else None}, puts={GRANT: str(grant).encode()})
        era = 1
        if recorded is not None:
            # A cluster used this store: its tokens are lower from now on.
            resource, begun = begin(KEYS, recorded, (), "static")
            era = resource.era
            writes.checks |= begun.checks
            writes.puts |= begun.puts
        with contextlib.suppress(ConflictError):
            await meta.commit(writes.checks, puts=writes.puts)
            return Token(era, grant)


class SoleOwnership:
    """Ownership by one instance of all partitions, while it holds the lock on its data directory. Each start is a new owner."""

    is_alone = True
    name = "instance"
    address = ""
    look = None
    lapses = 0

    def __init__(self) -> None:
        self._token = Token(1, 0)
        self.level = OLDEST

    def level_is(self, level: int) -> None:
        self.level = level

    @property
    def era(self) -> int:
        return self._token.era

    def still(self) -> dict[str, Millis]:
        return {}

    async def rounds(self) -> list[SealedRound]:
        return []

    async def reports(self) -> dict[str, LoadReport]:
        return {}

    async def start(self, meta: MetaStore, tell: OwnershipListener) -> None:
        self._token = await take_grant(meta)

    async def redefine(
        self, times: Mapping[str, Millis], strategy: Strategy | None, load_moves: int | None = None, also: Also = nothing_also
    ) -> tuple[Resource, Resource]:
        field = next(iter(times), "strategy" if strategy else "load_moves")
        raise invalid(field, "this server is not part of a cluster, so it has no such parameter")

    async def leave(self) -> None:
        """Do nothing: there is no other instance to hand over to."""

    async def stop(self) -> None:
        pass

    def holds(self) -> bool:
        return True

    def tokens(self, record: QueueRecord) -> dict[int, Token]:
        return {each.partition: self._token for each in record.partitions}

    def owner(self, incarnation: str, partition: int) -> Peer | None:
        return HERE

    def peers(self) -> list[Peer]:
        return []

    def placing(self, items: Sequence[str], limits: Mapping[str, int] = UNLIMITED) -> Writes:
        return Writes()

    def limiting(self, incarnation: str, most: int | None) -> Writes:
        return Writes()

    def pinning(self, item: str, where: Pin | None) -> Writes:
        raise invalid("partition", "this server is not part of a cluster, so it has all partitions")

    def removing(self, items: Iterable[str]) -> Writes:
        return Writes()

    async def follow(self, stamp: Stamp) -> None:
        pass

    async def changed(self, timeout: Millis) -> None:
        await asyncio.sleep(timeout / 1000)


class Clustered:
    """Ownership as a group: the instances of a cluster divide the partitions. `address`: URL by which others reach this instance.

    `parameters` apply to a new cluster. `times` and `strategy`, where given, replace the cluster's own when this instance starts.
    `zone`: this instance's failure domain.
    """

    is_alone = False

    def __init__(
        self,
        name: str,
        address: str,
        strategy: Strategy | None = None,
        parameters: Parameters = PARAMETERS,
        times: Mapping[str, Millis] = NO_TIMES,
        zone: str = "",
    ) -> None:
        self._wanted_name, self.address, self._zone = name, address, zone
        self._levels = KNOWN
        self._strategy = strategy
        self._parameters = parameters
        self._times = times
        self._member: GroupMember | None = None
        self._tell: OwnershipListener | None = None
        self._meta: MetaStore | None = None
        self._owners: Mapping[str, str] = {}
        self._peers: dict[str, Peer] = {}
        self._moved = asyncio.Event()
        self.level = OLDEST
        self.on_change: Callable[[bool], None] = lambda moved: None
        """Called after each look, with whether partitions have other owners."""
        self.on_outdated: Callable[[Level], None] = lambda _: None
        """Called when the group has no place for this instance any more, since its level is one that this release does not understand."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def era(self) -> int:
        return self.look.resource.era if self.look is not None and self.look.resource is not None else 1

    @property
    def look(self) -> GroupView | None:
        return self.member.look

    @property
    def lapses(self) -> int:
        return self.member.lapses

    def still(self) -> dict[str, Millis]:
        return self.member.still()

    @property
    def member(self) -> GroupMember:
        assert self._member is not None, "it is started first"
        return self._member

    async def start(self, meta: MetaStore, tell: OwnershipListener) -> None:
        """Join; returns with the first share of partitions, or after FIRST_PLAN without one."""
        await self._define(meta)
        self._meta, self._tell = meta, tell
        self._member = GroupMember(
            meta,
            GROUP,
            self._handle,
            name=self._wanted_name,
            address=self.address,
            on_look=self._look,
            on_expect=self._expect,
            levels=self._levels,
            release=__version__,
            zone=self._zone,
        )
        self._peers[self._member.name] = HERE
        await self._member.join()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PLAN / 1000):
                while not self._takes_part():
                    await self.changed(FIRST_PLAN)

    async def _define(self, meta: MetaStore) -> None:
        """Define the group over all partitions of all queues. Changes of queues keep it so, except while there is no cluster."""
        while True:
            view = await meta.read([KEYS.resource], [QUEUE])
            entry = view.entries.get(KEYS.resource)
            before = None if entry is None else decode_record(entry.value, Resource)
            known = before is not None and before.strategy != "static"
            strategy: Strategy = self._strategy or (before.strategy if before is not None and known else "rounds")
            parameters = with_times(before.parameters if before is not None and known else self._parameters, self._times)
            if before is not None and (strategy, parameters) == (before.strategy, before.parameters):
                return
            queues = [decode_queue(each.value) for each in view.prefix(QUEUE).values()]
            items = [item for record in queues for item in items_of(record)]
            limits = {record.incarnation: wanted(record.logical_queues, 1) for record in queues if record.logical_queues is not None}
            _, writes = begin(KEYS, entry, items, strategy, parameters, limits, first_era=2)
            with contextlib.suppress(ConflictError):
                await meta.commit(writes.checks, {QUEUE: view.stamp}, writes.puts)
                return

    async def redefine(
        self, times: Mapping[str, Millis], strategy: Strategy | None, load_moves: int | None = None, also: Also = nothing_also
    ) -> tuple[Resource, Resource]:
        assert self._meta is not None, "it is started first"
        while True:
            entry = (await self._meta.read([KEYS.resource])).entries[KEYS.resource]
            before = decode_record(entry.value, Resource)
            parameters = with_times(before.parameters, times)
            after, writes = begin(KEYS, entry, before.items, strategy or before.strategy, parameters, load_moves=load_moves)
            if not writes.puts:
                return before, after
            with contextlib.suppress(ConflictError):
                await self.follow(await self._meta.commit(writes.checks, puts={**writes.puts, **also(before, after)}))
                return before, after

    def _takes_part(self) -> bool:
        look = self.member.look
        if look is None or look.resource is None:
            return False
        if look.resource.strategy == "claims":
            return self.member.name in look.members
        return look.round is not None and look.round.sealed and self.member.name in look.round.participants

    async def _handle(self, change: Change) -> None:
        assert self._tell is not None
        incarnation, partition = partition_of(change.item)
        if isinstance(change, Gained):
            self._tell.gained(incarnation, partition, change.token)
        else:
            await self._tell.lost(incarnation, partition)

    def _expect(self, items: Iterable[str]) -> None:
        assert self._tell is not None
        for item in sorted(items):
            self._tell.expects(*partition_of(item))

    def level_is(self, level: int) -> None:
        self.level = max(self.level, level)

    def _look(self, look: GroupView) -> None:
        if look.level is not None:
            self.level_is(look.level.level)
            if self.member.name not in look.members and not admits(look.level, self._levels):
                self.on_outdated(look.level)
        before, self._owners = self._owners, owners(look)
        self._peers = {name: Peer(name, record.address) for name, record in look.members.items()} | {self.member.name: HERE}
        self._moved.set()
        self._moved = asyncio.Event()
        self.on_change(self._owners != before)

    async def leave(self) -> None:
        if self._member is not None:
            await self._member.leave()

    async def stop(self) -> None:
        if self._member is not None:
            await self._member.stop()

    def holds(self) -> bool:
        return self._member is not None and self._member.holds

    def tokens(self, record: QueueRecord) -> dict[int, Token]:
        if self._member is None:
            return {}
        held = self._member.items
        found = ((each.partition, held.get(item_of(record.incarnation, each.partition))) for each in record.partitions)
        return {number: token for number, token in found if token is not None}

    def owner(self, incarnation: str, partition: int) -> Peer | None:
        return self._peers.get(self._owners.get(item_of(incarnation, partition), ""))

    def peers(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer is not HERE]

    def placing(self, items: Sequence[str], limits: Mapping[str, int] = UNLIMITED) -> Writes:
        assert self.member.look is not None, "it has joined"
        return place(self.member.look, KEYS, items, self.member.late(), limits)

    def limiting(self, incarnation: str, most: int | None) -> Writes:
        assert self.member.look is not None, "it has joined"
        return limit(self.member.look, KEYS, incarnation, most)

    def pinning(self, item: str, where: Pin | None) -> Writes:
        look = self.member.look
        assert look is not None, "it has joined"
        if where is not None and where.instance in look.members:
            # Its name at this start: the next one has another suffix.
            where = Pin(instance=base_name(where.instance))
        return pin(look, KEYS, item, where)

    def removing(self, items: Iterable[str]) -> Writes:
        assert self.member.look is not None, "it has joined"
        return remove(self.member.look, KEYS, items)

    async def follow(self, stamp: Stamp) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOLLOW / 1000):
                await self.member.refresh(stamp)

    async def changed(self, timeout: Millis) -> None:
        moved = self._moved
        await system.wait(moved, timeout)

    async def rounds(self) -> list[SealedRound]:
        assert self._meta is not None, "it is started first"
        return rounds_of(await self._meta.read(prefixes=[KEYS.history]), KEYS)

    async def reports(self) -> dict[str, LoadReport]:
        assert self._meta is not None, "it is started first"
        return reports_of(await self._meta.read(prefixes=[KEYS.loads]), KEYS)
