"""The queues, and each of them."""

from __future__ import annotations

from typing import Final

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.view import Command, Field, View
from sluiceway.server.ui.visit import Visit

_PAGE: Final = 1_000


async def every_queue(visit: Visit) -> list[Facts]:
    """The records of all queues that the reader may see, by name."""
    found: list[Facts] = []
    pivot: str | None = None
    while True:
        page = await visit.api.call("queues.list", limit=_PAGE, pivot=pivot)
        found += page["items"]
        pivot = page["next"]
        if pivot is None:
            return found


def state_of(queue: Facts) -> str:
    """What is most to be said of a queue."""
    states = {part["state"] for part in queue["partitions"]}
    if "unavailable" in states:
        return "unavailable"
    if queue["paused"]:
        return "paused"
    return "draining" if queue["rebalance"] else "available"


VIEWS: Final[tuple[View, ...]] = ()

QUEUE: Final = Field("queue_name", "Queue", "known", required=True)

COMMANDS: Final = (
    Command(
        "queue.pause",
        "Pause a queue",
        "Pause",
        "Nothing is produced to it or leased from it until it is resumed. What is leased can still be settled.",
        "queue.pause",
        "manage",
        "queue pause",
        (QUEUE,),
    ),
    Command(
        "queue.resume",
        "Resume a queue",
        "Resume",
        "Producing and leasing go on.",
        "queue.resume",
        "manage",
        "queue resume",
        (QUEUE,),
    ),
)
