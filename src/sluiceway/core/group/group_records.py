"""What a group records in the meta store, what a member sees of it at one look, and what it decides to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, cast

import msgspec

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import invalid
from sluiceway.model.meta import Stamp, View

Record = TypeVar("Record", bound=msgspec.Struct)
Strategy = Literal["rounds", "claims", "static"]
"""How the items are divided. `static`: no member has any; their one owner is outside of the group, by a lock."""
PATIENCE = 1.25
"""How much longer than a lease a member must be silent before it is given up: room for clocks that run at different speeds."""

MAX_MEMBERS = 200
"""Who comes later waits outside until somebody has gone: the commit that seals a round names each member up to six times."""
MAX_MEMBER_NAME = 140
_OTHER_RECORDS = 4_096
"""Bytes, at most, of the round's two records without their participants and of the sealing member's own."""
ROUNDS_KEPT = 100
"""As many sealed rounds are kept for people to look at."""
MAX_TOLD = 16_384
"""Bytes of what a sealed round tells of the items that it moved, at most."""


BOUNDS: Mapping[str, tuple[Millis, Millis]] = {
    "settle_timeout": (1, 60_000),
    "round_interval": (1, 600_000),
    "heartbeat_interval": (1_000, 900_000),
    "beat_interval": (10, 60_000),
    "lease_timeout": (100, 300_000),
    "member_timeout": (125, 900_000),
}
"""The least and the most that an operator may set each time of a cluster to. Below, members do nothing but beat; above, nobody takes over
from one that has died."""


class Token(NamedTuple):
    """Proof of ownership. Tokens of an item compare: a later owner's is greater, so whoever stores the greatest can refuse the rest."""

    era: int
    grant: int


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of a group, in milliseconds. They are part of its resource: all members follow the same ones.

    `settle_timeout`: a round is sealed once nobody has joined it for so long. `round_interval`: the least between two rounds.
    `heartbeat_interval`: there is a round at least so often, whatever happens. `beat_interval`: how often a member shows that it lives.
    `lease_timeout`: a member that could not show it for so long serves nothing. `member_timeout`: one that has not been seen alive
    for so long is given up.
    """

    settle_timeout: Millis = 200
    round_interval: Millis = 1_000
    heartbeat_interval: Millis = 600_000
    beat_interval: Millis = 500
    lease_timeout: Millis = 2_000
    member_timeout: Millis = 3_000

    def __post_init__(self) -> None:
        if min(self.beat_interval, self.lease_timeout, self.member_timeout) < 1 or min(self.settle_timeout, self.round_interval) < 0:
            raise invalid("parameters", "a time is below its least")
        if self.lease_timeout < 2 * self.beat_interval:
            raise invalid("lease_timeout", f"must be at least twice the beat_interval, which is {self.beat_interval}ms")
        if self.member_timeout < PATIENCE * self.lease_timeout:
            raise invalid("member_timeout", f"must be at least {PATIENCE} times the lease_timeout, which is {self.lease_timeout}ms")


def with_times(before: Parameters, times: Mapping[str, Millis]) -> Parameters:
    """Those parameters with other times, by name. Raises `invalid_request` with the name of one that is out of bounds, or does not go with
    the others."""
    for name, time in times.items():
        least, most = BOUNDS[name]
        if not least <= time <= most:
            raise invalid(name, f"expected {format_duration(least)} to {format_duration(most)}, and it is {format_duration(time)}")
    return msgspec.structs.replace(before, **times)


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """What a group divides, and how. `version` rises with each change; `era` with each change of the strategy, and on a restore.

    `limits` has on how many members at most the items of a queue lie, those whose names are the same up to their last dot; of no queue
    that has no items. Claims pass over it.
    """

    items: tuple[str, ...]
    parameters: Parameters = Parameters()
    strategy: Strategy = "rounds"
    era: int = 1
    version: int = 1
    limits: dict[str, int] = {}


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One member. `beat` rises each time it shows that it lives; from when it sent that, it serves for `lease_timeout` at most.

    `applied` is the last plan, and `era` the last era, at which it has stopped what they took from it. `joined_at`, for people to look at,
    is by its own clock; 0: it does not say.
    """

    beat: int
    lease_timeout: Millis
    applied: int = 0
    era: int = 0
    leaving: bool = False
    address: str = ""
    joined_at: Millis = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The last round. Open: members are marking themselves in it. Sealed: the plan is made, from those that had."""

    number: int
    sealed: bool
    trigger: str
    participants: tuple[str, ...] = ()
    moved: int = 0
    kept: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns what since a round: each owner's items with their grants. A grant is the number of the round that gave the item.

    `waits` has, for some members, items that are not theirs any more and that they may still serve: a member has stopped once it has
    applied this plan, or is gone. Also items that the group has not now: they may come back.
    """

    round: int
    era: int
    resource_version: int
    owners: dict[str, dict[str, int]]
    waits: dict[str, tuple[str, ...]] = {}


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who has an item; None: nobody. The grant rises each time it is claimed."""

    owner: str | None
    grant: int


class Move(NamedTuple):
    """An item that has another owner than before; `before` empty: it had none."""

    item: str
    before: str
    owner: str


class SealedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round that is over, for people to look at. `sealed_at` and `duration`, how long it was seen open, are by its sealer's clocks.

    `moves` has those that it moved, as many as MAX_TOLD takes: there may be fewer than `moved`.
    """

    number: int
    trigger: str
    participants: tuple[str, ...]
    moved: int
    kept: int
    sealed_by: str
    sealed_at: Millis
    duration: Millis
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a group keeps its records."""

    group: str

    @property
    def prefix(self) -> str:
        return f"group/{self.group}/"

    @property
    def resource(self) -> str:
        return f"{self.prefix}resource"

    @property
    def round(self) -> str:
        return f"{self.prefix}round"

    @property
    def plan(self) -> str:
        return f"{self.prefix}plan"

    @property
    def members(self) -> str:
        return f"{self.prefix}member/"

    @property
    def marks(self) -> str:
        return f"{self.prefix}mark/"

    @property
    def claims(self) -> str:
        return f"{self.prefix}claim/"

    @property
    def history(self) -> str:
        """Of the sealed rounds. Not under the prefix, as no member reads them."""
        return f"rounds/{self.group}/"

    def sealed(self, number: int) -> str:
        return f"{self.history}{number:012}"

    def member(self, name: str) -> str:
        return self.members + name

    def mark(self, number: int, name: str) -> str:
        return f"{self.marks}{number:012}/{name}"


@dataclass(frozen=True)
class Look:
    """A group as one view of the meta store showed it. `seen_at` is when it had come, by the member's own clock."""

    view: View
    seen_at: Millis
    resource: Resource | None
    round: Round | None
    plan: Plan | None
    members: Mapping[str, MemberRecord]
    marks: frozenset[str]
    """Those who have marked themselves in the round, if it is open."""
    claims: Mapping[str, Claim]
    wall_at: Millis = 0
    """What the wall clock showed when the view had come. Written down for people; nothing depends on it."""

    def stamp(self, key: str) -> Stamp | None:
        entry = self.view.entries.get(key)
        return entry.stamp if entry else None


class GroupReader:
    """Makes looks of views of the group's whole prefix, and decodes no record again whose stamp is as it was. For one store."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._decoded: dict[str, tuple[Stamp, object]] = {}

    def read(self, view: View, seen_at: Millis, wall_at: Millis = 0) -> Look:
        """The group as the view shows it. Raises what msgspec raises at a record that is none."""
        keys, before = self._keys, self._decoded
        self._decoded = {}

        def one(key: str, kind: type[Record]) -> Record | None:
            entry = view.entries.get(key)
            if entry is None:
                return None
            known = before.get(key)
            if known is None or known[0] != entry.stamp:
                known = (entry.stamp, msgspec.json.decode(entry.value, type=kind))
            self._decoded[key] = known
            return cast(Record, known[1])

        def under(prefix: str, kind: type[Record]) -> dict[str, Record]:
            found = ((key.removeprefix(prefix), one(key, kind)) for key in view.entries if key.startswith(prefix))
            return {name: record for name, record in found if record is not None}

        current = one(keys.round, Round)
        marks = keys.mark(current.number, "") if current is not None else ""
        return Look(
            view,
            seen_at,
            one(keys.resource, Resource),
            current,
            one(keys.plan, Plan),
            under(keys.members, MemberRecord),
            frozenset(key.removeprefix(marks) for key in view.entries if marks and key.startswith(marks)),
            under(keys.claims, Claim),
            wall_at,
        )


def read_group(view: View, keys: Keys, seen_at: Millis) -> Look:
    """The records of the group in a view of its whole prefix."""
    return GroupReader(keys).read(view, seen_at)


def owners(look: Look) -> dict[str, str]:
    """Which member each item is given to, whether that serves it yet or not. Left out are items of nobody and of those who have gone.

    Where a member can be reached is in its record: `look.members[name].address`.
    """
    resource, plan = look.resource, look.plan
    if resource is not None and resource.strategy == "claims":
        owned = ((item, look.claims[item].owner) for item in resource.items if item in look.claims)
        return {item: owner for item, owner in owned if owner is not None and owner in look.members}
    if resource is None or resource.strategy != "rounds" or plan is None or plan.era != resource.era:
        return {}
    return {item: name for name, grants in plan.owners.items() if name in look.members for item in grants}


def rounds_of(view: View, keys: Keys) -> list[SealedRound]:
    """The last rounds, the newest first, from a view of the prefix `keys.history`."""
    return [msgspec.json.decode(entry.value, type=SealedRound) for entry in view.prefix(keys.history).values()][::-1]


def largest_commit(keys: Keys, items: Iterable[str], before: Iterable[str]) -> int:
    """The bytes at most of a commit that seals a round over those items; `before` are those of the plan that it replaces.

    One that changes the resource alone is smaller, its limits included: each of these is of at least one of the items.
    """
    owned = sum(len(msgspec.json.encode(item)) + len(":1000000000,") for item in items)
    # Everything may be waited for at its last owner, and at one who left before that and was not heard of since.
    waited = 2 * sum(len(msgspec.json.encode(item)) + 1 for item in {*items, *before})
    # In the plan's two parts and the participants of the round's two records, with quotes and brackets; a mark and a record that go.
    named = 4 * (MAX_MEMBER_NAME + 8) + len(keys.mark(0, "")) + len(keys.members) + 2 * MAX_MEMBER_NAME
    return owned + waited + MAX_MEMBERS * named + MAX_TOLD + _OTHER_RECORDS


@dataclass
class Writes:
    """A commit that a member wants to make."""

    checks: dict[str, Stamp | None] = field(default_factory=dict)
    unchanged: dict[str, Stamp] = field(default_factory=dict)
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: list[str] = field(default_factory=list)

    def put(self, key: str, record: msgspec.Struct) -> None:
        self.puts[key] = msgspec.json.encode(record)


@dataclass(frozen=True)
class Decision:
    """What follows from a look.

    `owned` are the items to be served, each with its token, until `lease_deadline` unless a later look says more. First stop what was
    served and is not among them, or has another token; then commit `writes`, which may say that it was stopped, and look again whatever
    becomes of it. Look again also when something may have changed, and at `wake_at` at the latest. `left`: it is out, for good.
    """

    owned: Mapping[str, Token]
    lease_deadline: Millis
    writes: Writes | None
    wake_at: Millis
    left: bool = False
