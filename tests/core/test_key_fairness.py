"""Fairness, weights, limits and rates by key, in a partition."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from sluiceway.contract.queue_settings import KeyRate, QueueSettings
from sluiceway.core.partition.key_flows import TURN_ITEMS, TURNS, KeyFlows, KeyRules, key_rules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import open_slices
from sluiceway.model.changes import Changes
from sluiceway.model.item_keys import hash_of
from sluiceway.model.requests import DONE, Settled
from tests.core.core_model import START, Rig, Row, batch_of


class Rated(Rig):
    """What a loaded partition does not know is how much of its rate a key has used up."""

    def commit(self) -> Changes | None:
        taken = self.machine.take_changes()
        if taken is not None:
            self.disk.apply(taken[0])
        return None if taken is None else taken[0]


def rig_of(keys: KeyRules) -> Rig:
    rig = Rated() if keys.interval else Rig()
    rig.follow(Rules(keys=keys))
    return rig


def produce(rig: Rig, key: str | None, count: int, now: int = START) -> None:
    rig.produce([Row(f"{key}".encode(), key=key) for _ in range(count)], now)


def leased(rig: Rig, want: int, now: int = START, *, settles: bool = True, runs: bool = False) -> list[str]:
    """The keys of the items of a lease."""
    lease = rig.machine.lease(want, "c", now + 1_000, now, runs=runs)
    rig.commit()
    if lease is None:
        return []
    served = rig.served(open_slices(lease))
    if settles:
        rig.settle([each.offset for each in served], DONE, now)
        rig.commit()
    return [each.payload.decode() for each in served]


def test_a_quiet_key_does_not_wait_for_a_flood() -> None:
    rig = rig_of(KeyRules(fair=True))
    produce(rig, "flood", 10_000)
    assert leased(rig, 1) == ["flood"]
    produce(rig, "quiet", 1)
    assert "quiet" in leased(rig, 1) + leased(rig, 1)
    produce(rig, "quiet", 3)
    assert Counter(leased(rig, 100))["quiet"] == 3


def test_without_fairness_it_does() -> None:
    rig = rig_of(KeyRules())
    produce(rig, "flood", 1_000)
    produce(rig, "quiet", 1)
    assert set(leased(rig, 500)) == {"flood"}


def test_new_keys_do_not_starve_one_that_waits() -> None:
    rig = rig_of(KeyRules(fair=True))
    produce(rig, "old", 200)
    found: Counter[str] = Counter()
    for number in range(200):
        produce(rig, f"new{number}", 1)
        found.update(leased(rig, 1))
    # A third: what it is not given goes to keys that have waited for less.
    assert 60 <= found["old"] <= 110


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_keys_get_their_shares(size: int) -> None:
    random = Random(size)
    weights = {f"k{number}": random.randint(1, 10) for number in range(100)}
    settings = QueueSettings(fair="key", key_weights=weights)
    rig = Rig()
    rig.machine.follow(Rules(keys=key_rules(settings)))
    for key, weight in weights.items():
        rig.machine.produce(batch_of([Row(key.encode(), key=key)] * (40 * weight)), START)
    total = sum(weights.values())
    found: Counter[str] = Counter()
    while found.total() < 20 * total:
        found.update(keys_of(rig, size))
    for key, weight in weights.items():
        share = 20 * weight
        # One turn more or less than others.
        turn = max(1, size // (10 * len(weights)), min(TURN_ITEMS, size // TURNS) // 10) * weight
        assert abs(found[key] - share) <= 0.05 * share + turn, (key, found[key], share)


def keys_of(rig: Rig, want: int) -> list[str]:
    """As `leased`, without the store."""
    machine = rig.machine
    lease = machine.lease(want, "c", START + 1_000, START)
    assert lease is not None
    found = []
    for part in lease.parts:
        keys = part.extent.blob.keys
        assert keys is not None
        for key, items in zip(*keys.split(part.extent.row + part.at, part.count), strict=True):
            found += [NAMES[key]] * items
    machine.close_lease(lease, START, Settled())
    return found


NAMES = {hash_of(f"k{number}"): f"k{number}" for number in range(100)}


def test_a_key_is_not_leased_beyond_its_limit() -> None:
    rig = rig_of(KeyRules(concurrency=3))
    produce(rig, "a", 10)
    produce(rig, None, 4)
    assert Counter(leased(rig, 100, settles=False)) == {"a": 3, "None": 4}
    assert leased(rig, 100, settles=False) == []
    rig.reload()
    assert rig.machine.servable == 0
    offsets = list(rig.machine.leases[1].parts[0].extent.rows_at(0, 1))
    rig.settle(offsets, DONE)
    assert leased(rig, 100, settles=False) == ["a"]


def test_a_rate_is_kept_and_used_up() -> None:
    rules = key_rules(QueueSettings(key_rate=KeyRate(10, burst=5)))
    rig = rig_of(rules)
    produce(rig, "a", 1_000)
    produce(rig, "b", 1_000)
    assert rig.machine.next_timer() == 0
    times: dict[str, list[int]] = {"a": [], "b": []}
    now = START
    for _ in range(3_000):
        rig.machine.tick(now)
        for key in leased(rig, 100, now):
            times[key].append(now)
        wakes_at = rig.machine.next_timer()
        assert wakes_at is not None
        now = max(now + 1, min(wakes_at, now + 7))
    for key, those in times.items():
        assert all(later - earlier >= 1_000 - 1 for earlier, later in zip(those, those[15:], strict=False)), key
        assert len(those) >= 0.95 * 10 * (now - START) / 1_000, key


def test_a_rate_allows_a_burst_after_a_pause_and_none_after_a_takeover() -> None:
    rig = rig_of(key_rules(QueueSettings(key_rate=KeyRate(10, burst=5))))
    rig.machine.tick(START)
    produce(rig, "a", 100)
    # Nobody knows what was leased before.
    assert leased(rig, 100) == []
    later = START + 600
    rig.machine.tick(later)
    assert len(leased(rig, 100, later)) == 5
    assert leased(rig, 100, later) == []
    rig.machine.tick(later + 100)
    assert len(leased(rig, 100, later + 100)) == 1
    rig.reload()
    rig.machine.tick(later + 150)
    assert leased(rig, 100, later + 150) == []


def test_a_key_that_waits_for_its_rate_wakes_once_and_says_so() -> None:
    rig = rig_of(key_rules(QueueSettings(order="key", key_rate=KeyRate(10, burst=1))))
    rig.machine.tick(START)
    for _ in range(50):
        produce(rig, "a", 1)
    flows = rig.machine.log.flows
    assert flows is not None
    assert len(flows._wakes) == 1
    (waiting,) = flows.most_waiting(1)
    assert waiting.blocked_by == "rate"
    for step in range(1, 6):
        rig.machine.tick(START + 100 * step)
        assert leased(rig, 10, START + 100 * step) == ["a"]
        assert len(flows._wakes) == 1


@pytest.mark.parametrize(("per_second", "burst"), [(6, 2), (1.5, 5), (0.6, 11), (600, 2)])
def test_a_key_that_has_used_up_its_rate_wakes_later_although_times_are_rounded(
    monkeypatch: pytest.MonkeyPatch, per_second: float, burst: int
) -> None:
    """An interval such as 166.666… ms: when the next item may be leased, and how many may be at that time, are rounded differently."""
    asked = 0
    allowed = KeyFlows._allowed

    def counted(flows: KeyFlows, number: int) -> int:
        nonlocal asked
        asked += 1
        assert asked < 20, "the key is woken without end"
        return allowed(flows, number)

    monkeypatch.setattr(KeyFlows, "_allowed", counted)
    begun = now = 1_795_000_000_000
    rig = rig_of(key_rules(QueueSettings(key_rate=KeyRate(per_second, burst=burst))))
    rig.machine.tick(now)
    produce(rig, "a", 100, now)
    for _ in range(100):
        asked = 0
        wakes_at = rig.machine.next_timer()
        assert wakes_at is not None
        now = wakes_at
        rig.machine.tick(now)
        leased(rig, 1, now)
    assert now - begun <= 1_000 / per_second * 100 + 200


def test_a_rate_is_remembered_while_a_key_has_nothing_waiting() -> None:
    rig = rig_of(key_rules(QueueSettings(key_rate=KeyRate(10, burst=1))))
    rig.machine.tick(START)
    now = START + 1_000
    rig.machine.tick(now)
    produce(rig, "a", 1, now)
    assert leased(rig, 1, now) == ["a"]
    produce(rig, "a", 1, now)
    assert leased(rig, 1, now + 50) == []
    rig.machine.tick(now + 100)
    assert leased(rig, 1, now + 100) == ["a"]


def test_keys_at_rest_are_looked_through_rarely_although_their_rates_are_low() -> None:
    rig = rig_of(key_rules(QueueSettings(key_rate=KeyRate(0.001, burst=1))))
    rig.machine.tick(START)
    now = START + 1_000_000
    rig.machine.tick(now)
    rig.produce([Row(b"", key=f"{number}") for number in range(2_500)], now)
    assert len(leased(rig, 2_500, now)) == 2_500
    flows = rig.machine.log.flows
    assert flows is not None
    looks = 0
    for step in range(100):
        before = flows._past
        rig.machine.tick(now + step)
        looks += flows._past is not before
    assert looks == 1
    assert len(flows._past) == 2_500
    # They are not kept for good.
    now += 1_000_001
    rig.produce([Row(b"", key=f"other {number}") for number in range(3_000)], now)
    assert len(leased(rig, 3_000, now)) == 3_000
    rig.machine.tick(now)
    assert len(flows._past) == 3_000
