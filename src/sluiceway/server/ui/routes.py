"""Route tables: navigation, pages and commands."""

from __future__ import annotations

from typing import Final

from sluiceway.server.ui.pages import (
    audit,
    cluster,
    dead,
    map,
    overview,
    queue,
    queue_items,
    queue_settings,
    queues,
    rebalances,
    settings,
    streaming,
    tasks,
)
from sluiceway.server.ui.view import Command, View

ROOMS: Final = (
    ("Overview", "/ui"),
    ("Queues", "/ui/queues"),
    ("Partition map", "/ui/map"),
    ("Instances", "/ui/instances"),
    ("Rounds", "/ui/rounds"),
    ("Rebalances", "/ui/rebalances"),
    ("Dead letters", "/ui/dead"),
    ("Tasks", "/ui/tasks"),
    ("Spark", "/ui/spark"),
    ("Audit", "/ui/audit"),
    ("Settings", "/ui/settings"),
)
"""The navigation: names and paths."""

VIEWS: Final[tuple[View, ...]] = (
    *overview.VIEWS,
    *queues.VIEWS,
    *queue.VIEWS,
    *queue_items.VIEWS,
    *queue_settings.VIEWS,
    *map.VIEWS,
    *rebalances.VIEWS,
    *cluster.VIEWS,
    *dead.VIEWS,
    *audit.VIEWS,
    *streaming.VIEWS,
    *tasks.VIEWS,
    *settings.VIEWS,
)
"""The first matching pattern wins."""

COMMANDS: Final[tuple[Command, ...]] = (*queues.COMMANDS, *queue_items.COMMANDS, *map.COMMANDS, *dead.COMMANDS, *settings.COMMANDS)
