"""What leases of large jobs have in common: how many partitions a call takes, and what follows an answer that was lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sluiceway.client.errors import CallError
from sluiceway.client.protocol import backoff

T = TypeVar("T")
log = logging.getLogger("sluiceway.client")

PARTITIONS = 100
"""Partitions of a lease call: with less in each than is asked for, it takes fewer calls."""
LOST_ANSWERS = 5
"""Answers in a row that may be lost before a job ends."""


def lease_again(queue_name: str, lease: Callable[[], T]) -> T:
    """The answer of `lease`, which is called again if its answer was lost. Raises CallError.

    What a lost call has leased is offered again when its lease runs out: no reason to end a job that has leased much before.
    """
    for lost in range(LOST_ANSWERS - 1):
        try:
            return lease()
        except CallError as error:
            if not (error.outcome_unknown and error.retryable):
                raise
            log.warning("queue %s: a lease may have taken items that are offered again when it runs out: %s", queue_name, error)
            time.sleep(backoff(lost, random.random()))
    return lease()
