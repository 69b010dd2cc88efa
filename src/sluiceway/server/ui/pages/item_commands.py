"""Commands on items: produce, run now, move, delete."""

from __future__ import annotations

from typing import Final

from sluiceway.adapters.system import now
from sluiceway.kernel.clock import format_time, parse_duration
from sluiceway.kernel.errors import invalid
from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.pages.queue_commands import QUEUE
from sluiceway.server.ui.view import Command, Field

COPY_OF: Final = "copy-of"
"""Header of an item that was edited and sent again: the origin of the item that it was made from."""
ITEM_TEXTS: Final = ("kind", "encoding", "reference", "key", "unique_key")
"""Fields of an item that are short texts."""
_IDS: Final = Field("ids", "Item IDs", "list", required=True)
_ITEMS: Final = "/ui/queues/{queue_name}/items"


def _headers(text: str) -> dict[str, str]:
    pairs = [line.partition("=") for line in text.split("\n") if line.strip()]
    if wrong := next((name for name, equals, _ in pairs if not (name.strip() and equals)), None):
        raise invalid("headers", f"{wrong[:40]!r} is not of the form NAME=VALUE")
    return {name.strip(): value for name, _, value in pairs}


def _header_words(text: str) -> list[str]:
    return [word for line in text.split("\n") if line.strip() for word in ("--header", line.strip())]


def _item(form: Facts) -> Facts:
    """The call that produces the item of a form."""
    item: Facts = {name: form[name] for name in ("utf8", *ITEM_TEXTS, "priority", "headers") if name in form}
    item.setdefault("utf8", "")
    if "after" in form:
        item["enqueue_at"] = format_time(now() + parse_duration(form["after"], "after"))
    return {"queue_name": form["queue_name"], "items": [item]}


HEADERS: Final = Field("headers", "Headers", "area", "--header", "NAME=VALUE, one per line.", means=_headers, words=_header_words)

PRIORITY: Final = Field("priority", "Priority", "number", "--priority", "From 0, the lowest, to 9. Blank = as 4.", means=int)

COMMANDS: Final = (
    Command(
        "queue.produce",
        "Produce an item",
        "Produce",
        "Stores one item.",
        "queue.produce",
        "produce",
        "produce",
        (
            QUEUE,
            Field("utf8", "Payload", "area"),
            Field("kind", "Kind", flag="--kind"),
            Field("encoding", "Encoding", flag="--encoding"),
            Field("reference", "Reference", flag="--reference"),
            Field("key", "Key", flag="--item-key", hint="What the item belongs to, such as a customer."),
            PRIORITY,
            Field(
                "unique_key",
                "Unique key",
                flag="--unique-key",
                hint="Not stored if an item with the same one is there. Needs the queue's setting unique.",
            ),
            HEADERS,
            Field("after", "Delay", flag="--after", hint="A duration such as 30s or 5m. Blank = ready at once."),
        ),
        then=_ITEMS,
        tells=True,
        shape=_item,
    ),
    Command(
        "items.run_now",
        "Run items now",
        "Run now",
        "Makes these scheduled items ready before they are due. Each gets a new id and keeps its origin and attempts.",
        "storage/items.run_now",
        "manage",
        "run-now",
        (QUEUE, _IDS),
        then=_ITEMS,
        tells=True,
    ),
    Command(
        "items.move",
        "Move items",
        "Move",
        "Moves these items to another queue if they are ready or scheduled. They are ready there at once, with their attempts reset.",
        "storage/items.move",
        "manage",
        "move",
        (QUEUE, _IDS, Field("target", "Target queue", flag="--to", hint="Blank = for dead items, the queue in which each died.")),
        then=_ITEMS,
        tells=True,
    ),
    Command(
        "items.delete",
        "Delete items",
        "Delete",
        "Permanently deletes these items if they are ready or scheduled. They do not go to the dead queue. Leased items stay.",
        "storage/items.delete",
        "manage",
        "drop",
        (QUEUE, _IDS),
        destroys=True,
        then=_ITEMS,
        tells=True,
    ),
)
