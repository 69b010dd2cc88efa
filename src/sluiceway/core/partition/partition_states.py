"""Partition states, and the operations each allows.

| state | produce | lease | settle | meaning |
| --- | --- | --- | --- | --- |
| available | yes | yes | yes | normal operation |
| preparing | no | no | yes | created by a rebalance that does not use it yet |
| draining | no | yes | yes | being emptied by a rebalance, then removed |
| paused | no | no | yes | stopped by an operator |
| unavailable | no | no | no | its store or owner does not answer, or it is being opened |
| error | no | no | no | damaged and stopped: an operator must act |

The last two are observed, the others recorded. A partition that waits for its predecessors (`PartitionRecord.after`) gives out nothing, and
otherwise follows its state. Settling calls (complete, retry, release, extend) are accepted wherever possible: they free items.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sluiceway.contract.rebalances import PartitionState
from sluiceway.model.queue import PartitionRecord, QueueRecord

ShownState = Literal["available", "preparing", "draining", "paused", "unavailable", "error"]


class Allows(NamedTuple):
    """Operations that a partition's record permits."""

    produce: bool = True
    lease: bool = True


_BY_STATE: dict[PartitionState, Allows] = {
    "available": Allows(),
    "preparing": Allows(False, False),
    "draining": Allows(False, True),
    "paused": Allows(False, False),
}


def allows(record: QueueRecord, each: PartitionRecord) -> Allows:
    """The operations that the record permits on that partition."""
    rule = _BY_STATE[each.state]
    return Allows(rule.produce, rule.lease and not record.holds_back(each))
