"""What holds up a key in order: the item that the others wait for, wherever it is, and how many wait."""

from __future__ import annotations

from sluiceway.core.partition.held_keys import Holder, failing, holder_before, holder_of, keys_in, longest_held
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import open_slices
from sluiceway.core.partition.records import LeaseState
from sluiceway.kernel.clock import Millis
from sluiceway.model.item_keys import hash_of
from sluiceway.model.requests import Disposition, Settled
from tests.core.core_model import START, Rig, Row

ADA, BOB = hash_of("ada"), hash_of("bob")
HOUR: Millis = 3_600_000


def rig(ada: int = 4, bob: int = 2, none: int = 0) -> Rig:
    """A partition in order. The items of `ada` have the offsets from 0 on."""
    found = Rig()
    found.follow(Rules(0, keys=KeyRules(order=True)))
    found.produce(
        [*(Row(b"a", key="ada") for _ in range(ada)), *(Row(b"b", key="bob") for _ in range(bob)), *(Row(b"-") for _ in range(none))]
    )
    found.commit()
    return found


def lease(rig: Rig, want: int = 100, now: Millis = START, client: str = "c", runs: bool = False) -> LeaseState:
    found = rig.machine.lease(want, client, now + HOUR, now, runs=runs)
    assert found is not None
    rig.commit()
    return found


def retry(rig: Rig, offset: int, times: int, after: Millis | None = None) -> None:
    """The item that was first given this offset fails."""
    for _ in range(times):
        held = lease(rig, 1)
        (served,) = rig.served(open_slices(held))
        assert served.origin == offset
        rig.settle([served.offset], Disposition("retry", retry_after=after))
        rig.commit()


def test_a_lease_holds_a_key_up_for_as_long_as_it_has_its_item() -> None:
    partition = rig()
    assert holder_of(partition.machine, ADA) is None
    lease(partition, 1, client="slow")
    held = Holder(0, 0, ADA, 3, 0, "slow", leased_at=START)
    assert holder_of(partition.machine, ADA) == holder_before(partition.machine, 3) == held
    assert holder_of(partition.machine, BOB) is None
    assert longest_held(partition.machine, START - 1, START) == []
    assert longest_held(partition.machine, START, START) == [held]
    partition.settle([0])
    assert holder_of(partition.machine, ADA) is None


def test_a_takeover_does_not_know_how_long_a_lease_has_lasted() -> None:
    partition = rig()
    lease(partition, 1, now=START - 50)
    lease(partition, 1, now=START)
    partition.reload()
    assert [each.leased_at for each in partition.machine.leases.values()] == [START, START]
    assert [(each.key, each.behind) for each in longest_held(partition.machine, START, START)] == [(ADA, 3)]


def test_a_retry_holds_its_key_up_until_it_is_due() -> None:
    partition = rig()
    retry(partition, 0, 1, after=HOUR)
    held = Holder(0, 0, ADA, 3, 1, due_at=START + HOUR)
    assert holder_of(partition.machine, ADA) == holder_before(partition.machine, 1) == held
    assert longest_held(partition.machine, START, START + HOUR) == []
    assert longest_held(partition.machine, START, START + HOUR - 1) == [held]
    partition.machine.tick(START + HOUR)
    assert holder_of(partition.machine, ADA) is None


def test_an_item_that_fails_again_and_again_is_named_by_its_first_offset_wherever_it_is() -> None:
    partition = rig(bob=0)
    retry(partition, 0, 4)
    # It is the next one itself.
    assert [(each.origin, each.key, each.behind, each.attempts) for each in failing(partition.machine)] == [(0, ADA, 3, 4)]
    held = lease(partition, 1)
    assert [(each.behind, each.is_failing) for each in failing(partition.machine)] == [(3, True)]
    partition.machine.release(held, START, Settled())
    retry(partition, 0, 1, after=HOUR)
    assert [(each.origin, each.behind, each.attempts) for each in failing(partition.machine)] == [(0, 3, 5)]
    partition.machine.tick(START + HOUR)
    partition.settle([lease(partition, 1).parts[0].first])
    assert list(failing(partition.machine)) == []


def test_an_item_that_nothing_waits_for_holds_nothing_up() -> None:
    partition = rig(ada=1, bob=0)
    retry(partition, 0, 4)
    assert list(failing(partition.machine)) == []
    lease(partition)
    assert longest_held(partition.machine, START, START) == []


def test_what_others_could_have_of_a_lease_is_its_keys_and_its_items_without_one() -> None:
    partition = rig(ada=4, bob=2, none=3)
    held = lease(partition, runs=True)
    assert held.count == 9
    assert [keys_in(held, most) for most in (100, 5, 2)] == [5, 5, 2]
