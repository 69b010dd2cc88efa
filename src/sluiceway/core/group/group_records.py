"""Records of a group in the meta store, a member's view of them, and its decisions."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, cast

import msgspec

from sluiceway.core.group.packed_items import PackedNames, PackedOwners, pack_names, pack_owners, packed_size, unpack_names, unpack_owners
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.compatibility import Levels
from sluiceway.kernel.errors import invalid
from sluiceway.model.meta import Stamp, View

Record = TypeVar("Record", bound=msgspec.Struct)
Strategy = Literal["rounds", "claims", "static"]
"""How items are divided. `static`: members have none; a single owner outside the group, proven by a lock, has all."""
PATIENCE = 1.25
"""A member is given up after being silent for this multiple of its lease: margin for clocks that run at different speeds."""

MAX_MEMBERS = 1_000
"""Later members wait outside until one leaves."""
MAX_NAMES = 40_000
"""Bytes of all members' names, also a limit: the commit that seals a round names each of them thrice."""
MAX_MEMBER_NAME = 140
MAX_CLEARED = 400
"""Marks that the commit of a seal deletes. The next one that opens a round deletes what is left."""
MAX_LEFT = 900
"""Marks that the commit of an opening deletes; both together delete more than there are members."""
MAX_GIVEN_UP = 40
"""Members that a round gives up: etcd compares that many records in one transaction. The next round gives up the others."""
MAX_PLAIN = 32_768
"""Bytes up to which a resource or a plan is JSON, as all other records are. Larger ones are packed."""
PACKED = b"\x01"
"""First byte of a packed record."""
_LEAST_OF_ITEM = 3
"""Bytes of JSON, at least, for an item of a plan or a resource: its quotes and a comma."""
_INFLATION = 1_024
"""Bytes, at most, by which compression grows what cannot be compressed."""
_OTHER_RECORDS = 4_096
"""Upper bound in bytes for the round's two records without their participants, plus the sealing member's own record."""
ROUNDS_KEPT = 100
"""Sealed rounds kept for display."""
MAX_TOLD = 16_384
"""Upper bound in bytes for the item moves listed in a sealed round."""


LOAD_MOVES = 6
"""Items that move in a minute to level loads, unless the operator says otherwise: each is not served for a moment."""
MAX_LOAD_MOVES = 20
"""More would not fit into the record of a round."""
MAX_REPORTED = 1_000
"""Items in a member's report of its loads: its busiest. Another one is not worth a move."""

MAX_PINS = 500
"""Pinned items of a group: they are in the resource's record."""

BOUNDS: Mapping[str, tuple[Millis, Millis]] = {
    "settle_timeout": (1, 60_000),
    "round_interval": (1, 600_000),
    "heartbeat_interval": (1_000, 900_000),
    "beat_interval": (10, 60_000),
    "lease_timeout": (100, 300_000),
    "member_timeout": (125, 900_000),
}
"""Minimum and maximum an operator may set for each time of a cluster. Below, members do nothing but beat; above, a dead member's items stay
unserved."""


class Token(NamedTuple):
    """Proof of ownership. Tokens of one item are ordered: a later owner's is greater, so a store that keeps the greatest can refuse the
    rest."""

    era: int
    grant: int


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of a group, in milliseconds. They belong to its resource: all members follow the same ones.

    `settle_timeout`: a round is sealed once no member has joined it for this long, or at once if it gives up a member. `round_interval`:
    minimum time between two rounds.
    `heartbeat_interval`: maximum time between two rounds. `beat_interval`: how often a member beats. `lease_timeout`: a member whose beat
    was not recorded for this long serves nothing. `member_timeout`: a member not seen alive for this long is given up.
    """

    settle_timeout: Millis = 200
    round_interval: Millis = 1_000
    heartbeat_interval: Millis = 600_000
    beat_interval: Millis = 500
    lease_timeout: Millis = 2_000
    member_timeout: Millis = 3_000

    def __post_init__(self) -> None:
        if min(self.beat_interval, self.lease_timeout, self.member_timeout) < 1 or min(self.settle_timeout, self.round_interval) < 0:
            raise invalid("parameters", "a time is below its minimum")
        if self.lease_timeout < 2 * self.beat_interval:
            raise invalid("lease_timeout", f"must be at least twice the beat_interval, which is {self.beat_interval}ms")
        if self.member_timeout < PATIENCE * self.lease_timeout:
            raise invalid("member_timeout", f"must be at least {PATIENCE} times the lease_timeout, which is {self.lease_timeout}ms")


def with_times(before: Parameters, times: Mapping[str, Millis]) -> Parameters:
    """Return the parameters with `times` replaced, by name. Raises `invalid_request` naming a time that is out of bounds or inconsistent
    with the others."""
    for name, time in times.items():
        least, most = BOUNDS[name]
        if not least <= time <= most:
            raise invalid(name, f"expected {format_duration(least)} to {format_duration(most)}, got {format_duration(time)}")
    return msgspec.structs.replace(before, **times)


class Pin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an item is to be: at a member of that name (`base_name`), or in that zone. While none is there, it is anywhere."""

    instance: str = ""
    zone: str = ""

    def __str__(self) -> str:
        return f"instance {self.instance}" if self.instance else f"zone {self.zone}"


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """Items, strategy and parameters of a group. `version` rises with each change; `era` with each change of strategy, and on a restore.

    `limits`: maximum number of members that hold items of a queue, that is, of items equal up to their last dot; only for queues with
    items. `load_moves`: items that may move in a minute to level loads; 0: none. `pins`: where some items are to be. Claims ignore all
    three.
    """

    items: tuple[str, ...]
    parameters: Parameters = Parameters()
    strategy: Strategy = "rounds"
    era: int = 1
    version: int = 1
    limits: dict[str, int] = {}
    load_moves: int = LOAD_MOVES
    pins: dict[str, Pin] = {}


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One member, from its two records: the beat, which changes all the time, and what is said about it once.

    `beat` rises with each sign of life; the member serves for at most `lease_timeout` after sending it.
    `applied` is the last plan, and `era` the last era, for which it has stopped serving what they took from it. `joined_at`, for display,
    is by its own clock; 0: unknown. `levels`: those that it understands, if the group has a level. `release`: its version of Sluiceway, for
    display. `zone`: the failure domain that it is in; empty: none was said.
    """

    beat: int
    lease_timeout: Millis
    applied: int = 0
    era: int = 0
    leaving: bool = False
    address: str = ""
    joined_at: Millis = 0
    levels: Levels | None = None
    release: str = ""
    zone: str = ""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A member's sign of life; see `MemberRecord`. All others read each of them, so it is small. On disk: append fields only."""

    beat: int
    lease_timeout: Millis
    applied: int
    era: int
    leaving: bool


class About(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a member says of itself when it joins; see `MemberRecord`."""

    address: str = ""
    joined_at: Millis = 0
    levels: Levels | None = None
    release: str = ""
    zone: str = ""


def put_member(writes: Writes, keys: Keys, name: str, record: MemberRecord, *, joins: bool) -> None:
    """Put the member's beat into the commit and, if it joins, what is said about it."""
    writes.put(keys.member(name), Beat(record.beat, record.lease_timeout, record.applied, record.era, record.leaving))
    if joins:
        told = About(address=record.address, joined_at=record.joined_at, levels=record.levels, release=record.release, zone=record.zone)
        writes.put(keys.about(name), told)


def decode_member(beat: bytes, about: bytes | None) -> MemberRecord:
    """Return the member of these records. Raises msgspec.DecodeError."""
    if not beat.startswith(b"["):
        # One record, from before there were two.
        return msgspec.json.decode(beat, type=MemberRecord)
    now, told = _decode_beat(beat), About() if about is None else _decode_about(about)
    return MemberRecord(
        beat=now.beat,
        lease_timeout=now.lease_timeout,
        applied=now.applied,
        era=now.era,
        leaving=now.leaving,
        address=told.address,
        joined_at=told.joined_at,
        levels=told.levels,
        release=told.release,
        zone=told.zone,
    )


_decode_beat = msgspec.json.Decoder(Beat).decode
_decode_about = msgspec.json.Decoder(About).decode


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The compatibility level that all members use, since each of them understands it.

    `rising_to`: from this record on, only members that understand this level may join; 0: it does not rise.
    """

    level: int
    rising_to: int = 0


class Move(NamedTuple):
    """An item whose owner has changed; `before` empty: it had none."""

    item: str
    before: str
    owner: str


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The last round. Open: members are marking themselves in it. Sealed: the plan is made from the members that had."""

    number: int
    sealed: bool
    trigger: str
    participants: tuple[str, ...] = ()
    moved: int = 0
    kept: int = 0
    swaps: tuple[Move, ...] = ()
    """Moves that the plan is to make to level loads, where they still fit. Only of an open round."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Ownership as of a round: each owner's items with their grants. A grant is the number of the round that gave the item.

    `waits`: per member, items it no longer owns but may still serve. A member has stopped once it has applied this plan, or is gone.
    Includes items the group does not have now, since they may come back. `swapped`: moves that were made to level loads, in all plans.
    """

    round: int
    era: int
    resource_version: int
    owners: dict[str, dict[str, int]]
    waits: dict[str, tuple[str, ...]] = {}
    swapped: int = 0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a member's items cost it: `loads`, in millionths of what a member can carry, of its busiest items; of the others, 0.

    `round`: that of the plan by which it had them. `items`, `bytes`: what it moves and writes per second, for display.
    """

    loads: dict[str, int]
    round: int = 0
    items: int = 0
    bytes: int = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Ownership of one item; `owner` None: free. The grant rises each time the item is claimed."""

    owner: str | None
    grant: int


def encode_record(record: msgspec.Struct) -> bytes:
    """Return the record as it is stored."""
    plain = None if _is_surely_large(record) else msgspec.json.encode(record)
    if plain is not None and len(plain) <= MAX_PLAIN:
        return plain
    packed: object = None
    if isinstance(record, Plan) and (owners := pack_owners(record.owners, record.waits)) is not None:
        packed = (msgspec.structs.replace(record, owners={}, waits={}), owners)
    elif isinstance(record, Resource):
        packed = (msgspec.structs.replace(record, items=()), pack_names(record.items))
    if packed is not None:
        encoded = PACKED + zlib.compress(msgspec.msgpack.encode(packed), 1)
        # All ownership rests on it: what would come back otherwise is stored as it is.
        if decode_record(encoded, type(record)) == record:
            return encoded
    return msgspec.json.encode(record) if plain is None else plain


def _is_surely_large(record: msgspec.Struct) -> bool:
    """Whether its JSON is longer than MAX_PLAIN, as far as the number of items tells: it need not be written then."""
    if isinstance(record, Plan):
        return _LEAST_OF_ITEM * sum(map(len, record.owners.values())) > MAX_PLAIN
    return isinstance(record, Resource) and _LEAST_OF_ITEM * len(record.items) > MAX_PLAIN


def decode_record(data: bytes, kind: type[Record]) -> Record:
    """Return the record of that kind. Raises msgspec.DecodeError."""
    if not data.startswith(PACKED):
        return msgspec.json.decode(data, type=kind)
    try:
        unpacked = zlib.decompress(data[len(PACKED) :])
        if kind is Plan:
            plan, cells = msgspec.msgpack.decode(unpacked, type=tuple[Plan, PackedOwners])
            owners, waits = unpack_owners(cells)
            return cast(Record, msgspec.structs.replace(plan, owners=owners, waits=waits))
        resource, names = msgspec.msgpack.decode(unpacked, type=tuple[Resource, PackedNames])
        return cast(Record, msgspec.structs.replace(resource, items=tuple(sorted(unpack_names(names)))))
    except (zlib.error, ValueError) as error:
        raise msgspec.DecodeError(f"a packed record cannot be read: {error}") from error


class SealedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed round, kept for display. `sealed_at` and `duration`, how long it was seen open, are by its sealer's clocks.

    `moves` lists the moved items, as many as fit into MAX_TOLD: possibly fewer than `moved`.
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
    """The keys of a group's records in the meta store."""

    group: str

    @property
    def prefix(self) -> str:
        return f"group/{self.group}/"

    @property
    def resource(self) -> str:
        return f"{self.prefix}resource"

    @property
    def level(self) -> str:
        return f"{self.prefix}level"

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
    def abouts(self) -> str:
        return f"{self.prefix}about/"

    @property
    def marks(self) -> str:
        return f"{self.prefix}mark/"

    @property
    def claims(self) -> str:
        return f"{self.prefix}claim/"

    @property
    def loads(self) -> str:
        """Prefix of the members' reports of their loads. Outside `prefix`, since only one member reads them."""
        return f"loads/{self.group}/"

    def load(self, name: str) -> str:
        return self.loads + name

    @property
    def history(self) -> str:
        """Prefix of the sealed rounds. Outside `prefix`, since no member reads them."""
        return f"rounds/{self.group}/"

    def sealed(self, number: int) -> str:
        return f"{self.history}{number:012}"

    def member(self, name: str) -> str:
        return self.members + name

    def about(self, name: str) -> str:
        return self.abouts + name

    def all_of(self, name: str) -> list[str]:
        """The keys of all records of a member, which go with it."""
        return [self.member(name), self.about(name), self.load(name)]

    def mark(self, number: int, name: str) -> str:
        return f"{self.marks}{number:012}/{name}"


@dataclass(frozen=True)
class GroupView:
    """A group as one view of the meta store showed it. `seen_at` is when the view arrived, by the member's own clock."""

    view: View
    seen_at: Millis
    resource: Resource | None
    round: Round | None
    plan: Plan | None
    members: Mapping[str, MemberRecord]
    marks: frozenset[str]
    """The members that have marked themselves in the round, if it is open."""
    claims: Mapping[str, Claim]
    wall_at: Millis = 0
    """Wall-clock time at which the view arrived. For display only."""
    level: Level | None = None
    """None: the members of this group have no levels."""

    @property
    def zones(self) -> dict[str, str]:
        """The zone of each member."""
        return {name: record.zone for name, record in self.members.items()}

    def stamp(self, key: str) -> Stamp | None:
        entry = self.view.entries.get(key)
        return entry.stamp if entry else None

    def marks_left(self, keys: Keys) -> list[str]:
        """The keys of marks that the commit which opens the next round deletes: the last round, which is sealed, may have left some."""
        return [key for key in self.view.entries if key.startswith(keys.marks)][:MAX_LEFT]


class GroupReader:
    """Decodes views of a group's whole prefix into looks, reusing records whose stamp is unchanged. Serves one store."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._decoded: dict[str, tuple[object, object]] = {}
        """Of each key, the stamp of what was decoded; of a member's, those of both records."""

    def read(self, view: View, seen_at: Millis, wall_at: Millis = 0) -> GroupView:
        """Return the group as the view shows it. Raises msgspec's decoding errors for a malformed record."""
        keys, before = self._keys, self._decoded
        self._decoded = {}

        def one(key: str, kind: type[Record]) -> Record | None:
            entry = view.entries.get(key)
            if entry is None:
                return None
            known = before.get(key)
            if known is None or known[0] != entry.stamp:
                known = (entry.stamp, decode_record(entry.value, kind))
            self._decoded[key] = known
            return cast(Record, known[1])

        def member(key: str) -> MemberRecord:
            beat, about = view.entries[key], view.entries.get(keys.about(key.removeprefix(keys.members)))
            stamps, known = (beat.stamp, about and about.stamp), before.get(key)
            if known is None or known[0] != stamps:
                known = (stamps, decode_member(beat.value, about and about.value))
            self._decoded[key] = known
            return cast(MemberRecord, known[1])

        def under(prefix: str, kind: type[Record]) -> dict[str, Record]:
            found = ((key.removeprefix(prefix), one(key, kind)) for key in view.entries if key.startswith(prefix))
            return {name: record for name, record in found if record is not None}

        current = one(keys.round, Round)
        # A seal may have left some, which mean nothing.
        marks = keys.mark(current.number, "") if current is not None and not current.sealed else ""
        return GroupView(
            view,
            seen_at,
            one(keys.resource, Resource),
            current,
            one(keys.plan, Plan),
            {key.removeprefix(keys.members): member(key) for key in view.entries if key.startswith(keys.members)},
            frozenset(key.removeprefix(marks) for key in view.entries if marks and key.startswith(marks)),
            under(keys.claims, Claim),
            wall_at,
            one(keys.level, Level),
        )


def read_group(view: View, keys: Keys, seen_at: Millis) -> GroupView:
    """Return the group's records from a view of its whole prefix."""
    return GroupReader(keys).read(view, seen_at)


def base_name(name: str) -> str:
    """The name that a member was given, without the suffix that each start adds."""
    base, dash, _ = name.rpartition("-")
    return base if dash else name


def members_of(pin: Pin, zones: Mapping[str, str]) -> tuple[str, ...]:
    """The members among those of `zones`, each with its zone, that the pin means; sorted."""
    return tuple(sorted(name for name, zone in zones.items() if (base_name(name) == pin.instance if pin.instance else zone == pin.zone)))


def pinned(pins: Mapping[str, Pin], zones: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The members that each item is pinned to, of those of `zones`. An item whose members are all away is not among them."""
    found = {pin: members_of(pin, zones) for pin in {*pins.values()}}
    return {item: members for item, pin in pins.items() if (members := found[pin])}


def is_full(members: Collection[str]) -> bool:
    """Whether a group with these members takes no other one."""
    return len(members) >= MAX_MEMBERS or sum(map(len, members)) > MAX_NAMES - MAX_MEMBER_NAME


def owners(look: GroupView) -> dict[str, str]:
    """Return the member each item is given to, whether or not it serves it yet. Omits free items and items of members that have left.

    A member's address is in its record: `look.members[name].address`.
    """
    resource, plan = look.resource, look.plan
    if resource is not None and resource.strategy == "claims":
        owned = ((item, look.claims[item].owner) for item in resource.items if item in look.claims)
        return {item: owner for item, owner in owned if owner is not None and owner in look.members}
    if resource is None or resource.strategy != "rounds" or plan is None or plan.era != resource.era:
        return {}
    return {item: name for name, grants in plan.owners.items() if name in look.members for item in grants}


def rounds_of(view: View, keys: Keys) -> list[SealedRound]:
    """The last sealed rounds, newest first, from a view of the prefix `keys.history`."""
    return [msgspec.json.decode(entry.value, type=SealedRound) for entry in view.prefix(keys.history).values()][::-1]


def largest_commit(keys: Keys, items: Iterable[str], before: Iterable[str]) -> int:
    """Upper bound in bytes of a commit that seals a round over `items`; `before` are the items of the plan it replaces.

    A commit that changes only the resource is smaller, its limits included: each limit belongs to at least one of the items, whose name has
    the queue's, and pins are few.
    """
    # Each item may be awaited from its last owner, and from one that left before that and has not reported since.
    plan = max(MAX_PLAIN, packed_size(items, before) + _INFLATION)
    # Names occur in the plan and the participants of the round's two records, with quotes and brackets; plus marks, records and reports to
    # delete.
    named = 3 * (MAX_NAMES + 8 * MAX_MEMBERS)
    deleted = MAX_NAMES + MAX_CLEARED * len(keys.mark(0, "")) + MAX_GIVEN_UP * sum(map(len, keys.all_of("x" * MAX_MEMBER_NAME)))
    return plan + named + deleted + MAX_TOLD + _OTHER_RECORDS


@dataclass
class Writes:
    """A commit that a member wants to make. Without `hint`, watchers of the group need not be told of it."""

    checks: dict[str, Stamp | None] = field(default_factory=dict)
    unchanged: dict[str, Stamp] = field(default_factory=dict)
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: list[str] = field(default_factory=list)
    hint: bool = True

    def put(self, key: str, record: msgspec.Struct) -> None:
        self.puts[key] = encode_record(record)


@dataclass(frozen=True)
class Decision:
    """Decision of a member after a look.

    `owned`: the items to serve, each with its token, until `lease_deadline` unless a later look extends it. First stop items that were
    served and are missing here, or have another token. Then commit `writes`, which may record that they were stopped, and look again
    whatever the commit's outcome. Also look again on any possible change, and at `wake_at` at the latest. `left`: the member is out for
    good. `expected`: items that it will probably own within moments, since their owner's lease has run out. Others may still serve them.
    """

    owned: Mapping[str, Token]
    lease_deadline: Millis
    writes: Writes | None
    wake_at: Millis
    left: bool = False
    expected: frozenset[str] = frozenset()
