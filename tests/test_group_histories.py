"""Groups in the simulated world: many histories without a broken promise, and each planted bug found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sluiceway.core.assignment.beating import Beating
from sluiceway.core.assignment.claims import Claims
from sluiceway.core.assignment.group import Look, Parameters, Plan, Resource, Writes
from sluiceway.core.assignment.rounds import Rounds
from sluiceway.sim.checks import BrokenPromiseError
from sluiceway.sim.group import GroupWorld

SEEDS = 60
MOST_SEEDS = 2_000


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_promise_is_broken(seed: int) -> None:
    GroupWorld(seed).run()


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(act: Plant) -> Plant:
    PLANTS[act.__name__.removeprefix("_")] = act
    return act


# The three that the protocol rests on.


@plant
def _serves_beyond_its_lease(patch: pytest.MonkeyPatch) -> None:
    def deadline(self: Beating, parameters: Parameters) -> int:
        return 0 if self._confirmed is None else self._confirmed + 2 * parameters.lease_timeout

    patch.setattr(Beating, "lease_deadline", deadline)


@plant
def _does_not_wait_for_the_old_owner_to_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "_awaited", lambda *_: False)


@plant
def _gives_members_up_too_soon(patch: pytest.MonkeyPatch) -> None:
    def silent(self: Beating, look: Look, name: str, parameters: Parameters) -> bool:
        since = self.seen.since(f"beat/{name}", look.members[name].beat, look.seen_at)
        return name != self.name and look.seen_at - since >= parameters.member_timeout // 3

    patch.setattr(Beating, "silent", silent)


# And smaller ones.


@plant
def _takes_its_lease_from_when_the_answer_came(patch: pytest.MonkeyPatch) -> None:
    note = Beating.note

    def noted(self: Beating, look: Look) -> None:
        note(self, look)
        if self.name in look.members:
            self._confirmed = look.seen_at

    patch.setattr(Beating, "note", noted)


@plant
def _gives_up_a_member_that_beats_after_all(patch: pytest.MonkeyPatch) -> None:
    seal = Rounds._seal

    def sealed(self: Rounds, look: Look, *args: Any) -> Writes:
        writes = seal(self, look, *args)
        for name in look.members:
            writes.checks.pop(self._keys.member(name), None)
        # Who beats again marks itself in the round too, unless it is leaving.
        writes.unchanged.clear()
        return writes

    patch.setattr(Rounds, "_seal", sealed)


@plant
def _forgets_who_had_it_before_the_last_owner(patch: pytest.MonkeyPatch) -> None:
    seal = Rounds._seal

    def sealed(self: Rounds, look: Look, *args: Any) -> Writes:
        writes = seal(self, look, *args)
        plan = msgspec.json.decode(writes.puts[self._keys.plan], type=Plan)
        last = {} if look.plan is None else {item: owner for item, (owner, _) in look.plan.owners.items()}
        waits = {item: tuple(name for name in names if last.get(item) == name) for item, names in plan.waits.items()}
        writes.put(self._keys.plan, msgspec.structs.replace(plan, waits=waits))
        return writes

    patch.setattr(Rounds, "_seal", sealed)


@plant
def _claims_from_a_member_that_is_back(patch: pytest.MonkeyPatch) -> None:
    write = Claims._write

    def written(self: Claims, look: Look, *args: Any) -> Writes:
        writes = write(self, look, *args)
        writes.checks = {key: stamp for key, stamp in writes.checks.items() if not key.startswith(self._keys.members)}
        return writes

    patch.setattr(Claims, "_write", written)


@plant
def _claims_without_looking_whose_it_is(patch: pytest.MonkeyPatch) -> None:
    write = Claims._write

    def written(self: Claims, look: Look, *args: Any) -> Writes:
        writes = write(self, look, *args)
        writes.checks = {key: stamp for key, stamp in writes.checks.items() if not key.startswith(self._keys.claims)}
        return writes

    patch.setattr(Claims, "_write", written)


@plant
def _serves_before_all_have_left_the_era(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Beating, "one_era", lambda *_: True)


@plant
def _keeps_the_grant_when_the_owner_changes(patch: pytest.MonkeyPatch) -> None:
    seal = Rounds._seal

    def sealed(self: Rounds, look: Look, *args: Any) -> Writes:
        writes = seal(self, look, *args)
        plan = msgspec.json.decode(writes.puts[self._keys.plan], type=Plan)
        before = look.plan.owners if look.plan else {}
        owners = {item: (owner, before[item][1] if item in before else grant) for item, (owner, grant) in plan.owners.items()}
        writes.put(self._keys.plan, msgspec.structs.replace(plan, owners=owners))
        return writes

    patch.setattr(Rounds, "_seal", sealed)


@plant
def _never_gives_back_what_is_too_much(patch: pytest.MonkeyPatch) -> None:
    surplus = Claims._surplus
    patch.setattr(Claims, "_surplus", lambda *args: min(0, surplus(*args)))


@plant
def _no_round_for_a_silent_member(patch: pytest.MonkeyPatch) -> None:
    trigger = Rounds._trigger

    def other(self: Rounds, look: Look, resource: Resource) -> str | None:
        why = trigger(self, look, resource)
        return None if why is not None and (why.endswith("silent") or why == "heartbeat") else why

    patch.setattr(Rounds, "_trigger", other)


def seeds_until_found() -> int | None:
    """How many histories it takes until one breaks a promise."""
    for seed in range(MOST_SEEDS):
        try:
            GroupWorld(seed).run()
        except BrokenPromiseError:
            return seed + 1
    return None


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[bug](monkeypatch)
    assert seeds_until_found() is not None
