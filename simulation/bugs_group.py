"""Planted bugs of the group protocol: each of its checks, waits and timeouts missing or wrong."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from simulation.planting import Bug, shelf
from sluiceway.core.group import rounds
from sluiceway.core.group.claims import Claims
from sluiceway.core.group.group_records import Claim, Decision, GroupView, Parameters, Plan, Resource, Token, Writes
from sluiceway.core.group.heartbeats import Beating, LastChanges
from sluiceway.core.group.member import Member
from sluiceway.core.group.plan import moves
from sluiceway.core.group.rounds import Rounds

BUGS: list[Bug] = []
bug = shelf(BUGS)
RARE: list[Bug] = []
"""Bugs that need a coincidence too rare for random histories; tests/group/test_assignment_holes.py has a history for each."""
rare = shelf(RARE)


def unchecked(original: Any, part: str) -> Any:
    """Return `original` with its commit's checks dropped for keys that contain `part`."""

    def write(self: Any, *args: Any) -> Writes:
        writes: Writes = original(self, *args)
        writes.checks = {key: stamp for key, stamp in writes.checks.items() if part not in key}
        return writes

    return write


def replanned(change: Any) -> Any:
    """Return a plant that changes each new plan. `change` gets the plan, the look, the resource, the round's number and its
    participants."""

    @functools.wraps(change)
    def plant(original: Any) -> Any:
        def next_plan(look: GroupView, resource: Resource, number: int, members: list[str], given_up: list[str]) -> tuple[Plan, int]:
            plan, moved = original(look, resource, number, members, given_up)
            return change(plan, look, resource, number, members), moved

        return next_plan

    return plant


# ---- leases and beats -----------------------------------------------------------------------------------------


@bug(Beating, "lease_deadline")
def serves_beyond_its_lease(original: Any) -> Any:
    """A lease is taken to last 2 s longer than it does."""
    return lambda self: original(self) and original(self) + 2_000


@bug(Beating, "note")
def takes_its_lease_from_when_the_answer_came(original: Any) -> Any:
    """The lease starts when its beat is seen to be recorded instead of when it was sent."""

    def note(self: Any, look: GroupView) -> None:
        before = self._confirmed
        original(self, look)
        if self._confirmed > before:
            self._confirmed = look.seen_at + look.members[self.name].lease_timeout

    return note


@rare(Beating, "note")
def takes_every_beat_for_recorded(original: Any) -> Any:
    """A beat renews the lease when sent, recorded or not."""

    def note(self: Any, look: GroupView) -> None:
        sent = dict(self._sent)
        original(self, look)
        if self.name in look.members:
            self._confirmed = max(self._confirmed, *sent.values(), 0)
            self._sent.clear()

    return note


@rare(Beating, "lease_deadline")
def serves_by_its_old_lease_after_asking_for_a_shorter_one(original: Any) -> Any:
    """A beat with a shorter lease binds only once its member has seen it recorded."""
    return lambda self: self._confirmed


@bug(Beating, "silent_at")
def judges_others_by_its_own_parameters(original: Any) -> Any:
    """A member that has not yet seen new parameters is given up according to them."""

    def silent_at(self: Any, look: GroupView, name: str, parameters: Parameters) -> int:
        since: int = self.seen.since(f"beat/{name}", look.members[name].beat, look.seen_at)
        return since + parameters.member_timeout

    return silent_at


@bug(Beating, "silent_at")
def gives_members_up_too_soon(original: Any) -> Any:
    """A member is given up after half of the time."""

    def silent_at(self: Any, look: GroupView, name: str, parameters: Parameters) -> int:
        since: int = self.seen.since(f"beat/{name}", look.members[name].beat, look.seen_at)
        until: int = original(self, look, name, parameters)
        return (since + until) // 2

    return silent_at


@bug(Beating, "silent_at")
def has_no_patience_with_clocks(original: Any) -> Any:
    """A member is given up as soon as its lease has expired by another member's clock."""

    def silent_at(self: Any, look: GroupView, name: str, parameters: Parameters) -> int:
        record = look.members[name]
        since: int = self.seen.since(f"beat/{name}", record.beat, look.seen_at)
        return since + record.lease_timeout

    return silent_at


@bug(LastChanges, "since")
def takes_the_first_beat_for_the_last(original: Any) -> Any:
    """A member's silence is counted from its first beat."""

    def since(self: Any, name: str, value: object, now: int) -> int:
        found: int = original(self, name, "" if name.startswith("beat/") else value, now)
        return found

    return since


@bug(Beating, "_record")
def says_too_soon_that_it_has_stopped(original: Any) -> Any:
    """The open round counts as applied before its plan exists."""

    def record(self: Any, look: GroupView, resource: Resource) -> Any:
        number = look.round.number if look.round else 0
        return msgspec.structs.replace(original(self, look, resource), applied=number)

    return record


@bug(Beating, "one_era")
def serves_before_all_have_left_the_era(original: Any) -> Any:
    """Items are served under the new strategy while other members still serve them under the old one."""
    return lambda *_: True


@bug(Beating, "_record")
def leaves_the_era_before_it_knows(original: Any) -> Any:
    """A record states one era more than its member follows."""

    def record(self: Any, look: GroupView, resource: Resource) -> Any:
        return msgspec.structs.replace(original(self, look, resource), era=resource.era + 1)

    return record


@bug(Member, "look")
def leaves_the_era_out_of_the_token(original: Any) -> Any:
    """A token lacks the era."""

    def look(self: Any, look: GroupView) -> Decision:
        decision: Decision = original(self, look)
        owned = {item: Token(1, grant) for item, (_, grant) in decision.owned.items()}
        return Decision(owned, decision.lease_deadline, decision.writes, decision.wake_at, decision.left)

    return look


@rare(Member, "look")
def forgets_that_a_beat_may_end_its_lease(original: Any) -> Any:
    """A decision's lease ignores its own beat, which may ask for a shorter one."""

    def look(self: Any, look: GroupView) -> Decision:
        self._beating.note(look)
        before = self._beating.lease_deadline()
        decision: Decision = original(self, look)
        return Decision(decision.owned, before, decision.writes, decision.wake_at, decision.left)

    return look


@rare(Member, "look")
def stays_when_it_was_going(original: Any) -> Any:
    """A member whose record may still be removed resumes serving planned items."""

    def look(self: Any, look: GroupView) -> Decision:
        self._going = False
        decision: Decision = original(self, look)
        return decision

    return look


# ---- rounds ---------------------------------------------------------------------------------------------------


@bug(Rounds, "_awaited")
def does_not_wait_for_the_old_owner_to_stop(original: Any) -> Any:
    """Newly planned items are served at once."""
    return lambda *_: False


@bug(Rounds, "_awaited")
def does_not_wait_for_those_who_leave(original: Any) -> Any:
    """A member that has announced its leaving counts as stopped."""
    return lambda self, look, plan, other: original(self, look, plan, other) and not look.members[other].leaving


@rare(rounds, "next_plan")
@replanned
def forgets_who_had_it_before_the_last_owner(plan: Plan, look: GroupView, *_: Any) -> Plan:
    """Only an item's last owner is waited for."""
    had = look.plan.owners if look.plan else {}
    waits = {name: tuple(item for item in items if item in had.get(name, {})) for name, items in plan.waits.items()}
    return msgspec.structs.replace(plan, waits=waits)


@rare(rounds, "next_plan")
@replanned
def forgets_who_serves_what_is_not_in_the_plan(plan: Plan, *_: Any) -> Plan:
    """No former owner is waited for when an item returns to the plan."""
    owned = {item for grants in plan.owners.values() for item in grants}
    waits = {name: tuple(item for item in items if item in owned) for name, items in plan.waits.items()}
    return msgspec.structs.replace(plan, waits=waits)


@rare(rounds, "_may_serve")
def waits_for_nobody_from_an_earlier_plan(original: Any) -> Any:
    """Items that a member had before the last plan count as stopped."""
    return lambda look, before, name: set(before.owners.get(name, {}))


@rare(Rounds, "_seal")
def gives_up_a_member_that_beats_after_all(original: Any) -> Any:
    """Sealing removes records that have changed since they were read."""
    return unchecked(original, "member/")


@bug(Rounds, "_seal")
def seals_over_a_mark(original: Any) -> Any:
    """A member that marks itself during the sealing goes unnoticed."""

    def seal(self: Any, *args: Any) -> Writes:
        writes: Writes = original(self, *args)
        writes.unchanged.clear()
        return writes

    return seal


@bug(Rounds, "_seal")
def seals_a_resource_that_has_changed(original: Any) -> Any:
    """The plan is recorded although the resource has changed."""
    return unchecked(original, "resource")


@bug(Rounds, "_mark")
def marks_itself_in_a_round_that_is_over(original: Any) -> Any:
    """A mark does not check that the round is still open."""
    return unchecked(original, "round")


@bug(Rounds, "_missing")
def seals_without_waiting_for_anyone(original: Any) -> Any:
    """A round is sealed without waiting for any member."""
    return lambda *_: []


@bug(Rounds, "_left_and_silent")
def never_strikes_off_a_silent_leaver(original: Any) -> Any:
    """A member that died while leaving stays in the records."""
    return lambda *_: False


@bug(Rounds, "_trigger")
def no_round_for_a_silent_member(original: Any) -> Any:
    """Neither a dead member nor the heartbeat triggers a round."""

    def trigger(self: Any, look: GroupView, resource: Resource) -> str | None:
        why: str | None = original(self, look, resource)
        return None if why is not None and (why.endswith("silent") or why == "heartbeat") else why

    return trigger


@bug(Rounds, "_trigger")
def opens_round_after_round(original: Any) -> Any:
    """Every round triggers another."""
    return lambda self, look, resource: original(self, look, resource) or "why not"


@bug(rounds, "next_plan")
@replanned
def keeps_the_grant_when_the_owner_changes(plan: Plan, look: GroupView, *_: Any) -> Plan:
    """The new owner's token equals the old one's."""
    had = {item: grant for grants in look.plan.owners.values() for item, grant in grants.items()} if look.plan else {}
    owners = {name: {item: had.get(item, grant) for item, grant in grants.items()} for name, grants in plan.owners.items()}
    return msgspec.structs.replace(plan, owners=owners)


@bug(rounds, "next_plan")
@replanned
def counts_grants_anew(plan: Plan, look: GroupView, resource: Resource, number: int, members: list[str]) -> Plan:
    """Grants start over every few rounds."""
    owners = {
        name: {item: number % 4 if grant == number else grant for item, grant in grants.items()} for name, grants in plan.owners.items()
    }
    return msgspec.structs.replace(plan, owners=owners)


@bug(rounds, "sticky")
def moves_more_than_it_must(original: Any) -> Any:
    """The plan is even but ignores current owners."""
    return lambda items, members, current, *more: original(items, members, {}, *more)


@bug(rounds, "sticky")
def moves_one_more_than_it_must(original: Any) -> Any:
    """Two members exchange an item in each round that moves any."""

    def sticky(items: Any, members: Any, current: Any, *more: Any) -> Any:
        plan = original(items, members, current, *more)
        stays = [item for item in plan if current.get(item) == plan[item]]
        others = [item for item in stays if plan[item] != plan[stays[0]]]
        if others and moves(plan, current):
            plan[stays[0]], plan[others[0]] = plan[others[0]], plan[stays[0]]
        return plan

    return sticky


# ---- claims ---------------------------------------------------------------------------------------------------


@rare(Claims, "_write")
def claims_from_a_member_that_is_back(original: Any) -> Any:
    """A claim does not check that the last owner is still away."""
    return unchecked(original, "member/")


@bug(Claims, "_write")
def claims_without_looking_whose_it_is(original: Any) -> Any:
    """A claim does not check that the item is still free."""
    return unchecked(original, "claim/")


@bug(Claims, "_write")
def claims_without_a_new_grant(original: Any) -> Any:
    """A new claim keeps the token of the former owner."""

    def write(self: Any, *args: Any) -> Writes:
        writes: Writes = original(self, *args)
        for key in writes.puts:
            claim = msgspec.json.decode(writes.puts[key], type=Claim)
            writes.put(key, msgspec.structs.replace(claim, grant=max(1, claim.grant - (claim.owner is not None))))
        return writes

    return write


@bug(Claims, "_surplus")
def never_gives_back_what_is_too_much(original: Any) -> Any:
    """The first member keeps every item."""
    return lambda *args: min(0, original(*args))


@rare(Claims, "_renounce")
def keeps_what_it_was_giving_back(original: Any) -> Any:
    """An item whose return may not be recorded is served again once there is no reason to return it."""
    return lambda *_: None


@bug(Claims, "owned")
def serves_what_it_gives_back(original: Any) -> Any:
    """A member serves every item claimed in its name, including those it is about to return."""
    return lambda self, look, resource: dict(self._divide(look, resource).mine)


@bug(Member, "look")
def changes_what_it_has_read(original: Any) -> Any:
    """A member removes itself from a look that other members share."""

    def look(self: Any, look: Any) -> Any:
        decision = original(self, look)
        look.members.pop(self.name, None)
        return decision

    return look
