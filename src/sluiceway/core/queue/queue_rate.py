"""Rate of a whole queue: tokens that its instances take from one record, each before it leases an item.

A pure machine. The record is a token bucket in the meta store, changed by compare-and-swap. `take` decides a change of it: tokens that the
bucket has, and tokens that it will have within the next HORIZON ms, which one instance thereby reserves. A token may be used from its
release on, for KEEP ms, by the instance that took it, for any of its partitions. So a crash, a lost answer or a partition that moves can
waste tokens, and never makes more of them.

The releases of all tokens, whichever instance has them, form one sequence that keeps to the rate and the burst: within t ms, at most
`burst + per_second * t / 1000` are released. As a token is used up to KEEP ms later, within t ms at most `burst + per_second * (t + KEEP)
/ 1000` items are leased.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from sluiceway.contract.queue_settings import Rate
from sluiceway.kernel.clock import Millis

TOKEN: Final = 1_000_000_000
"""Units of a token: with a billion, each rate that a setting can have gives a whole number of them in a millisecond."""
HORIZON: Final[Millis] = 400
"""How far ahead tokens are reserved. One change of the record then serves many leases, and an instance loses no token while it writes."""
YIELD: Final[Millis] = 200
"""By how much less the instance that took last may look ahead: the one that has waited longest finds the next token first."""
REFILL_BELOW: Final[Millis] = 200
"""More tokens are taken once those left are an instance's part of what comes in this time, or less."""
KEEP: Final[Millis] = 500
"""How long a token may be used after its release: longer than a slow commit, for which a partition's leases wait. Without an end, an
instance could save up a second burst."""
WRONG_CLOCK: Final[Millis] = 60_000
"""A record that is further ahead of this instance's clock was written by a wrong one. To wait until then could stop the queue for years."""
BETWEEN: Final[Millis] = 50
"""Least time between two changes by one instance, while tokens can only be reserved."""
AFTER_FAILURE: Final[Millis] = 200
"""Delay before the record is tried again after an error of the meta store."""
REMOTE: Final[Millis] = 1_000
"""How far ahead an instance promises tokens to consumers of other instances, who wait that long for its items."""
FORGET: Final[Millis] = 5_000
"""How long an instance that took tokens counts as one that wants more; at low rates, for as long as four tokens take."""
MAX_TAKERS: Final = 16


class RateRecord(msgspec.Struct, frozen=True):
    """The bucket: `level` units as of the time `at`, under the rate of that `version` of the queue's settings. Below 0, tokens are
    reserved.

    `takers`: the instances that took tokens last, each with the time, the most recent at the end.
    """

    version: int
    rate: Rate
    level: int
    at: Millis
    takers: tuple[tuple[str, Millis], ...] = ()


class Reservation:
    """Tokens that an instance took. They are released one after the other, from when the bucket would have had them."""

    __slots__ = ("_count", "_gone", "_level", "_per_ms", "_since")

    def __init__(self, level: int, since: Millis, per_ms: int, count: int) -> None:
        self._level, self._since, self._per_ms, self._count = level, since, per_ms, count
        self._gone = 0
        """Tokens used, or not used in time."""

    def _released(self, now: Millis) -> int:
        return max(0, min(self._count, (self._level + self._per_ms * (now - self._since)) // TOKEN))

    def available(self, now: Millis) -> int:
        """Tokens that may be used now. Those that were not used in time are dropped."""
        self._gone = max(self._gone, self._released(now - KEEP) if now - KEEP >= self._since else 0)
        return max(0, self._released(now) - self._gone)

    def use(self, count: int) -> None:
        """Use that many of the available tokens."""
        self._gone += count

    @property
    def left(self) -> int:
        """Tokens that are, or will be, available."""
        return self._count - self._gone

    @property
    def next_at(self) -> Millis:
        """When the next token is released."""
        return self._since + max(0, _ms_until((self._gone + 1) * TOKEN - self._level, self._per_ms))


class Taken(NamedTuple):
    """A change of the record, and the tokens that it gives once it is durable; None: too few are left."""

    record: RateRecord
    tokens: Reservation | None


def per_ms(rate: Rate) -> int:
    """Units that the bucket gets in a millisecond."""
    return max(1, round(rate.per_second * TOKEN / 1_000))


def _ms_until(units: int, speed: int) -> Millis:
    return -(-units // speed)


def brought_to(record: RateRecord | None, rate: Rate, version: int, now: Millis) -> RateRecord:
    """The record as of now, under that rate. Without one the bucket is full. A change of the rate keeps what is in the bucket, up to the
    new burst, and drops what is reserved, since the instances drop it, too."""
    if record is None:
        return RateRecord(version, rate, rate.burst * TOKEN, now)
    at = now if record.at > now + WRONG_CLOCK else record.at
    # The time never goes back: an instance with a slow clock adds nothing that one with a fast clock has added.
    level = min(record.rate.burst * TOKEN, record.level + per_ms(record.rate) * max(0, now - at))
    if record.rate != rate:
        level = min(rate.burst * TOKEN, max(0, level))
    forget = now - max(FORGET, 4 * _ms_until(TOKEN, per_ms(rate)))
    takers = tuple(each for each in record.takers if each[1] > forget)
    return RateRecord(max(version, record.version), rate, level, max(at, now), takers)


def _instances(record: RateRecord, name: str) -> list[str]:
    """Those that share the rate, the one of that name included; who took last is the last one."""
    names = [each for each, _ in record.takers]
    return names if name in names else [name, *names]


def horizon(record: RateRecord, name: str) -> Millis:
    """How far ahead that instance may reserve tokens."""
    names = _instances(record, name)
    return HORIZON - YIELD * names.index(name) // max(1, len(names) - 1)


def take(record: RateRecord | None, rate: Rate, version: int, name: str, want: int, until: Millis, now: Millis) -> Taken | None:
    """Take up to `want` tokens that are released by `until`, for the instance of that name; it leases no later. Of those to come, it gets
    its part.

    None: the record is of later settings than these, which this instance is about to learn.
    """
    if record is not None and record.version > version:
        return None
    current = brought_to(record, rate, version, now)
    speed = per_ms(rate)
    ahead = max(0, min(until - now, horizon(current, name)))
    part = max(1, speed * HORIZON // TOKEN // len(_instances(current, name)))
    count = min(want, max(0, (current.level + speed * ahead) // TOKEN), max(0, current.level // TOKEN) + part)
    if count <= 0:
        return Taken(current, None)
    takers = (*(each for each in current.takers if each[0] != name), (name, now))[-MAX_TAKERS:]
    after = RateRecord(current.version, rate, current.level - count * TOKEN, current.at, takers)
    return Taken(after, Reservation(current.level, now, speed, count))


class QueueRate:
    """One instance's tokens of a queue, and when it takes more.

    In each scheduling cycle: `available`, `use` for each lease, `wish` at the end. The answer to a wish is `taken` or `failed`.
    """

    def __init__(self, rate: Rate, version: int) -> None:
        self.rate = rate
        self.version = version
        self.name = ""
        """The instance's, by which the rate is shared out: that of its last `taken`."""
        self.record: RateRecord | None = None
        """The record as last seen; others may have changed it."""
        self.taking = False
        """Whether a wish has not been answered."""
        self.wake_at: Millis | None = None
        """When a cycle has to look again, without an event."""
        self.offered = rate.burst
        """Items that may be leased within REMOTE ms, as far as was known in the last cycle."""
        self.holds_back = False
        """Whether leases waited for tokens in the last cycle."""
        self._held: list[Reservation] = []
        self._try_at: Millis = 0
        self._recent, self._before, self._counts_since = 0, 0, 0
        """Tokens used within the present HORIZON ms, and in those before; when the present ones began."""

    def available(self, now: Millis) -> int:
        """Items that may be leased now."""
        found = sum(each.available(now) for each in self._held)
        self._held = [each for each in self._held if each.left > 0]
        return found

    def use(self, count: int, now: Millis) -> None:
        """Note a lease of that many items; no more than are available."""
        self._count(now)
        self._recent += count
        for each in self._held:
            those = min(count, each.available(now))
            each.use(those)
            count -= those
        assert not count, "items are leased only for tokens"

    def _count(self, now: Millis) -> None:
        gone = now - self._counts_since
        if not 0 <= gone < HORIZON:
            self._before = self._recent if 0 <= gone < 2 * HORIZON else 0
            self._recent, self._counts_since = 0, now

    def wish(self, demand: int, servable: int, until: Millis, now: Millis) -> int:
        """The tokens to take now, 0 for none, for waiting leases that could be given `demand` more of the `servable` items, by `until` at
        the latest."""
        self.wake_at = None
        left = sum(each.left for each in self._held)
        self.offered = left + self._within(REMOTE, now)
        self.holds_back = demand > 0 and self.is_used_up(now)
        if self.taking or demand <= 0:
            if not self.taking and not self.offered:
                self.wake_at = max(now + 1, self._released_at(now) - REMOTE)
            return 0
        if self.available(now):
            # What waits cannot use them; an event will say when it can.
            return 0
        sharing = 1 if self.record is None else len(_instances(self.record, self.name))
        due = self._due(until, now) if left < demand and left * TOKEN * sharing <= per_ms(self.rate) * REFILL_BELOW else None
        if due is not None and due <= now:
            self._count(now)
            self.taking = True
            return min(servable, max(demand, self._recent, self._before)) - left
        times = [each.next_at for each in self._held] + ([] if due is None else [due])
        self.wake_at = min(times, default=None)
        return 0

    def _due(self, until: Millis, now: Millis) -> Millis | None:
        """When the next attempt is worth it, as far as is known; None: not before `until`."""
        if self.record is None:
            return self._try_at
        released = self._released_at(now)
        if released > max(until, now):
            return None
        return max(self._try_at, released - horizon(self.record, self.name))

    def _released_at(self, now: Millis) -> Millis:
        """When the bucket has its next token, as far as is known."""
        level = brought_to(self.record, self.rate, self.version, now).level
        return now + max(0, _ms_until(TOKEN - level, per_ms(self.rate)))

    def _within(self, time: Millis, now: Millis) -> int:
        """Tokens that the bucket has within that time, as far as is known."""
        level = brought_to(self.record, self.rate, self.version, now).level
        return max(0, (level + per_ms(self.rate) * time) // TOKEN)

    def is_used_up(self, now: Millis) -> bool:
        """Whether an item that is ready now has to wait for a token, as far as is known."""
        return not self.available(now) and not self._within(0, now)

    def taken(self, record: RateRecord, tokens: Reservation | None, name: str, now: Millis) -> None:
        """The record is this one, and the tokens are those of the instance of that name, which this is."""
        self.name = name
        self.taking, self.record = False, record
        if tokens is not None:
            self._held.append(tokens)
        self._try_at = now if record.level >= TOKEN else now + BETWEEN

    def failed(self, now: Millis) -> None:
        """The record could not be changed, or it is not known whether it was: no token comes of it."""
        self.taking, self.record = False, None
        self._try_at = now + AFTER_FAILURE
