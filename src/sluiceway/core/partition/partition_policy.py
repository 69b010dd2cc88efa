"""What partitions follow: settings of their queue, and its circuit breaker."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.contract.queue_settings import RetryBackoff, Unique
from sluiceway.core.partition.circuit_breaker import Circuit
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.kernel.clock import Millis


class Rules(NamedTuple):
    """The queue settings that a partition follows, and the breaker to which it reports outcomes. `max_attempts` 0: no limit; without
    `keeps_dead` dead items are dropped.

    Dead items go to the `dead_queue` set when they die, even if the queue's changes later, and to its incarnation at that time:
    `dead_incarnation`, None if it is not known.
    """

    max_attempts: int = 0
    keeps_dead: bool = False
    expire_timeout: Millis = 0
    backoff: RetryBackoff | None = None
    dead_queue: str | None = None
    circuit: Circuit | None = None
    keys: KeyRules = KeyRules()
    unique: Unique | None = None
    dead_incarnation: str | None = None
