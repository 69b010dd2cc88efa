"""The cluster as one instance sees it: the members, the partitions of each, and the reasons."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from sluiceway import __version__
from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership, item_of, partition_of
from sluiceway.contract.instance_answers import InstanceState
from sluiceway.core.group.group_records import (
    PATIENCE,
    GroupView,
    LoadReport,
    MemberRecord,
    Parameters,
    Pin,
    Plan,
    Resource,
    SealedRound,
    Strategy,
    is_full,
    members_of,
    owners,
)
from sluiceway.core.group.levels import understood
from sluiceway.core.group.load_balance import INSTANCE
from sluiceway.core.queue.routing import HERE, Peer
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import KNOWN, NEWEST
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.model.health import Check
from sluiceway.model.instances import Belonging, ClusterInfo, InstanceInfo, PinInfo, RoundInfo
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

REPORTS_KEPT: Millis = 5_000
"""How long reports of loads are shown before they are read again: instances write them every 15 s at most."""
PATIENCE_FOR_REPORTS: Millis = 500
"""How long a list of the instances waits for them: it is wanted most when the meta store does not answer."""


class Instances:
    """View of the cluster from this instance. Its knowledge of others may be as old as the last look: a second or less."""

    def __init__(
        self, ownership: Ownership, queues: Callable[[], Iterable[QueueRecord]], audit: Callable[[], AuditTrail] | None = None
    ) -> None:
        self._ownership = ownership
        self._queues = queues
        self._audit = audit
        self._reports: Mapping[str, LoadReport] = {}
        self._reports_at: Millis | None = None

    def owner(self, record: QueueRecord, partition: int) -> Peer | None:
        """Return the owner of the partition, also this instance under its own name; None if it has no owner at the moment."""
        peer = self._ownership.owner(record.incarnation, partition)
        return Peer(self._ownership.name, self._ownership.address) if peer is HERE else peer

    def elsewhere(self, record: QueueRecord, partitions: Iterable[int]) -> str | None:
        """Return the address of the other instance that owns all of these partitions; None if there is none."""
        owners = {self._ownership.owner(record.incarnation, number) for number in partitions}
        only = owners.pop() if len(owners) == 1 else None
        return only.address or None if only is not None else None

    def cluster(self) -> ClusterInfo:
        ownership, look = self._ownership, self._ownership.look
        if look is None or look.resource is None:
            has = sum(len(record.partitions) for record in self._queues()) if ownership.is_alone else 0
            state: InstanceState = "alive" if ownership.is_alone else "joining"
            alone = InstanceInfo(ownership.name, ownership.address, True, state, partitions=has, release=__version__, levels=KNOWN)
            return ClusterInfo([alone], "static", ownership.era, ownership.level, max(ownership.level, NEWEST))
        instances = instances_of(look, ownership.still(), ownership.name, ownership.holds())
        if ownership.name not in look.members:
            instances.append(InstanceInfo(ownership.name, ownership.address, True, "joining", release=__version__, levels=KNOWN))
        resource = look.resource
        parameters = msgspec.structs.asdict(resource.parameters)
        return ClusterInfo(
            sorted(instances, key=lambda each: each.name),
            resource.strategy,
            resource.era,
            ownership.level,
            max(ownership.level, understood(look, NEWEST)),
            parameters,
            last_round(look, resource),
            resource.load_moves,
            self._pins(resource.pins),
        )

    async def with_loads(self) -> ClusterInfo:
        """The same, with what the instances have reported of their loads; without, if the meta store does not answer soon."""
        now = system.steady()
        if not self._ownership.is_alone and (self._reports_at is None or now - self._reports_at >= REPORTS_KEPT):
            self._reports_at = now
            with contextlib.suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(PATIENCE_FOR_REPORTS / 1000):
                    self._reports = await self._ownership.reports()
        found = self.cluster()
        for each in found.instances:
            report = self._reports.get(each.name)
            if report is not None:
                each.load = round(sum(report.loads.values()) / INSTANCE, 3)
                each.items, each.bytes = report.items, report.bytes
        return found

    def _pins(self, pins: Mapping[str, Pin]) -> list[PinInfo]:
        """The pins of partitions whose queues this instance knows, by queue and number."""
        names = {record.incarnation: record.queue_name for record in self._queues()} if pins else {}
        placed = ((*partition_of(item), pin) for item, pin in pins.items())
        found = [PinInfo(names[each], number, pin.instance, pin.zone) for each, number, pin in placed if each in names]
        return sorted(found)

    async def redefine(
        self, times: Mapping[str, Millis], strategy: Strategy | None, by: Actor, load_moves: int | None = None
    ) -> ClusterInfo:
        """Change the cluster's timing parameters in `times`, and its strategy and bound of moves for loads unless None; a round follows.

        Raises `invalid_request`, `unavailable`, `outcome_unknown`.
        """

        def noted(before: Resource, after: Resource) -> dict[str, bytes]:
            changed = _changes(before, after)
            return dict([self._audit().entry("instances.update", by, detail=changed)]) if changed and self._audit is not None else {}

        try:
            _, after = await self._ownership.redefine(times, strategy, load_moves, noted)
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error
        parameters = msgspec.structs.asdict(after.parameters)
        return replace(self.cluster(), strategy=after.strategy, era=after.era, parameters=parameters, load_moves=after.load_moves)

    @property
    def holds(self) -> bool:
        """Whether this instance still owns its partitions."""
        return self._ownership.holds()

    @property
    def lapses(self) -> int:
        """Number of times the ownership ended because the meta store did not confirm it in time."""
        return self._ownership.lapses

    def problems(self) -> list[str]:
        """Return why this instance serves no partitions of its own and only forwards; empty if it serves them."""
        ownership, look = self._ownership, self._ownership.look
        if ownership.holds():
            return []
        if look is not None and ownership.name in look.members:
            return ["the meta store has not confirmed which partitions this instance owns, so it only forwards calls to the others"]
        full = look is not None and is_full(look.members)
        why = f"it has {len(look.members)} members, which is the maximum" if look is not None and full else "it is joining, or has left"
        return [f"this instance is not a member of the cluster: {why}; it only forwards calls to the others"]

    def checks(self) -> list[Check]:
        """Health check of the cluster; none for an instance that is alone."""
        if self._ownership.is_alone:
            return []
        problems, seen = self.problems(), self.cluster()
        states = Counter(each.state for each in seen.instances)
        found = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return [Check("cluster", not problems, problems[0] if problems else f"instances: {found}; {seen.strategy}, era {seen.era}", 0)]

    async def rounds(self, limit: int) -> Sequence[SealedRound]:
        """The last rounds, newest first; a hundred are kept. Raises `unavailable`."""
        return (await self._rounds())[:limit]

    async def _rounds(self) -> Sequence[SealedRound]:
        try:
            return await self._ownership.rounds()
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error

    async def why(self, record: QueueRecord, partition: int) -> Belonging:
        """Explain the ownership of the queue's partition. Raises `unavailable`."""
        ownership, look = self._ownership, self._ownership.look
        if ownership.is_alone:
            return Belonging("single server: it owns all partitions", ownership.name, ownership.address or None, ownership.era)
        if look is None or look.resource is None:
            return Belonging("this instance has not joined the cluster yet; try again, or ask another instance", era=ownership.era)
        history = {each.number: each for each in await self._rounds()} if look.resource.strategy == "rounds" else {}
        item = item_of(record.incarnation, partition)
        found = belonging(look, look.resource, item, history, record.created_at)
        pin = look.resource.pins.get(item)
        return found if pin is None else _with_pin(found, pin, look, look.resource.strategy)


def _changes(before: Resource, after: Resource) -> dict[str, object]:
    """What an operator has changed of the cluster: old and new value by name."""
    old, new = (
        {"strategy": each.strategy, "load_moves": each.load_moves, **msgspec.structs.asdict(each.parameters)} for each in (before, after)
    )
    return {name: {"from": old[name], "to": new[name]} for name in new if new[name] != old[name]}


# ---- the instances ----------------------------------------------------------------------------------------------------


def instances_of(look: GroupView, still: Mapping[str, Millis], here: str, holds: bool) -> list[InstanceInfo]:
    """List the members. `still`: time since this instance, named `here`, last saw each one alive; `holds`: whether it owns its items."""
    assert look.resource is not None, "a group has a resource before it has members"
    shares = Counter(owners(look).values())
    parameters = look.resource.parameters
    return [
        InstanceInfo(
            name,
            record.address,
            name == here,
            state_of(record, still.get(name, 0), parameters, name == here and not holds),
            still.get(name, 0),
            record.joined_at or None,
            shares[name],
            record.release,
            record.levels,
            record.zone,
        )
        for name, record in look.members.items()
    ]


def state_of(record: MemberRecord, still: Millis, parameters: Parameters, lapsed: bool) -> InstanceState:
    """Classify a member. `lapsed`: the member is this instance and knows that it serves nothing."""
    if lapsed or still >= max(parameters.member_timeout, math.ceil(PATIENCE * record.lease_timeout)):
        return "silent"
    return "leaving" if record.leaving else "alive"


def last_round(look: GroupView, resource: Resource) -> RoundInfo | None:
    """Return the last round; None under another strategy, or before the first."""
    found = look.round
    if found is None or resource.strategy != "rounds":
        return None
    return RoundInfo(found.number, found.sealed, found.trigger, found.participants, found.moved, found.kept)


# ---- one partition ----------------------------------------------------------------------------------------------------


def belonging(look: GroupView, resource: Resource, item: str, history: Mapping[int, SealedRound], created_at: Millis) -> Belonging:
    """Explain the item's ownership. `history`: the rounds still known, by number; `created_at`: creation time of its queue."""
    if item not in resource.items:
        return Belonging("not assigned yet: the queue was just created", era=resource.era)
    name = owners(look).get(item)
    if name is None:
        return Belonging(_why_nobody(look, resource, item), era=resource.era)
    if resource.strategy == "claims":
        grant = look.claims[item].grant
        why = f"claimed by {name}"
    else:
        assert look.plan is not None, "no owner without a plan"
        grant = look.plan.owners[name][item]
        why = _since(name, grant, history.get(grant), created_at)
    waits_for = _waits_for(look, resource, item, name)
    if waits_for:
        why += f"; waiting until {_listed(waits_for)} {'has' if len(waits_for) == 1 else 'have'} stopped serving it"
    return Belonging(why, name, look.members[name].address or None, resource.era, grant, waits_for)


def _with_pin(found: Belonging, pin: Pin, look: GroupView, strategy: Strategy) -> Belonging:
    """Add what the partition's pin does for it."""
    if strategy == "claims":
        effect = "which has no effect with the strategy claims"
    elif not members_of(pin, look.zones):
        effect = "of which no instance is in the cluster now"
    elif found.owner in members_of(pin, look.zones):
        effect = "where it is"
    else:
        effect = "where the next round puts it"
    return replace(found, reason=f"{found.reason}; pinned to {pin}, {effect}", pinned_instance=pin.instance, pinned_zone=pin.zone)


def _since(name: str, grant: int, given: SealedRound | None, created_at: Millis) -> str:
    if given is None:
        return f"owned by {name} since round {grant}, whose record no longer exists"
    if created_at >= given.sealed_at:
        # The grant of a placed item is the number of the last round before it.
        return f"assigned to {name} when its queue was created, after round {grant}"
    return f"owned by {name} since round {grant}; reason of the round: {_told(given.trigger)}"


def _told(trigger: str) -> str:
    return "scheduled" if trigger == "heartbeat" else trigger


def _why_nobody(look: GroupView, resource: Resource, item: str) -> str:
    if resource.strategy == "claims":
        return "no owner: not claimed yet; an instance with less than its share will claim it"
    plan: Plan | None = look.plan
    if resource.strategy != "rounds" or plan is None or plan.era != resource.era:
        return f"no owner: there has been no round in era {resource.era} yet"
    gone = next((name for name, grants in plan.owners.items() if item in grants), None)
    if gone is not None:
        return f"no owner: {gone} has left; the next round assigns it to another instance"
    return "no owner: it was created after the last round; the next round assigns it"


def _waits_for(look: GroupView, resource: Resource, item: str, owner: str) -> list[str]:
    """Members that may still serve the item, or may serve by the rules of an earlier era."""
    found = {name for name, record in look.members.items() if record.era < resource.era}
    if resource.strategy == "rounds" and look.plan is not None:
        late = {name for name, record in look.members.items() if record.applied < look.plan.round}
        found |= {name for name, items in look.plan.waits.items() if name in late and item in items}
    return sorted(found - {owner})


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
