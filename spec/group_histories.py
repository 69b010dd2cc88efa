"""Histories of the simulator's groups, for the trace check: what members see, serve and decide, and which of their commits land.

The items of these groups change, and some are placed and removed without a round; members join, leave, die, pause and are cut off. What
neither specification is about is left out: zones, pins and loads. A history ends where the strategy changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from simulation.cluster_group import MemberWorld
from simulation.group import KEYS, Actor, GroupWorld
from simulation.group_loads import ItemLoads
from simulation.planting import Bug, planted
from sluiceway.core.group.group_records import (
    Claim,
    Decision,
    GroupReader,
    GroupView,
    MemberRecord,
    Plan,
    Resource,
    Round,
    Writes,
    decode_member,
    decode_record,
)
from sluiceway.core.group.heartbeats import FEW
from sluiceway.core.group.member import Member
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import Stamp, View
from spec import group_claims, group_rounds
from spec.group_rounds import Division, Open, Record, division_of
from spec.group_trace import NO_PLAN, NO_ROUND, Changed, Decided, Defined, Event, GroupHistory, Landed, Looked, RanOut


class Look(NamedTuple):
    """A member's look, and what it decided."""

    name: str
    look: GroupView
    decision: Decision


class LandedCommit(NamedTuple):
    """The commit of that member with that beat; None: the one that removes its record. `after`: the group then, if it is known."""

    name: str
    beat: int | None
    stamp: Stamp
    after: GroupView | None


class ItemsChanged(NamedTuple):
    """An operator's commit."""

    after: GroupView


class Redefined(NamedTuple):
    """An operator's commit that changes nothing but the resource."""

    stamp: Stamp
    resource: Resource


class LeaseOver(NamedTuple):
    """The lease of that beat of the member is over, by its clock."""

    name: str
    beat: int


Noted = Look | LandedCommit | ItemsChanged | Redefined | LeaseOver


class GroupRecorder:
    """What happens in one group. `clocks`: those of its members, as of now."""

    def __init__(self, clocks: Callable[[], Mapping[str, Millis]]) -> None:
        self.noted: list[Noted] = []
        self._clocks = clocks
        self._leases: dict[str, dict[int, Millis]] = {}
        """When the leases of each member's beats are over, by its clock; without those that are."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note all looks of members in the block."""
        with planted(Bug("look", "", Member, "look", self._looking)):
            yield

    def _looking(self, original: Callable[[Member, GroupView], Decision]) -> Callable[[Member, GroupView], Decision]:
        def looks(member: Member, look: GroupView) -> Decision:
            self._expire()
            decision = original(member, look)
            looked = Look(member.name, look, decision)
            self.noted.append(looked)
            if (lease := lease_of(looked)) is not None:
                self._leases.setdefault(member.name, {})[lease.beat] = lease.until
            return decision

        return looks

    def landed(self, before: GroupView, after: GroupView) -> None:
        """A commit has landed. Those of members change the members' records, and those of operators do not."""
        self._expire()
        if before.members != after.members:
            self.noted.append(LandedCommit(*_committer(before, after), after.view.stamp, after))
        elif (before.resource, before.plan, before.claims) != (after.resource, after.plan, after.claims):
            self.noted.append(ItemsChanged(after))

    def _expire(self) -> None:
        for name, clock in self._clocks().items():
            leases = self._leases.get(name, {})
            for beat in [beat for beat, deadline in leases.items() if deadline <= clock]:
                del leases[beat]
                self.noted.append(LeaseOver(name, beat))

    def histories(self) -> dict[str, GroupHistory]:
        """What was noted so far; see `histories_of`."""
        return histories_of(self.noted)


class RecordedGroup(GroupWorld):
    """A simulated group that is recorded. The state machines of its members are the code's, what drives them is the simulator's."""

    def __init__(self, seed: int) -> None:
        self.recorder = GroupRecorder(lambda: {actor.name: actor.clock(self.now) for actor in self.actors})
        super().__init__(seed)
        kinds = tuple(kind for kind in self.weather.kinds if kind != "era")
        self.weather = replace(self.weather, kinds=kinds, zones=1, pins=0, loads=False)
        self.loads = ItemLoads(None)

    def _put_resource(self, resource: Resource) -> None:
        super()._put_resource(resource)
        self.recorder.noted.append(ItemsChanged(self.looks.of(self.store.read(), 0)))

    def _land(self, actor: Actor, writes: Writes) -> None:
        before = self.looks.of(self.store.read(), 0)
        super()._land(actor, writes)
        self.recorder.landed(before, self.looks.of(self.store.read(), 0))


class RecordedMembers(MemberWorld):
    """The same with real drivers, in virtual time. A small group: in a large one a member may take its own beat into what it has read
    before, which the specifications have not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_large = False
        self.recorder = GroupRecorder(lambda: {actor.member.name: actor.process.steady(self.loop.seconds) for actor in self.actors})
        self._reader = GroupReader(KEYS)
        self.shared.followers.append(self._follow)

    def _join(self) -> None:
        if len(self.actors) < FEW:
            super()._join()

    def _follow(self, before: View, after: View) -> None:
        self.recorder.landed(self._reader.read(before, 0), self._reader.read(after, 0))


class Lease(NamedTuple):
    beat: int
    until: Millis


def lease_of(looked: Look) -> Lease | None:
    """The lease of the beat that the member decided to send, by its clock."""
    record = _own(looked.decision.writes, looked.name)
    return None if record is None else Lease(record.beat, looked.look.seen_at + record.lease_timeout)


def _own(writes: Writes | None, name: str) -> MemberRecord | None:
    data = writes.puts.get(KEYS.member(name)) if writes is not None else None
    return None if data is None else decode_member(data, None)


class _Translation:
    """What was noted, up to the first change of the strategy, as events of a specification."""

    def __init__(self, noted: list[Noted]) -> None:
        self._noted = noted[: next((index for index, each in enumerate(noted) if _era(each) > 1), len(noted))]
        self.names = tuple(sorted({each.name for each in self._noted if not isinstance(each, ItemsChanged | Redefined)}))
        self._at = {name: at for at, name in enumerate(self.names)}
        looks = [look for each in self._noted if (look := _look_of(each)) is not None]
        given = (look.resource.items for look in looks if look.resource is not None)
        self.items = tuple(sorted({item for items in given for item in items}))

    def rounds(self) -> GroupHistory:
        return GroupHistory(self.names, self.items, (), list(self._events(None)))

    def claims(self, item: str) -> GroupHistory:
        return GroupHistory(self.names, (item,), (), list(self._events(item)))

    def _events(self, item: str | None) -> Iterator[Event]:
        """`item`: the one whose claims it is about; None: the group goes by rounds."""
        numbers: dict[tuple[str, int | None], int] = {}
        for number, each in enumerate(self._noted):
            match each:
                case LeaseOver():
                    yield RanOut(self._at[each.name], each.beat)
                case ItemsChanged():
                    yield Changed(each.after.view.stamp, self._store(each.after, item))
                case Redefined(stamp, resource):
                    yield Defined(stamp, *_divided(resource))
                case LandedCommit():
                    after = None if each.after is None else self._store(each.after, item)
                    yield Landed(numbers.get((each.name, each.beat), -1), each.stamp, after)
                case Look():
                    at, seen = self._at[each.name], self._store(each.look, item)
                    served = {name: token.grant for name, token in each.decision.owned.items()}
                    serves = tuple(sorted(served.items())) if item is None else served.get(item, 0)
                    yield Looked(at, each.look.view.stamp, seen, serves)
                    if (writes := each.decision.writes) is not None:
                        record = _own(writes, each.name)
                        numbers[each.name, None if record is None else record.beat] = number
                        commit = self._round_commit(at, seen, writes) if item is None else self._claim_commit(at, seen, writes, item)
                        yield Decided(at, number, commit)

    def _store(self, look: GroupView, item: str | None) -> Any:
        if item is not None:
            claim = look.claims.get(item, Claim(owner=None, grant=0))
            owner = group_claims.NOBODY if claim.owner is None else self._at[claim.owner]
            beats = (look.members[name].beat if name in look.members else None for name in self.names)
            return group_claims.Store(group_claims.Claim(owner, claim.grant), tuple(beats))
        current = NO_ROUND if look.round is None else _open(look.round, look.marks)
        plan = NO_PLAN if look.plan is None else division_of(look.plan)
        members = tuple(_record(look.members.get(name)) for name in self.names)
        return group_rounds.Store(current, plan, members, *_divided(look.resource))

    def _round_commit(self, at: int, seen: group_rounds.Store, writes: Writes) -> group_rounds.Commit:
        name = self.names[at]
        commit = group_rounds.Commit("", _record(_own(writes, name)), seen.members[at])
        marks = frozenset({name}) if any(key.startswith(KEYS.marks) for key in writes.puts) else frozenset()
        after: tuple[Open, Division] | None = None
        if KEYS.round in writes.puts:
            current = msgspec.json.decode(writes.puts[KEYS.round], type=Round)
            plan = division_of(decode_record(writes.puts[KEYS.plan], Plan)) if current.sealed else seen.plan
            after = _open(current, marks), plan
        elif marks:
            after = seen.round._replace(marks=seen.round.marks | marks), seen.plan
        if after is None:
            return commit
        given_up = tuple((other, record) for other in self._removed(writes, at) if (record := seen.members[other]) is not None)
        return commit._replace(round=seen.round, given_up=given_up, after=after, resource=seen.resource if after[0].sealed else None)

    def _claim_commit(self, at: int, seen: group_claims.Store, writes: Writes, item: str) -> group_claims.Commit:
        record = _own(writes, self.names[at])
        commit = group_claims.Commit("", None if record is None else record.beat, seen.beats[at])
        if (data := writes.puts.get(KEYS.claims + item)) is not None:
            takes = msgspec.json.decode(data, type=Claim).owner is not None
            former = seen.claim.owner if takes and seen.claim.owner != group_claims.NOBODY else None
            return commit._replace(claim=seen.claim, other=former)
        for other in self._removed(writes, at):
            return commit._replace(other=other, seen=seen.beats[other])
        return commit

    def _removed(self, writes: Writes, at: int) -> list[int]:
        """The other members whose records the commit removes."""
        names = (key.removeprefix(KEYS.members) for key in writes.deletes if key.startswith(KEYS.members))
        return sorted(self._at[name] for name in names if name != self.names[at])


def _look_of(noted: Noted) -> GroupView | None:
    if isinstance(noted, Look):
        return noted.look
    return noted.after if isinstance(noted, LandedCommit | ItemsChanged) else None


def _era(noted: Noted) -> int:
    look = _look_of(noted)
    return 1 if look is None or look.resource is None else look.resource.era


def _committer(before: GroupView, after: GroupView) -> tuple[str, int | None]:
    """Whose commit it was: the member's whose record has a new beat, or, without one, whose record is gone; and that beat."""
    beats = [
        (name, each.beat) for name, each in after.members.items() if name not in before.members or before.members[name].beat != each.beat
    ]
    return beats[0] if beats else (next(iter(before.members.keys() - after.members.keys())), None)


def _divided(resource: Resource | None) -> group_rounds.Divided:
    return ((), ()) if resource is None else (resource.items, tuple(sorted(resource.limits.items())))


def _record(record: MemberRecord | None) -> Record | None:
    return None if record is None else Record(record.beat, record.applied, record.leaving)


def _open(current: Round, marks: frozenset[str]) -> Open:
    return Open(current.number, current.sealed, current.participants, marks)


def histories_of(noted: list[Noted]) -> dict[str, GroupHistory]:
    """What was noted of a group, by the name of its strategy; by claims, of some items, each a history."""
    resource = next((each.look.resource for each in noted if isinstance(each, Look) and each.look.resource is not None), None)
    if resource is None:
        return {}
    told = _Translation(noted)
    if resource.strategy == "rounds":
        return {"rounds": told.rounds()}
    return {f"claims of {item}": told.claims(item) for item in {*told.items[:1], *told.items[-1:]}}


def group_histories(seed: int) -> dict[str, GroupHistory]:
    """Run the seed's history of a group, and return what was recorded. Raises what the history does."""
    world = RecordedGroup(seed)
    with world.recorder.recording():
        world.live()
    return world.recorder.histories()


def member_histories(seed: int) -> dict[str, GroupHistory]:
    """The same of a group whose members have real drivers."""
    world = RecordedMembers(seed)
    with world.recorder.recording():
        world.live()
    return world.recorder.histories()
