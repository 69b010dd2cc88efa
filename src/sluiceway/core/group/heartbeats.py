"""Heartbeats, common to all strategies: a member beats, watches the beats of others, and serves no longer than its lease."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from sluiceway.core.group.group_records import (
    PATIENCE,
    GroupView,
    Keys,
    LoadReport,
    MemberRecord,
    Parameters,
    Resource,
    Writes,
    put_member,
)
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import Levels

FEW = 10
"""Members up to which all are told of each commit. In larger groups each beat would wake all others, so that looks would grow with the
square of the members: beats and marks are seen by those who look for reasons of their own."""


class LastChanges:
    """Time of each value's last observed change, by this member's own clock."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[object, Millis]] = {}

    def since(self, name: str, value: object, now: Millis) -> Millis:
        known = self._values.get(name)
        if known is None or known[0] != value:
            known = self._values[name] = (value, now)
        return known[1]

    def keep(self, prefix: str, names: Iterable[str]) -> None:
        """Forget the entries under the prefix that `names` does not contain."""
        wanted = {prefix + name for name in names}
        for name in [name for name in self._values if name.startswith(prefix) and name not in wanted]:
            del self._values[name]


class Beating:
    """A member's own record, and its knowledge of the others: which are alive, and until when they may serve."""

    def __init__(self, keys: Keys, name: str, address: str = "", levels: Levels | None = None, release: str = "", zone: str = "") -> None:
        self.keys, self.name, self.address = keys, name, address
        self.levels, self.release, self.zone = levels, release, zone
        self.seen = LastChanges()
        self._beat = 0
        self._beat_at: Millis | None = None
        self._joined_at: Millis = 0
        self._sent: dict[int, Millis] = {}
        """For each beat not yet known to be recorded: until when it lets the member serve."""
        self._confirmed: Millis = 0
        """The same for the last beat known to be recorded; 0: none."""
        self.leaving = False
        self._looked_at: Millis | None = None
        self._report: LoadReport | None = None
        """The report of loads to send, until it is known to be recorded."""
        self._reported_with: set[int] = set()
        """The beats that carried it."""
        self._looking_since: Millis = 0
        """Since when there was no long time without a look."""

    def note(self, look: GroupView) -> None:
        """Update from the members' records."""
        lease = 0 if look.resource is None else look.resource.parameters.lease_timeout
        if self._looked_at is None or look.seen_at - self._looked_at > lease // 2:
            self._looking_since = look.seen_at
        self._looked_at = look.seen_at
        self.seen.keep("beat/", look.members)
        for name, record in look.members.items():
            self.seen.since(f"beat/{name}", record.beat, look.seen_at)
        mine = look.members.get(self.name)
        if mine is None:
            # Not a member, or given up as dead: others may own what it had.
            self._confirmed = 0
            self._sent.clear()
        elif mine.beat in self._sent:
            self._confirmed = self._sent[mine.beat]
            self._sent = {beat: deadline for beat, deadline in self._sent.items() if beat > mine.beat}
        if mine is not None and mine.beat in self._reported_with:
            self._report, self._reported_with = None, set()

    def report(self, report: LoadReport) -> None:
        """Put the report into beats until one of them is known to be recorded."""
        self._report, self._reported_with = report, set()

    def lease_deadline(self) -> Millis:
        """End of this member's lease, until which it may serve its items; 0: no lease."""
        # A beat with a shorter lease binds from when it is sent: others may rely on it before this member knows that it was recorded.
        return min(self._confirmed, *self._sent.values()) if self._sent else self._confirmed

    def silent_at(self, look: GroupView, name: str, parameters: Parameters) -> Millis:
        """Time at which the member certainly serves nothing any more, if its beat stays unchanged."""
        record = look.members[name]
        since = self.seen.since(f"beat/{name}", record.beat, look.seen_at)
        # By the lease in its record: it may not have seen the newest parameters.
        return since + max(parameters.member_timeout, math.ceil(PATIENCE * record.lease_timeout))

    def lapses_at(self, look: GroupView, name: str) -> Millis:
        """Time at which the member's lease has run out, by this member's clock, if its beat stays unchanged.

        Not counted from before a time without looks: when the meta store was away, all have been silent, and come back one by one.
        """
        record = look.members[name]
        since = self.seen.since(f"beat/{name}", record.beat, look.seen_at)
        return max(since, self._looking_since) + record.lease_timeout

    def lapsed(self, look: GroupView) -> frozenset[str]:
        """The other members whose leases have run out. They are probably dead, and are given up once they are silent."""
        return frozenset(name for name in look.members if name != self.name and look.seen_at >= self.lapses_at(look, name))

    def silent(self, look: GroupView, name: str, parameters: Parameters) -> bool:
        """Whether that member's beat stood still for so long that, if that is unchanged when recorded, it surely serves nothing."""
        return name != self.name and look.seen_at >= self.silent_at(look, name, parameters)

    def late(self, look: GroupView, now: Millis) -> frozenset[str]:
        """The members not seen alive for half of their lease: not silent yet, but to be given nothing new."""
        others = ((name, record) for name, record in look.members.items() if name != self.name)
        return frozenset(
            name for name, record in others if now - self.seen.since(f"beat/{name}", record.beat, look.seen_at) > record.lease_timeout // 2
        )

    def still(self, look: GroupView, now: Millis) -> dict[str, Millis]:
        """Milliseconds that each member's beat has stood still, as observed by this member."""
        return {name: now - self.seen.since(f"beat/{name}", record.beat, look.seen_at) for name, record in look.members.items()}

    def live(self, look: GroupView, parameters: Parameters) -> list[str]:
        """The participants of the next round or division, by name: members neither silent nor leaving."""
        return [name for name in sorted(look.members) if not look.members[name].leaving and not self.silent(look, name, parameters)]

    def beat(self, look: GroupView, resource: Resource, writes: Writes) -> Writes:
        """Put this member's record with a new beat into a commit. By then it has stopped the items that this look takes away."""
        key = self.keys.member(self.name)
        self._joined_at = self._joined_at or look.wall_at
        self._beat += 1
        self._beat_at = look.seen_at
        self._sent[self._beat] = look.seen_at + resource.parameters.lease_timeout
        writes.checks[key] = look.stamp(key)
        record = self._record(look, resource)
        writes.hint = self._concerns_all(look, record, writes)
        if self.name not in look.members and self.levels is not None:
            # The level may be about to rise to one that this member does not understand.
            writes.checks[self.keys.level] = look.stamp(self.keys.level)
        if self._report is not None and not writes.puts and not writes.deletes:
            # Alone with the beat: the commit that seals a round is large enough.
            writes.put(self.keys.load(self.name), self._report)
            self._reported_with.add(self._beat)
        put_member(writes, self.keys, self.name, record, joins=self.keys.about(self.name) not in look.view.entries)
        return writes

    def _concerns_all(self, look: GroupView, record: MemberRecord, writes: Writes) -> bool:
        """Whether the others are to be told of the commit. In a large group not of beats and marks, for which only a few wait."""
        before = look.members.get(self.name)
        is_routine = before is not None and before.leaving == record.leaving and not writes.deletes
        return len(look.members) <= FEW or not is_routine or any(not key.startswith(self.keys.marks) for key in writes.puts)

    def _record(self, look: GroupView, resource: Resource) -> MemberRecord:
        return MemberRecord(
            beat=self._beat,
            lease_timeout=resource.parameters.lease_timeout,
            applied=look.plan.round if look.plan else 0,
            era=resource.era,
            leaving=self.leaving,
            address=self.address,
            joined_at=self._joined_at,
            levels=self.levels,
            release=self.release,
            zone=self.zone,
        )

    def one_era(self, look: GroupView, resource: Resource) -> bool:
        """Whether no member serves by the rules of an earlier era any more."""
        return all(record.era >= resource.era for record in look.members.values())

    def beat_due_at(self, look: GroupView, resource: Resource) -> Millis:
        """Due time of the next beat: now if this member's record is missing or outdated."""
        mine = look.members.get(self.name)
        if mine is None or self._beat_at is None or msgspec.structs.replace(mine, beat=self._beat) != self._record(look, resource):
            return look.seen_at
        return self._beat_at + resource.parameters.beat_interval
