"""What is said of items that a client settles again, where items are leased out of turn."""

from __future__ import annotations

from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.model.requests import DONE, Settled
from tests.core.core_model import START, Rig, Row, array_of, batch_of


def test_what_was_completed_before_an_earlier_item_is_not_said_to_wait() -> None:
    """Also after a takeover, when completed leases are forgotten."""
    rig = Rig()
    rig.follow(Rules(keys=KeyRules(order=True)))
    rig.machine.produce(batch_of([Row(b"x", key=key) for key in "aab"]), START)
    rig.commit()
    lease = rig.machine.lease(10, "c", START + 1_000, START)
    assert lease is not None
    rig.machine.settle_offsets(array_of([0, 2]), DONE, START, False, Settled())
    rig.commit()
    for reason in ("completed", "settled"):
        assert rig.machine.settle_offsets(array_of([1, 2]), DONE, START, False, Settled()) == [(1, "not_leased"), (2, reason)]
        rig.reload()
