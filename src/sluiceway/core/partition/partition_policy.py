"""The settings of a queue, as far as its partitions follow them."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.kernel.clock import Millis


class Rules(NamedTuple):
    """The settings of the queue that a partition follows. `max_attempts` 0: no limit; without `keeps_dead` dead items are dropped.

    What dies goes to the `dead_queue` of that moment, whatever the queue's is later.
    """

    max_attempts: int = 0
    keeps_dead: bool = False
    expire_timeout: Millis = 0
    backoff: RetryBackoff | None = None
    dead_queue: str | None = None
