"""The settings of a queue."""

from __future__ import annotations

from typing import Any, Final

from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Setting
from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.payload import visible
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit


async def _gather(visit: Visit) -> Facts:
    info = await visit.api.call("queues.info", queue_name=visit.parts["name"])
    rows = [_row(each, info[each.name]) for each in QUEUE_SETTINGS.values()]
    return {"here": "Settings", "queue": info, "rows": rows}


def _row(setting: Setting, value: Any) -> Facts:
    is_set = value != setting.text(setting.default)
    return {"name": setting.name, "label": setting.label, "value": _text(setting.shown(value)), "set": is_set, "does": setting.about}


def _text(value: Any) -> str:
    if isinstance(value, dict) and "failure_rate" in value:
        return f"opens at {value['failures']:,} failures beyond a share of {value['failure_rate']:.0%}"
    if isinstance(value, dict):
        return f"{value['first']}, doubling with each attempt, up to {value['most']}"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))


VIEWS: Final = (
    View("/ui/queues/{name}/settings", "Settings of {name}", "queue_settings.html", _gather, "Queues", still="queue_head.html"),
)
