"""Rounds strategy: members divide items without a leader.

After a protocol described in a FoundationDB forum: a member that notices a change opens a round; every member marks itself in it; once no
new member has come for a while, any of them seals it, and the plan is made of the marked ones. Changed here: members also beat, so that a
crash is noticed before the next round; the plan is sticky; times and strategy are records of the group; and an item changes hands only when
no other member can be serving it:

* a member serves only while its last beat that is surely recorded is younger than `lease_timeout`;
* a round is sealed without a member only if its beat stood still for `member_timeout`, which is longer; its record goes in that commit;
* an item taken from a live member is served by its new owner once the old one has recorded that it stopped.

So clocks need not agree, only run at about the same speed; if that fails too, the grant, which rises with each change of owner, fences the
old owner's writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from sluiceway.core.group.group_records import (
    MAX_CLEARED,
    MAX_GIVEN_UP,
    MAX_TOLD,
    ROUNDS_KEPT,
    GroupView,
    Move,
    Parameters,
    Plan,
    Resource,
    Round,
    SealedRound,
    Writes,
    pinned,
)
from sluiceway.core.group.heartbeats import FEW, Beating
from sluiceway.core.group.plan import NO_PINS, sticky
from sluiceway.kernel.clock import Millis

SEALERS = 3
"""Members that poll for marks in a large group, whose watchers are not told of marks. If all fail, another finds them at its next look."""
LOOKS_A_BEAT = 8
"""How often a member looks in a large group while it waits for others."""
MAX_EXPECTED = 20_000
"""Items up to which a member plans ahead what it would get of a member whose lease has run out: all members do that at the same moment, and
planning takes a second with 100,000."""
TURN: Millis = 20
"""Stagger between members in opening and sealing: it makes conflicts rare, which would be harmless."""
MAX_TURNS = 10


class Rounds:
    """The strategy as one member runs it."""

    def __init__(self, beating: Beating) -> None:
        self._beating = beating
        self._keys, self._name, self._seen = beating.keys, beating.name, beating.seen
        self._expected: frozenset[str] = frozenset()
        self._expected_of: object = None
        """What `_expected` was planned from."""

    def owned(self, look: GroupView, resource: Resource) -> dict[str, int]:
        """The items this member serves by the plan, with their grants."""
        plan = look.plan
        if plan is None or plan.era != resource.era:
            return {}
        awaited = {item for name, items in plan.waits.items() if self._awaited(look, plan, name) for item in items}
        return {item: grant for item, grant in plan.owners.get(self._name, {}).items() if item not in awaited}

    def _awaited(self, look: GroupView, plan: Plan, other: str) -> bool:
        """Whether the other member may still serve items that the plan has taken away."""
        return other in look.members and look.members[other].applied < plan.round

    def may_go(self, look: GroupView) -> bool:
        """Whether the plan holds nothing of this member any more, and the next one will not, as it is not marked."""
        plan = look.plan
        if self._name in look.marks:
            return False
        if plan is None:
            return True
        in_plan = look.round is not None and self._name in look.round.participants
        return not in_plan and self._name not in plan.owners

    def expected(self, look: GroupView, resource: Resource) -> frozenset[str]:
        """The items that this member is to own once the members whose leases have run out are given up, if all others stay."""
        plan, lapsed = look.plan, self._beating.lapsed(look)
        if plan is None or plan.era != resource.era or not lapsed.intersection(plan.owners) or len(resource.items) > MAX_EXPECTED:
            return frozenset()
        heirs = _heirs(look, [name for name in self._beating.live(look, resource.parameters) if name not in lapsed])
        # Planning takes a while with thousands of items.
        if self._expected_of != (case := (plan.round, resource.version, lapsed, heirs)):
            after, _ = next_plan(look, resource, plan.round + 1, heirs, lapsed)
            self._expected_of = case
            self._expected = frozenset(after.owners.get(self._name, {}).keys() - plan.owners.get(self._name, {}).keys())
        return self._expected

    def next(self, look: GroupView, resource: Resource) -> tuple[Writes | None, Millis]:
        """The round's next write for this member, or None and when to look again."""
        writes, wake_at = self._next(look, resource)
        if writes is None and len(look.members) > FEW and self._waits_for_others(look, resource):
            pause = resource.parameters.beat_interval // LOOKS_A_BEAT
            if look.round is not None and not look.round.sealed:
                # Few look for marks, so they may do that often where beats are rare: all wait for them.
                pause = min(pause, resource.parameters.settle_timeout)
            wake_at = min(wake_at, look.seen_at + max(1, pause))
        return writes, wake_at

    def _waits_for_others(self, look: GroupView, resource: Resource) -> bool:
        """Whether it waits for what only a look shows in a large group: marks, if it may seal the round, or that others have stopped what
        it is to serve."""
        if look.round is not None and not look.round.sealed:
            return self._turn(look, resource.parameters) < SEALERS * TURN
        given = look.plan.owners.get(self._name, {}) if look.plan is not None and look.plan.era == resource.era else {}
        return given.keys() != self.owned(look, resource).keys()

    def _next(self, look: GroupView, resource: Resource) -> tuple[Writes | None, Millis]:
        now, parameters = look.seen_at, resource.parameters
        since = self._seen.since("round", look.stamp(self._keys.round), now)
        if look.round is not None and not look.round.sealed:
            if self._name in self._missing(look):
                # A leaving member records that first.
                return (Writes() if self._beating.leaving else self._mark(look, look.round)), now
            seal_at = self._seal_at(look, parameters)
            return (self._seal(look, resource, look.round), now) if now >= seal_at else (None, seal_at)
        trigger = self._trigger(look, resource)
        if trigger is None:
            return None, self._quiet_until(look, parameters)
        # The first round of a group need not wait for another.
        open_at = since + (parameters.round_interval if look.round else 0) + self._turn(look, parameters)
        return (self._open(look, trigger), now) if now >= open_at else (None, open_at)

    def _turn(self, look: GroupView, parameters: Parameters) -> Millis:
        live = self._beating.live(look, parameters)
        place = live.index(self._name) if self._name in live else len(live)
        return TURN * min(place, MAX_TURNS)

    # ---- opening ----------------------------------------------------------------------------------------------

    def _trigger(self, look: GroupView, resource: Resource) -> str | None:
        """The reason for a new round, in words; None: none is needed."""
        if look.round is None or look.plan is None:
            return "the group is new"
        if look.plan.resource_version != resource.version:
            return "the resource has changed"
        for name in sorted(look.members):
            # Also members that take no part: another may be waiting for them to stop.
            if self._beating.silent(look, name, resource.parameters):
                return f"{name} is silent"
        for name in look.round.participants:
            if name not in look.members:
                return f"{name} has left"
            if look.members[name].leaving:
                return f"{name} is leaving"
        for name in self._beating.live(look, resource.parameters):
            if name not in look.round.participants:
                return f"{name} has joined"
        since = self._seen.since("round", look.stamp(self._keys.round), look.seen_at)
        return "heartbeat" if look.seen_at - since >= resource.parameters.heartbeat_interval else None

    def _quiet_until(self, look: GroupView, parameters: Parameters) -> Millis:
        """When, without changes, the next member's lease runs out, one becomes silent, or the heartbeat round is due."""
        times = [self._seen.since("round", look.stamp(self._keys.round), look.seen_at) + parameters.heartbeat_interval]
        for name in look.members:
            if name != self._name:
                lapses_at = self._beating.lapses_at(look, name)
                times.append(lapses_at if lapses_at > look.seen_at else self._beating.silent_at(look, name, parameters))
        return min(times)

    def _open(self, look: GroupView, trigger: str) -> Writes:
        number = look.round.number + 1 if look.round else 1
        writes = Writes(checks={self._keys.round: look.stamp(self._keys.round)}, deletes=look.marks_left(self._keys))
        participants = look.round.participants if look.round else ()
        writes.put(self._keys.round, Round(number=number, sealed=False, trigger=trigger, participants=participants))
        if not self._beating.leaving:
            writes.puts[self._keys.mark(number, self._name)] = b""
        return writes

    def _mark(self, look: GroupView, current: Round) -> Writes:
        writes = Writes(checks={self._keys.round: look.stamp(self._keys.round)})
        writes.puts[self._keys.mark(current.number, self._name)] = b""
        return writes

    # ---- sealing ----------------------------------------------------------------------------------------------

    def _seal_at(self, look: GroupView, parameters: Parameters) -> Millis:
        """When, without changes, this member may seal the round: no new mark for a while, or missing members surely serve nothing."""
        marked_since = self._seen.since("marks", (look.stamp(self._keys.round), look.marks), look.seen_at)
        silent_at = [self._beating.silent_at(look, name, parameters) for name in self._missing(look)]
        # The items of a dead member have no owner meanwhile, so its silence is all that this waits for.
        return max(silent_at, default=marked_since + parameters.settle_timeout) + self._turn(look, parameters)

    def _left_and_silent(self, look: GroupView, name: str, parameters: Parameters) -> bool:
        return look.members[name].leaving and self._beating.silent(look, name, parameters)

    def _missing(self, look: GroupView) -> list[str]:
        """The members that should have marked themselves and have not."""
        return [name for name, record in look.members.items() if name not in look.marks and not record.leaving]

    def _seal(self, look: GroupView, resource: Resource, current: Round) -> Writes:
        """The commit that ends the round: the plan, the round's record, and deletion of the given-up members' records."""
        keys = self._keys
        gone = self._missing(look) + [name for name in look.members if self._left_and_silent(look, name, resource.parameters)]
        # The plan takes everything from the others too. What they had is served once the next round has given them up.
        given_up = gone[:MAX_GIVEN_UP]
        members = [name for name in sorted(look.marks) if name in look.members and not look.members[name].leaving]
        if given_up:
            members = _heirs(look, members)
        plan, moved = next_plan(look, resource, current.number, members, given_up)
        sealed = msgspec.structs.replace(
            current, sealed=True, participants=tuple(members), moved=moved, kept=len(resource.items) - moved if members else 0, swaps=()
        )
        writes = Writes(
            # The plan changes only together with one of these.
            checks={key: look.stamp(key) for key in (keys.round, keys.resource)},
            # A member marking itself concurrently must either be in the plan or fail to mark itself.
            unchanged={keys.marks: look.view.stamp},
            deletes=[keys.mark(current.number, name) for name in sorted(look.marks)[:MAX_CLEARED]],
        )
        for name in given_up:
            # A member that beats after all is not given up.
            writes.checks[keys.member(name)] = look.stamp(keys.member(name))
            writes.deletes += keys.all_of(name)
        writes.put(keys.plan, plan)
        writes.put(keys.round, sealed)
        writes.put(keys.sealed(sealed.number), self._noted(look, sealed, plan))
        if sealed.number > ROUNDS_KEPT:
            writes.deletes.append(keys.sealed(sealed.number - ROUNDS_KEPT))
        return writes

    def _noted(self, look: GroupView, sealed: Round, plan: Plan) -> SealedRound:
        return SealedRound(
            number=sealed.number,
            trigger=sealed.trigger,
            participants=sealed.participants,
            moved=sealed.moved,
            kept=sealed.kept,
            sealed_by=self._name,
            sealed_at=look.wall_at,
            duration=look.seen_at - self._seen.since("round", look.stamp(self._keys.round), look.seen_at),
            moves=tuple(told(look.plan, plan)),
        )


def _heirs(look: GroupView, members: list[str]) -> list[str]:
    """The members that take over a dead member's items: those of the last round, which are prepared, or, if none is left, the newcomers.
    Otherwise newcomers get a round of their own."""
    return [name for name in members if look.round is not None and name in look.round.participants] or members


def next_plan(look: GroupView, resource: Resource, number: int, members: Iterable[str], given_up: Iterable[str]) -> tuple[Plan, int]:
    """Return the plan of that round, and how many items it moves. Members of `given_up` are not waited for: they surely serve nothing."""
    before = look.plan or Plan(round=0, era=0, resource_version=0, owners={})
    current = {item: owner for owner, grants in before.owners.items() for item in grants}
    # Their new owners may be opening them still. Members often leave and come back in two rounds.
    unsettled = {item for grants in before.owners.values() for item, grant in grants.items() if grant == before.round}
    members = [*members]
    swaps = _swaps(look, number, members, current)
    pins = pinned(resource.pins, {name: look.zones.get(name, "") for name in members}) if resource.pins else NO_PINS
    chosen = sticky(resource.items, members, current | swaps, resource.limits, unsettled | swaps.keys(), look.zones, pins)
    owners, kept = _granted(chosen, before, number)
    waits: dict[str, tuple[str, ...]] = {}
    for name in look.members.keys() - set(given_up):
        taken = _may_serve(look, before, name) - owners.get(name, {}).keys()
        if taken:
            waits[name] = tuple(sorted(taken))
    plan = Plan(
        round=number,
        era=resource.era,
        resource_version=resource.version,
        owners=owners,
        waits=waits,
        swapped=before.swapped + len(swaps),
    )
    return plan, len(chosen) - kept


def _granted(chosen: Mapping[str, str], before: Plan, number: int) -> tuple[dict[str, dict[str, int]], int]:
    """The items of each owner with their grants, which are `number` for those that move, and how many stay. Set by set: there may be a
    hundred thousand, and all members wait."""
    owners: dict[str, dict[str, int]] = {}
    for item, owner in chosen.items():
        if owner in owners:
            owners[owner][item] = number
        else:
            owners[owner] = {item: number}
    kept = 0
    for owner, grants in owners.items():
        had = before.owners.get(owner, {})
        stay = grants.keys() & had.keys()
        kept += len(stay)
        for item in stay:
            grants[item] = had[item]
    return owners, kept


def _swaps(look: GroupView, number: int, members: Collection[str], current: Mapping[str, str]) -> dict[str, str]:
    """The new owners of the items that this round moves to level loads: of those that are where they were, if their new owner takes part.

    They only begin where the plan begins from: it is as even as any.
    """
    if look.round is None or look.round.sealed or look.round.number != number:
        return {}
    return {move.item: move.owner for move in look.round.swaps if current.get(move.item) == move.before and move.owner in members}


def told(before: Plan | None, plan: Plan) -> Iterator[Move]:
    """The plan's moves, item by item, as many as fit into MAX_TOLD."""
    was = before.owners if before else {}
    moved = {item: name for name, grants in plan.owners.items() for item in grants.keys() - was.get(name, {}).keys()}
    had = {item: name for name, grants in was.items() for item in grants.keys() & moved.keys()}
    room = MAX_TOLD
    for item, name in sorted(moved.items()):
        move = Move(item, had.get(item, ""), name)
        room -= len(msgspec.json.encode(move)) + 1
        if room < 0:
            return
        yield move


def _may_serve(look: GroupView, before: Plan, name: str) -> set[str]:
    """Items that the member may serve: those it owns, and earlier ones unless it has recorded that it stopped them."""
    earlier = before.waits.get(name, ()) if look.members[name].applied < before.round else ()
    return {*earlier, *before.owners.get(name, {})}
