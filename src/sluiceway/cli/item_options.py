"""Options that describe an item which the server keeps: that of a schedule, or the follow-up of a bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import WholeNumber, printable
from sluiceway.cli.items import pairs
from sluiceway.kernel.limits import MAX_PRIORITY

if TYPE_CHECKING:
    from sluiceway.client import Item

T = TypeVar("T")


def item_options(command: Callable[..., T]) -> Callable[..., T]:
    """Options of the item."""
    for option in (
        click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=pairs, help="A header. May be repeated."),
        click.option("--priority", type=WholeNumber(0, MAX_PRIORITY), help="Priority of the item, from 0, the lowest, to 9."),
        click.option("--unique-key", help="Unique key of the item: it is not stored while there is one with the same."),
        click.option("--item-key", "key", help="Key of the item, such as a customer."),
        click.option("--reference", help="Reference of the item."),
        click.option("--encoding", help="Encoding of the payload."),
        click.option("--kind", help="Kind of the item."),
        click.option(
            "--payload-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The payload is this file's content."
        ),
        click.option("--payload", help="Payload of the item, as text."),
    ):
        command = option(command)
    return command


def item_of(payload: str | None, payload_file: Path | None, columns: dict[str, Any]) -> Item | None:
    """The item of the options; None: they name none."""
    from sluiceway.client import Item

    if payload is not None and payload_file is not None:
        raise click.UsageError("--payload and --payload-file exclude each other")
    given: str | bytes | None = payload if payload_file is None else payload_file.read_bytes()
    if given is not None:
        return Item(given, **columns)
    if any(value is not None for value in columns.values()):
        raise click.UsageError("an item is given as a whole: pass its --payload, too")
    return None


def item_rows(item: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a stored item, for a table."""
    fields = [(name, value) for name, value in item.items() if name != "headers"]
    return [
        *((name.replace("utf8", "payload").replace("bytes", "payload (base64)"), printable(str(value).encode())) for name, value in fields),
        *((f"header {name}", printable(str(value).encode())) for name, value in item.get("headers", {}).items()),
    ]
