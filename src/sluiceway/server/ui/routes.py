"""Route tables: navigation, pages and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sluiceway.server.ui.pages import (
    audit,
    cluster,
    dead,
    item_commands,
    map,
    overview,
    queue,
    queue_items,
    queue_settings,
    queues,
    rebalances,
    schedule_pages,
    settings,
    streaming,
    tasks,
)
from sluiceway.server.ui.view import Command, View

ROOMS: Final = (
    ("Overview", "/ui"),
    ("Queues", "/ui/queues"),
    ("Dead letters", "/ui/dead"),
    ("Streams", "/ui/captures"),
    ("Cluster", "/ui/map"),
    ("Audit", "/ui/audit"),
    ("Settings", "/ui/settings"),
)
"""The navigation: names and paths. Seven at most, so that each is found at a glance."""

PARTS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "Queues": (("Queues", "/ui/queues"), ("Schedules", "/ui/schedules")),
    "Streams": (("Change capture", "/ui/captures"), ("Spark queries", "/ui/spark")),
    "Cluster": (("Partition map", "/ui/map"), ("Instances", "/ui/instances"), ("Rounds", "/ui/rounds"), ("Rebalances", "/ui/rebalances")),
}
"""The pages below an entry of the navigation, for those that have several."""

MOVED: Final[Mapping[str, str]] = {"/ui/tasks": "/ui/captures", "/ui/streams": "/ui/captures", "/ui/cluster": "/ui/map"}
"""Earlier paths of pages, and those that one would guess; with what follows them, they lead to the present ones."""

VIEWS: Final[tuple[View, ...]] = (
    *overview.VIEWS,
    *queues.VIEWS,
    *queue.VIEWS,
    *queue_items.VIEWS,
    *queue_settings.VIEWS,
    *map.VIEWS,
    *rebalances.VIEWS,
    *cluster.VIEWS,
    *schedule_pages.VIEWS,
    *dead.VIEWS,
    *audit.VIEWS,
    *streaming.VIEWS,
    *tasks.VIEWS,
    *settings.VIEWS,
)
"""The first matching pattern wins."""

COMMANDS: Final[tuple[Command, ...]] = (
    *queues.COMMANDS,
    *item_commands.COMMANDS,
    *schedule_pages.COMMANDS,
    *map.COMMANDS,
    *dead.COMMANDS,
    *settings.COMMANDS,
)
