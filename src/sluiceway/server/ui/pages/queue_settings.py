"""The settings of a queue, and what it takes to end it."""

from __future__ import annotations

from typing import Final

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.payload import visible
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

SETTINGS: Final = (
    ("lease_timeout", "Lease timeout", "1m", "", "how long a lease lives that does not ask for a time of its own"),
    ("max_lease_timeout", "Longest lease", "30d", "", "the most that a lease may ask for"),
    ("max_attempts", "Attempts at most", 0, "no limit", "leases that an item may use up before it is dead"),
    ("dead_queue", "Dead queue", None, "none: dead items are dropped", "where dead items go"),
    ("expire_timeout", "Items expire after", "0s", "never", "an item that was not completed so long after it was due is dead"),
    (
        "retry_backoff",
        "Retry back-off",
        None,
        "none: a retry does not wait",
        "wait after an untimed retry or an expired lease",
    ),
    ("idempotency_window", "Idempotency window", "1d", "", "how long an idempotency key is remembered at most"),
    ("write_timeout", "Write timeout", None, "as the backend says", "a commit that takes longer has an unknown outcome"),
    ("logical_queues", "Logical queues", None, "one on each instance", "on how many instances of a cluster the queue lies"),
    ("reference", "Reference", "", "none", "a note of yours"),
)
"""Name, what it is called, the default, how that is said if not by itself, and what it does."""


async def _gather(visit: Visit) -> Facts:
    info = await visit.api.call("queues.info", queue_name=visit.parts["name"])
    rows = [
        {
            "name": name,
            "label": label,
            "value": said if said and info[name] == default else _text(info[name]),
            "set": info[name] != default,
            "does": does,
        }
        for name, label, default, said, does in SETTINGS
    ]
    return {"here": "Settings", "queue": info, "rows": rows}


def _text(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['first']}, twice as long each time, {value['most']} at most"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))


VIEWS: Final = (
    View("/ui/queues/{name}/settings", "Settings of {name}", "queue_settings.html", _gather, "Queues", still="queue_head.html"),
)
