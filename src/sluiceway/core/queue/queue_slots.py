"""Concurrency of a whole queue: how many items each of its partitions may have leased, out of one record.

A pure machine. The record in the meta store has a quota for each partition, changed by compare-and-swap; together they are the limit at
most. A partition leases below its quota only. Its owner raises the quota when some of the limit is free. To lower it, the owner first
leases no more than that, and then writes it. Leased items move with their partition, and so does its quota.

A new owner writes its token to the partition's quota before it leases; an earlier owner, whose token is lower, then changes it no more.
What a partition has leased is what its store has: a commit in flight may fail, so of the counts before and after it the higher one holds.

When the limit is introduced, partitions may have items leased already. Each owner first records how many (`unclaimed` are the partitions
of which that is not known yet); until all are, no quota is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from sluiceway.kernel.clock import Millis

Token = tuple[int, int]
"""An owner's token for a partition: a later owner's is greater."""

AT_ONCE: Final[Millis] = 5
BETWEEN: Final[Millis] = 100
"""Delay of the next look at the record, after one that gave nothing to leases that waited: if a partition here has what another lacks, and
if others have it all."""
LOOK: Final[Millis] = 1_000
"""How often an instance that could give something looks whether another wants it, and how long it remembers what it wanted and used."""
SLICE: Final[Millis] = 2_000
"""How long partitions take turns for, where the limit is below the number of those that want something."""
FRESH: Final[Millis] = 5_000
"""How long what a partition needs is believed. Its owner may have died, and nothing may be kept for it for ever."""
RENEW: Final[Millis] = 2_000
"""How often an unmet need is written again."""


class Share(msgspec.Struct, frozen=True):
    """A partition's `quota`, by the owner with that `token`, which needed `need` as of the time `at`."""

    token: Token
    quota: int
    need: int = 0
    at: Millis = 0


class SlotRecord(msgspec.Struct, frozen=True):
    """The limit, and what each partition has of it. `unclaimed`: partitions that may have any number of leased items."""

    limit: int
    unclaimed: tuple[int, ...] = ()
    shares: dict[int, Share] = {}

    @property
    def free(self) -> int:
        """What may still be given out; below 0 after the limit was lowered or introduced."""
        return self.limit - sum(each.quota for each in self.shares.values())


class Held(NamedTuple):
    """A partition as its owner knows it: the `leased` items that its store has, or may have after the commit in flight, and those that
    it could use beyond, `wanted`. `is_open`: whether that is known."""

    token: Token
    is_open: bool
    leased: int = 0
    wanted: int = 0


class Decided(NamedTuple):
    """The record as it is to be, and what each of the own partitions is to have leased at most from now on, if less than its quota."""

    record: SlotRecord
    ceilings: dict[int, int]


def targets(limit: int, needs: Mapping[int, int], now: Millis) -> dict[int, int]:
    """Divide the limit: a partition gets less than it needs only where none gets more than it. What is left over is shared out, too.

    Where more partitions want something than there is, chance decides for each time slice, alike at all instances.
    """
    found = dict.fromkeys(needs, 0)
    wanting = sorted((number for number, need in needs.items() if need > 0), key=lambda number: (needs[number], number))
    left, short = limit, list(wanting)
    while short and needs[short[0]] <= left // len(short):
        number = short.pop(0)
        found[number] = needs[number]
        left -= needs[number]
    if among := short or wanting:
        part, more = divmod(left, len(among))
        turn = now // SLICE if short and not part else None
        # In a fixed order, some would wait for as long as leases end at its beat.
        among.sort(key=lambda number: (b"" if turn is None else blake2b(f"{turn}.{number}".encode(), digest_size=8).digest(), number))
        for at, number in enumerate(among):
            found[number] += part + (at < more)
    return found


def decide(record: SlotRecord, held: Mapping[int, Held], gone: Collection[int], now: Millis) -> Decided:
    """Decide about the own partitions. `gone`: numbers of partitions that the queue had and has no more, with nothing leased in them."""
    shares = {number: share for number, share in record.shares.items() if number not in gone}
    mine = {number: each for number, each in held.items() if number not in shares or shares[number].token <= each.token}
    unclaimed = tuple(number for number in record.unclaimed if number not in gone and not (number in mine and mine[number].is_open))
    mine = {number: each for number, each in mine.items() if number not in unclaimed}
    for number, each in mine.items():
        share = shares.get(number, Share(each.token, 0))
        shares[number] = msgspec.structs.replace(share, token=each.token, quota=max(share.quota, each.leased))
    needs = {number: _need(share, mine.get(number), record.limit, now) for number, share in shares.items()}
    wanted = targets(record.limit, needs, now)
    ceilings = _lower(record.limit, shares, mine, needs, wanted)
    if not unclaimed:
        _raise(record.limit, shares, mine, wanted)
    for number in mine:
        shares[number] = _noted(shares[number], record.shares.get(number), needs[number], now)
    return Decided(SlotRecord(record.limit, unclaimed, shares), ceilings)


def _lower(
    limit: int, shares: dict[int, Share], mine: Mapping[int, Held], needs: Mapping[int, int], wanted: Mapping[int, int]
) -> dict[int, int]:
    """Give what others lack, or what is not used. Returns the ceilings of the partitions that have too much."""
    if sum(each.quota for each in shares.values()) > limit:
        # The limit was lowered or introduced: nothing is leased before less than that is.
        for number, each in mine.items():
            if each.is_open:
                shares[number] = msgspec.structs.replace(shares[number], quota=each.leased)
        if sum(each.quota for each in shares.values()) > limit:
            return dict.fromkeys(mine, 0)
    missing = sum(max(0, min(need, wanted[number]) - shares[number].quota) for number, need in needs.items())
    is_short = missing > limit - sum(each.quota for each in shares.values())
    ceilings = {}
    for number, each in mine.items():
        if each.is_open and shares[number].quota > wanted[number] and (is_short or not needs[number]):
            ceilings[number] = wanted[number]
            shares[number] = msgspec.structs.replace(shares[number], quota=max(wanted[number], each.leased))
    return ceilings


def _raise(limit: int, shares: dict[int, Share], mine: Mapping[int, Held], wanted: Mapping[int, int]) -> None:
    """Take what is free for those that want it, the one with least first."""
    free = limit - sum(each.quota for each in shares.values())
    for number in sorted(mine, key=lambda number: (shares[number].quota, number)):
        more = min(free, wanted[number] - shares[number].quota)
        if more > 0 and mine[number].is_open and mine[number].wanted:
            shares[number] = msgspec.structs.replace(shares[number], quota=shares[number].quota + more)
            free -= more


def _need(share: Share, mine: Held | None, limit: int, now: Millis) -> int:
    """What a partition needs."""
    if mine is not None and mine.is_open:
        need = mine.leased + mine.wanted
        # Rounded up, so that it does not change with each item.
        return min(limit, 1 << (need - 1).bit_length()) if mine.wanted else need
    # What it has is in use, as far as is known.
    return max(share.quota, share.need) if now - share.at < FRESH else share.quota


def _noted(share: Share, before: Share | None, need: int, now: Millis) -> Share:
    """Note the need where others have to know: what is not met, as long as it is not, and that it no longer is."""
    was = before or Share(share.token, 0)
    if need > share.quota:
        is_new = need != was.need or now - was.at >= RENEW
    else:
        is_new = was.need > share.quota
    return msgspec.structs.replace(share, need=need if is_new else was.need, at=now if is_new else was.at)


class _Use:
    """What a partition has leased, and could lease, as its owner saw it lately."""

    __slots__ = ("_before", "_most", "_since", "_unmet", "_unmet_at", "is_open", "leased", "unmet")

    def __init__(self) -> None:
        self.is_open = False
        self.leased = self.unmet = 0
        self._most = self._before = self._unmet = 0
        """The most that was leased in the present LOOK ms, and in those before; the last unmet demand, and its time."""
        self._since: Millis = 0
        self._unmet_at: Millis = 0

    def note(self, is_open: bool, leased: int, unmet: int, now: Millis) -> None:
        if leased > self.leased:
            # It got some of what it wanted.
            self._unmet = 0
        self.is_open, self.leased, self.unmet = is_open, leased, unmet
        if not 0 <= now - self._since < LOOK:
            self._before = self._most if 0 <= now - self._since < 2 * LOOK else 0
            self._most, self._since = 0, now
        self._most = max(self._most, leased)
        if unmet:
            self._unmet, self._unmet_at = unmet, now

    def held(self, token: Token, now: Millis) -> Held:
        if not self.is_open:
            return Held(token, False)
        unmet = self._unmet if now - self._unmet_at < LOOK else 0
        used = max(self._most, self._before) if now - self._since < LOOK else 0
        return Held(token, True, self.leased, max(0, used - self.leased, unmet))


class QueueSlots:
    """One instance's quotas of a queue, and when it looks at the record.

    At the begin of each scheduling cycle: `quota` of each partition. After leases were served: `note` of each, then `wish`. When that says
    so, the driver reads the record, decides with `held`, calls `begin`, writes what has changed, and reports `done` or `failed`.

    A change whose outcome is not known may still land, and lower quotas. So `done` may follow only when another change has landed since.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.wake_at: Millis | None = None
        """When a cycle has to look again, without an event."""
        self.holds_back = False
        """Whether leases waited for the limit in the last cycle."""
        self.is_coming = False
        """Whether what they lack may come within a moment."""
        self._quotas: dict[int, int] = {}
        """What the record has for the partitions that this instance has claimed."""
        self._ceilings: dict[int, int] = {}
        self._uses: dict[int, _Use] = {}
        self.is_busy = False
        """Whether a wish has not been answered."""
        self._looked_at: Millis = -LOOK
        self._refused_at: Millis = -LOOK
        """When a look last gave nothing to leases that waited."""
        self.offers = True
        """Whether consumers of other instances may be told of items here, although there is no quota for them yet."""

    def follow(self, limit: int) -> None:
        """The limit is this one from now on. Nothing is leased under the former one any more."""
        if limit != self._limit:
            self._limit = limit
            self._quotas.clear()

    def quota(self, number: int) -> int:
        """The most items of that partition that may be leased."""
        quota = self._quotas.get(number, 0)
        return min(quota, self._ceilings.get(number, quota))

    def note(self, number: int, is_open: bool, leased: int, unmet: int, now: Millis) -> None:
        """Note the state of a partition. `leased`: as in `Held`. `unmet`: items that waiting leases could be given if the quota were
        higher; 0 while it is not used up."""
        self._uses.setdefault(number, _Use()).note(is_open, leased, unmet, now)

    def drop(self, number: int) -> None:
        """Forget a partition that is no longer owned: its quota stays in the record for its next owner."""
        for each in (self._quotas, self._ceilings, self._uses):
            each.pop(number, None)

    def wish(self, now: Millis) -> bool:
        """Whether to look at the record now."""
        self.wake_at = None
        uses = self._uses.items()
        self.holds_back = self.is_coming = any(each.unmet for _, each in uses)
        self.offers = now - self._refused_at >= LOOK
        if self.is_busy:
            return False
        has_spare = any(self._quotas.get(number, 0) > each.leased for number, each in uses if each.is_open)
        if self.holds_back or any(self._is_due(number, each) for number, each in uses):
            # Where the last look has helped, or a partition here has what another lacks, the next one will help.
            was_refused = self._refused_at == self._looked_at
            due = self._looked_at + (0 if not was_refused else AT_ONCE if has_spare else BETWEEN)
            self.is_coming &= due <= now + AT_ONCE
        elif has_spare or not self.offers:
            due = self._looked_at + LOOK
        else:
            return False
        if due > now:
            self.wake_at = due
            return False
        self.is_busy = True
        return True

    def _is_due(self, number: int, use: _Use) -> bool:
        """Whether the record lacks something: a claim, or that items which are to be others' are no longer leased."""
        if not use.is_open:
            return False
        quota = self._quotas.get(number)
        return quota is None or quota > max(use.leased, self._ceilings.get(number, quota))

    def held(self, tokens: Mapping[int, Token], now: Millis) -> dict[int, Held]:
        """The own partitions, for `decide`."""
        return {number: each.held(tokens[number], now) for number, each in self._uses.items() if number in tokens}

    def begin(self, before: SlotRecord, decided: Decided, tokens: Mapping[int, Token]) -> None:
        """Keep to the record as it was read and as it is to be, whichever has less, until `done`: only then may lower quotas be written."""
        read, after = self._own(before, tokens), decided.record.shares
        both = read.keys() & after.keys()
        self._quotas = {number: min(quota, read[number], after[number].quota) for number, quota in self._quotas.items() if number in both}
        self._ceilings = dict(decided.ceilings)

    def done(self, decided: Decided, tokens: Mapping[int, Token], now: Millis) -> None:
        """The record is the decided one, durably."""
        self.is_busy, self._looked_at = False, now
        had, self._quotas = self._quotas, self._own(decided.record, tokens)
        if self.holds_back and not any(quota > had.get(number, 0) for number, quota in self._quotas.items()):
            self._refused_at = now
        self._ceilings = dict(decided.ceilings)

    def failed(self, now: Millis) -> None:
        """It could not be read or changed, or that is not known."""
        self.is_busy, self._looked_at, self._refused_at = False, now, now

    def _own(self, record: SlotRecord, tokens: Mapping[int, Token]) -> dict[int, int]:
        """The quotas of the partitions that this instance has claimed."""
        found = ((number, record.shares.get(number)) for number in self._uses if number not in record.unclaimed)
        return {number: share.quota for number, share in found if share is not None and share.token == tokens.get(number)}
