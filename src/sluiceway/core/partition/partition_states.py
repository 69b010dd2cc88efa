"""What may be done with a partition, by its state.

| state | produce | lease | settle | meaning |
| --- | --- | --- | --- | --- |
| available | yes | yes | yes | as usual |
| preparing | no | no | yes | made by a rebalance that has not begun to use it |
| draining | no | yes | yes | a rebalance empties it, to remove it |
| paused | no | no | yes | somebody has stopped it |
| unavailable | no | no | no | its store or its owner does not answer, or it is being opened |
| error | no | no | no | it is damaged, and was stopped: a person must look |

The last two are observed, the others recorded. A partition that waits for those before it (`PartitionRecord.after`) gives out nothing, and
is otherwise as its state says. What settles (complete, retry, release, extend) is always welcome where it can be: it frees items.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sluiceway.contract.rebalances import PartitionState
from sluiceway.model.queue import PartitionRecord, QueueRecord

ShownState = Literal["available", "preparing", "draining", "paused", "unavailable", "error"]


class Allows(NamedTuple):
    """What a partition may be asked for, as far as its record says."""

    produce: bool = True
    lease: bool = True


_BY_STATE: dict[PartitionState, Allows] = {
    "available": Allows(),
    "preparing": Allows(False, False),
    "draining": Allows(False, True),
    "paused": Allows(False, False),
}


def allows(record: QueueRecord, each: PartitionRecord) -> Allows:
    """What that partition of the queue may be asked for."""
    rule = _BY_STATE[each.state]
    return Allows(rule.produce, rule.lease and not record.holds_back(each))
