"""Queue settings that partitions follow."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.clock import Millis
from sluiceway.model.queue import Backoff


class Rules(NamedTuple):
    """The queue settings that a partition follows. `max_attempts` 0: no limit; without `keeps_dead` dead items are dropped.

    Dead items go to the `dead_queue` set when they die, even if the queue's changes later.
    """

    max_attempts: int = 0
    keeps_dead: bool = False
    expire_timeout: Millis = 0
    backoff: Backoff | None = None
    dead_queue: str | None = None
